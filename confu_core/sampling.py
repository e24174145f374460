"""Drawing tokens: arg max, or coupled sampling whose noise depends on nothing but the place.

A token is drawn as arg max(logits / T + Gumbel noise), which has exactly the softmax distribution.
The noise is a function of (seed, absolute position, token id) alone, so plain decoding, EAGLE-3
and ConFu, which reach the same position by different passes, draw the same token there: with one
seed they write the same text at any temperature (our choice; method.md section 5).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from confu_core.errors import TargetError
from confu_core.ranking import largest

_MASK_64 = (1 << 64) - 1
_HEAD = 1024  # tokens ranked before the whole vocabulary is


def _signed(value: int) -> int:
    """A 64-bit pattern as the signed number that torch wants."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64: every input bit changes every output bit about half the time."""
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def gumbel_noise(
    seed: int, position: int, vocab: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Gumbel noise (V,), float32, a pure function of (seed, position, token id).

    Integer hashing, so that every device draws the same bits. Computed in double precision, on the
    CPU where a device has none (MPS).
    """
    device = torch.device(device)
    where = torch.device("cpu") if device.type == "mps" else device
    golden = 0x9E3779B97F4A7C15
    key = torch.tensor([_signed(seed * golden + 1), 0], device=where)
    key = _mix(_mix(key[:1]) + _signed((position + 1) * golden))
    ids = torch.arange(1, vocab + 1, device=where)
    bits = _shift_right(_mix(key + ids * _signed(golden)), 11)  # 53 random bits
    uniform = (bits.double() + 0.5) * 2.0**-53
    return (-torch.log(-torch.log(uniform))).float().to(device)


@dataclass(frozen=True)
class Draw:
    """One drawn token. `margin`: lead over the second choice, in logits after temperature and
    noise; where it is near zero, arithmetic alone may decide."""

    token_id: int
    margin: float


class Sampler:
    """Draws the token at an absolute position from the target's logits.

    Args:
        temperature: 0 for arg max. top_p: keep the smallest set of tokens whose probability
            reaches it (after temperature, as in transformers). seed: any integer.
    """

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.seed = seed

    def draw(self, logits: torch.Tensor, position: int) -> Draw:
        """Draw from logits (V,), float32. `position`: where the token will stand in the text.

        Raises:
            TargetError: the logits are not numbers, as some targets' are in float16.
        """
        if self.temperature > 0:
            logits = logits / self.temperature
            if self.top_p < 1:
                logits = keep_top_p(logits, self.top_p)
            logits = logits + gumbel_noise(self.seed, position, len(logits), logits.device)
        best, ids = largest(logits.unsqueeze(0), 2)  # (1, 2) each
        margin = float(best[0, 0] - best[0, 1])
        if math.isnan(margin):
            raise TargetError(
                "The target's numbers left the range of its precision. Choose --dtype bfloat16 "
                "or float32."
            )
        # Under top-p a lone survivor leads by infinity, which plain data cannot hold.
        return Draw(int(ids[0, 0]), min(margin, 1e6))


def keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Set logits (V,) outside the nucleus to -inf; the most likely token always stays.

    The nucleus is nearly always small, so the head of the distribution is ranked first and the
    whole vocabulary only if that was not enough (a full sort takes longer than a draft step).
    """
    probs = logits.softmax(-1)
    for count in (min(_HEAD, len(probs)), len(probs)):
        best, index = probs.topk(count)
        before = best.cumsum(-1) - best  # mass of all likelier tokens
        if float(before[-1] + best[-1]) >= top_p:
            break
    keep = before < top_p
    keep[0] = True
    kept = index[keep]
    return torch.full_like(logits, float("-inf")).scatter(0, kept, logits[kept])
