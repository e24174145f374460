"""Teacher links: what is understood is taken and clamped, junk is ignored and named."""

from hypothesis import given, settings
from hypothesis import strategies as st

from app.form import FIELDS, settings_of
from app.links import parse

PRESETS = ("sky", "code")


def test_a_full_link():
    link = parse(
        {
            "preset": "sky", "tokens": "32", "nodes": "60", "temperature": "0.7", "seed": "5",
            "step": "7", "hide": "plain,junk,legend", "a": "confu", "b": "junk", "lang": "en",
            "__theme": "dark",
        },
        PRESETS,
    )  # fmt: skip
    assert link.preset == "sky" and link.step == 7 and link.language == "en"
    assert link.numbers == {"max_new_tokens": 32, "nodes": 60, "temperature": 0.7, "seed": 5}
    assert link.hide == ("plain", "legend") and link.panels == ("confu",) and not link.ignored


def test_junk_is_ignored_and_named():
    link = parse(
        {"preset": "../../etc", "nodes": "many", "depth": "nan", "step": "-3", "lang": "tlh",
         "prompt": "x" * 5000},
        PRESETS,
    )  # fmt: skip
    assert set(link.ignored) == {"preset", "nodes", "depth", "step", "lang", "prompt"}
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
        {"methods": "confu-plus,junk,plain", "change": "force future expert", "expert": "3"},
        PRESETS,
    )
    assert link.methods == ("plain", "confu-plus")
    assert link.change == "force future expert" and link.expert == 3 and not link.ignored
    junk = parse({"methods": "junk", "change": "swap future", "expert": "1e9"}, PRESETS)
    assert junk.ignored == ("methods", "change", "expert")
    assert junk.methods == () and junk.change is None and junk.expert is None


@settings(deadline=None)  # a busy machine is not a fault
@given(st.dictionaries(st.text(max_size=12), st.text(max_size=40), max_size=8))
def test_no_query_raises(query):
    junk = query.get("a", "1")
    link = parse(
        query | {"step": junk, "seed": query.get("b", "2"), "methods": junk, "expert": junk},
        PRESETS,
    )
    values = tuple(link.numbers.get(f.name, f.default) for f in FIELDS)
    settings_of(values)
