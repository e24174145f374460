"""Drafters: what a method guesses before the target looks.

`NoDrafter` guesses nothing, which makes the loop plain decoding. `EagleDrafter` grows EAGLE's
dynamic tree with an EAGLE-3 head, and lets a future token steer every step if there is one.
A drafter belongs to one run.

Sizes: k beam and branching (top_k), D draft vocabulary, H draft width, m new entries, P entries of
the lasting cache, T rows of the tree under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from confu_core.budget import AutoBudget, FixedBudget
from confu_core.cache import KVCache
from confu_core.contemplation import FutureToken
from confu_core.heads import Contemplation, DraftHead
from confu_core.ranking import largest
from confu_core.target import Target, attend
from confu_core.tree import DraftTree, select


@dataclass(frozen=True)
class Draft:
    """A drafted tree and how many forward passes of the draft it took."""

    tree: DraftTree
    passes: int


@dataclass(frozen=True)
class DraftStep:
    """One draft step, for observers: its depth (1 is the root's children), the token ids (B, k) and
    cumulative scores (B, k) of the candidates below each of the B expanded nodes, and the states
    (B, H) of those nodes."""

    depth: int
    token_ids: torch.Tensor
    scores: torch.Tensor
    states: torch.Tensor


class NoDrafter:
    """Guesses nothing: the tree is the root alone."""

    def draft(
        self,
        taps: torch.Tensor,
        token_ids: list[int],
        future: None,
        depth: int,
        on_step: Callable[[DraftStep], None] | None,
    ) -> Draft:
        return Draft(DraftTree.root_only(token_ids[-1]), 0)


class EagleDrafter:
    """Grows a dynamic tree (EAGLE-2) with an EAGLE-3 head.

    Its lasting cache holds entries made from true target features only; entries of the tree under
    way are pending rows that are dropped when the tree is done. The future token stands in the
    cache's one fixed slot, so it too is never part of the lasting text.
    """

    def __init__(
        self,
        head: DraftHead,
        contemplation: Contemplation | None,
        target: Target,
        *,
        budget: FixedBudget | AutoBudget,
        top_k: int,
        capacity: int,
    ) -> None:
        """budget: how far trees grow, and how many nodes stay. top_k: children per expanded node,
        and most nodes expanded per level. capacity: most entries of the lasting cache and of one
        tree together."""
        shape = head.shape
        self._head = head
        self._part = contemplation
        self._embed = partial(head.embed, target)
        self._budget = budget
        self._top_k = min(top_k, shape.draft_vocab)
        self.cache = KVCache(
            layers=1,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            capacity=capacity,
            fixed=1 if contemplation is not None and contemplation.shape.future_entry else 0,
            device=head.fc.weight.device,
            dtype=head.fc.weight.dtype,
        )
        self._pull: torch.Tensor | None = None  # (H,) what f adds to this tree's input states
        # cos and sin (1, 1, capacity, W): made in float32, kept in the precision of the rows.
        positions = torch.arange(capacity, device=head.fc.weight.device).unsqueeze(0)
        self._turns = tuple(table.to(head.fc.weight.dtype) for table in head.rotary(positions))

    def draft(
        self,
        taps: torch.Tensor,
        token_ids: list[int],
        future: FutureToken | None,
        depth: int,
        on_step: Callable[[DraftStep], None] | None,
    ) -> Draft:
        """Take in what the last round made certain, then grow a tree below the newest token.

        Args:
            taps: (m, 3 Ht) target features of the tokens committed since the last call.
            token_ids: for each of them the token that followed; the last one is the root.
            depth: how many levels to grow at most; 0 drafts nothing.
        """
        root = token_ids[-1]
        grow = depth > 0 and self._budget.most_nodes > 1
        state = self._take_in(taps, token_ids, future, grow)
        if state is None:
            return Draft(DraftTree.root_only(root), 0)
        # The root's draft position; nodes of depth j stand j further on.
        base = self.cache.length - 1
        k = self._top_k
        growth = self._budget.start()
        tokens, scores = self._children(state, 1, future)  # (1, k), (1, k)
        if on_step:
            on_step(DraftStep(1, tokens, scores, state))
        all_tokens, all_scores = [tokens.flatten()], [scores.flatten()]
        all_parents = [torch.full((k,), -1, device=state.device)]
        beam = torch.arange(k, device=state.device)  # candidate numbers of the nodes to expand
        beam_tokens, beam_scores = tokens[0], scores[0]
        beam_states = state.expand(k, -1)
        # (k, T): which pending rows each beam node descends from; itself is added on expansion.
        lineage = torch.zeros(k, 0, dtype=torch.bool, device=state.device)
        first = k  # number of the first candidate of the level below
        passes = 1
        for level in range(2, depth + 1):
            count = growth.expand(all_scores, beam_scores)
            if not count:
                break
            beam, beam_tokens, beam_scores = beam[:count], beam_tokens[:count], beam_scores[:count]
            own = torch.eye(count, dtype=torch.bool, device=state.device)
            lineage = torch.cat((lineage[:count], own), dim=1)
            states = self._expand(
                beam_tokens, beam_states[:count], lineage, base + level - 1, future
            )
            passes += 1
            tokens, scores = self._children(states, level, future)
            scores = scores + beam_scores.unsqueeze(1)  # (count, k) cumulative
            if on_step:
                on_step(DraftStep(level, tokens, scores, states))
            all_tokens.append(tokens.flatten())
            all_scores.append(scores.flatten())
            all_parents.append(beam.repeat_interleave(k))
            # Stable, so that ties are broken the same way everywhere.
            order = scores.flatten().sort(descending=True, stable=True).indices[:k]
            parent = order // k  # (k,) row of the old beam
            beam = first + order
            beam_tokens, beam_scores = tokens.flatten()[order], scores.flatten()[order]
            beam_states, lineage = states[parent], lineage[parent]
            first += count * k
        self.cache.drop_pending()
        # With a fixed budget the one transfer from the device; an automatic one reads each level.
        scores = torch.cat(all_scores).tolist()
        tree = select(
            root,
            torch.cat(all_tokens).tolist(),
            torch.cat(all_parents).tolist(),
            scores,
            growth.size(scores),
        )
        return Draft(tree, passes)

    def _take_in(
        self, taps: torch.Tensor, token_ids: list[int], future: FutureToken | None, grow: bool
    ) -> torch.Tensor | None:
        """Commit entries for new text; returns the root's state (1, H) if a tree is to be grown.

        Only the last entry needs an output; of the others keys and values are enough, and those
        do not depend on the future token.
        """
        head, cache, count = self._head, self.cache, len(token_ids)
        device = taps.device
        e = self._embed(torch.tensor(token_ids, device=device)).to(taps.dtype)  # (m, H)
        fused = head.fuse(taps)  # (m, H)
        first, last = cache.length, cache.length + count - 1
        x = head.attention_input(e, fused).unsqueeze(0)  # (1, m, 2H)
        if future is not None and cache.fixed:
            self._set_future_entry(future, last)
        cache.open(count, see_fixed=future is not None)
        keys, values = cache.extend(0, *head.keys_values(x, *self._rotary(first, count)))
        cache.commit(list(range(count)))
        if not grow:
            return None
        steered = future is not None and self._part.shape.future_query
        self._pull = self._part.steer(future.feature) if steered else None
        state = self._steer(fused[-1:])  # (1, H)
        x = head.attention_input(e[-1:], state).unsqueeze(0)  # (1, 1, 2H)
        q = head.queries(x, *self._rotary(last))
        mask = self._mask(torch.ones(1, 0, dtype=torch.bool, device=device), future)
        return head.finish(state.unsqueeze(0), attend(q, keys, values, mask))[0]

    def _expand(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        lineage: torch.Tensor,
        position: int,
        future: FutureToken | None,
    ) -> torch.Tensor:
        """Run the beam: tokens (k,) with their parents' states (k, H) -> their states (k, H).

        lineage: (k, T) pending rows that each may see, its own new one included.
        """
        head, cache, count = self._head, self.cache, len(token_ids)
        e = self._embed(token_ids).to(states.dtype)
        x = head.attention_input(e, states).unsqueeze(0)
        cos, sin = self._rotary(position)  # the same for the whole level
        cache.open(count, see_fixed=future is not None)
        keys, values = cache.extend(0, *head.keys_values(x, cos, sin))
        states = self._steer(states)
        if self._pull is not None:
            x = head.attention_input(e, states).unsqueeze(0)
        q = head.queries(x, cos, sin)
        mixed = attend(q, keys, values, self._mask(lineage, future))
        return head.finish(states.unsqueeze(0), mixed)[0]

    def _children(
        self, states: torch.Tensor, level: int, future: FutureToken | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best k tokens (target ids) below each state (B, H), and their log-probabilities.

        level: depth of these children; the future token may have a word of its own on it.
        """
        logits = self._head.logits(states)
        if future is not None and future.read_out is not None and level <= len(future.read_out):
            logits = self._part.pool(logits, future.read_out[level - 1])
        logits = logits.float()
        best, ids = largest(logits, self._top_k)
        return self._head.target_ids(ids), best - logits.logsumexp(-1, keepdim=True)

    def _steer(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._pull is None else states + self._pull

    def _rotary(self, position: int, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (1, 1, count, W) of the positions from this one on."""
        cos, sin = self._turns
        return cos[:, :, position : position + count], sin[:, :, position : position + count]

    def _set_future_entry(self, future: FutureToken, position: int) -> None:
        """f as a key/value entry at the root's draft position, as in training."""
        head = self._head
        x = head.attention_input(future.embedding, future.feature).view(1, 1, -1)
        keys, values = head.keys_values(x, *self._rotary(position))
        self.cache.set_fixed(keys, values)

    def _mask(self, lineage: torch.Tensor, future: FutureToken | None) -> torch.Tensor:
        """Additive mask (1, 1, G·R, [1 +] P + T): f's learned bias, the whole text, the lineage."""
        dtype = self._head.fc.weight.dtype
        rows, shape = lineage.shape[0], self._head.shape
        start = self.cache.fixed if future is not None else 0
        text = start + self.cache.length
        mask = torch.zeros(rows, text + lineage.shape[1], dtype=dtype, device=lineage.device)
        if start:
            mask[:, 0] = self._part.entry_bias
        mask[:, text:].masked_fill_(~lineage, float("-inf"))
        groups = shape.heads // shape.kv_heads
        return mask.repeat(groups, 1).view(1, 1, groups * rows, -1)
