"""Views are pure: the same trace gives the same bytes, and nothing a model wrote is markup."""

import json
import re
from dataclasses import replace

import pytest
from fake_engine import HOSTILE, FakeEngine, make_trace

from app.text import LANGUAGES
from app.views import chart, experts, futures, lesson, marks, progress, speed, wire
from app.views.reference import GroupUse, Reference
from confu_core.trace import Intervention, Reading, Token, Trace

CHARTS = {
    "contemplate": lambda trace, language: experts.chart(trace, "contemplate", language),
    "future": lambda trace, language: experts.chart(trace, "future", language),
    "map": futures.chart,
    "race": speed.race,
    "phases": speed.phases,
}


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_chart_has_picture_sentence_and_table(trace, name, language):
    chart = CHARTS[name](trace, language)
    again = CHARTS[name](trace, language)
    assert chart.figure.to_json() == again.figure.to_json()
    assert chart.sentence and "{" not in chart.sentence
    assert chart.table.startswith("<details") and "<td>" in chart.table


@pytest.mark.parametrize("name", CHARTS)
def test_hostile_tokens_are_never_markup(hostile_trace, name):
    chart = CHARTS[name](hostile_trace, "en")
    drawn = chart.figure.to_json()
    for text in (drawn, chart.table):
        assert "<img" not in text and "</script>" not in text and "\u202e" not in text
    assert len(chart.figure.to_json()) < 60_000


@pytest.mark.parametrize("name", CHARTS)
def test_charts_of_an_empty_or_plain_run_say_so(trace, name):
    empty = replace(trace, lanes={k: replace(v, rounds=()) for k, v in trace.lanes.items()})
    assert CHARTS[name](empty, "en").sentence
    *_, last = FakeEngine().compare("hello", trace.settings, ("plain",))
    assert CHARTS[name](last.trace, "en").sentence


def test_figures_carry_plain_lists_for_the_older_plotly_in_gradio(trace):
    for draw in CHARTS.values():
        assert "bdata" not in draw(trace, "en").figure.to_json()


@pytest.mark.parametrize("name", ["contemplate", "future", "map", "race"])
def test_charts_tell_whose_rounds_they_show(trace, name):
    for drawn in CHARTS[name](trace, "en").figure.data:
        rounds = drawn.meta["rounds"]
        lane = trace.lanes[drawn.meta["lane"]]
        assert drawn.meta["run"] == trace.created and len(rounds) == len(drawn.x)
        assert {r for r in rounds if r is not None} <= {record.index for record in lane.rounds}
    points = CHARTS["map"](trace, "en").figure.data[0]
    for round_, x in zip(points.meta["rounds"], points.x, strict=True):
        assert trace.lanes["confu"].rounds[round_].future.point[0] == x


def test_each_head_has_charts_of_its_own(trace):
    methods = ("plain", "confu", "confu-lite")
    *_, last = FakeEngine().compare("two heads", trace.settings, methods)
    one, two = chart.heads(last.trace)
    for name in ("contemplate", "future"):
        first, second = (experts.chart(last.trace, name, "en", head) for head in (one, two))
        assert first.figure.data[0].meta["lane"] == "confu"
        assert second.figure.data[0].meta["lane"] == "confu-lite"
        assert "ConFu lite" in second.figure.layout.title.text
    # The axes of a map belong to its head: no other head's trail is drawn over them.
    for head, lane in ((one, "confu"), (two, "confu-lite"), (None, "confu")):
        drawn = futures.chart(last.trace, "en", head=head).figure.data
        assert [trail.meta["lane"] for trail in drawn] == [lane]


def test_groups_that_use_the_experts_alike_tell_nothing_of_a_run(trace):
    def told(*weights: tuple[float, ...]) -> str:
        uses = tuple(GroupUse(f"group{n}", 9, 2.0, use, use) for n, use in enumerate(weights))
        return experts.usual_chart(trace, "future", "en", Reference(usual=uses)).sentence

    first = (1.0, *[0.0] * 7)
    assert "alike in every group" in told(first, (0.999, 0.001, *[0.0] * 6))
    assert "most like" in told(first, (0.0, 1.0, *[0.0] * 6))


def told(*texts: str) -> list[Token]:
    return [Token(n, text, "bonus", 1.0) for n, text in enumerate(texts)]


def test_a_word_comes_true_whatever_its_spaces_and_capitals():
    assert futures.came_true(" Sky", told(" blue", "sky")) == 2
    assert futures.came_true(" ", told(" ")) == 0
    assert futures.came_true("sky", told(" blue")) == 0


def with_words(trace: Trace, *words: str) -> Trace:
    """The same run, but every future token of ConFu reads as these words."""
    lane = trace.lanes["confu"]
    readings = tuple(Reading(n, word, 0.1) for n, word in enumerate(words))
    rounds = tuple(
        replace(r, future=r.future and replace(r.future, readings=readings)) for r in lane.rounds
    )
    return replace(trace, lanes={**trace.lanes, "confu": replace(lane, rounds=rounds)})


def test_the_map_marks_words_that_came_true(trace):
    lane = trace.lanes["confu"]
    coming = lane.rounds[1].tokens[0].text
    chart = futures.chart(with_words(trace, coming, "never<b>"), "en")
    points = chart.figure.data[0]
    # Not by colour alone: filled and hollow symbols, a tick and a distance in the words.
    assert points.marker.symbol[0] == "square" and "✓+1" in points.customdata[0][2]
    assert "never" in points.customdata[0][2] and "<b>" not in points.customdata[0][2]
    assert coming.strip() in points.customdata[0][1]
    never = futures.chart(with_words(trace, "never"), "en")
    assert set(never.figure.data[0].marker.symbol) == {"square-open"}
    assert f"Of {len(points.x)} nearest words, 0 " in never.sentence and "0%" in never.sentence


def test_the_map_tells_what_chance_would_bring(trace):
    def shares(*words: str) -> tuple[str, str]:
        sentence = futures.chart(with_words(trace, *words), "en").sentence
        came = re.search(r"next 8 tokens \((\d+%)\)", sentence)[1]
        return came, re.search(r"in (\d+%) of cases", sentence)[1]

    # The same word in every round is right as often as chance; what the next token is, more often.
    word = max((t.text for t in trace.lanes["confu"].tokens), key=str.isalpha)
    came, chance = shares(word)
    assert came == chance
    lane = trace.lanes["confu"]
    own = [
        r.future and replace(r.future, readings=(Reading(0, r.tokens[0].text, 0.1),))
        for r in lane.rounds
    ]
    rounds = tuple(replace(r, future=f) for r, f in zip(lane.rounds, own, strict=True))
    told = futures.chart(
        replace(trace, lanes={"confu": replace(lane, rounds=rounds)}), "en"
    ).sentence
    assert "(100%)" in told and "in 100% of cases" not in told


def test_messages_rebuild_the_trace(trace):
    lanes = {name: [] for name in trace.lanes}
    header = json.loads(wire.reset("r", trace))
    assert all(lane["rounds"] == [] for lane in header["trace"]["lanes"].values())
    for name, lane in trace.lanes.items():
        for number, record in enumerate(lane.rounds, 1):
            message = json.loads(wire.step("r", number, name, record, lane.text))
            lanes[name].append(message["record"])
    rebuilt = header["trace"]
    for name, rounds in lanes.items():
        rebuilt["lanes"][name] |= {"rounds": rounds, "text": trace.lanes[name].text}
    full = json.loads(wire.full("r", 9, trace, "finished", "live"))
    assert rebuilt == full["trace"]
    read = Trace.from_json(json.dumps(full["trace"]))
    assert [t.id for t in read.lanes["confu"].tokens] == [t.id for t in trace.lanes["confu"].tokens]


def test_a_step_of_60_nodes_is_small():
    trace = make_trace("size", nodes=60, max_new_tokens=20)
    sizes = [len(wire.step("r", 1, "confu", record, "")) for record in trace.lanes["confu"].rounds]
    assert max(sizes) < 12_000


def test_messages_are_ascii_even_with_half_characters(trace):
    record = trace.lanes["plain"].rounds[0]
    odd = replace(record, tokens=(replace(record.tokens[0], text="\ud83d\u202e</script>"),))
    message = wire.step("r", 1, "plain", odd, "\ud83d")
    assert message.isascii()
    assert json.loads(message)["record"]["tokens"][0]["text"] == "\ud83d\u202e</script>"


@pytest.mark.parametrize("text", HOSTILE)
def test_visible_shows_every_character_and_stays_short(text):
    shown = marks.visible(text)
    assert 0 < len(shown) <= 14
    assert shown.isprintable()


def test_progress_escapes_and_is_bounded():
    line = progress.line("<b>bad</b>", "error", fraction=7.0)
    assert "<b>" not in line and "width:100%" in line and "role='alert'" in line


@pytest.mark.parametrize("language", LANGUAGES)
def test_lesson_has_no_open_places(language):
    assert "{" not in lesson.head(language) + lesson.body(language)


def test_a_changed_lane_has_its_own_name_and_trail(trace):
    change = Intervention("remove future")
    *_, last = FakeEngine().compare("why", trace.settings, intervention=change)
    drawn = futures.chart(last.trace, "en").figure
    assert len(drawn.data) == 2 and drawn.data[0].name != drawn.data[1].name
    assert "withheld" in speed.race(last.trace, "en").sentence


@pytest.mark.parametrize("name", CHARTS)
def test_odd_traces_from_files_raise_nothing(trace, name):
    lane = trace.lanes["confu"]
    first, *rest = lane.rounds
    odd = replace(
        lane,
        method="<b>evil</b>",
        rounds=(replace(first, contemplate_router=(1.0,), tokens=()), *rest[:3]),
    )
    chart = CHARTS[name](replace(trace, lanes={"x": odd}), "en")
    assert "<b>" not in chart.table
    if chart.figure:
        assert "<b>evil" not in chart.figure.to_json()
