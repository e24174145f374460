"""Contemplation: where contemplate tokens stand, and the future token that they give.

`Contemplator` belongs to one run. In each verification pass every node of the tree carries a
contemplate token, since nobody knows yet which node will be the last accepted one (paper); after
the walk the one at the last accepted node becomes the future token of the next round.

Sparse contemplation (ours): only the nodes where the round most likely ends carry one. If it ends
elsewhere, the nearest ancestor that carries one serves, a few tokens stale.

Sizes: N nodes, C contemplate tokens, Ht target width, H draft width, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.cache import KVCache
from confu_core.heads import Contemplation, DraftHead
from confu_core.target import Adapters, Rows, Target, Verification
from confu_core.tree import DraftTree


@dataclass(frozen=True)
class FutureToken:
    """What the target says about where the text is going, as the draft sees it.

    embedding: (H,) from the future-token mixture; feature: (H,) the fused state at the contemplate
    token. born_round, born_node: whose contemplate token it was. *_router: (E,) the weights that
    made the contemplate token's embedding, and this future token's. read_out: (R, D) logits in the
    draft vocabulary, which the draft adds to its own, one row per depth; None in ConFu lite.
    """

    embedding: torch.Tensor
    feature: torch.Tensor
    born_round: int
    born_node: int
    contemplate_router: torch.Tensor
    future_router: torch.Tensor
    read_out: torch.Tensor | None = None


@dataclass(frozen=True)
class ContemplatePlan:
    """The contemplate tokens of one pass: the node of each, and the embedding and adapters that
    they share."""

    nodes: tuple[int, ...]
    embedding: torch.Tensor | None
    router: torch.Tensor | None
    adapters: Adapters | None = None


NOTHING = ContemplatePlan((), None, None)


def contemplated_count(nodes: int, share: float) -> int:
    """How many of a tree's nodes carry a contemplate token: at most their share, at least one."""
    return max(1, int(share * nodes + 1e-9))


def likely_ends(tree: DraftTree, share: float) -> tuple[int, ...]:
    """The nodes that carry a contemplate token, ascending: those where the round most likely ends.

    The root always does. It nearly always ranks first anyway, since every draft may be rejected;
    and so each round has a future token of its own, never older than the accepted path is long.
    """
    count = contemplated_count(len(tree), share)
    if count == len(tree):
        return tuple(range(count))
    chances = tree.end_chances
    ranked = sorted(range(1, len(tree)), key=lambda node: (-chances[node], node))
    return (0, *sorted(ranked[: count - 1]))


class NoContemplator:
    """For methods without contemplation: no extra rows, no future token."""

    soft_prompts = 0

    def rows(self, nodes: int, share: float) -> int:
        """Rows of the target pass that verifies a tree of so many nodes."""
        return nodes

    def begin(self, target: Target, cache: KVCache, prefix: Rows) -> None:
        return None

    def plan(self, tree: DraftTree, share: float) -> ContemplatePlan:
        return NOTHING

    def gather(
        self,
        tree: DraftTree,
        plan: ContemplatePlan,
        verification: Verification,
        last_node: int,
        round_index: int,
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
        rows = target.contemplate(cache, plan.embedding, plan.adapters)
        return self._future(plan, rows.taps, rows.last, born_round=0, born_node=0)

    def rows(self, nodes: int, share: float) -> int:
        """Rows of the target pass that verifies a tree of so many nodes."""
        return nodes + contemplated_count(nodes, share)

    def plan(self, tree: DraftTree, share: float) -> ContemplatePlan:
        """Contemplate tokens for this share of the nodes; 1 gives every node its own."""
        return self._make_plan(likely_ends(tree, share))

    def gather(
        self,
        tree: DraftTree,
        plan: ContemplatePlan,
        verification: Verification,
        last_node: int,
        round_index: int,
    ) -> FutureToken | None:
        """The future token of the last accepted node, or of its nearest ancestor that has one."""
        self._state = verification.taps[last_node]
        source = last_node
        while source not in plan.nodes:  # ends at the root, which always has one
            source = tree.parents[source]
        row, age = plan.nodes.index(source), tree.depths[last_node] - tree.depths[source]
        taps, last = verification.contemplate_taps[row], verification.contemplate_last[row]
        return self._future(plan, taps, last, round_index, source, age)

    def _make_plan(self, nodes: tuple[int, ...]) -> ContemplatePlan:
        embedding, weights = self._part.contemplate(self._state, self._changes.contemplate_expert)
        return ContemplatePlan(nodes, embedding, weights, self._part.adapters)

    def _future(
        self,
        plan: ContemplatePlan,
        taps: torch.Tensor,
        last: torch.Tensor,
        born_round: int,
        born_node: int,
        age: int = 0,
    ) -> FutureToken | None:
        """taps (3 Ht,) and last (Ht,) are the contemplate row's. The draft-side state that the
        second router reads is the fused feature of the most recently accepted token.

        age: how many tokens were accepted behind the contemplate token's node; the read-outs of
        these are of no more use.
        """
        if self._changes.remove or self._changes.future is not None:
            return self._changes.future
        state, feature = self._head.fuse(torch.stack((self._state, taps)))
        embedding, weights = self._part.future(state, self._changes.future_expert)
        read_out = None
        if self._part.shape.read_outs > age:
            read_out = self._head.lm_head(self._part.read_states(last)[age:])
            read_out = self._part.read_out_weight[age:].unsqueeze(-1) * read_out
        return FutureToken(
            embedding=embedding,
            feature=feature,
            born_round=born_round,
            born_node=born_node,
            contemplate_router=plan.router,
            future_router=weights,
            read_out=read_out,
        )
