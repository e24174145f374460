"""Recorded runs: written by the command, read back, and told apart by head."""

import json

import pytest
from fake_engine import FakeEngine

from app import record, recorded
from app.lessons import EXAMPLES
from app.views import experts
from app.views.reference import Reference
from confu_core.trace import Trace


@pytest.fixture
def folder(tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": n, "category": group, "turns": [f"question {n}"]}
        for n, group in enumerate(["qa", "qa", "coding"])
    ]
    questions.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "examples"
    options = ["sky", "code", "--out", str(out), "--max-new-tokens", "20"]
    record.write(FakeEngine(), record.parse([*options, "--questions", str(questions)]))
    recorded.known.cache_clear()
    return out


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


def test_the_reference_belongs_to_a_head(folder):
    trace = recorded.load("code", folder)
    found = recorded.reference(trace, folder=folder)
    assert found.explained == (0.21, 0.12) and len(found.points) == 120
    assert [use.group for use in found.usual] == ["mt_bench", "qa"]
    assert all(sum(use.future) == pytest.approx(1, abs=0.01) for use in found.usual)
    other = json.loads((folder / "code.json").read_text())
    other["lanes"]["confu"]["head"]["sha256"] = "1" * 64
    assert recorded.reference(Trace.from_json(json.dumps(other)), folder=folder) == Reference()


def test_a_run_is_compared_with_the_usual(folder):
    trace = recorded.load("code", folder)
    found = recorded.reference(trace, folder=folder)
    for router in experts.ROUTERS:
        chart = experts.usual_chart(trace, router, "en", found)
        assert len(chart.figure.data[0].z) == 3 and "by task group" in chart.sentence
    assert experts.usual_chart(trace, "future", "en", Reference()).figure is None


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        record.parse(["nonsense"])
    assert "unknown example" in capsys.readouterr().err


def test_shipped_recordings_can_be_read():
    for path in recorded.FOLDER.glob("*.json"):
        if path.name != recorded.REFERENCE:
            Trace.from_json(path.read_text(encoding="utf-8"))
            assert path.stat().st_size < 400_000
