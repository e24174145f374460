"""The step player: its JavaScript and CSS, joined into what `gr.HTML` and the saved page need."""

import json
from functools import cache
from importlib.resources import files

from app import lessons, recorded
from app.text import LANGUAGES, table

# In order: each part uses only those above it.
SCRIPTS = (
    "layout.js",
    "dom.js",
    "story.js",
    "state.js",
    "tree.js",
    "chips.js",
    "panel.js",
    "race.js",
    "map.js",
    "charts.js",
    "future.js",
    "card.js",
    "dialogs.js",
    "export.js",
    "tour.js",
    "player.js",
)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def source() -> str:
    """One function `bundle`, which gives the player's constructor and leaks no other name."""
    scripts = "\n".join(_read(name) for name in SCRIPTS)
    return f"function bundle() {{\n{scripts}\nreturn confuPlayer;\n}}"


@cache
def assets() -> str:
    """What the player needs besides its code, as a JavaScript expression."""
    return as_script(
        {
            "css": _read("player.css"),
            "strings": {language: table(language) for language in LANGUAGES},
            "tour": lessons.TOUR,
            "glossary": lessons.GLOSSARY,
            "maps": recorded.backdrops(),
        }
    )


def as_script(value: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
