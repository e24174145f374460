"""Targets to choose from: the default, and pairs of a target and a public EAGLE-3 head.

A preset says what must be downloaded, how large it is, and which heads there are. Hub ids, shapes
and draft vocabularies are those that the publishers state; sizes are counted from them. No public
target but the default has a ConFu head: train one with `python -m confu_core train confu`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from confu_core.errors import ConFuError, SettingsError, TargetError
from confu_core.sizes import BYTES, PACKED, TargetShape, eagle3_parameters

if TYPE_CHECKING:
    from confu_core.compare import Engine

DEFAULT = "smollm2-135m-instruct"
# Beside the weights: caches, logits and the libraries themselves (ours, generous).
WORKING_BYTES = 2_000_000_000
LLAMA_LICENCE = "Llama 3.1 Community License"


@dataclass(frozen=True)
class Preset:
    """One choice.

    target: hub id or folder; None for the default target, which is fetched another way.
    heads: method -> hub id or folder; None for those that ship for the default target.
    draft_vocab: D of the EAGLE-3 head. dtype: what the target is loaded in.
    gate: a licence that must be accepted on the hub first. note: what else to know.
    """

    name: str
    title: str
    target: str | None
    shape: TargetShape
    draft_vocab: int
    dtype: str = "bfloat16"
    heads: Mapping[str, str] | None = field(default_factory=dict)
    download: int | None = None
    gate: str = ""
    note: str = ""

    @property
    def head_bytes(self) -> int:
        return eagle3_parameters(self.shape, self.draft_vocab) * BYTES["float16"]

    @property
    def download_bytes(self) -> int:
        """What is fetched the first time; public weights are in 16-bit precision."""
        if self.download is not None:
            return self.download
        heads = len(self.heads or ())
        return self.shape.bytes("bfloat16") + heads * self.head_bytes

    def memory_bytes(self, dtype: str | None = None, bits: int | None = None) -> int:
        """What it takes while it decodes: weights, head, and room to work. In the preset's own
        precision, if no other is named; `bits` 4 or 8 packs the target's weights."""
        return self.shape.bytes(dtype or self.dtype, bits) + self.head_bytes + WORKING_BYTES

    def has(self, method: str) -> bool:
        """Whether the method can run: plain decoding needs no head."""
        return method == "plain" or self.heads is None or method in self.heads


def _llama_8b() -> TargetShape:
    return TargetShape("llama", 32, 4096, 32, 8, 128, 14336, 128256, tied=False)


def _qwen3(layers: int, hidden: int, heads: int, intermediate: int, tied: bool) -> TargetShape:
    return TargetShape("qwen3", layers, hidden, heads, 8, 128, intermediate, 151936, tied)


_ALL = (
    Preset(
        name=DEFAULT,
        title="SmolLM2-135M-Instruct",
        target=None,
        shape=TargetShape("llama", 30, 576, 9, 3, 64, 1536, 49152, tied=True),
        draft_vocab=8192,
        dtype="float32",
        heads=None,
        download=92_871_040,
    ),
    Preset(
        name="qwen3-1.7b",
        title="Qwen3-1.7B",
        target="Qwen/Qwen3-1.7B",
        shape=_qwen3(28, 2048, 16, 6144, tied=True),
        draft_vocab=32000,
        heads={"eagle3": "AngelSlim/Qwen3-1.7B_eagle3"},
    ),
    Preset(
        name="qwen3-4b",
        title="Qwen3-4B",
        target="Qwen/Qwen3-4B",
        shape=_qwen3(36, 2560, 32, 9728, tied=True),
        draft_vocab=32000,
        heads={"eagle3": "AngelSlim/Qwen3-4B_eagle3"},
    ),
    Preset(
        name="qwen3-8b",
        title="Qwen3-8B",
        target="Qwen/Qwen3-8B",
        shape=_qwen3(36, 4096, 32, 12288, tied=False),
        draft_vocab=32000,
        heads={"eagle3": "RedHatAI/Qwen3-8B-speculator.eagle3"},
    ),
    Preset(
        name="qwen3-14b",
        title="Qwen3-14B",
        target="Qwen/Qwen3-14B",
        shape=_qwen3(40, 5120, 40, 17408, tied=False),
        draft_vocab=32000,
        heads={"eagle3": "AngelSlim/Qwen3-14B_eagle3"},
    ),
    Preset(
        name="qwen3-32b",
        title="Qwen3-32B",
        target="Qwen/Qwen3-32B",
        shape=TargetShape("qwen3", 64, 5120, 64, 8, 128, 25600, 151936, tied=False),
        draft_vocab=32000,
        heads={"eagle3": "AngelSlim/Qwen3-32B_eagle3"},
    ),
    Preset(
        name="llama-3.1-8b",
        title="Llama-3.1-8B-Instruct",
        target="meta-llama/Llama-3.1-8B-Instruct",
        shape=_llama_8b(),
        draft_vocab=32000,
        heads={"eagle3": "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3"},
        gate=LLAMA_LICENCE,
    ),
    Preset(
        name="deepseek-r1-llama-8b",
        title="DeepSeek-R1-Distill-Llama-8B",
        target="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        shape=_llama_8b(),
        draft_vocab=32000,
        heads={"eagle3": "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"},
        note="This head is published as a pickle file, which is refused: convert it once, where "
        "you trust it (docs/errors.md), and name the folder with --eagle3.",
    ),
)
PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}


def find(name: str) -> Preset:
    """A preset by its name.

    Raises:
        SettingsError: there is none of that name; says which there are.
    """
    if name not in PRESETS:
        raise SettingsError(f"There is no preset {name!r}. Choose: {', '.join(PRESETS)}.")
    return PRESETS[name]


# ---- Whether it can run here -------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Where a preset is to run. memory: bytes in all of the device that computes; None if that is
    not known. space: whether this is a Hugging Face Space."""

    device: str
    memory: int | None
    space: bool


def this_machine(device: str = "auto") -> Machine:
    """The machine that this process runs on, for models on `device`."""
    import torch

    from confu_core.compare import best_device
    from confu_core.target import SPREAD

    chosen = best_device() if device in ("auto", SPREAD) else device
    if chosen == "spread" or chosen.startswith("cuda"):
        count = torch.cuda.device_count()
        memory = sum(torch.cuda.get_device_properties(n).total_memory for n in range(count))
    else:
        memory = _main_memory()
    return Machine(chosen, memory, "SPACE_ID" in os.environ)


def _main_memory() -> int | None:
    """Bytes of main memory that this process may use: a container's limit, else the machine's."""
    found = []
    try:
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit.isdigit():
            found.append(int(limit))
    except (OSError, ValueError, AttributeError):  # another system, or no such limit
        pass
    return min(found, default=None)


def refusal(
    preset: Preset, machine: Machine, dtype: str | None = None, bits: int | None = None
) -> str:
    """Why a preset cannot run on a machine, with what to do instead; empty if it can.

    Args:
        dtype, bits: as in `load`.
    """
    if dtype not in (None, *BYTES):
        return f"Precision {dtype!r} is not supported. Choose: {', '.join(BYTES)}."
    if bits not in (None, *PACKED):
        return f"{bits}-bit targets are not supported. Choose 4 or 8 bits."
    if preset.target is None:
        return ""
    if machine.space and machine.device == "cpu":
        return (
            f"{preset.title} needs a GPU, and this Space has none. Duplicate the Space with a GPU, "
            f"or run it on a machine of your own: python app.py --preset {preset.name}."
        )
    needed = preset.memory_bytes(dtype, bits)
    if machine.memory is None or needed <= machine.memory:
        return ""
    said = (
        f"{preset.title} needs about {gigabytes(needed)} GB while it runs; this machine has "
        f"{gigabytes(machine.memory)} GB. Choose a smaller one"
    )
    packed = preset.memory_bytes(preset.dtype, 4)
    if packed <= machine.memory:
        return f"{said}, or --bits 4, which needs about {gigabytes(packed)} GB."
    return f"{said}."


def gigabytes(count: int) -> str:
    """Bytes as gigabytes (10^9), one digit behind the point below ten."""
    value = count / 1e9
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


# ---- Loading -----------------------------------------------------------------------------------


def load(
    preset: Preset,
    device: str = "auto",
    progress: Callable[[str, float], None] | None = None,
    heads: Mapping[str, str | Path] | None = None,
    dtype: str | None = None,
    taps: str | None = None,
    bits: int | None = None,
) -> Engine:
    """Load a preset, after giving back what models that are no longer used had taken.

    Args:
        heads, dtype: others than the preset's own. taps, bits: as in `load_engine`.

    Raises:
        TargetError, CheckpointError: with what to do about it.
        SettingsError: it cannot run on this machine.
    """
    from confu_core.compare import load_engine

    free_memory()
    reason = refusal(preset, this_machine(device), dtype, bits)
    if reason:
        raise SettingsError(reason)
    chosen = heads or preset.heads
    chosen = None if chosen is None else dict(chosen)
    try:
        return load_engine(
            preset.target, device, progress, dtype or preset.dtype, chosen, taps, bits
        )
    except TargetError as error:
        if not preset.gate:
            raise
        raise TargetError(
            f"{error} {preset.title} stands under the {preset.gate}: accept it on the model's hub "
            "page, then log in with `hf auth login`."
        ) from error
    except ConFuError as error:
        if not preset.note:
            raise
        raise type(error)(f"{error} {preset.note}") from error


def free_memory() -> None:
    """Give memory of dropped models back: collect them, then empty the GPU's cache."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
