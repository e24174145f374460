"""The walk: which drafted tokens the target agrees with, the bonus token, and where to stop.

One rule at every temperature. At a node the target's token is drawn; if the tree holds that child,
step into it; if not, the drawn token is the bonus and the walk ends. The tree was chosen without
looking at the draw, so every token has exactly the target's distribution. Stops are inside the
walk, so no token is ever produced and then cut away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.sampling import Draw, Sampler
from confu_core.trace import Stop
from confu_core.tree import DraftTree


@dataclass(frozen=True)
class Limits:
    """When a run ends: a stop id, `room` more tokens, and what using up the room is called."""

    stop_ids: frozenset[int]
    room: int
    full: Stop


@dataclass(frozen=True)
class Acceptance:
    """What one verification decided.

    path: accepted nodes in order, root left out. draws: the gained tokens in order; the first
    len(path) are the path, one more, if there is one, is the bonus token.
    """

    path: tuple[int, ...]
    draws: tuple[Draw, ...]
    stop: Stop | None

    @property
    def last_node(self) -> int:
        """The last accepted node; the root if every draft was rejected."""
        return self.path[-1] if self.path else 0


def accept(
    tree: DraftTree, logits: torch.Tensor, position: int, sampler: Sampler, limits: Limits
) -> Acceptance:
    """Walk the tree.

    Args:
        logits: (N, V) float32, the target's, per node.
        position: text position of the root.
    """
    path: list[int] = []
    draws: list[Draw] = []
    node = 0
    while True:
        draw = sampler.draw(logits[node], position + tree.depths[node] + 1)
        draws.append(draw)
        child = tree.child(node, draw.token_id)
        if child is not None:
            path.append(child)
            node = child
        stop = stop_reason(draw.token_id, len(draws), limits)
        if stop or child is None:
            return Acceptance(tuple(path), tuple(draws), stop)


def stop_reason(token_id: int, gained: int, limits: Limits) -> Stop | None:
    """Whether the run ends with this token, the `gained`-th since `limits` were drawn up."""
    if token_id in limits.stop_ids:
        return "eos"
    return limits.full if gained >= limits.room else None
