"""Contemplation: where contemplate tokens stand, and the future token that they give.

`Contemplator` belongs to one run. In each verification pass every node of the tree carries a
contemplate token, since nobody knows yet which node will be the last accepted one (paper); after
the walk the one at the last accepted node becomes the future token of the next round.

Sizes: N nodes, C contemplate tokens, Ht target width, H draft width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.cache import KVCache
from confu_core.heads import Contemplation, DraftHead
from confu_core.target import Rows, Target, Verification
from confu_core.tree import DraftTree


@dataclass(frozen=True)
class FutureToken:
    """What the target says about where the text is going, as the draft sees it.

    embedding: (H,) from the future-token mixture; feature: (H,) the fused state at the contemplate
    token. born_round, born_node: whose contemplate token it was. *_router: (E,) the weights that
    made the contemplate token's embedding, and this future token's.
    """

    embedding: torch.Tensor
    feature: torch.Tensor
    born_round: int
    born_node: int
    contemplate_router: torch.Tensor
    future_router: torch.Tensor


@dataclass(frozen=True)
class ContemplatePlan:
    """The contemplate tokens of one pass: the node of each, and the embedding that they share."""

    nodes: tuple[int, ...]
    embedding: torch.Tensor | None
    router: torch.Tensor | None


NOTHING = ContemplatePlan((), None, None)


class NoContemplator:
    """For methods without contemplation: no extra rows, no future token."""

    soft_prompts = 0
    rows_per_node = 1

    def begin(self, target: Target, cache: KVCache, prefix: Rows) -> None:
        return None

    def plan(self, tree: DraftTree) -> ContemplatePlan:
        return NOTHING

    def gather(
        self, plan: ContemplatePlan, verification: Verification, last_node: int, round_index: int
    ) -> None:
        return None


@dataclass(frozen=True)
class Changes:
    """Interventions on one run: f withheld from the draft, f replaced, an expert forced."""

    remove: bool = False
    future: FutureToken | None = None
    contemplate_expert: int | None = None
    future_expert: int | None = None


class Contemplator:
    """ConFu's contemplation for one run.

    All contemplate tokens of a pass share one embedding: when the pass starts, the newest known
    target state is the one of the token that the *previous* pass accepted last.
    """

    rows_per_node = 2  # at most: the node and its contemplate token

    def __init__(
        self, part: Contemplation, head: DraftHead, changes: Changes | None = None
    ) -> None:
        self._part = part
        self._head = head
        self._changes = changes or Changes()
        self._state: torch.Tensor | None = None  # (3 Ht,) taps of the last accepted token
        self.soft_prompts = part.shape.soft_prompts

    def begin(self, target: Target, cache: KVCache, prefix: Rows) -> FutureToken | None:
        """The first future token, from one contemplate row behind the prompt.

        The prompt is read first and this row runs in a second, one-row pass, because its router
        needs the state of the last prompt token (our choice; the paper's prefill is one pass).
        """
        cache.set_fixed(self._part.soft_keys, self._part.soft_values)
        self._state = prefix.taps[0, -1]
        plan = self._make_plan((-1,))
        taps = target.contemplate(cache, plan.embedding)
        return self._future(plan, taps, born_round=0, born_node=0)

    def plan(self, tree: DraftTree) -> ContemplatePlan:
        """One contemplate token per node, the root included: every draft may be rejected."""
        return self._make_plan(tuple(range(len(tree))))

    def gather(
        self, plan: ContemplatePlan, verification: Verification, last_node: int, round_index: int
    ) -> FutureToken | None:
        """The future token of the last accepted node."""
        self._state = verification.taps[last_node]
        taps = verification.contemplate_taps[plan.nodes.index(last_node)]
        return self._future(plan, taps, round_index, last_node)

    def _make_plan(self, nodes: tuple[int, ...]) -> ContemplatePlan:
        embedding, weights = self._part.contemplate(self._state, self._changes.contemplate_expert)
        return ContemplatePlan(nodes, embedding, weights)

    def _future(
        self, plan: ContemplatePlan, taps: torch.Tensor, born_round: int, born_node: int
    ) -> FutureToken | None:
        """taps: (3 Ht,) of the contemplate row. The draft-side state that the second router reads
        is the fused feature of the most recently accepted token."""
        if self._changes.remove or self._changes.future is not None:
            return self._changes.future
        state = self._head.fuse(self._state)
        embedding, weights = self._part.future(state, self._changes.future_expert)
        return FutureToken(
            embedding=embedding,
            feature=self._head.fuse(taps),
            born_round=born_round,
            born_node=born_node,
            contemplate_router=plan.router,
            future_router=weights,
        )
