"""Teacher links: what is understood is taken and clamped, junk is ignored and named."""

from pathlib import Path

from fake_engine import make_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from app import links
from app.form import FIELDS, settings_of
from app.links import parse, within

PRESETS = ("sky", "code")


def test_a_full_link():
    link = parse(
        {
            "preset": "sky", "tokens": "32", "nodes": "60", "temperature": "0.7", "seed": "5",
            "step": "7", "phase": "check", "hide": "plain,examples,speed", "a": "confu",
            "b": "eagle3", "lang": "en", "__theme": "dark",
        },
        PRESETS,
    )  # fmt: skip
    assert link.preset == "sky" and link.step == 7 and link.phase == 2 and link.language == "en"
    assert link.numbers == {"max_new_tokens": 32, "nodes": 60, "temperature": 0.7, "seed": 5}
    assert link.hide == ("plain", "examples", "speed")
    assert link.panels == ("confu", "eagle3") and not link.ignored and not link.clamped


def test_junk_is_ignored_and_named():
    link = parse(
        {"preset": "../../etc", "nodes": "many", "depth": "nan", "step": "-3", "lang": "tlh",
         "prompt": "x" * 5000, "phase": "4", "hide": "plain,junk", "b": "junk"},
        PRESETS,
    )  # fmt: skip
    junk = {"preset", "nodes", "depth", "step", "lang", "prompt", "phase", "hide", "b"}
    assert set(link.ignored) == junk and link.hide == ("plain",) and link.phase is None
    assert link.prompt is None and link.preset is None and not link.numbers


def test_numbers_are_clamped():
    assert parse({"nodes": "1e9", "temperature": "-4"}, PRESETS).numbers == {
        "nodes": 120,
        "temperature": 0.0,
    }


def test_what_was_clamped_is_named():
    link = parse({"nodes": "1e9", "tokens": "32", "depth": "3.7"}, PRESETS)
    assert link.clamped == ("nodes", "depth") and not link.ignored


def test_methods_and_an_intervention():
    link = parse(
        {"methods": "confu-lite,junk,plain", "change": "force future expert", "expert": "3"},
        PRESETS,
    )
    assert link.methods == ("plain", "confu-lite") and link.ignored == ("methods",)
    assert link.change == "force future expert" and link.expert == 3
    junk = parse({"methods": "junk", "change": "swap future", "expert": "1e9"}, PRESETS)
    assert junk.ignored == ("methods", "change", "expert")
    assert junk.methods == () and junk.change is None and junk.expert is None


def test_panels_are_trees_of_the_run_that_is_asked_for():
    def panels(query):
        link = parse(query, PRESETS)
        return link.panels, link.ignored

    # Plain decoding drafts no tree, whether it is asked for alone or beside others.
    assert panels({"a": "plain", "b": "confu"}) == (("confu",), ("a",))
    assert panels({"methods": "plain", "a": "plain"}) == ((), ("a",))
    # A method that the run leaves out has none either.
    assert panels({"a": "confu-lite"}) == ((), ("a",))
    assert panels({"methods": "confu-lite", "a": "confu-lite"}) == (("confu-lite",), ())
    assert panels({"a": "changed"}) == ((), ("a",))
    assert panels({"a": "changed", "change": "remove future"}) == (("changed",), ())
    assert panels({"a": "confu", "b": "confu"}) == (("confu",), ())


def test_a_step_beyond_the_end_of_a_known_run_is_clamped_and_named():
    trace = make_trace("Why?", max_new_tokens=20)
    last = max(len(trace.lanes[name].rounds) for name in ("eagle3", "confu")) - 1
    far = within(parse({"step": "999", "nodes": "1e9"}, PRESETS), trace)
    assert far.step == last and far.clamped == ("nodes", "step")
    assert within(parse({"step": str(last)}, PRESETS), trace).clamped == ()
    assert within(parse({}, PRESETS), trace).step is None


def test_every_parameter_and_every_part_that_can_be_hidden_is_documented():
    page = Path(__file__).resolve().parents[2] / "docs" / "api.md"
    section = page.read_text(encoding="utf-8").split("## Links")[1].split("\n## ")[0]
    numbers = [links.NAMES.get(entry.name, entry.name) for entry in FIELDS]
    names = ["preset", "prompt", "methods", "change", "expert", "step", "phase", "a", "b", "lang"]
    for name in (*numbers, *names, "hide", *links.HIDEABLE, *links.PHASES):
        assert f"`{name}`" in section, name


@settings(deadline=None)  # a busy machine is not a fault
@given(st.dictionaries(st.text(max_size=12), st.text(max_size=40), max_size=8))
def test_no_query_raises(query):
    junk = query.get("a", "1")
    link = parse(
        query
        | {"step": junk, "seed": query.get("b", "2"), "methods": junk, "expert": junk}
        | {"a": junk, "hide": junk, "phase": junk},
        PRESETS,
    )
    values = tuple(link.numbers.get(f.name, f.default) for f in FIELDS)
    settings_of(values)
