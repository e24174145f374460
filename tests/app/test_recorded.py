"""Recorded runs: written by the command, read back, and told apart by head."""

import json

import pytest
from fake_engine import FakeEngine

from app import record, recorded
from app.lessons import EXAMPLES
from confu_core.trace import Trace


@pytest.fixture
def folder(tmp_path):
    options = record.parse(["sky", "code", "--out", str(tmp_path), "--max-new-tokens", "20"])
    record.write(FakeEngine(), options)
    return tmp_path


def test_recorded_runs_are_small_and_read_back(folder):
    trace = recorded.load("sky", folder)
    assert trace.prompt == EXAMPLES[0].prompt and set(trace.lanes) == {"plain", "eagle3", "confu"}
    assert (folder / "sky.json").stat().st_size < 200_000
    assert not trace.differences()


def test_what_is_missing_damaged_or_unknown_is_none(folder):
    assert recorded.load("rhyme", folder) is None
    (folder / "days.json").write_text("{}")
    assert recorded.load("days", folder) is None
    assert recorded.load("../code", folder) is None


def test_the_map_belongs_to_a_head(folder):
    trace = recorded.load("code", folder)
    assert recorded.reference(trace, folder=folder).explained == (0.21, 0.12)
    other = json.loads((folder / "code.json").read_text())
    other["lanes"]["confu"]["head"]["sha256"] = "1" * 64
    other["lanes"]["eagle3"]["head"]["sha256"] = "2" * 64
    assert recorded.reference(Trace.from_json(json.dumps(other)), folder=folder) is None


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        record.parse(["nonsense"])
    assert "unknown example" in capsys.readouterr().err


def test_shipped_recordings_can_be_read():
    for path in recorded.FOLDER.glob("*.json"):
        if path.name != recorded.MAP:
            Trace.from_json(path.read_text(encoding="utf-8"))
            assert path.stat().st_size < 400_000
