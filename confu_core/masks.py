"""Who may attend to whom. Stated once; decoding and training both read it here.

Every mask is boolean and True means "may attend". Three rules make speculation lossless whatever
the draft and the contemplate weights are (paper for the first, our reading for the others):

1. Only contemplate tokens may attend to the soft prompts.
2. A contemplate token sees the soft prompts, the prefix, its node, the node's ancestors, itself.
3. Nothing else ever sees a contemplate token.

Sizes: F soft-prompt slots, P prefix, N tree nodes, C contemplate tokens, T text positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ancestor_matrix(parents: Sequence[int]) -> torch.Tensor:
    """(N, N): node i's row marks its ancestors and itself. `parents[0]` is -1 (the root).

    A parent stands before its children, so each row is its parent's row plus itself.
    """
    matrix = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            matrix[node] |= matrix[parent]
    return matrix


def verify_mask(
    ancestors: torch.Tensor, contemplate_nodes: Sequence[int], prefix: int, soft: int
) -> torch.Tensor:
    """The mask of one verification pass, nodes first, contemplate tokens after them.

    Args:
        ancestors: (N, N) as `ancestor_matrix` gives it; N may be 0.
        contemplate_nodes: for each contemplate token the node it belongs to; -1 for one that
            continues the prefix itself (at prefill).
        prefix: number P of committed tokens.
        soft: number F of soft-prompt slots in front of the prefix.

    Returns:
        (N + C, F + P + N + C). Without contemplate tokens the soft-prompt columns are left out,
        since nobody may see them: (N, P + N).
    """
    nodes, contemplate = ancestors.shape[0], len(contemplate_nodes)
    soft = soft if contemplate else 0
    mask = torch.zeros(nodes + contemplate, soft + prefix + nodes + contemplate, dtype=torch.bool)
    mask[:, soft : soft + prefix] = True
    mask[:nodes, soft + prefix : soft + prefix + nodes] = ancestors
    if contemplate:
        rows, own = mask[nodes:], torch.tensor(contemplate_nodes)
        rows[:, :soft] = True
        on_tree = own >= 0
        rows[on_tree, soft + prefix : soft + prefix + nodes] = ancestors[own[on_tree]]
        rows[:, soft + prefix + nodes :].fill_diagonal_(True)
    return mask


def anchor_mask(anchors: torch.Tensor, text: int, soft: int) -> torch.Tensor:
    """The mask of the training pass over anchors alone (pass B).

    Args:
        anchors: (B, A) text position of each anchor; its contemplate token sees the text up to
            and including that position.
        text: number T of text positions whose keys and values come from pass A.
        soft: number F of soft-prompt slots.

    Returns:
        (B, A, F + T + A).
    """
    batch, count = anchors.shape
    sees_text = torch.arange(text, device=anchors.device) <= anchors.unsqueeze(-1)  # (B, A, T)
    sees_soft = sees_text.new_ones(batch, count, soft)
    sees_self = torch.eye(count, dtype=torch.bool, device=anchors.device).expand(batch, -1, -1)
    return torch.cat((sees_soft, sees_text, sees_self), dim=-1)


def additive(may_attend: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same mask as numbers to add to attention scores: 0 where allowed, -inf elsewhere."""
    return torch.zeros(may_attend.shape, dtype=dtype, device=may_attend.device).masked_fill_(
        ~may_attend, float("-inf")
    )
