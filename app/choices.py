"""The models that visitors can choose from, and what the page says of each before it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.form import METHODS
from app.text import say
from confu_core import presets
from confu_core.presets import Preset, gigabytes
from confu_core.trace import LABELS

# Loads an engine: called in a thread, with a function that takes (sentence, fraction).
EngineSource = Callable[[Callable[[str, float], None]], Any]


@dataclass(frozen=True)
class Choice:
    """A model by the name that form and links use. `preset` is None for one of the user's own.
    `bits`: 4 or 8 if its weights are packed."""

    name: str
    title: str
    load: EngineSource
    preset: Preset | None = None
    device: str = "auto"
    bits: int | None = None

    def refusal(self) -> str:
        """Why it cannot be loaded on this machine; empty if it can."""
        if self.preset is None or self.preset.target is None:
            return ""
        return presets.refusal(self.preset, presets.this_machine(self.device), bits=self.bits)

    def about(self, language: str) -> str:
        """What choosing it means, in a sentence or two."""
        if self.preset is None:
            return say(language, "choice.own", title=self.title)
        missing = [LABELS[name] for name in METHODS if not self.preset.has(name)]
        parts = [
            say(
                language,
                "choice.about",
                title=self.title,
                download=gigabytes(self.preset.download_bytes),
                memory=gigabytes(self.preset.memory_bytes(bits=self.bits)),
            )
        ]
        if missing:
            parts.append(say(language, "engine.missing", methods=", ".join(missing)))
        if self.preset.gate:
            parts.append(say(language, "choice.gate", licence=self.preset.gate))
        return " ".join(parts)


def of_preset(preset: Preset, device: str, bits: int | None = None) -> Choice:
    """A preset as a choice."""
    return Choice(
        preset.name,
        preset.title,
        lambda report: presets.load(preset, device, report, bits=bits),
        preset,
        device,
        bits,
    )
