"""Recorded runs: written by the command, read back, and told apart by head."""

import json

import pytest
from fake_engine import HEAD, LITE, FakeBasis, FakeEngine

from app import record, recorded
from app.lessons import EXAMPLES
from app.views import experts
from app.views.chart import heads
from app.views.reference import Reference
from confu_core.trace import Settings, Trace

# ConFu's head and ConFu lite's, each with a map of its own.
BASES = {"confu": FakeBasis(), "confu-lite": FakeBasis(explained=(0.4, 0.3))}


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
    engine = FakeEngine(bases=dict(BASES))
    record.write(engine, record.parse([*options, "--questions", str(questions)]))
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
    other["lanes"]["confu"]["head"]["sha256"] = "2" * 64
    assert recorded.reference(Trace.from_json(json.dumps(other)), folder=folder) == Reference()


def test_a_run_is_compared_with_the_usual(folder):
    trace = recorded.load("code", folder)
    found = recorded.reference(trace, folder=folder)
    for router in experts.ROUTERS:
        chart = experts.usual_chart(trace, router, "en", found)
        assert len(chart.figure.data[0].z) == 3 and "by task group" in chart.sentence
    assert experts.usual_chart(trace, "future", "en", Reference()).figure is None


def two_heads() -> Trace:
    """A run of both heads that contemplate, as the page makes it without a recording."""
    settings = Settings(max_new_tokens=20)
    *_, last = FakeEngine().compare("two heads", settings, ("plain", "confu", "confu-lite"))
    return last.trace


def test_every_head_that_contemplates_has_a_reference_of_its_own(folder):
    trace = two_heads()
    assert heads(trace) == [HEAD, LITE]
    for head, explained, lane in ((HEAD, (0.21, 0.12), "ConFu"), (LITE, (0.4, 0.3), "ConFu lite")):
        found = recorded.reference(trace, folder=folder, head=head)
        assert found.explained == explained and len(found.points) == 120
        assert [use.group for use in found.usual] == ["mt_bench", "qa"]
        for router in experts.ROUTERS:
            chart = experts.usual_chart(trace, router, "en", found, head)
            assert chart.figure.layout.title.text.startswith(f"{lane} ·")
    first, second = (recorded.known(folder)[head]["usual"] for head in (HEAD, LITE))
    assert first != second
    assert (folder / recorded.REFERENCE).stat().st_size < 100_000


def test_a_head_without_a_reference_shows_one_line_that_says_so(folder):
    entries = recorded.known(folder)
    del entries[LITE]
    (folder / recorded.REFERENCE).write_text(json.dumps(entries))
    recorded.known.cache_clear()
    trace = two_heads()
    found = recorded.reference(trace, folder=folder, head=LITE)
    charts = [experts.usual_chart(trace, router, "en", found, LITE) for router in experts.ROUTERS]
    assert [chart.figure for chart in charts] == [None, None]
    said = "No usual weights of this ConFu lite head were recorded to compare with."
    assert [chart.sentence for chart in charts] == [said, ""]


def test_recording_again_keeps_what_is_needed_and_drops_heads_that_are_gone(folder):
    usual = recorded.known(folder)[LITE]["usual"]
    entries = recorded.known(folder) | {"9" * 64: {"usual": []}}
    (folder / recorded.REFERENCE).write_text(json.dumps(entries))
    recorded.known.cache_clear()
    options = record.parse(["sky", "--out", str(folder), "--max-new-tokens", "8"])
    record.write(FakeEngine(bases=dict(BASES)), options)
    assert set(recorded.known(folder)) == {HEAD, LITE}
    assert recorded.known(folder)[LITE]["usual"] == usual
    # ConFu's head stays for the recorded runs, though this engine has no map of it.
    record.write(FakeEngine(bases={}), options)
    assert set(recorded.known(folder)) == {HEAD}


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        record.parse(["nonsense"])
    assert "unknown example" in capsys.readouterr().err


def test_shipped_recordings_can_be_read():
    for path in recorded.FOLDER.glob("*.json"):
        if path.name != recorded.REFERENCE:
            Trace.from_json(path.read_text(encoding="utf-8"))
            assert path.stat().st_size < 400_000
