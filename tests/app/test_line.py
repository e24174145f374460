"""The line before the engine: everybody keeps their place, nobody is told another's."""

import json

from fake_engine import FakeEngine, make_trace

from app.form import CHOSEN
from app.line import Line
from app.runs import Runs
from confu_core.trace import Settings


def test_places_move_up_and_a_begun_run_does_not_wait():
    line = Line()
    for session in "abc":
        line.join(session)
    line.begin("a")
    assert [line.ahead(session) for session in "abc"] == [None, 1, 2]
    line.leave("b")
    line.leave("nobody")
    assert line.ahead("b") is None and line.ahead("c") == 1
    line.leave("a")
    assert line.ahead("c") == 0


def test_who_asks_again_goes_to_the_end():
    line = Line()
    for session in "aba":
        line.join(session)
    assert [line.ahead(session) for session in "ab"] == [1, 0]


def test_a_run_that_waits_says_so_and_one_that_ends_makes_room():
    runs = Runs(lambda report: FakeEngine())
    runs.line.join("first")
    frames = runs.stream("first", "en", "Why?", CHOSEN, Settings(max_new_tokens=8))
    next(frames)
    runs.line.join("second")
    assert runs.waiting("first", "en") is None
    assert "runs before yours: 1" in runs.waiting("second", "en")
    frames.close()
    assert "Starting" in runs.waiting("second", "en")
    list(runs.stream("second", "en", " ", CHOSEN, Settings()))  # refused: no prompt
    assert runs.waiting("second", "en") is None


def test_stop_in_the_line_leaves_what_is_on_show():
    runs = Runs(lambda report: FakeEngine())
    trace = make_trace(max_new_tokens=8)
    runs.show("me", trace, "recorded")
    runs.line.join("me")
    frame = runs.stop("me", "en")
    assert frame.player is None and "Taken out of the line" in frame.progress
    assert runs.waiting("me", "en") is None and runs.trace("me") is trace
    assert json.loads(runs.stop("me", "en").player)["state"] == "stopped"
