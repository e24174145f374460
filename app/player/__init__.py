"""The step player: its JavaScript and CSS, joined into what `gr.HTML` and the saved page need."""

import json
from functools import cache
from importlib.resources import files

from app import lessons
from app.text import LANGUAGES, table

# In order: each part uses only those above it.
SCRIPTS = (
    "layout.js",
    "dom.js",
    "story.js",
    "tree.js",
    "export.js",
    "tour.js",
    "player.js",
)


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def source() -> str:
    """One function `bundle` that gives the player's constructor and shares no name with the page."""
    scripts = "\n".join(_read(name) for name in SCRIPTS)
    return f"function bundle() {{\n{scripts}\nreturn confuPlayer;\n}}"


@cache
def assets() -> str:
    """What the player needs besides its code, as a JavaScript expression."""
    return json.dumps(
        {
            "css": _read("player.css"),
            "strings": {language: table(language) for language in LANGUAGES},
            "tour": lessons.TOUR,
            "glossary": lessons.GLOSSARY,
        },
        ensure_ascii=False,
    )
