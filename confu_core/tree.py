"""The draft tree: nodes, parents, scores, and the choice of the best ones. Knows no model.

Node 0 is the root, the newest token of the text. Parents stand before children. A node's score is
the sum of natural log-probabilities along its path, so it is never above its parent's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from confu_core.masks import ancestor_matrix


@dataclass(frozen=True)
class DraftTree:
    """A tree of N nodes, root included; all tuples have length N.

    token_ids: target vocabulary. parents: -1 for the root. scores: cumulative, 0 for the root.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    scores: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def root_only(cls, token_id: int) -> DraftTree:
        """The tree of plain decoding: nothing is guessed."""
        return cls((token_id,), (-1,), (0,), (0.0,))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        return {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(self.parents, self.token_ids, strict=True))
        }

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that proposes this token, if there is one."""
        return self._children.get((node, token_id))

    @cached_property
    def end_chances(self) -> tuple[float, ...]:
        """How likely the accepted path ends at each node, as the draft sees it: the probability of
        its path times the chance that none of its children in the tree follows."""
        reach = [math.exp(score) for score in self.scores]
        ends = list(reach)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                ends[parent] -= reach[node]
        return tuple(max(0.0, chance) for chance in ends)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """(N, N) boolean: ancestors of each node and itself."""
        return ancestor_matrix(self.parents)


def select(
    root: int,
    token_ids: Sequence[int],
    parents: Sequence[int],
    scores: Sequence[float],
    budget: int,
) -> DraftTree:
    """Keep the best `budget - 1` candidates below the root (EAGLE-2's re-ranking).

    Args:
        token_ids, parents, scores: all candidates; a parent is the index of an earlier candidate,
            or -1 for the root.
        budget: number of nodes with the root; more than there are candidates keeps them all.

    Ties go to the smaller index. A parent has a smaller index and a score at least as high as its
    child, so the kept set always contains the parents of its members; `topk`, which is not stable,
    does not guarantee that (pitfalls 1.6).

    Raises:
        ValueError: a score is not finite, or a parent was not kept; both mean a broken caller.
    """
    if not all(math.isfinite(score) for score in scores):
        raise ValueError("draft scores must be finite")
    ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    kept = sorted(ranked[: budget - 1])
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, 1)}
    tree_parents, depths = [-1], [0]
    for candidate in kept:
        if parents[candidate] not in node_of:
            raise ValueError(f"candidate {candidate} was kept without its parent")
        parent = node_of[parents[candidate]]
        tree_parents.append(parent)
        depths.append(depths[parent] + 1)
    return DraftTree(
        token_ids=(root, *(token_ids[c] for c in kept)),
        parents=tuple(tree_parents),
        depths=tuple(depths),
        scores=(0.0, *(scores[c] for c in kept)),
    )
