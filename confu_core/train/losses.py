"""Train-time test: the draft unrolled over its own states, with a future token if there is one.

Pass A runs the frozen target over the text without gradients. Pass B, with gradients, runs only
the anchors' contemplate tokens against pass A's keys and values. Because no text row ever sees a
contemplate token, the two passes together equal one pass over everything.

Index convention (pitfalls 1.4): start i pairs the features h_i with token t_{i+1} and predicts
t_{i+2}. Step k of the chain from start i reads token t_{i+1+k} at draft position i + k.

Sizes: B sequences, T positions, M starts, A anchors, H draft width, D draft vocabulary, K·G heads,
W head width, F soft prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from confu_core import masks
from confu_core.heads import Contemplation, DraftHead
from confu_core.target import Target
from confu_core.train.anchors import Anchors, sample_anchors
from confu_core.train.data import Batch
from confu_core.train.features import FeatureReader, Features, read_text
from confu_core.train.store import Memory, Store


class AnchorMemory:
    """Memory of pass B: soft prompts, then pass A's text, then the contemplate rows themselves."""

    def __init__(self, features: Features, contemplation: Contemplation) -> None:
        self.features = features
        self.contemplation = contemplation

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        batch = keys.shape[0]
        soft_keys = self.contemplation.soft_keys[layer].to(keys.dtype).expand(batch, -1, -1, -1)
        soft_values = self.contemplation.soft_values[layer].to(keys.dtype).expand(batch, -1, -1, -1)
        return (
            torch.cat((soft_keys, self.features.keys[layer], keys), dim=2),
            torch.cat((soft_values, self.features.values[layer], values), dim=2),
        )


def chain_starts(answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions i where t_{i+1} and t_{i+2} are both the target's own: (B, M) and a validity mask.

    The first answer token is drawn from the prompt's logits, so the first start pairs it with the
    prompt's last features: exactly the entry of the first round of decoding.
    """
    supervised = answer[:, 1:-1] & answer[:, 2:]
    counts = supervised.sum(1)
    # A stable sort of "not supervised" brings the supervised positions to the front, in order.
    order = (~supervised).to(torch.int8).sort(dim=1, stable=True).indices
    starts = order[:, : int(counts.max())]
    valid = torch.arange(starts.shape[1]).unsqueeze(0) < counts.unsqueeze(1)
    return starts, valid


@dataclass(frozen=True)
class FutureRows:
    """Future tokens spread over the starts that they serve.

    feature: (B, M, H) fused contemplate features; entry: keys and values (B, K, M, W) of f's entry,
    or None; present: (B, M); age: (B, M) how many tokens the start is behind its anchor;
    read_states: (B, A, R, H) of the anchors, or None; anchor_of: (B, M) index into A;
    router_weights: of both mixtures over the anchors, (B, A, E), for statistics.
    imbalance: () of both routers together, for the loss.
    """

    feature: torch.Tensor
    entry: tuple[torch.Tensor, torch.Tensor] | None
    present: torch.Tensor
    age: torch.Tensor
    read_states: torch.Tensor | None
    anchor_of: torch.Tensor
    router_weights: tuple[torch.Tensor, torch.Tensor]
    imbalance: torch.Tensor


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of (B, N, C) at (B, M): (B, M, C)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


@dataclass(frozen=True)
class Opinions:
    """What is known of the next token at n chains, before it is one guess.

    draft: (n, D) logits. told: (n,) where a read-out of the future token reaches; read_out: its
    (m, D) logits there, number: (m,) which of the read-outs it is.
    """

    draft: torch.Tensor
    told: torch.Tensor
    read_out: torch.Tensor | None = None
    number: torch.Tensor | None = None


@dataclass(frozen=True)
class Unrolled:
    """Loss and agreement of an unrolled batch, per depth (lists of length `steps`).

    losses: soft cross-entropy against the target, mean over what was supervised.
    counts: how many starts were supervised at each depth.
    read_out_losses: the same for the future tokens' own read-outs (ours, not the paper's).
    top1, top8: (n,) booleans per depth on the starts whose chain is long enough to be judged at
        every depth: whether the draft's best / best 8 hold the token that followed.
    imbalance: of both routers together (`router_imbalance`); None without a future token.
    """

    losses: list[torch.Tensor]
    counts: list[int]
    top1: list[torch.Tensor]
    top8: list[torch.Tensor]
    router_weights: tuple[torch.Tensor, torch.Tensor] | None
    read_out_losses: list[torch.Tensor]
    imbalance: torch.Tensor | None


class DraftTrainee(nn.Module):
    """A draft head, and ConFu's part if it has one, unrolled on batches of text.

    One module, so that data-parallel wrappers see one forward. store: keeps what the target read;
    memory by default.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        contemplation: Contemplation | None,
        store: Store | None = None,
    ) -> None:
        super().__init__()
        self.head = head
        self.contemplation = contemplation
        # In a tuple, so that the frozen target's parameters are not ours.
        self._target = (target,)
        self.reader = FeatureReader(target, store or Memory())
        target_ids = head.target_ids(torch.arange(head.shape.draft_vocab))
        known = torch.zeros(head.shape.vocab, dtype=torch.bool)
        known[target_ids] = True
        self.register_buffer("known", known, persistent=False)
        self.register_buffer("vocabulary", target_ids, persistent=False)

    @property
    def target(self) -> Target:
        return self._target[0]

    def forward(
        self,
        batch: Batch,
        steps: int,
        dice: random.Random,
        anchor_every: int = 3,
        replicate: bool = True,
        judge: Callable[[int, Opinions, torch.Tensor], None] | None = None,
    ) -> Unrolled:
        """Unroll `steps` draft steps from every supervised start of the batch.

        judge: when evaluating, called at each depth with the opinions at all chains that reach the
            last depth, and the token ids (n,) that followed.
        """
        target, head = self.target, self.head
        features = self.reader.read(batch, remember=self.contemplation is not None)
        ids, answer = batch.ids.to(target.device), batch.answer
        starts, valid = chain_starts(answer)
        if self.contemplation is not None:
            anchors = sample_anchors(starts, valid, anchor_every, dice, replicate)
        answer, starts, valid = (t.to(target.device) for t in (answer, starts, valid))

        taps = features.taps.to(head.fc.weight.dtype)
        fused = head.fuse(taps)  # (B, T, H)
        next_ids = torch.cat((ids[:, 1:], ids[:, -1:]), dim=1)
        e = self.embed(next_ids)
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        text_keys, text_values = head.keys_values(
            head.attention_input(e, fused), *head.rotary(positions)
        )
        future = None
        if self.contemplation is not None:
            future = self._futures(features, fused, anchors, starts)

        label_probs, row_of = self._labels(features, answer)
        state = gather_rows(fused, starts)  # (B, M, H)
        own: list[tuple[torch.Tensor, torch.Tensor]] = []
        losses, counts, top1, top8 = [], [], [], []
        read_out_losses = []
        width = ids.shape[1]
        # Judge only chains that reach the last depth, so every depth has the same n.
        judged = valid & gather_at(answer, starts + 1 + steps)
        for k in range(steps):
            token = ids.gather(1, (starts + 1 + k).clamp(max=width - 1))
            state = self._step(k, token, state, starts, (text_keys, text_values), own, future)

            label = starts + 1 + k  # the target's distribution after this token
            label_in = label.clamp(max=width - 1)
            supervised = valid & gather_at(answer, label + 1)
            wanted = features.wanted.gather(1, label_in)
            supervised &= self.known[wanted.clamp(min=0)] & (wanted >= 0)
            rows = row_of.gather(1, label_in)[supervised]
            known = self._opinions(state, supervised, k, future)
            losses.append(_cross_entropy(self._pool(known), label_probs[rows]))
            if known.read_out is not None:
                labels = label_probs[rows[known.told]]
                read_out_losses.append(_cross_entropy(known.read_out, labels))
            counts.append(int(supervised.sum()))
            if not self.training:
                followed = ids.gather(1, (label + 1).clamp(max=width - 1))[judged]
                known = self._opinions(state, judged, k, future)
                if judge is not None:
                    judge(k, known, followed)
                best = self._pool(known).topk(8, dim=-1).indices
                hits = self.vocabulary[best] == followed.unsqueeze(-1)
                top1.append(hits[:, 0])
                top8.append(hits.any(-1))
        weights = future.router_weights if future else None
        imbalance = future.imbalance if future else None
        return Unrolled(losses, counts, top1, top8, weights, read_out_losses, imbalance)

    def futures_of(self, batch: Batch, anchors: Anchors, starts: torch.Tensor) -> FutureRows:
        """The future tokens of given anchors, without any draft step."""
        features = read_text(self.target, batch, remember=True)
        fused = self.head.fuse(features.taps.to(self.head.fc.weight.dtype))
        return self._futures(features, fused, anchors, starts)

    def _opinions(
        self, state: torch.Tensor, chosen: torch.Tensor, k: int, future: FutureRows | None
    ) -> Opinions:
        """Step k's opinions at chosen (B, M) chains."""
        logits = self.head.logits(state[chosen])
        told = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if future is None or future.read_states is None:
            return Opinions(logits, told)
        # An f that is `age` tokens old has named `age` tokens that the chain has already read.
        number = future.age[chosen] + k
        told = future.present[chosen] & (number < future.read_states.shape[2])
        if not told.any():
            return Opinions(logits, told)
        sequence = chosen.nonzero()[:, 0][told]
        number = number[told]
        states = future.read_states[sequence, future.anchor_of[chosen][told], number]
        return Opinions(logits, told, self.head.lm_head(states), number)

    def _pool(self, known: Opinions) -> torch.Tensor:
        """(n, D) logits: the draft's, with the read-outs mixed in where they reach."""
        if known.read_out is None:
            return known.draft
        weight = self.contemplation.read_out_weight[known.number].to(known.read_out.dtype)
        pooled = self.contemplation.pool(
            known.draft[known.told], weight.unsqueeze(-1) * known.read_out
        )
        return known.draft.index_copy(0, known.told.nonzero().squeeze(-1), pooled)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token embeddings as in decoding, in the draft's precision."""
        return self.head.embed(self.target, ids).to(self.head.fc.weight.dtype)

    @torch.no_grad()
    def _labels(
        self, features: Features, answer: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's distributions restricted to D (EAGLE-3), once for all steps.

        Returns:
            (n, D) probabilities where an answer token follows, and (B, T) the row of each position.
        """
        labelled = torch.zeros_like(answer)
        labelled[:, :-1] = answer[:, 1:]
        weight = self.target.model.get_output_embeddings().weight[self.vocabulary]
        probs = (features.last[labelled] @ weight.t()).float().softmax(-1)
        rows = labelled.reshape(-1).cumsum(0).view_as(labelled) - 1
        return probs.to(weight.dtype), rows.clamp(min=0)

    def _futures(
        self,
        features: Features,
        fused: torch.Tensor,
        anchors: Anchors,
        starts: torch.Tensor,
    ) -> FutureRows:
        """Pass B, and its future tokens spread over the starts that they serve."""
        part, target, head = self.contemplation, self.target, self.head
        positions = anchors.positions.to(target.device)
        lagged = gather_rows(features.taps, anchors.router_positions.to(target.device))
        embedding, contemplate_weights = part.contemplate(lagged.to(part.contemplate.mean.dtype))
        may_attend = masks.anchor_mask(positions, fused.shape[1], part.shape.soft_prompts)
        rows = target.run(
            embedding.to(features.taps.dtype),
            positions + 1,
            may_attend,
            AnchorMemory(features, part),
            part.adapters,
        )
        feature = head.fuse(rows.taps.to(fused.dtype))  # (B, A, H)
        slot, future_weights = part.future(gather_rows(fused, positions))  # (B, A, H)
        present = anchors.of_start.to(target.device) >= 0
        index = anchors.of_start.to(target.device).clamp(min=0)
        feature, slot = gather_rows(feature, index), gather_rows(slot, index)  # (B, M, H)
        starts = starts.to(target.device)
        age = starts - positions.gather(1, index)
        read_states = part.read_states(rows.last.to(fused.dtype)) if part.shape.read_outs else None
        entry = None
        if part.shape.future_entry:
            # f's entry stands at the position of the chain's first entry, as the root's does.
            entry = head.keys_values(head.attention_input(slot, feature), *head.rotary(starts))
        weights = (contemplate_weights, future_weights)
        real = positions > 0  # a start follows a prompt, so 0 is padding
        imbalance = sum(router_imbalance(w[real]) for w in weights)
        return FutureRows(feature, entry, present, age, read_states, index, weights, imbalance)

    def _step(
        self,
        k: int,
        token: torch.Tensor,
        state: torch.Tensor,
        starts: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        own: list[tuple[torch.Tensor, torch.Tensor]],
        future: FutureRows | None,
    ) -> torch.Tensor:
        """One draft step of all chains: states (B, M, H) -> (B, M, H). Adds to `own`."""
        head = self.head
        e = self.embed(token)
        cos, sin = head.rotary(starts + k)
        if k > 0:  # step 0's key already stands among the text's
            own.append(head.keys_values(head.attention_input(e, state), cos, sin))
        if future is not None and self.contemplation.shape.future_query:
            steer = self.contemplation.steer(future.feature)
            state = state + steer * future.present.unsqueeze(-1)
        q = head.queries(head.attention_input(e, state), cos, sin)  # (B, K·G, M, W)
        entry_bias = self.contemplation.entry_bias if future is not None else None
        mixed = chain_attention(q, text, own, starts, future, entry_bias)
        return head.finish(state, mixed)


def router_imbalance(weights: torch.Tensor) -> torch.Tensor:
    """How unevenly a mixture uses its experts: E times the sum of squared mean weights, less 1.

    0 when all carry the same on average, E - 1 when one carries everything. Ours: without it in
    the loss, routers collapsed onto one expert (docs/training.md).

    Args:
        weights: (n, E), each row summing to 1.
    """
    return weights.shape[-1] * weights.float().mean(0).square().sum() - 1


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of -sum(p log softmax(z)), with its gradient made on the way.

    Logits and targets over the draft vocabulary are the largest tensors of a step; writing the
    gradient softmax(z) - p at once saves half of the trips through memory.
    """

    @staticmethod
    def forward(ctx, logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """logits, probs: (n, D) in any precision, each row of probs summing to 1 -> () float32."""
        z = logits.float()
        if z is logits:  # never write into what the caller still holds
            z = z.clone()
        z -= z.amax(-1, keepdim=True)
        p = probs.float()
        loss = -torch.linalg.vecdot(z, p).mean()
        total = z.exp_().sum(-1, keepdim=True)
        loss += total.log().mean()
        gradient = z.div_(total).sub_(p).div_(len(z))
        ctx.save_for_backward(gradient.to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx, upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None


def _cross_entropy(draft_logits: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """Soft cross-entropy, mean over rows; zero (with a gradient path) if there is no row."""
    if not len(probs):
        return draft_logits.sum()
    return SoftCrossEntropy.apply(draft_logits, probs)


def gather_at(flags: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """flags (B, T) at (B, M); False beyond the end."""
    inside = index < flags.shape[1]
    return flags.gather(1, index.clamp(max=flags.shape[1] - 1)) & inside


def chain_attention(
    q: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    own: list[tuple[torch.Tensor, torch.Tensor]],
    starts: torch.Tensor,
    future: FutureRows | None,
    entry_bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one unrolled step: the text up to the chain's start, the chain's own later
    keys, and f's entry, under one softmax.

    Args:
        q: (B, K·G, M, W). text: keys and values (B, K, T, W). own: per earlier step (B, K, M, W).

    Returns:
        (B, K·G, M, W)
    """
    batch, heads, count, width = q.shape
    kv_heads, length = text[0].shape[1], text[0].shape[2]
    groups = heads // kv_heads
    q = q.view(batch, kv_heads, groups, count, width) * width**-0.5
    stacked = q.reshape(batch, kv_heads, groups * count, width)
    scores = (stacked @ text[0].transpose(-1, -2)).view(batch, kv_heads, groups, count, length)
    seen = torch.arange(length, device=q.device) <= starts.unsqueeze(-1)  # (B, M, T)
    scores = scores.float().masked_fill(~seen[:, None, None], float("-inf"))
    columns = list(own)
    extra = [(q * keys.unsqueeze(2)).sum(-1, keepdim=True).float() for keys, _ in own]
    if future is not None and future.entry is not None:
        columns.append(future.entry)
        score = (q * future.entry[0].unsqueeze(2)).sum(-1, keepdim=True).float() + entry_bias
        absent = ~future.present[:, None, None, :, None]
        extra.append(score.masked_fill(absent, float("-inf")))
    weights = torch.cat((scores, *extra), dim=-1).softmax(-1).to(q.dtype)
    inside = weights[..., :length].reshape(batch, kv_heads, groups * count, length)
    mixed = (inside @ text[1]).view(batch, kv_heads, groups, count, width)
    for index, (_, values) in enumerate(columns):
        mixed = mixed + weights[..., length + index, None] * values.unsqueeze(2)
    return mixed.reshape(batch, heads, count, width)
