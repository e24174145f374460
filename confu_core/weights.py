"""Weight files: safetensors only, read without running anything, compared name by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from confu_core.errors import CheckpointError

SHOWN = 5  # faults that a message lists; the rest are counted


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of one file, on the CPU.

    Raises:
        CheckpointError: it is not a readable safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}.") from error


def compare_weights(
    folder: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    """Every expected tensor with its exact shape, and no other.

    Raises:
        CheckpointError: names what is missing, unexpected, or of another shape.
    """
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(
            f"The weights in {folder} do not fit its config: {'; '.join(faults[:SHOWN])}{more}."
        )
