"""Lanes: what the benchmark runs beside each other, and what each of them says of an answer.

Every lane is timed in the same way, by the wall clock around one whole call and at the moment when
the pass that reads the prompt has given its first token. What comes after that moment is decoding.
No lane has an observer, so nothing is counted that a user would not pay for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from confu_core.checkpoints import find_checkpoint
from confu_core.compare import Engine
from confu_core.decoding import Round, decode
from confu_core.errors import SettingsError
from confu_core.methods import Method, with_head
from confu_core.published import load_head
from confu_core.target import Target
from confu_core.trace import Settings

BASELINE = "plain"  # what every speed is compared with; it drafts nothing


@dataclass(frozen=True)
class Answer:
    """One lane's answer to one prompt.

    token_ids: the new tokens; a stop token, if there is one, is the last.
    margins: the target's lead per token, as `trace.Token` has it; empty where a lane tells none.
    first_tokens: tokens gained by the pass that read the prompt (1, or more with a peer that
        guesses already then). passes: target passes after it.
    first_seconds: from the call to the first token; seconds: from there to the end.
    phases: of `seconds`, those in draft, verification and the rest; None if a lane tells none.
    target_rows: rows in those passes; None likewise.
    offered, accepted: acceptance by depth, see `count_depths`; empty likewise.
    """

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    first_tokens: int
    passes: int
    first_seconds: float
    seconds: float
    phases: tuple[float, float, float] | None = None
    target_rows: int | None = None
    offered: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()


class Lane(Protocol):
    """One way to answer. `drafts_tree`: whether the node budget matters to it; `samples`: whether
    it can follow our coupled sampling, so that texts are comparable above temperature 0."""

    name: str
    drafts_tree: bool
    samples: bool

    def answer(self, prompt_ids: list[int], settings: Settings) -> Answer: ...


class OwnLane:
    """A method of this program, by the one decoding loop.

    Args:
        contemplate: this lane's share of nodes with a contemplate token; None leaves the run's.
    """

    samples = True

    def __init__(
        self, name: str, method: Method, target: Target, contemplate: float | None = None
    ) -> None:
        self.name = name
        self.drafts_tree = name != BASELINE
        self._method = method
        self._target = target
        self._changes = {} if contemplate is None else {"contemplate": contemplate}

    def answer(self, prompt_ids: list[int], settings: Settings) -> Answer:
        """Decode to the end, alone and unobserved.

        Raises:
            SettingsError: a setting is out of range.
        """
        settings = replace(settings, **self._changes)
        rounds: list[Round] = []
        first = 0.0
        began = time.perf_counter()
        for round in decode(self._target, self._method, prompt_ids, settings):
            if not rounds:
                first = time.perf_counter() - began
            rounds.append(round)
        total = time.perf_counter() - began
        draws = [draw for round in rounds for draw in round.draws]
        later = rounds[1:]
        offered, accepted = count_depths(later)
        return Answer(
            token_ids=tuple(draw.token_id for draw in draws),
            margins=tuple(draw.margin for draw in draws),
            first_tokens=len(rounds[0].draws),
            passes=len(later),
            first_seconds=first,
            seconds=total - first,
            phases=(
                sum(round.seconds.draft for round in later),
                sum(round.seconds.verify for round in later),
                sum(round.seconds.rest for round in later),
            ),
            target_rows=sum(round.target_rows for round in later),
            offered=offered,
            accepted=accepted,
        )


def load_methods(
    engine: Engine, names: Sequence[str] | None, also: Sequence[str]
) -> dict[str, Method]:
    """The methods that a benchmark runs, by name.

    Args:
        names: None takes all that have a head.
        also: more trained heads, each as NAME=FOLDER or NAME=HUB_ID.

    Raises:
        SettingsError, CheckpointError: an unknown method, a name twice, a head that does not load.
    """
    if names is None:
        names = [name for name, info in engine.methods.items() if info.available]
    methods = {name: engine.method(name) for name in names}
    for entry in also:
        name, separator, source = entry.partition("=")
        if not (name and separator and source) or name in methods:
            raise SettingsError(f"{entry!r} must be NAME=FOLDER, with a name that is not in use.")
        methods[name] = with_head(name, load_head(find_checkpoint(source), engine.target))
    return methods


def own_lanes(methods: dict[str, Method], target: Target, shares: Sequence[float]) -> list[OwnLane]:
    """A lane per method; with several shares of contemplate tokens, one per share for those methods
    that contemplate, named `confu-0.25` and so on."""
    lanes = []
    for name, method in methods.items():
        contemplates = method.checkpoint is not None and method.checkpoint.contemplation is not None
        if contemplates and len(shares) > 1:
            lanes += [OwnLane(f"{name}-{share:g}", method, target, share) for share in shares]
        else:
            lanes.append(OwnLane(name, method, target))
    return lanes


def order_lanes(lanes: Sequence[Lane]) -> list[Lane]:
    """Plain decoding first, since it is the reference; the others as they were named.

    Raises:
        SettingsError: no lane, or two of one name.
    """
    names = [lane.name for lane in lanes]
    if not names or len(set(names)) < len(names):
        raise SettingsError("Name at least one method, and none twice.")
    return sorted(lanes, key=lambda lane: lane.name != BASELINE)


def count_depths(rounds: list[Round]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Acceptance by depth; entry i of both is depth i + 1.

    A round *offers* depth k if its walk came to a node of depth k - 1 (the root has depth 0), drew
    a token there, and the tree held at least one child of that node. It *accepts* depth k if the
    drawn token was one of these children. So `accepted / offered` is the chance that a level of the
    tree is right, given that it was reached and that there was one: neither the end of a tree nor
    the end of a run counts against a draft.
    """
    offered: list[int] = []
    accepted: list[int] = []
    for round in rounds:
        tree, path = round.draft.tree, round.acceptance.path
        parents = set(tree.parents)
        for depth, node in enumerate((0, *path)[: len(round.draws)]):
            if node not in parents:
                continue
            if depth == len(offered):
                offered.append(0)
                accepted.append(0)
            offered[depth] += 1
            accepted[depth] += depth < len(path)
    return tuple(offered), tuple(accepted)


def first_difference(a: Answer, b: Answer) -> tuple[int, float | None] | None:
    """Where two answers first differ (index of the token) and by what margin; None if nowhere.

    The margin is the smaller of those that are known. An answer that is a beginning of the other
    differs where the longer one goes on.
    """
    pairs = list(zip(a.token_ids, b.token_ids, strict=False))
    index = next((i for i, (left, right) in enumerate(pairs) if left != right), len(pairs))
    if index == max(len(a.token_ids), len(b.token_ids)):
        return None
    margins = [answer.margins[index] for answer in (a, b) if index < len(answer.margins)]
    return index, min(margins, default=None)
