"""Pass A: the frozen target reads training text, without gradients.

What it knows of a conversation never changes, so a store (`store.py`) may keep it.

Sizes: B sequences, T positions, Ht target width, L layers, K key/value heads, W head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.target import Target
from confu_core.train.data import Batch
from confu_core.train.store import Store, Tensors


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
    """Reads batches through pass A, or takes from a store what was read before."""

    def __init__(self, target: Target, store: Store) -> None:
        self.target = target
        self.store = store

    def read(self, batch: Batch, remember: bool) -> Features:
        """Features of a batch; with `remember`, keys and values too."""
        names = ["taps", "last", "wanted"] + (["keys", "values"] if remember else [])
        texts = [
            ids[:length] for ids, length in zip(batch.ids, batch.lengths.tolist(), strict=True)
        ]
        found = [self.store.find(ids, names) for ids in texts]
        if all(kept is not None for kept in found):
            return _assemble(found)
        features = read_text(self.target, batch, remember)
        for row, (ids, kept) in enumerate(zip(texts, found, strict=True)):
            if kept is None and self.store.wants(names):
                self.store.keep(ids, _row(features, row, len(ids)))
        return features


def _row(features: Features, row: int, length: int) -> Tensors:
    """One conversation of a batch; keys and values as (L, K, T, W)."""
    read = {name: getattr(features, name)[row, :length] for name in ("taps", "last", "wanted")}
    if features.keys:
        read["keys"] = torch.stack([layer[row, :, :length] for layer in features.keys])
        read["values"] = torch.stack([layer[row, :, :length] for layer in features.values])
    return read


def _assemble(rows: list[Tensors]) -> Features:
    """Conversations as one right-padded batch."""

    def pad(name: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True)

    def layers(name: str) -> tuple[torch.Tensor, ...]:
        if name not in rows[0]:
            return ()
        width = max(row[name].shape[2] for row in rows)
        padded = [
            torch.nn.functional.pad(row[name], (0, 0, 0, width - row[name].shape[2]))
            for row in rows
        ]
        return torch.stack(padded, dim=1).unbind(0)  # (L, B, K, T, W) -> L times (B, K, T, W)

    return Features(pad("taps"), pad("last"), pad("wanted"), layers("keys"), layers("values"))
