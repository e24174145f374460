"""Where what the frozen target read of the training text is kept: in memory, on disk, or nowhere.

It never changes, so keeping it trades bytes for passes of the target. Per token and in bfloat16:
taps, final state and wanted token take 8 Ht + 8 bytes (4.6 KB for the default target), the keys and
values that ConFu's pass B needs 4 L K W bytes more (23 KB). Memory takes the first alone; a disk
takes both, and every later run, or variant of an ablation, over the same text finds them there.

Sizes: T positions, Ht target width, L layers, K key/value heads, W head width.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from confu_core.errors import DataError
from confu_core.target import Target
from confu_core.train.plan import KEPT_BYTES

DIGEST_ROWS = 16  # of each weight; any training changes all of them

Tensors = dict[str, torch.Tensor]  # of one conversation, by the names of `Features`' fields


class Store(Protocol):
    """What a `FeatureReader` asks for the tensors of one conversation, and gives them to."""

    def find(self, ids: torch.Tensor, names: Sequence[str]) -> Tensors | None:
        """All tensors of these names for the conversation with token ids (T,), or None."""

    def wants(self, names: Sequence[str]) -> bool:
        """Whether it would keep tensors of these names; asked before they are copied."""

    def keep(self, ids: torch.Tensor, read: Tensors) -> None:
        """Take tensors that were not found."""


class Nowhere:
    """Everything is read anew."""

    def find(self, ids: torch.Tensor, names: Sequence[str]) -> None:
        return None

    def wants(self, names: Sequence[str]) -> bool:
        return False

    def keep(self, ids: torch.Tensor, read: Tensors) -> None:
        return None


class Memory:
    """Features without keys and values, up to `KEPT_BYTES`; what is beyond is read anew."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensors] = {}
        self._bytes = 0

    def find(self, ids: torch.Tensor, names: Sequence[str]) -> Tensors | None:
        kept = self._kept.get(_name(ids))
        return kept if kept is not None and all(name in kept for name in names) else None

    def wants(self, names: Sequence[str]) -> bool:
        return "keys" not in names and self._bytes < KEPT_BYTES

    def keep(self, ids: torch.Tensor, read: Tensors) -> None:
        self._kept[_name(ids)] = {name: tensor.clone() for name, tensor in read.items()}
        self._bytes += sum(tensor.nbytes for tensor in read.values())


class Disk:
    """One safetensors file per conversation, in a folder per target and precision. Runs and
    processes may share it: files are replaced in one rename, and a damaged one is read anew."""

    def __init__(self, folder: Path, target: Target) -> None:
        taps = "-".join(map(str, target.tap_layers))
        precision = target.precision.replace(", ", "-").replace(" ", "-")
        self._folder = folder / f"{weights_digest(target)}-{precision}-taps-{taps}"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._device = target.device

    def find(self, ids: torch.Tensor, names: Sequence[str]) -> Tensors | None:
        try:
            with safe_open(self._path(ids), framework="pt", device=str(self._device)) as file:
                return {name: file.get_tensor(name) for name in names}
        except (FileNotFoundError, SafetensorError):
            return None

    def wants(self, names: Sequence[str]) -> bool:
        return True

    def keep(self, ids: torch.Tensor, read: Tensors) -> None:
        path = self._path(ids)
        fresh = path.with_suffix(f".{os.getpid()}.new")
        save_file({name: tensor.contiguous() for name, tensor in read.items()}, fresh)
        fresh.replace(path)

    def _path(self, ids: torch.Tensor) -> Path:
        return self._folder / f"{_name(ids)}.safetensors"


def weights_digest(target: Target) -> str:
    """Sixteen hex digits that tell targets apart by what they compute: some rows of every weight.

    `Target.fingerprint` leaves weights out, since a finetune may share a head; it may not share
    features.
    """
    digest = hashlib.sha256(target.fingerprint().encode())
    for name, weight in target.model.named_parameters():
        middle = len(weight) // 2
        rows = (weight if weight.dim() == 1 else weight[middle : middle + DIGEST_ROWS]).detach()
        digest.update(name.encode())
        digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def bytes_per_token(target: Target, remember: bool) -> int:
    """What one token of text takes; with `remember`, keys and values included."""
    size = target.dtype.itemsize
    features = size * (len(target.tap_layers) + 1) * target.hidden + 8
    return features + remember * 2 * size * target.layers * target.kv_heads * target.head_dim


def open_store(where: str, target: Target, tokens: int, remember: bool) -> tuple[Store, str]:
    """The store that `--features` names, and what it will take, in words.

    Args:
        where: "memory", "recompute", or a folder.
        tokens: of the text, all together.
        remember: whether keys and values are wanted too.

    Raises:
        DataError: the disk has not enough room.
    """
    if where == "recompute":
        return Nowhere(), "nothing is kept"
    each = bytes_per_token(target, remember and where != "memory")
    size = f"{each * tokens / 1e9:.2f} GB ({each / 1000:.1f} KB for each of {tokens:,} tokens)"
    if where == "memory":
        if remember:
            return Memory(), "nothing is kept: keys and values are wanted; a folder would keep them"
        return Memory(), f"{size} in memory, of which at most {KEPT_BYTES / 1e9:.0f} GB are kept"
    store = Disk(Path(where), target)
    free = shutil.disk_usage(where).free
    if each * tokens > free:
        raise DataError(
            f"Features of this text take {size}, and {where} has {free / 1e9:.2f} GB left. "
            "Choose another folder, or --features recompute."
        )
    return store, f"{size} in {where}"


def _name(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:32]
