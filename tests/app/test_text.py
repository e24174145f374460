"""No string is missing in a language, no place in a sentence is lost, no key is unused."""

import re
from pathlib import Path

import pytest

from app import lessons
from app.text import DEFAULT, LANGUAGES, choose, say, table

APP = Path(__file__).resolve().parents[2] / "app"
PLACE = re.compile(r"\{[a-z_]+\}|%\{[^}]+\}")
# Plural forms that a language adds or lacks; the key without a suffix is the common one.
PLURAL = re.compile(r"\.(zero|one|two|few|many|other)$")


def stems(language: str) -> set[str]:
    return {PLURAL.sub("", key) for key in table(language)}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_has_every_string(language):
    assert stems(language) == stems(DEFAULT)
    assert all(text.strip() for text in table(language).values())
    for stem in stems(language):
        assert stem in table(language), f"{stem} has only plural forms"


@pytest.mark.parametrize("language", LANGUAGES)
def test_places_are_those_of_the_english_sentence(language):
    for key, text in table(language).items():
        stem = PLURAL.sub("", key)
        wanted = set(PLACE.findall(table(DEFAULT)[stem]))
        given = set(PLACE.findall(text))
        # A singular may leave its number out.
        assert given <= wanted, key
        if key == stem:
            assert given == wanted, key


def test_every_string_is_used():
    code = "\n".join(
        path.read_text(encoding="utf-8") for path in [*APP.rglob("*.py"), *APP.rglob("*.js")]
    )
    families = re.findall(r"[`\"']([a-z]+\.[a-z_]*)\$?\{", code)
    named = set(re.findall(r"[`\"']([a-z]+\.[a-z_0-9]+)[`\"']", code))
    lost = [
        key
        for key in stems(DEFAULT)
        if key not in named and not any(key.startswith(family) for family in families)
    ]
    assert not lost


def test_lessons_have_words():
    for card in lessons.TOUR:
        assert say(DEFAULT, f"tour.{card['key']}") and say(DEFAULT, f"tour.{card['key']}_text")
    for word in lessons.GLOSSARY:
        assert say(DEFAULT, f"glossary.{word}_means")
    for example in lessons.EXAMPLES:
        assert say(DEFAULT, f"try.{example.name}")


@pytest.mark.parametrize(
    ("wanted", "header", "expected"),
    [
        ("en", "de", "en"),
        (None, "xx,en;q=0.5", "en"),
        ("junk", "", "en"),
        (None, "en;q=abc", "en"),
        (None, "de-AT,de;q=0.9,en;q=0.8", "de"),
        (None, "en;q=0.2,zh-CN;q=0.9", "zh"),
        ("it", "de", "it"),
    ],
)
def test_choice_of_language(wanted, header, expected):
    assert choose(wanted, header) == expected
