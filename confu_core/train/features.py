"""Pass A: the frozen target reads training text, without gradients.

What it knows of a conversation never changes, so it can be kept. `FeatureReader` keeps taps, final
states and the target's choices in memory (bfloat16: 8 Ht + 8 bytes a token, 4.6 KB for the default
target) until `KEPT_BYTES` are full; what is beyond is read anew. Keys and values, which only
ConFu's pass B needs, are five times larger and are recomputed.

Sizes: B sequences, T positions, Ht target width, K key/value heads, W head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.target import Target
from confu_core.train.data import Batch

KEPT_BYTES = 8_000_000_000  # of one reader; a large target's features would fill any GPU


@dataclass(frozen=True)
class Features:
    """What pass A knows of a batch.

    taps: (B, T, 3 Ht); last: (B, T, Ht); wanted: (B, T) the target's most likely next token.
    keys, values: per layer (B, K, T, W), for pass B; empty if it is not needed.
    """

    taps: torch.Tensor
    last: torch.Tensor
    wanted: torch.Tensor
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]


class TextMemory:
    """Memory of pass A: rows see each other; keys and values are remembered if asked for."""

    def __init__(self, remember: bool) -> None:
        self.remember = remember
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def extend(self, layer: int, keys: torch.Tensor, values: torch.Tensor):
        if self.remember:
            self.keys.append(keys)
            self.values.append(values)
        return keys, values


@torch.no_grad()
def read_text(target: Target, batch: Batch, remember: bool) -> Features:
    """Pass A over right-padded text (causal, so padding is never seen)."""
    ids = batch.ids.to(target.device)
    positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    memory = TextMemory(remember)
    rows = target.run(target.embed(ids), positions, None, memory)
    wanted = torch.full_like(ids, -1)
    # Logits over the whole vocabulary only where an answer is predicted.
    predicts = torch.zeros_like(batch.answer)
    predicts[:, :-1] = batch.answer[:, 1:]
    predicts = predicts.to(ids.device)
    wanted[predicts] = target.logits(rows.last[predicts]).argmax(-1)
    return Features(rows.taps, rows.last, wanted, tuple(memory.keys), tuple(memory.values))


class FeatureReader:
    """Reads batches through pass A, each conversation once if nothing but features is needed."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._bytes = 0

    def read(self, batch: Batch, remember: bool) -> Features:
        """Features of a batch; with `remember`, keys and values too (always computed anew).

        Batches of one reader must come from one list of conversations: `batch.numbers` name them.
        """
        if not remember and all(number in self._kept for number in batch.numbers):
            return self._assemble(batch)
        features = read_text(self.target, batch, remember)
        columns = (features.taps, features.last, features.wanted)
        for row, number in enumerate(batch.numbers):
            if remember or number in self._kept or self._bytes >= KEPT_BYTES:
                continue
            kept = tuple(column[row, : int(batch.lengths[row])].clone() for column in columns)
            self._kept[number] = kept
            self._bytes += sum(column.nbytes for column in kept)
        return features

    def forget(self) -> None:
        """Keep nothing of what was read."""
        self._kept.clear()
        self._bytes = 0

    def _assemble(self, batch: Batch) -> Features:
        kept = [self._kept[number] for number in batch.numbers]
        taps, last, wanted = (
            torch.nn.utils.rnn.pad_sequence(column, batch_first=True)
            for column in zip(*kept, strict=True)
        )
        return Features(taps, last, wanted, (), ())
