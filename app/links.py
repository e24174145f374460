"""Teacher links: what a URL's parameters ask for. Junk is ignored, numbers are clamped."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from app.form import CHANGES, FIELDS, METHODS, MOST_CHARACTERS, MOST_EXPERTS
from app.text import LANGUAGES

# Parts of the player that a lesson may hide.
HIDEABLE = ("race", "future", "plain", "card", "legend", "actions")

# Short names in the URL for the fields of the form.
NAMES = {"max_new_tokens": "tokens"}


@dataclass(frozen=True)
class Link:
    """A parsed link; None means that the link does not say."""

    preset: str | None = None
    prompt: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    change: str | None = None
    expert: int | None = None
    step: int | None = None
    hide: tuple[str, ...] = ()
    panels: tuple[str, ...] = ()
    language: str | None = None
    ignored: tuple[str, ...] = ()
    clamped: tuple[str, ...] = ()


def parse(query: Mapping[str, str], presets: tuple[str, ...]) -> Link:
    """Read a page's query. Parameters that are not ours (Gradio has its own) pass unseen."""
    ignored, clamped = [], []
    numbers = {}
    for entry in FIELDS:
        name = NAMES.get(entry.name, entry.name)
        if name not in query:
            continue
        value = _number(query[name])
        if value is None:
            ignored.append(name)
        else:
            numbers[entry.name] = entry.clamp(value)
            if numbers[entry.name] != value:
                clamped.append(name)
    methods = tuple(name for name in METHODS if name in query.get("methods", "").split(","))
    if "methods" in query and not methods:
        ignored.append("methods")
    # Another prompt's future token is left out: a link would have to hold that prompt too.
    change = query.get("change")
    if change is not None and (change not in CHANGES or change == "swap future"):
        ignored.append("change")
        change = None
    expert = _number(query["expert"]) if "expert" in query else None
    if "expert" in query and (expert is None or not 1 <= expert <= MOST_EXPERTS):
        ignored.append("expert")
        expert = None
    preset = query.get("preset")
    if preset is not None and preset not in presets:
        ignored.append("preset")
        preset = None
    prompt = query.get("prompt")
    if prompt is not None and not 0 < len(prompt) <= MOST_CHARACTERS:
        ignored.append("prompt")
        prompt = None
    step = _number(query["step"]) if "step" in query else None
    if "step" in query and (step is None or step < 0):
        ignored.append("step")
        step = None
    language = query.get("lang")
    if language is not None and language not in LANGUAGES:
        ignored.append("lang")
        language = None
    hide = tuple(part for part in query.get("hide", "").split(",") if part in HIDEABLE)
    return Link(
        preset=preset,
        prompt=prompt,
        numbers=numbers,
        methods=methods,
        change=change,
        expert=None if expert is None else int(expert),
        step=None if step is None else int(step),
        hide=hide,
        panels=tuple(query[key] for key in ("a", "b") if query.get(key) in METHODS),
        language=language,
        ignored=tuple(ignored),
        clamped=tuple(clamped),
    )


def _number(text: str) -> float | None:
    try:
        value = float(text[:32])
    except ValueError:
        return None
    return value if math.isfinite(value) else None
