"""Anchor sampling and future-prediction replication: which starts get whose future token.

Contemplate tokens stand only at random anchors (paper), so a sequence of N tokens costs N + A rows
instead of 2N. An anchor's future token also serves the next few starts (paper), *forward only*
(ours): it has seen the text up to its anchor, so an earlier start would be told the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

# Lags with which the contemplate router sees the last accepted state: in decoding that state is
# one whole round old, and a round gains this many tokens (ours; short ones are the common case).
ROUTER_LAGS = (1, 1, 2, 2, 2, 3, 3, 4, 5, 6)
REPLICATION = (0, 0, 0, 0, 1, 2, 3)  # how many later starts an anchor serves besides its own


@dataclass(frozen=True)
class Anchors:
    """For one batch.

    positions: (B, A) text position of each anchor, padded with 0.
    router_positions: (B, A) position whose target state the contemplate router reads.
    of_start: (B, M) index into A of the anchor that serves each start; -1 for none.
    """

    positions: torch.Tensor
    router_positions: torch.Tensor
    of_start: torch.Tensor


def sample_anchors(
    starts: torch.Tensor, valid: torch.Tensor, every: int, dice: random.Random, replicate: bool
) -> Anchors:
    """Draw fresh anchors among the chain starts.

    Args:
        starts, valid: (B, M) positions of chain starts, ascending, and which are real.
        every: one anchor per so many starts on average; 1 means every start.
        replicate: whether anchors serve later starts too (off for the ablation).
    """
    rows = []
    for row_starts, row_valid in zip(starts.tolist(), valid.tolist(), strict=True):
        own = [s for s, real in zip(row_starts, row_valid, strict=True) if real]
        count = max(1, len(own) // every) if own else 0
        anchors = sorted(dice.sample(own, count))
        served = {}
        for index, anchor in enumerate(anchors):
            reach = dice.choice(REPLICATION) if replicate else 0
            for start in range(anchor, anchor + reach + 1):
                served[start] = index  # a later, fresher anchor overwrites an earlier one
        lags = [max(0, a - dice.choice(ROUTER_LAGS)) for a in anchors]
        rows.append((anchors, lags, [served.get(s, -1) for s in row_starts]))
    width = max(1, *(len(anchors) for anchors, _, _ in rows))

    def padded(values: list[int]) -> list[int]:
        return values + [0] * (width - len(values))

    of_start = torch.tensor([served for _, _, served in rows])
    return Anchors(
        positions=torch.tensor([padded(anchors) for anchors, _, _ in rows]),
        router_positions=torch.tensor([padded(lags) for _, lags, _ in rows]),
        of_start=of_start.masked_fill(~valid.cpu(), -1),
    )
