"""The race: a stream of plain events, fair turns, errors before the first event."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from confu_core import decoding
from confu_core.cache import KVCache
from confu_core.checkpoints import save_checkpoint
from confu_core.compare import Engine, load_engine
from confu_core.decoding import decode
from confu_core.drafter import NoDrafter
from confu_core.errors import CheckpointError, PromptError, SettingsError, TargetError
from confu_core.events import Advanced, Finished, Started
from confu_core.methods import PLAIN, Method
from confu_core.probes import Observer
from confu_core.prompt import chat_ids
from confu_core.trace import Settings, Trace
from tests import fakes

SETTINGS = Settings(max_new_tokens=12, nodes=8, depth=2, top_k=3)
TEXT = "The user and the hen"


@pytest.fixture(scope="module")
def engine(llama, head, part) -> Engine:
    methods = {"plain": PLAIN, "eagle3": fakes.method(head), "confu": fakes.method(head, part)}
    return Engine(llama, methods, {})


def test_events_in_order(engine, llama, greedy, prompt):
    events = list(engine.compare(TEXT, SETTINGS))
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert all(isinstance(event, Advanced) for event in events[1:-1])
    started, finished = events[0].trace, events[-1].trace
    assert list(started.lanes) == ["plain", "eagle3", "confu"]
    assert all(lane.rounds == () for lane in started.lanes.values())
    assert replace(finished, lanes=started.lanes) == started
    assert started.prompt == TEXT
    assert started.prompt_tokens == len(prompt)
    assert started.settings == SETTINGS
    target = started.target
    assert (target.layers, target.hidden, target.vocab) == (8, 32, llama.vocab)
    assert (target.device, target.dtype) == ("cpu", "float32")
    for name, lane in finished.lanes.items():
        records = [event.record for event in events[1:-1] if event.lane == name]
        assert list(lane.rounds) == records
        assert [record.index for record in records] == list(range(len(records)))
        assert [token.id for token in lane.tokens] == greedy[-48:][:12]
        assert lane.stop == "length"
        assert (lane.head is None) == (name == "plain")
    assert finished.differences() == ()
    assert Trace.from_json(finished.to_json()) == finished


def test_texts_grow_and_end_as_the_full_text(engine, llama, greedy):
    shown: dict[str, str] = {}
    for event in engine.compare(TEXT, SETTINGS):
        if isinstance(event, Advanced):
            assert event.text.startswith(shown.get(event.lane, ""))
            shown[event.lane] = event.text
        if isinstance(event, Finished):
            wanted = llama.tokenizer.decode(greedy[-48:][:12], skip_special_tokens=True)
            assert {lane.text for lane in event.trace.lanes.values()} == {wanted}
            assert shown == dict.fromkeys(shown, wanted)


def test_chosen_lanes_only_in_the_given_order(engine):
    events = list(engine.compare(TEXT, SETTINGS, ["confu", "plain"]))
    assert list(events[-1].trace.lanes) == ["confu", "plain"]


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only when a drafter says so."""

    class FakeTime:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

    fake = FakeTime()
    monkeypatch.setattr(decoding, "time", fake)
    return fake


def timed(name: str, seconds: float, clock) -> Method:
    """Plain decoding whose every draft takes so long."""

    class Slow(NoDrafter):
        def draft(self, *arguments):
            clock.now += seconds
            return super().draft(*arguments)

    return Method(name, None, lambda target, **sizes: Slow(), PLAIN.contemplator)


def test_who_has_used_least_time_goes_next(llama, clock):
    costs = {"plain": 1.0, "eagle3": 3.0, "confu": 2.5}
    engine = Engine(llama, {name: timed(name, s, clock) for name, s in costs.items()}, {})
    used = dict.fromkeys(costs, 0.0)
    rounds = dict.fromkeys(costs, 0)
    order = ""
    for event in engine.compare(TEXT, SETTINGS):
        clock.now += 50  # the reader's time is nobody's
        if isinstance(event, Advanced):
            open_lanes = [name for name in costs if rounds[name] < 12]
            assert used[event.lane] == min(used[name] for name in open_lanes)
            used[event.lane] += event.record.seconds.total
            rounds[event.lane] += 1
            order += event.lane[0]
    assert used == {name: 11 * seconds for name, seconds in costs.items()}
    # prefills cost nothing here, so that each lane is twice in a row at first; by least time then,
    # the first lane on ties
    assert order.startswith("ppeecc" + "ppcpep")


def test_stop_ends_all_lanes_and_still_finishes(engine, greedy):
    seen = 0

    def should_stop() -> bool:
        return seen >= 7

    events = []
    for event in engine.compare(TEXT, SETTINGS, should_stop=should_stop):
        seen += isinstance(event, Advanced)
        events.append(event)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert seen == 7
    for lane in finished.trace.lanes.values():
        assert lane.stop == "cancelled"
        assert [t.id for t in lane.tokens] == greedy[-48:][: len(lane.tokens)]
    assert finished.trace.differences() == ()


def test_stopped_at_once(engine):
    events = list(engine.compare(TEXT, SETTINGS, should_stop=lambda: True))
    assert isinstance(events[-1], Finished)
    assert all(len(lane.tokens) <= 1 for lane in events[-1].trace.lanes.values())


@pytest.mark.parametrize(
    ("text", "settings", "methods", "error", "words"),
    [
        ("", SETTINGS, ["plain"], PromptError, "empty"),
        ("a" * 2000, SETTINGS, ["plain"], PromptError, "at most 255"),
        (TEXT, replace(SETTINGS, nodes=0), ["plain"], SettingsError, "between 1"),
        (TEXT, SETTINGS, ["eagle9"], SettingsError, "plain, eagle3, confu"),
        (TEXT, SETTINGS, [], SettingsError, "at least one method"),
    ],
)
def test_errors_come_before_the_first_event(engine, text, settings, methods, error, words):
    with pytest.raises(error, match=words):
        engine.compare(text, settings, methods)  # not even iterated


def test_closing_frees_the_caches(engine, monkeypatch):
    made = []
    original = KVCache.__init__

    def remember(self, **sizes) -> None:
        original(self, **sizes)
        made.append(weakref.ref(self._slots))

    monkeypatch.setattr(KVCache, "__init__", remember)
    events = engine.compare(TEXT, SETTINGS)
    kept = [next(events) for _ in range(9)]
    assert len(made) == 5
    events.close()
    gc.collect()
    assert [ref() for ref in made] == [None] * 5, "kept events must not hold caches"
    assert len(kept) == 9


def test_a_lane_out_of_memory_says_so_and_the_others_go_on(llama, head, greedy):
    class Greedy(NoDrafter):
        calls = 0

        def draft(self, *arguments):
            self.calls += 1
            if self.calls == 3:
                raise torch.OutOfMemoryError("boom")
            return super().draft(*arguments)

    hungry = Method("eagle3", None, lambda target, **sizes: Greedy(), PLAIN.contemplator)
    events = list(Engine(llama, {"plain": PLAIN, "eagle3": hungry}, {}).compare(
        TEXT, SETTINGS, ["plain", "eagle3"]
    ))  # fmt: skip
    lanes = events[-1].trace.lanes
    assert "ran out of memory" in lanes["eagle3"].error
    assert len(lanes["eagle3"].tokens) == 3
    assert lanes["plain"].error is None
    assert [t.id for t in lanes["plain"].tokens] == greedy[-48:][:12]
    assert events[-1].trace.differences() == ()
    assert Trace.from_json(events[-1].trace.to_json()) == events[-1].trace


def test_two_races_at_once(engine, greedy):
    """Two visitors on one engine, event by event."""
    races = [engine.compare(TEXT, SETTINGS), engine.compare(TEXT, SETTINGS)]
    last = [None, None]
    while races[0] or races[1]:
        for number in (0, 1):
            if races[number]:
                event = next(races[number], None)
                if event is None:
                    races[number] = None
                else:
                    last[number] = event
    for event in last:
        for lane in event.trace.lanes.values():
            assert [t.id for t in lane.tokens] == greedy[-48:][:12]


def test_rounds_run_in_inference_mode_and_their_reader_does_not(engine, llama, prompt):
    for _ in engine.compare(TEXT, replace(SETTINGS, max_new_tokens=2)):
        assert not torch.is_inference_mode_enabled()

    class Watch(Observer):
        def verified(self, view):
            assert torch.is_inference_mode_enabled()
            seen.append(view.verification.logits.is_inference())

    seen = []
    for _ in decode(llama, engine.method("eagle3"), prompt, SETTINGS, Watch()):
        assert not torch.is_inference_mode_enabled()
    assert seen and all(seen)


def test_what_a_page_asks(engine, llama, prompt):
    assert engine.context == 256
    assert engine.count_tokens(TEXT) == len(prompt)
    assert {name: info.available for name, info in engine.methods.items()} == {
        "plain": True,
        "eagle3": True,
        "confu": True,
        "confu-lite": False,
    }
    contemplating = {name for name, info in engine.methods.items() if info.contemplates}
    assert contemplating == {"confu", "confu-lite"}
    alone = Engine(llama, {"plain": PLAIN}, {}).methods
    assert not alone["confu"].available
    assert "ConFu" in alone["confu"].reason


def test_sampled_lanes_write_the_same_text(engine, llama, prompt):
    settings = replace(SETTINGS, temperature=0.7, top_p=0.9, seed=12)
    wanted = [t for r in decode(llama, PLAIN, prompt, settings) for t in r.token_ids]
    finished = list(engine.compare(TEXT, settings))[-1]
    for lane in finished.trace.lanes.values():
        assert [t.id for t in lane.tokens] == wanted
        assert lane.tau >= 1.0


# Loading -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory, llama, head, part):
    """A target and two heads on disk."""
    home = tmp_path_factory.mktemp("engine")
    fakes.tiny_model().save_pretrained(home / "target")
    llama.tokenizer.save_pretrained(home / "target")
    for name, contemplation in (("eagle3", None), ("confu", part)):
        save_checkpoint(home / name, head, contemplation, llama, {}, dtype=torch.float32)
    return home


def test_load_engine(folders, greedy):
    reports = []
    engine = load_engine(
        str(folders / "target"),
        device="cpu",
        progress=lambda message, fraction: reports.append((message, fraction)),
        heads={"eagle3": folders / "eagle3", "confu": folders / "confu"},
    )
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    finished = list(engine.compare(TEXT, SETTINGS))[-1]
    for lane in finished.trace.lanes.values():
        assert [t.id for t in lane.tokens] == greedy[-48:][:12]
    assert len(finished.trace.lanes["confu"].head.sha256) == 64
    assert not finished.trace.lanes["confu"].head.trained


def test_load_engine_without_heads(folders):
    engine = load_engine(str(folders / "target"), device="cpu", heads={})
    assert [name for name, info in engine.methods.items() if info.available] == ["plain"]
    with pytest.raises(SettingsError, match="Available: plain"):
        engine.compare(TEXT, SETTINGS)


def test_heads_of_the_wrong_kind_are_refused(folders):
    for name, folder in (("confu", "eagle3"), ("eagle3", "confu")):
        with pytest.raises(CheckpointError, match=folder):
            load_engine(str(folders / "target"), device="cpu", heads={name: folders / folder})


def test_unknown_precision(folders):
    with pytest.raises(TargetError, match="float32, bfloat16"):
        load_engine(str(folders / "target"), device="cpu", dtype="int3", heads={})


def test_bfloat16_runs_and_reports_its_precision(folders, prompt):
    """No claim of equality there, but it must run and say what it ran in."""
    engine = load_engine(
        str(folders / "target"),
        device="cpu",
        dtype="bfloat16",
        heads={"confu": folders / "confu"},
    )
    settings = replace(SETTINGS, max_new_tokens=6, temperature=0.5)
    finished = list(engine.compare(TEXT, settings, ["plain", "confu"]))[-1]
    assert finished.trace.target.dtype == "bfloat16"
    assert all(1 <= len(lane.tokens) <= 6 for lane in finished.trace.lanes.values())
    assert len(chat_ids(engine.target, TEXT)) == len(prompt)
