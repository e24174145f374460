"""Documentation that cannot lie: schema page, error page and map of files are complete."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from confu_core import errors, trace

ROOT = Path(__file__).resolve().parent.parent
RECORDS = [
    kind
    for kind in vars(trace).values()
    if dataclasses.is_dataclass(kind) and kind.__name__ != "Difference"
]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_trace_is_documented(kind):
    text = page("trace.md")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if f"`{field.name}`" not in text
        and not (field.name.startswith("choice_") and "`choice_ids`" in text)
    ]
    assert not missing


def test_the_schema_version_is_the_documented_one():
    assert f"Schema version: {trace.SCHEMA}." in page("trace.md")


def test_every_error_is_documented():
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and name != "ConFuError"
    ]
    assert kinds and all(f"| `{name}` |" in page("errors.md") for name in kinds)


def test_the_licence_that_the_front_matter_names_lies_beside_it():
    front = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "\nlicense: apache-2.0\n" in front
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    cards = list((ROOT / "checkpoints").rglob("README.md"))
    heads = [card for card in cards if (card.parent / "config.json").is_file()]
    assert heads and all("Licence: Apache-2.0" in p.read_text(encoding="utf-8") for p in heads)


def test_the_map_of_confu_core_is_complete():
    rooms = page("architecture.md").split("## Rooms of `confu_core`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+\.py)`", rooms))
    files = {path.name for path in (ROOT / "confu_core").glob("*.py")} - {"__init__.py"}
    assert named == files
