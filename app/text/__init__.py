"""Every sentence that a visitor reads, by key, one JSON file per language.

A key with a suffix (`.one`) is the form for a number that the language treats so; the player
chooses it with the browser's plural rules, Python needs none so far.
"""

import json
import re
from functools import cache
from importlib.resources import files

# In the order in which the page offers them: (code, its own name).
LANGUAGES = {
    "en": "English",
    "de": "Deutsch",
    "fr": "Français",
    "it": "Italiano",
    "zh": "中文",
}
DEFAULT = "en"

_PLACE = re.compile(r"\{([a-z_]+)\}")


@cache
def table(language: str) -> dict[str, str]:
    """All strings of one language."""
    text = files(__package__).joinpath(f"{language}.json").read_text(encoding="utf-8")
    return json.loads(text)


def say(language: str, key: str, **values: object) -> str:
    """The sentence for `key`, its {places} filled; a missing translation falls back to English."""
    pattern = table(language).get(key) or table(DEFAULT)[key]
    return _PLACE.sub(lambda place: str(values.get(place[1], place[0])), pattern)


def choose(wanted: str | None, accept_language: str = "") -> str:
    """The language to speak: an explicit choice, else the browser's first that we have."""
    if wanted in LANGUAGES:
        return wanted
    offers = []
    for entry in accept_language.split(","):
        name, _, quality = entry.partition(";q=")
        code = name.strip().lower().split("-")[0]
        if code in LANGUAGES:
            try:
                offers.append((-float(quality or 1), code))
            except ValueError:
                continue
    return min(offers, default=(0, DEFAULT))[1]
