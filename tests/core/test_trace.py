"""The trace: survives JSON unchanged, and every damage is named with its place."""

from __future__ import annotations

import copy
import dataclasses
import json
import types
import typing
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confu_core import trace as trace_module
from confu_core.errors import TraceError
from confu_core.trace import (
    Difference,
    Future,
    Head,
    Intervention,
    Lane,
    Reading,
    RoundRecord,
    Seconds,
    Settings,
    TargetInfo,
    Token,
    Trace,
    Tree,
)

# Any trace ---------------------------------------------------------------------------------------

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values(kind: Any) -> st.SearchStrategy:
    """Any value of an annotated type of the trace."""
    if kind is Tree:
        return trees()
    if kind is RoundRecord:
        return rounds()
    if dataclasses.is_dataclass(kind):
        return st.builds(kind, **fields(kind))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if a is type(None) else values(a) for a in arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=6), values(arguments[1]), max_size=2)
    return {int: st.integers(), float: FLOATS, str: st.text(max_size=8), bool: st.booleans()}[kind]


def fields(kind: Any) -> dict[str, st.SearchStrategy]:
    hints = typing.get_type_hints(kind)
    return {f.name: values(hints[f.name]) for f in dataclasses.fields(kind)}


@st.composite
def trees(draw) -> Tree:
    count = draw(st.integers(0, 5))
    parents, depths = [-1], [0]
    for node in range(1, count):
        parents.append(draw(st.integers(0, node - 1)))
        depths.append(depths[parents[-1]] + 1)
    shape = {"parents": tuple(parents[:count]), "depths": tuple(depths[:count])}
    hints = typing.get_type_hints(Tree)
    columns = {
        f.name: draw(st.tuples(*[values(typing.get_args(hints[f.name])[0])] * count))
        for f in dataclasses.fields(Tree)
        if f.name not in shape
    }
    return Tree(**columns, **shape)


@st.composite
def rounds(draw) -> RoundRecord:
    record = draw(st.builds(RoundRecord, **fields(RoundRecord)))
    tree, path, node = record.tree, [], 0
    while node in tree.parents[1:] and draw(st.booleans()):
        node = draw(
            st.sampled_from([n for n in range(len(tree.parents)) if tree.parents[n] == node])
        )
        path.append(node)
    count = len(tree.token_ids)
    contemplated = draw(st.lists(st.integers(0, count - 1))) if count else []
    return dataclasses.replace(record, path=tuple(path), contemplated=tuple(contemplated))


@given(st.builds(Trace, **(fields(Trace) | {"schema": st.just(trace_module.SCHEMA)})))
@settings(max_examples=30, deadline=None)
def test_any_trace_survives_json(trace):
    text = trace.to_json()
    assert Trace.from_json(text) == trace
    assert Trace.from_json(trace.to_json(indent=2)) == trace
    assert Trace.from_json(text).to_json() == text


# Damage ------------------------------------------------------------------------------------------


def token(number: int, text: str, origin: str = "bonus") -> Token:
    return Token(number, text, origin, 0.5)


def sample() -> Trace:
    """A small trace with every field in use."""
    tree = Tree(
        token_ids=(5, 6, 7),
        texts=(" a", "<b>", "\n"),
        parents=(-1, 0, 1),
        depths=(0, 1, 2),
        draft_probs=(1.0, 0.5, 0.25),
        scores=(0.0, -0.7, -2.1),
        target_probs=(1.0, 0.9, 0.1),
        states=("accepted", "accepted", "rejected"),
        choice_ids=(6, 8, 9),
        choice_texts=("<b>", "é", "😀"),
        choice_probs=(0.9, 0.4, 0.3),
    )
    prefill = RoundRecord(
        0, 4, Tree(), (), (token(5, " a"),), (), (), (), None, 4, 0, Seconds(0, 0.5, 0.25), None
    )
    second = RoundRecord(
        index=1,
        position=5,
        tree=tree,
        path=(1,),
        tokens=(token(6, "<b>", "accepted"), token(8, "é")),
        contemplated=(0, 1, 2),
        contemplate_router=(0.25, 0.75, 0.0),
        future_router=(1.0, 0.0),
        future=Future(0, 0, (Reading(7, "i", 0.25),), (Reading(6, "<b>", 0.5),), (0.5, -1.5)),
        target_rows=6,
        draft_passes=2,
        seconds=Seconds(0.25, 1.0, 0.125),
        stop="length",
    )
    lanes = {
        "plain": Lane("plain", None, rounds=(prefill,), text=" a"),
        "confu": Lane(
            "confu",
            Head("confu", "ab" * 32, True),
            Intervention("force future expert", 1),
            rounds=(prefill, second),
            text=" a<b>é",
        ),
    }
    target = TargetInfo("tiny", "0123", 8, 32, 300, "cpu", "float32")
    return Trace("Hi & <bye>", 4, Settings(seed=3), target, lanes, "2026-11-29T00:00:00+00:00")


@pytest.fixture(scope="module")
def plain() -> dict:
    return json.loads(sample().to_json())


def test_the_sample_is_good(plain):
    assert Trace.from_json(json.dumps(plain)) == sample()


ROUND = ("lanes", "confu", "rounds", 1)
DROP = object()
DAMAGES = [
    # where, what is put there (or DROP), place in the message, words of the message
    (("prompt",), 5, "trace.prompt", "type str"),
    (("prompt_tokens",), "4", "trace.prompt_tokens", "whole number"),
    (("prompt_tokens",), 4.5, "trace.prompt_tokens", "whole number"),
    (("prompt_tokens",), True, "trace.prompt_tokens", "whole number"),
    (("settings", "temperature"), "warm", "trace.settings.temperature", "finite number"),
    (("settings", "temperature"), float("nan"), "trace.settings.temperature", "finite number"),
    (("settings", "top_p"), float("inf"), "trace.settings.top_p", "finite number"),
    (("settings", "top_p"), 10**400, "trace.settings.top_p", "finite number"),
    (("settings", "nodes"), "many", "trace.settings.nodes", "one of 'auto'"),
    (("settings", "nodes"), None, "trace.settings.nodes", "whole number"),
    (("settings", "nodes"), 3.5, "trace.settings.nodes", "whole number"),
    (("settings", "contemplate"), DROP, "trace.settings.contemplate", "missing"),
    (("settings", "seed"), DROP, "trace.settings.seed", "missing"),
    (("settings", "colour"), 1, "trace.settings.colour", "not a known field"),
    (("settings",), [], "trace.settings", "object"),
    (("lanes",), None, "trace.lanes", "object"),
    (("lanes", "confu", "head"), 3, "trace.lanes.confu.head", "object"),
    (("lanes", "confu", "head", "trained"), 1, "trace.lanes.confu.head.trained", "type bool"),
    (("lanes", "confu", "error"), 7, "trace.lanes.confu.error", "type str"),
    (("lanes", "confu", "rounds"), {}, "trace.lanes.confu.rounds", "list"),
    ((*ROUND, "index"), None, "trace.lanes.confu.rounds[1].index", "whole number"),
    ((*ROUND, "stop"), "tired", "trace.lanes.confu.rounds[1].stop", "one of 'eos', 'length'"),
    ((*ROUND, "stop"), [], "trace.lanes.confu.rounds[1].stop", "one of"),
    ((*ROUND, "tokens", 1, "origin"), "stolen", "rounds[1].tokens[1].origin", "one of 'accepted'"),
    ((*ROUND, "tokens", 0), "x", "rounds[1].tokens[0]", "object"),
    ((*ROUND, "seconds", "draft"), None, "rounds[1].seconds.draft", "finite number"),
    ((*ROUND, "future", "point"), [1.0], "rounds[1].future.point", "2 entries"),
    ((*ROUND, "future", "point", 1), "y", "rounds[1].future.point[1]", "finite number"),
    ((*ROUND, "tree", "texts"), ["a"], "rounds[1].tree.texts", "1 entries, token_ids has 3"),
    ((*ROUND, "tree", "parents", 0), 1, "rounds[1].tree.parents[0]", "root has parent -1"),
    ((*ROUND, "tree", "depths", 0), 1, "rounds[1].tree.parents[0]", "depth 0"),
    ((*ROUND, "tree", "parents", 1), 2, "rounds[1].tree.parents[1]", "before its child"),
    ((*ROUND, "tree", "parents", 2), 2, "rounds[1].tree.parents[2]", "before its child"),
    ((*ROUND, "tree", "parents", 2), -1, "rounds[1].tree.parents[2]", "before its child"),
    ((*ROUND, "tree", "parents", 2), 9, "rounds[1].tree.parents[2]", "before its child"),
    ((*ROUND, "tree", "depths", 2), 1, "rounds[1].tree.depths[2]", "one deeper"),
    ((*ROUND, "tree", "states", 2), "lost", "rounds[1].tree.states[2]", "one of"),
    ((*ROUND, "path"), [2], "rounds[1].path[0]", "does not continue"),
    ((*ROUND, "path"), [1, 1], "rounds[1].path[1]", "does not continue"),
    ((*ROUND, "path"), [0], "rounds[1].path[0]", "not a drafted node"),
    ((*ROUND, "path"), [3], "rounds[1].path[0]", "not a drafted node"),
    ((*ROUND, "contemplated", 2), 3, "rounds[1].contemplated[2]", "not a node"),
    ((*ROUND, "contemplated", 0), -1, "rounds[1].contemplated[0]", "not a node"),
]


@pytest.mark.parametrize(("where", "put", "place", "words"), DAMAGES)
def test_damage_is_named_with_its_place(plain, where, put, place, words):
    broken = copy.deepcopy(plain)
    spot = broken
    for step in where[:-1]:
        spot = spot[step]
    if put is DROP:
        del spot[where[-1]]
    else:
        spot[where[-1]] = put
    with pytest.raises(TraceError) as caught:
        Trace.from_json(json.dumps(broken))
    message = str(caught.value)
    assert f"{place}:" in message
    assert words in message


def test_every_field_is_demanded(plain):
    """No field anywhere may be left out."""

    def without_one(value: Any, build) -> typing.Iterator[Any]:
        if isinstance(value, dict):
            for key, entry in value.items():
                rest = {k: v for k, v in value.items() if k != key}
                yield key, build(rest)
                yield from without_one(
                    entry, lambda new, key=key: build({**value, key: new})
                )  # fmt: skip
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield from without_one(value[0], lambda new: build([new, *value[1:]]))

    checked = 0
    for key, broken in without_one(plain, lambda new: new):
        if key in plain["lanes"]:  # lanes have free names
            continue
        with pytest.raises(TraceError):
            Trace.from_json(json.dumps(broken))
        checked += 1
    assert checked > 50


@pytest.mark.parametrize("schema", [1, 2])
def test_traces_of_earlier_schemas_are_read(plain, schema):
    """Schema 1 knew no sparse contemplation: every node carried a contemplate token. Neither knew
    what a future token names."""
    old = copy.deepcopy(plain) | {"schema": schema}
    if schema == 1:
        del old["settings"]["contemplate"]
    wanted = copy.deepcopy(plain)
    rounds = [r for t in (old, wanted) for lane in t["lanes"].values() for r in lane["rounds"]]
    futures = [r["future"] for r in rounds if r["future"]]
    assert len(futures) > 1
    for index, future in enumerate(futures):
        if index < len(futures) // 2:
            del future["named"]
        else:
            future["named"] = []
    assert Trace.from_json(json.dumps(old)) == Trace.from_json(json.dumps(wanted))
    del old["settings"]["depth"]
    with pytest.raises(TraceError, match=r"trace\.settings\.depth"):
        Trace.from_json(json.dumps(old))


@pytest.mark.parametrize("schema", [0, 4, "1", None, 1.5, True, [1]])
def test_other_schemas_are_refused(plain, schema):
    with pytest.raises(TraceError, match=f"schema {schema!r}".replace("[", r"\[")):
        Trace.from_json(json.dumps(plain | {"schema": schema}))


@pytest.mark.parametrize(
    "text", ["", "nonsense", "{", '{"schema": 1', "\x00", "[" * 100_000, '{"schema": 1e999}']
)
def test_what_is_not_json_is_refused(text):
    with pytest.raises(TraceError):
        Trace.from_json(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"trace"', "{}"])
def test_other_json_is_refused(text):
    with pytest.raises(TraceError, match="schema None"):
        Trace.from_json(text)


def test_nothing_infinite_is_ever_written():
    record = sample().lanes["plain"].rounds[0]
    late = dataclasses.replace(record, seconds=Seconds(0, float("nan"), 0))
    lane = Lane("plain", None, rounds=(late,))
    with pytest.raises(ValueError, match="JSON compliant"):
        dataclasses.replace(sample(), lanes={"plain": lane}).to_json()


# Figures -----------------------------------------------------------------------------------------


def lane_of(*rounds: int, stop: str | None = "length", error=None, ids=None) -> Lane:
    """A lane whose rounds gained so many tokens; `ids` names them."""
    ids = iter(ids or range(1000))
    base = sample().lanes["plain"].rounds[0]
    records = []
    for index, count in enumerate(rounds):
        gained = tuple(token(next(ids), f"t{index}") for _ in range(count))
        last = index == len(rounds) - 1
        records.append(
            dataclasses.replace(base, index=index, tokens=gained, stop=stop if last else None)
        )
    return Lane("x", None, rounds=tuple(records), error=error)


def test_tau_counts_gained_tokens_per_pass_without_the_prefill():
    lane = lane_of(1, 4, 1, 3)
    assert lane.target_passes == 3
    assert lane.tau == pytest.approx(8 / 3)
    assert len(lane.tokens) == 9
    assert lane.seconds == pytest.approx(4 * 0.75)
    assert lane.stop == "length"


def test_tau_of_nothing_is_zero():
    assert (lane_of().tau, lane_of().target_passes, lane_of().stop) == (0.0, 0, None)
    assert lane_of(1).tau == 0.0


def test_differences():
    same = lane_of(1, 2, ids=[5, 6, 7])
    other = lane_of(1, 1, 1, ids=[5, 8, 7])
    trace = dataclasses.replace(
        sample(), lanes={"a": same, "b": other, "c": lane_of(3, ids=[5, 6, 7])}
    )
    assert trace.differences() == (Difference("a", "b", 1, "t1", "t1", 0.5),)


def test_one_that_goes_on_differs_where_the_other_ended():
    short, long = lane_of(2, ids=[5, 6], stop="eos"), lane_of(3, ids=[5, 6, 9])
    trace = dataclasses.replace(sample(), lanes={"short": short, "long": long})
    assert trace.differences() == (Difference("short", "long", 2, "", "t0", 0.5),)


@pytest.mark.parametrize("cut", [{"stop": "cancelled"}, {"stop": None}, {"error": "no memory"}])
def test_lanes_cut_short_are_compared_as_far_as_they_came(cut):
    short, long = lane_of(2, ids=[5, 6], **cut), lane_of(3, ids=[5, 6, 9])
    trace = dataclasses.replace(sample(), lanes={"short": short, "long": long})
    assert trace.differences() == ()
