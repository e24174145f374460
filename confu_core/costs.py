"""What passes cost on this machine, with this model, in this precision.

Measured at the first run with an automatic budget and kept as long as the model is loaded. A
machine that is busy while it is measured, or much busier afterwards, gets a budget that is not the
best one; the text is the same in any case.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal
from weakref import WeakKeyDictionary

import torch

from confu_core.budget import AutoBudget, Costs, FixedBudget, curve
from confu_core.cache import KVCache
from confu_core.contemplation import Contemplator, FutureToken, NoContemplator
from confu_core.heads import Adapters
from confu_core.methods import Method
from confu_core.target import Target
from confu_core.tree import DraftTree

# Of target passes that are timed. Matrix products work in tiles of 16 rows: a row behind a tile's
# end costs a jump, which a count in the middle of the next tile would spread over all of it.
ROWS = (1, 2, 4, 8, 16, 17, 32, 33, 48, 49, 64, 96, 128)
DRAFT_ROWS = (1, 2, 4, 8, 16)
ADAPTED_ROWS = (1, 2, 4, 8, 16, 32)  # contemplate rows
MOST_DRAFT_ROWS = 64  # the largest top-k
PREFIX = 256  # tokens before the timed rows: a short chat
TOO_DEAR = 4.0  # times a pass over one row: passes over more rows are not timed, hardly any pays
# Sweeps over all row counts go on for so many seconds, and until there were two of them if that
# does not take too long.
SECONDS, SWEEPS, TOO_LONG = 0.8, 2, 4.0

# Per model, since several targets may share one and differ in the layers that are tapped.
_verify: WeakKeyDictionary[torch.nn.Module, tuple[float, ...]] = WeakKeyDictionary()
_draft: WeakKeyDictionary[torch.nn.Module, tuple[float, tuple[float, ...]]] = WeakKeyDictionary()
_adapting: WeakKeyDictionary[torch.nn.Module, tuple[float, ...]] = WeakKeyDictionary()


def budget_for(
    target: Target,
    method: Method,
    contemplator: NoContemplator | Contemplator,
    nodes: int | Literal["auto"],
    share: float,
) -> FixedBudget | AutoBudget:
    """The budget of a run: `Settings.nodes` and `Settings.contemplate` made ready."""
    if nodes != "auto":
        return FixedBudget(nodes)
    if method.checkpoint is None:  # without a head nothing is drafted
        return FixedBudget(1)
    return AutoBudget(measured(target, method), partial(contemplator.rows, share=share))


def measured(target: Target, method: Method) -> Costs:
    """The costs of this target and this method's head; measured if they are not known yet."""
    head, part = method.checkpoint.head, method.checkpoint.contemplation
    adapters = part.adapters if part is not None else None
    if target.model not in _verify:
        _verify[target.model] = _verification(target)
    if head not in _draft:
        _draft[head] = _drafting(target, method)
    if adapters is not None and adapters not in _adapting:
        _adapting[adapters] = _adaptation(target, adapters)
    adapting = _adapting[adapters] if adapters is not None else ()
    return Costs(_verify[target.model], *_draft[head], adapting)


@torch.inference_mode()
def _verification(target: Target) -> tuple[float, ...]:
    """Seconds of a target pass over 1, 2, ... rows behind a text of ordinary length."""
    cache = _short_chat(target, ROWS[-1])

    def run(rows: int) -> None:
        children = rows - 1
        tree = DraftTree((0,) * rows, (-1, *[0] * children), (0, *[1] * children), (0.0,) * rows)
        target.verify(cache, tree)
        target.wait()
        cache.drop_pending()

    seconds = fastest(run, ROWS)
    return curve(seconds, max(seconds))


@torch.inference_mode()
def _adaptation(target: Target, adapters: Adapters) -> tuple[float, ...]:
    """Seconds that adapters add to a pass with 1, 2, ... contemplate rows."""
    cache = _short_chat(target, 1 + ADAPTED_ROWS[-1])
    root, nothing = DraftTree.root_only(0), torch.zeros(target.hidden, device=target.device)

    def run(rows: int, used: Adapters | None) -> None:
        target.verify(cache, root, (0,) * rows, nothing, used)
        target.wait()
        cache.drop_pending()

    plain = fastest(partial(run, used=None), ADAPTED_ROWS)
    adapted = fastest(partial(run, used=adapters), ADAPTED_ROWS)
    both = plain.keys() & adapted.keys()
    return curve({rows: max(0.0, adapted[rows] - plain[rows]) for rows in both}, ROWS[-1])


def _short_chat(target: Target, rows: int) -> KVCache:
    """A cache that holds a text of ordinary length, with room for so many rows."""
    prefix = min(PREFIX, target.context // 2)
    cache = target.new_cache(prefix + rows)
    cache.open(prefix)
    cache.commit(list(range(prefix)))
    return cache


@torch.inference_mode()
def _drafting(target: Target, method: Method) -> tuple[float, tuple[float, ...]]:
    """Seconds of taking in a token and drafting one level, and of a further level of 1, 2, ...
    nodes."""
    head, deep = method.checkpoint.head, 4
    like, width = head.fc.weight, head.shape.hidden
    taps = like.new_zeros(1, head.fc.in_features)
    future = None
    if method.checkpoint.contemplation is not None:
        nothing, router = like.new_zeros(width), like.new_zeros(1)
        future = FutureToken(nothing, nothing, 0, 0, router, router)
    prefix = min(PREFIX, target.context // 2)

    def drafter(rows: int):
        made = method.drafter(
            target,
            budget=FixedBudget(1 + rows * rows * deep),
            top_k=rows,
            capacity=prefix + 1 + rows * deep,
        )
        made.cache.open(prefix)
        made.cache.commit(list(range(prefix)))
        return made

    drafters = {rows: drafter(rows) for rows in DRAFT_ROWS}

    def run(rows: int, depth: int) -> None:
        drafters[rows].draft(taps, [0], future, depth, None)
        target.wait()
        drafters[rows].cache.keep(prefix)

    first = fastest(partial(run, depth=1), DRAFT_ROWS)
    whole = fastest(partial(run, depth=deep), DRAFT_ROWS)
    # Below zero only if the clock was disturbed.
    both = first.keys() & whole.keys()
    more = {rows: max(0.0, whole[rows] - first[rows]) / (deep - 1) for rows in both}
    return min(first.values()), curve(more, MOST_DRAFT_ROWS)


def fastest(run: Callable[[int], None], counts: Sequence[int]) -> dict[int, float]:
    """Seconds of the fastest run at each count, up to the first that is too dear.

    Sweep after sweep over all counts, so that a busy moment does not hit one count alone; the
    fastest, since what else the machine does can only add.
    """
    run(counts[0])  # warms up
    found: dict[int, float] = {}
    began, sweeps, passed = time.perf_counter(), 0, 0.0
    while passed < (SECONDS if sweeps >= SWEEPS else TOO_LONG):
        sweeps += 1
        for count in counts:
            start = time.perf_counter()
            run(count)
            seconds = time.perf_counter() - start
            found[count] = min(seconds, found.get(count, seconds))
            if found[count] > TOO_DEAR * found[counts[0]]:
                break
        passed = time.perf_counter() - began
    return found
