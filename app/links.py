"""Teacher links: what a URL's parameters ask for (docs/api.md lists them for people).

One rule for all: what this page cannot show or does not know is left out, a number beyond its range
is brought into it, and the page names every parameter to which either happened.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from app.form import CHANGES, CHOSEN, FIELDS, METHODS, MOST_CHARACTERS, MOST_EXPERTS
from app.text import LANGUAGES
from confu_core.trace import Trace

# What a lesson may hide: parts of the player, and of the page around it, with what they are there.
TABS = ("lesson", "experts", "futures", "speed")
PLAYER_PARTS = ("race", "future", "plain", "card", "legend", "actions")
PAGE_PARTS = {
    "head": "#head .page-head",
    "ask": "#ask",
    "examples": "#examples > button",
    "settings": "#settings",
    "charts": "#charts",
    **{name: f"#tab-{name}-button, #tab-{name}" for name in TABS},
}
HIDEABLE = (*PLAYER_PARTS, *PAGE_PARTS)

# Short names in the URL for the fields of the form.
NAMES = {"max_new_tokens": "tokens"}
PHASES = ("draft", "check", "accept", "append")


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
    phase: int | None = None
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
    asked = _list(query, "methods")
    methods = tuple(name for name in METHODS if name in asked)
    if set(asked) - set(methods):
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
    phase = query.get("phase")
    if phase is not None and phase not in PHASES:
        ignored.append("phase")
        phase = None
    hide = tuple(name for name in dict.fromkeys(_list(query, "hide")) if name in HIDEABLE)
    if set(_list(query, "hide")) - set(hide):
        ignored.append("hide")
    # A panel is a tree of a run that the link asks for. Plain decoding drafts none: its text has a
    # place of its own below the panels.
    trees = [name for name in methods or CHOSEN if name != "plain"]
    panels = []
    for key in ("a", "b"):
        if key in query and query[key] in (*trees, *(["changed"] if change else [])):
            panels.append(query[key])
        elif key in query:
            ignored.append(key)
    return Link(
        preset=preset,
        prompt=prompt,
        numbers=numbers,
        methods=methods,
        change=change,
        expert=None if expert is None else int(expert),
        step=None if step is None else int(step),
        phase=None if phase is None else PHASES.index(phase) + 1,
        hide=hide,
        panels=tuple(dict.fromkeys(panels)),
        language=language,
        ignored=tuple(ignored),
        clamped=tuple(clamped),
    )


def within(link: Link, trace: Trace) -> Link:
    """The link with its step brought into a run that is known already. Of a run that is still to be
    computed the player alone learns the end; it says the same then."""
    trees = [lane for lane in trace.lanes.values() if lane.method != "plain"]
    last = max((len(lane.rounds) - 1 for lane in trees or trace.lanes.values()), default=0)
    if link.step is None or link.step <= last:
        return link
    return replace(link, step=last, clamped=(*link.clamped, "step"))


def _list(query: Mapping[str, str], name: str) -> list[str]:
    return query[name].split(",") if query.get(name) else []


def _number(text: str) -> float | None:
    try:
        value = float(text[:32])
    except ValueError:
        return None
    return value if math.isfinite(value) else None
