"""Rotary frequencies of a draft head, plain or scaled. The target has its own module for its own.

Only scalings that do not depend on the length of the text are offered: with any other, the keys
that stand in the cache would have been turned by other frequencies than the next query.
"""

from __future__ import annotations

import math

import torch

from confu_core.errors import CheckpointError

# What each kind needs besides its name, with the names of transformers' `rope_parameters`.
SCALINGS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def frequencies(
    width: int, theta: float, scaling: dict | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Radians per position of each pair of dimensions: (W / 2,), float32.

    Args:
        width: W, the head width.
        scaling: None, or a `rope_type` of `SCALINGS` with its numbers (see `check_scaling`).
    """
    # Made anew in float32: a buffer would follow the head into bfloat16, where angles drown.
    steps = torch.arange(0, width, 2, device=device).float()
    plain = theta ** (-steps / width)
    kind = scaling["rope_type"] if scaling else "default"
    if kind == "default":
        return plain
    slow = plain / scaling["factor"]
    if kind == "linear":
        return slow
    # Llama-3: short waves stay, long ones are stretched, those between are mixed.
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return slow * (1 - share) + plain * share


def check_scaling(scaling: dict) -> None:
    """Refuse a scaling that `frequencies` cannot make.

    Raises:
        CheckpointError: of another kind, or without one of its numbers.
    """
    kind = scaling.get("rope_type")
    if kind not in SCALINGS:
        raise CheckpointError(
            f"The head asks for rope scaling of the kind {kind!r}. Supported: "
            f"{', '.join(SCALINGS)}."
        )
    absent = [name for name in SCALINGS[kind] if not isinstance(scaling.get(name), (int, float))]
    if absent:
        raise CheckpointError(f"Rope scaling {kind!r} lacks its number {', '.join(absent)}.")
