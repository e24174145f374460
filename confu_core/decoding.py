"""The loop. Plain decoding, EAGLE-3 and ConFu are this one generator with other parts plugged in.

A round is one pass of the target:

    draft    the drafter grows a tree below the newest token (the root)
    verify   the target scores the whole tree in one pass, contemplate tokens riding along
    accept   the walk follows the target's own choices through the tree; one more token is the bonus
    advance  the accepted rows stay in the cache, the rest is forgotten; the contemplate token at
             the last accepted node becomes the future token of the next round
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from confu_core.acceptance import Acceptance, Limits, accept, stop_reason
from confu_core.contemplation import ContemplatePlan, FutureToken
from confu_core.costs import budget_for
from confu_core.drafter import Draft
from confu_core.errors import SettingsError
from confu_core.methods import Method
from confu_core.probes import Accepted, Observer, Prefilled, Verified, Verifying
from confu_core.sampling import Draw, Sampler
from confu_core.target import Target
from confu_core.trace import Seconds, Settings, Stop


@dataclass(frozen=True)
class Round:
    """One target pass, as the loop knows it. Round 0 is the prefill: no draft, one token.

    position: text position of the first gained token. draws: the gained tokens in order.
    future: what steered this round's draft. target_rows: rows in the target pass.
    """

    index: int
    position: int
    draft: Draft | None
    plan: ContemplatePlan | None
    acceptance: Acceptance | None
    draws: tuple[Draw, ...]
    future: FutureToken | None
    target_rows: int
    seconds: Seconds
    stop: Stop | None

    @property
    def token_ids(self) -> list[int]:
        return [draw.token_id for draw in self.draws]


@torch.inference_mode()  # round by round: between rounds other code runs in this thread
def decode(
    target: Target,
    method: Method,
    prompt_ids: list[int],
    settings: Settings,
    observer: Observer | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Round]:
    """Decode one sequence, yielding a `Round` per target pass, the moment it is known.

    Args:
        prompt_ids: at least one token, fewer than the target's context.
        cancelled: asked between draft and verification and between rounds; a cancelled run ends
            with what it has.

    Raises:
        SettingsError: a setting out of range, or no room for a token.
    """
    check_settings(settings)
    target = method.reading(target)
    room = min(settings.max_new_tokens, target.context - len(prompt_ids))
    if not prompt_ids or room < 1:
        raise SettingsError(
            f"A prompt of {len(prompt_ids)} tokens leaves no room in a context of {target.context}."
        )
    full: Stop = "length" if room == settings.max_new_tokens else "context"
    sampler = Sampler(settings.temperature, settings.top_p, settings.seed)
    contemplator = method.contemplator()
    budget = budget_for(target, method, contemplator, settings.nodes, settings.contemplate)
    most_rows = contemplator.rows(budget.most_nodes, settings.contemplate)
    cache = target.new_cache(len(prompt_ids) + room + most_rows, fixed=contemplator.soft_prompts)
    drafter = method.drafter(
        target,
        budget=budget,
        top_k=settings.top_k,
        capacity=len(prompt_ids) + room + settings.top_k * settings.depth,
    )
    clock = Clock()
    on_step = clock.not_counting(observer.drafted) if observer else None

    with clock.phase("verify"):
        prefix = target.prefill(cache, prompt_ids)
        logits = target.logits(prefix.last[0, -1])
        target.wait()
    draws = (sampler.draw(logits, len(prompt_ids)),)
    stop = stop_reason(draws[0].token_id, 1, Limits(target.stop_ids, room, full))
    future = None
    if not stop:
        with clock.phase("verify"):
            future = contemplator.begin(target, cache, prefix)
            target.wait()
    if observer:
        with clock.aside():
            observer.prefilled(Prefilled(prefix, draws[0], future))
    yield Round(
        0, len(prompt_ids), None, None, None, draws, None, len(prompt_ids), clock.lap(), stop
    )

    taps, follows = prefix.taps[0], [*prompt_ids[1:], draws[0].token_id]
    del prefix
    room -= 1
    index = 0
    while not stop and not cancelled():
        index += 1
        clock.lap()
        with clock.phase("draft"):
            # No deeper than what can still be gained: the bonus token takes one place.
            draft = drafter.draft(taps, follows, future, min(settings.depth, room - 1), on_step)
        tree = draft.tree
        plan = contemplator.plan(tree, settings.contemplate)
        if observer:
            with clock.aside():
                observer.verifying(Verifying(index, draft, future, plan))
        if cancelled():
            break
        with clock.phase("verify"):
            verification = target.verify(cache, tree, plan.nodes, plan.embedding, plan.adapters)
            target.wait()
        if observer:
            with clock.aside():
                observer.verified(Verified(index, draft, verification))

        root = cache.length
        limits = Limits(target.stop_ids, room, full)
        acceptance = accept(tree, verification.logits, root, sampler, limits)

        kept = [0, *acceptance.path]
        cache.commit(kept)
        taps = verification.taps[kept]
        follows = [draw.token_id for draw in acceptance.draws]
        steered_by = future
        future = contemplator.gather(tree, plan, verification, acceptance.last_node, index)
        room -= len(acceptance.draws)
        stop = acceptance.stop
        if observer:
            with clock.aside():
                observer.accepted(
                    Accepted(index, draft, verification, acceptance, future, clock.read())
                )
        yield Round(
            index=index,
            position=root + 1,
            draft=draft,
            plan=plan,
            acceptance=acceptance,
            draws=acceptance.draws,
            future=steered_by,
            target_rows=len(tree) + len(plan.nodes),
            seconds=clock.lap(),
            stop=stop,
        )


class Clock:
    """Seconds of a round by phase. What happens in `aside`, or between laps, is not counted."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._start = time.perf_counter()
        self._spent = {"draft": 0.0, "verify": 0.0, "aside": 0.0}

    def read(self) -> Seconds:
        """The seconds since the last lap."""
        spent = self._spent
        rest = time.perf_counter() - self._start - sum(spent.values())
        return Seconds(spent["draft"], spent["verify"], max(0.0, rest))

    def lap(self) -> Seconds:
        """The same, and a fresh start."""
        seconds = self.read()
        self._restart()
        return seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start, aside = time.perf_counter(), self._spent["aside"]
        yield
        inside = self._spent["aside"] - aside  # what lay aside within this phase is not its own
        self._spent[name] += time.perf_counter() - start - inside

    def aside(self):
        """Time that is not the method's own: an observer's."""
        return self.phase("aside")

    def not_counting(self, call: Callable) -> Callable:
        """The same call, with its time laid aside."""

        def wrapped(view) -> None:
            with self.aside():
                call(view)

        return wrapped


def check_settings(settings: Settings) -> None:
    """Refuse what is not supported, with the range that is.

    Raises:
        SettingsError
    """

    def demand(holds: bool, what: str, value: object, allowed: str) -> None:
        if not holds:
            raise SettingsError(f"{what} is {value}, but must be {allowed}.")

    s = settings
    demand(s.max_new_tokens >= 1, "Max new tokens", s.max_new_tokens, "at least 1")
    # Below 0.01 the scaled logits leave what float32 can tell apart from greedy.
    warm = s.temperature == 0 or 0.01 <= s.temperature <= 5
    demand(warm, "Temperature", s.temperature, "0 (greedy) or between 0.01 and 5")
    demand(0 < s.top_p <= 1, "Top-p", s.top_p, "above 0 and at most 1 (1 is off)")
    fits = s.nodes == "auto" or (isinstance(s.nodes, int) and 1 <= s.nodes <= 256)
    demand(fits, "Tree size", s.nodes, "between 1 (root only) and 256, or auto")
    demand(0 <= s.depth <= 16, "Tree depth", s.depth, "between 0 and 16")
    demand(
        0 < s.contemplate <= 1, "Contemplate", s.contemplate, "above 0 and at most 1 (all nodes)"
    )
    demand(1 <= s.top_k <= 64, "Top-k", s.top_k, "between 1 and 64")
