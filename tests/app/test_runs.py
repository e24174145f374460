"""The run desk: streams, stops, keeps visitors apart, and turns errors into sentences."""

import json
import threading
import time

import pytest
from fake_engine import FakeEngine, make_trace

from app.form import CHOSEN, intervention_of
from app.runs import Runs, RunStore
from confu_core.errors import CheckpointError, ConFuError, SettingsError
from confu_core.trace import Settings, Trace

SHORT = Settings(max_new_tokens=24)


def desk(engine=None):
    engine = engine or FakeEngine()
    return Runs(lambda report: engine), engine


def messages(frames):
    return [json.loads(frame.player) for frame in frames if frame.player]


def test_a_run_streams_and_ends_with_everything():
    runs, engine = desk()
    frames = list(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    sent = messages(frames)
    assert [m["kind"] for m in sent[:2]] == ["reset", "step"] and sent[-1]["kind"] == "full"
    assert [m["seq"] for m in sent] == list(range(len(sent)))
    assert len({m["run"] for m in sent}) == 1
    assert not frames[-1].running and all(frame.running for frame in frames[:-1])
    assert runs.trace("me").lanes["confu"].text == runs.trace("me").lanes["plain"].text
    assert engine.open_runs == 0


def test_lanes_take_turns_while_streaming():
    runs, _ = desk()
    sent = messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    first = [m["lane"] for m in sent if m["kind"] == "step"][:12]
    assert set(first) == set(CHOSEN)


def test_two_runs_with_equal_settings_differ_in_their_messages():
    runs, _ = desk()
    one = messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    two = messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    assert one[0]["run"] != two[0]["run"]


def test_stop_keeps_the_rounds_and_frees_the_engine():
    runs, engine = desk(FakeEngine(pause=0.01))
    frames = runs.stream("me", "en", "Why?", CHOSEN, Settings(max_new_tokens=200))
    for _ in range(12):
        next(frames)
    stopped = runs.stop("me", "en")
    assert list(frames) == []
    assert engine.open_runs == 0
    message = json.loads(stopped.player)
    assert message["state"] == "stopped" and not stopped.running
    assert any(lane["rounds"] for lane in message["trace"]["lanes"].values())


def test_closing_the_stream_frees_the_engine():
    runs, engine = desk(FakeEngine(pause=0.001))
    frames = runs.stream("me", "en", "Why?", CHOSEN, SHORT)
    for _ in range(5):
        next(frames)
    assert engine.open_runs == 1
    frames.close()
    assert engine.open_runs == 0


def test_what_stop_said_is_told_again_of_a_stopped_run_only():
    runs, _ = desk(FakeEngine(pause=0.01))
    frames = runs.stream("me", "en", "Why?", CHOSEN, Settings(max_new_tokens=200))
    for _ in range(4):
        next(frames)
    assert runs.stopped_line("me", "en") is None and runs.stopped_line("nobody", "en") is None
    stopped = runs.stop("me", "en")
    assert runs.stopped_line("me", "en") == stopped.progress
    assert list(frames) == []


def test_stop_without_a_run_is_harmless():
    runs, _ = desk()
    assert runs.stop("nobody", "en").player is None


def test_visitors_do_not_see_each_other():
    runs, _ = desk()
    list(runs.stream("a", "en", "first prompt", CHOSEN, SHORT))
    list(runs.stream("b", "en", "second prompt", CHOSEN, SHORT))
    assert runs.trace("a").prompt == "first prompt"
    assert runs.trace("b").prompt == "second prompt"
    runs.store.drop("a")
    assert runs.trace("a") is None and runs.trace("b") is not None


def test_the_store_is_bounded():
    store = RunStore(most=3)
    opened = [store.open(str(number)) for number in range(10)]
    assert len(store) == 3 and opened[0].stop.is_set() and not opened[-1].stop.is_set()


def test_waiting_for_the_engine_shows_progress_then_runs():
    gate = threading.Event()

    def slow(report):
        report("Reading weights.", 0.4)
        gate.wait(5)
        return FakeEngine()

    runs = Runs(slow)
    frames = runs.stream("me", "en", "Why?", CHOSEN, SHORT)
    first = [next(frames) for _ in range(2)]
    assert "Reading weights." in first[-1].progress and first[-1].player is None
    gate.set()
    assert messages(frames)[-1]["kind"] == "full"


def test_stop_while_waiting_ends_the_run():
    gate = threading.Event()
    runs = Runs(lambda report: gate.wait(5) and FakeEngine())
    frames = runs.stream("me", "en", "Why?", CHOSEN, SHORT)
    next(frames)
    runs.stop("me", "en")
    assert list(frames) == []
    gate.set()


def test_a_failed_engine_says_why_and_can_be_tried_again():
    tries = []

    def flaky(report):
        tries.append(1)
        if len(tries) == 1:
            raise CheckpointError("The EAGLE-3 head is damaged. Fetch it again.")
        return FakeEngine()

    runs = Runs(flaky)
    frames = list(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    assert "damaged" in frames[-1].progress and not frames[-1].running
    assert messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT))[-1]["kind"] == "full"


@pytest.mark.parametrize(
    ("prompt", "settings", "word"),
    [
        ("", SHORT, "empty"),
        ("word " * 3000, SHORT, "longer"),
        ("fine", Settings(nodes=0), "between"),
    ],
)
def test_errors_become_sentences_and_lose_nothing(prompt, settings, word):
    runs, engine = desk()
    frames = list(runs.stream("me", "en", prompt, CHOSEN, settings))
    assert word in frames[-1].progress and "progress-error" in frames[-1].progress
    assert not frames[-1].running and frames[-1].player is None and engine.open_runs == 0


def test_an_unexpected_error_is_logged_and_not_shown_raw(caplog):
    class Broken(FakeEngine):
        def compare(self, *arguments, **options):
            raise RuntimeError("secret detail")

    runs, _ = desk(Broken())
    frames = list(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    assert "secret" not in frames[-1].progress and "secret" in caplog.text


def test_missing_heads_are_left_out_or_named():
    runs, _ = desk(FakeEngine(unavailable=("confu",)))
    sent = messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT))
    assert list(sent[0]["trace"]["lanes"]) == ["plain", "eagle3"]
    frames = list(runs.stream("me", "en", "Why?", ["confu"], SHORT))
    assert "No checkpoint" in frames[-1].progress
    assert "tick at least one" in list(runs.stream("me", "en", "Why?", [], SHORT))[-1].progress


def test_the_endpoints_answer():
    runs, _ = desk()
    answer = runs.compare("Why?", SHORT)
    assert answer["identical"] is True and set(answer["methods"]) == set(CHOSEN)
    confu = answer["methods"]["confu"]
    assert set(confu) == {"text", "tokens", "rounds", "tau", "seconds"}
    assert confu["tokens"] == 24 and confu["tau"] == pytest.approx(23 / confu["rounds"], abs=1e-3)
    json.dumps(answer)
    with pytest.raises(SettingsError):
        runs.compare("Why?", Settings(nodes=0))


def test_the_endpoint_gives_the_trace_if_asked():
    runs, _ = desk()
    answer = json.loads(json.dumps(runs.compare("Why?", SHORT, trace=True)))
    trace = Trace.from_json(json.dumps(answer.pop("trace")))
    assert answer == runs.compare("Why?", SHORT)
    assert trace.lanes["confu"].text == answer["methods"]["confu"]["text"]


def test_the_endpoint_reports_a_difference():
    runs, _ = desk(FakeEngine(break_at=5))
    assert runs.compare("Why?", SHORT)["identical"] is False


def test_the_endpoint_says_why_there_is_no_engine():
    def broken(report):
        raise CheckpointError("No weights.")

    runs = Runs(broken)
    with pytest.raises(ConFuError, match="No weights"):
        runs.compare("Why?", SHORT)


def test_showing_a_recorded_trace_makes_it_the_sessions_run():
    runs, _ = desk()
    trace = make_trace(max_new_tokens=16)
    message = json.loads(runs.show("me", trace, "recorded", position=3))
    assert message["source"] == {"kind": "recorded"} and message["position"] == 3
    assert runs.trace("me") is trace


@pytest.mark.alone
def test_stop_is_quick_even_between_slow_rounds():
    runs, engine = desk(FakeEngine(pause=0.2))
    frames = runs.stream("me", "en", "Why?", CHOSEN, Settings(max_new_tokens=100))
    for _ in range(4):
        next(frames)
    begin = time.monotonic()
    runs.stop("me", "en")
    list(frames)
    assert time.monotonic() - begin < 1 and engine.open_runs == 0


def test_an_intervention_runs_in_a_lane_of_its_own():
    runs, _ = desk()
    change = intervention_of("force future expert", 3, "")
    sent = messages(runs.stream("me", "en", "Why?", CHOSEN, SHORT, change))
    lanes = sent[-1]["trace"]["lanes"]
    assert list(lanes) == [*CHOSEN, "changed"]
    assert lanes["changed"]["intervention"] == {
        "change": "force future expert",
        "expert": 2,
        "donor": None,
    }
    assert lanes["changed"]["text"] == lanes["plain"]["text"]


def test_interventions_of_the_form():
    assert intervention_of("none", 1, "x") is None
    assert intervention_of("swap future", 4, "other").donor == "other"
    assert intervention_of("remove future", 4, "other").expert is None
    assert intervention_of("force contemplate expert", None, "").expert == 0
