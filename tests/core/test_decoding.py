"""The loop: what its caches hold after every round, runs side by side, observers, bad settings."""

from __future__ import annotations

import gc
import math
import time
import weakref
from dataclasses import replace

import pytest
import torch

from confu_core import decoding
from confu_core.cache import KVCache
from confu_core.decoding import Clock, check_settings, decode
from confu_core.errors import SettingsError
from confu_core.methods import PLAIN
from confu_core.probes import Observer
from confu_core.trace import Settings
from tests import fakes

SHORT = Settings(max_new_tokens=14, nodes=10, depth=3, top_k=3)


def tokens(rounds) -> list[int]:
    return [token for round in rounds for token in round.token_ids]


@pytest.fixture
def caches(monkeypatch) -> list[KVCache]:
    """Every cache that is made during the test, in order: a run makes the target's, then the
    draft's."""
    made = []
    original = KVCache.__init__

    def remember(self, **sizes) -> None:
        original(self, **sizes)
        made.append(self)

    monkeypatch.setattr(KVCache, "__init__", remember)
    return made


@pytest.fixture(scope="module")
def methods(llama, greedy, head, part):
    """Name -> method, among them one with long accepted paths and contemplate tokens."""
    return {
        "plain": PLAIN,
        "eagle3": fakes.method(head),
        "confu": fakes.method(head, part),
        "half right": fakes.half_right(greedy, llama.vocab),
        "half right, contemplating": fakes.half_right(greedy, llama.vocab, head=head, part=part),
    }


NAMES = ["plain", "eagle3", "confu", "half right", "half right, contemplating"]


# Caches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_target_cache_equals_a_fresh_prefill_after_every_round(
    llama, prompt, methods, caches, name
):
    text = list(prompt)
    for round in decode(llama, methods[name], prompt, replace(SHORT, max_new_tokens=20)):
        text += round.token_ids
        cache = caches[0]
        # the newest token is the next root: drawn, but not yet run through the target
        assert (cache.length, cache.pending) == (len(text) - 1, 0)
        fresh = llama.new_cache(len(text))
        llama.prefill(fresh, text[:-1])
        for kept, wanted in zip(cache.committed(), fresh.committed(), strict=True):
            torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=1e-5)
    assert len(text) == len(prompt) + 20


class DraftCacheChecker(Observer):
    """After each draft: the lasting draft cache equals entries made from true features only."""

    def __init__(self, target, head, caches, prompt) -> None:
        self.target, self.head, self.caches = target, head, caches
        self.text = list(prompt)
        self.checked = 0

    def prefilled(self, view) -> None:
        self.text.append(view.first.token_id)

    def verifying(self, view) -> None:
        head, ids = self.head, self.text
        cache = self.caches[1]
        assert (cache.length, cache.pending) == (len(ids) - 1, 0)
        fresh = self.target.new_cache(len(ids))
        taps = self.target.prefill(fresh, ids[:-1]).taps
        e = self.target.embed(torch.tensor([ids[1:]]))
        positions = torch.arange(len(ids) - 1).unsqueeze(0)
        keys, values = head.keys_values(
            head.attention_input(e, head.fuse(taps)), *head.rotary(positions)
        )
        for kept, wanted in zip(cache.committed(), (keys, values), strict=True):
            torch.testing.assert_close(kept[0], wanted, atol=1e-5, rtol=1e-5)
        self.checked += 1

    def accepted(self, view) -> None:
        self.text += [draw.token_id for draw in view.acceptance.draws]


@pytest.mark.parametrize("contemplates", [False, True])
def test_draft_cache_holds_true_features_only(llama, prompt, part, greedy, caches, contemplates):
    """With a head that can name whatever the target writes, so that several tokens are accepted
    at once and approximated entries would show."""
    head = fakes.tiny_head(llama, vocabulary=greedy[len(prompt) :])
    part = part if contemplates else None
    checker = DraftCacheChecker(llama, head, caches, prompt)
    settings = replace(SHORT, max_new_tokens=24, nodes=60, depth=2, top_k=64)
    rounds = list(decode(llama, fakes.method(head, part), prompt, settings, checker))
    assert checker.checked == len(rounds) - 1 >= 5
    assert max(len(round.draws) for round in rounds[1:]) >= 2


def test_draft_cache_keeps_up_without_drafting(llama, prompt, head, caches):
    """At depth 0 nothing is drafted, but the features still go in; later depth would need them."""
    checker = DraftCacheChecker(llama, head, caches, prompt)
    rounds = list(decode(llama, fakes.method(head), prompt, replace(SHORT, depth=0), checker))
    assert checker.checked == 13
    assert all(round.draft.passes == 0 for round in rounds[1:])


@pytest.mark.parametrize("name", NAMES)
def test_lengths_and_positions(llama, prompt, methods, name):
    so_far, last = len(prompt), prompt[-1]
    for index, round in enumerate(decode(llama, methods[name], prompt, SHORT)):
        assert (round.index, round.position) == (index, so_far)
        if index == 0:
            assert (round.target_rows, len(round.draws), round.draft) == (len(prompt), 1, None)
        else:
            tree = round.draft.tree
            assert tree.token_ids[0] == last, "the root is the newest token"
            gained = [tree.token_ids[node] for node in round.acceptance.path]
            assert round.token_ids[: len(gained)] == gained
            assert len(round.draws) == len(gained) + 1
        so_far += len(round.draws)
        last = round.token_ids[-1]


def test_caches_are_sized_once_and_never_grow(llama, prompt, methods, caches):
    for name in NAMES:
        before = len(caches)
        rounds = decode(llama, methods[name], prompt, SHORT)
        next(rounds)
        storage = [cache._slots.data_ptr() for cache in caches[before:]]
        for _ in rounds:
            assert [cache._slots.data_ptr() for cache in caches[before:]] == storage
        assert len(caches) - before == (1 if "half" in name or name == "plain" else 2)


# Runs on one target ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_long_after_short_after_long(llama, prompt, greedy, methods, name):
    """Nothing of a run is left in target or method: lengths and settings may change freely."""
    continuation = greedy[len(prompt) :]
    for count, nodes in ((3, 30), (25, 4), (1, 60), (25, 30), (8, 1)):
        settings = replace(SHORT, max_new_tokens=count, nodes=nodes)
        assert tokens(decode(llama, methods[name], prompt, settings)) == continuation[:count]


def test_other_prompts_in_between(llama, prompt, greedy, methods):
    other = [1, 50, 60, 2, 201, 1, 285]
    alone = tokens(decode(llama, PLAIN, other, SHORT))
    for name in ("eagle3", "confu"):
        for _ in range(2):
            assert tokens(decode(llama, methods[name], other, SHORT)) == alone
            assert tokens(decode(llama, methods[name], prompt, SHORT)) == greedy[-48:][:14]


def test_two_runs_interleaved(llama, prompt, greedy, methods):
    """Two people on one target and one head, round by round."""
    other = [1, 50, 60, 2, 201, 1, 285]
    alone = tokens(decode(llama, PLAIN, other, SHORT))
    for name in ("eagle3", "confu"):
        runs = [decode(llama, methods[name], p, SHORT) for p in (prompt, other, prompt)]
        texts = [[], [], []]
        open_runs = {0, 1, 2}
        while open_runs:
            for number in sorted(open_runs):
                round = next(runs[number], None)
                if round is None:
                    open_runs.remove(number)
                else:
                    texts[number] += round.token_ids
        assert texts == [greedy[-48:][:14], alone, greedy[-48:][:14]]


@pytest.mark.parametrize("name", ["plain", "eagle3", "confu"])
@pytest.mark.parametrize("asks", [0, 1, 2, 5])
def test_cancelled_runs(llama, prompt, greedy, methods, name, asks):
    """Asked twice a round; a cancelled run ends with what it has, and the next one is fresh."""
    answers = iter([False] * asks + [True] * 99)
    rounds = list(decode(llama, methods[name], prompt, SHORT, cancelled=lambda: next(answers)))
    assert tokens(rounds) == greedy[-48:][: len(tokens(rounds))]
    assert len(rounds) == 1 + asks // 2
    assert all(round.stop is None for round in rounds)
    assert tokens(decode(llama, methods[name], prompt, SHORT)) == greedy[-48:][:14]


@pytest.mark.parametrize("name", ["plain", "eagle3", "confu"])
@pytest.mark.parametrize("how", ["close", "abandon", "finish", "raise"])
def test_memory_of_a_run_is_freed(llama, prompt, methods, caches, name, how):
    class Failing(Observer):
        def verified(self, view) -> None:
            raise RuntimeError("a faulty observer")

    run = decode(llama, methods[name], prompt, SHORT, Failing() if how == "raise" else None)
    kept = [next(run)]
    if how == "close":
        kept.append(next(run))
        run.close()
    elif how == "finish":
        kept += list(run)
    elif how == "raise":
        with pytest.raises(RuntimeError):
            next(run)
    else:
        kept.append(next(run))
    slots = [weakref.ref(cache._slots) for cache in caches]
    assert all(ref() is not None for ref in slots)
    del run
    caches.clear()
    gc.collect()
    assert [ref() for ref in slots] == [None] * len(slots), "kept rounds must not hold caches"
    assert len(tokens(kept)) >= 1


def test_memory_is_flat_over_many_runs(llama, prompt, methods):
    """Live tensors after 30 runs, a third of them cut off, are as many as after 3."""

    def live(runs: int) -> int:
        for number in range(runs):
            for name in ("plain", "eagle3", "confu"):
                run = decode(llama, methods[name], prompt, replace(SHORT, max_new_tokens=5))
                next(run)
                if number % 3:
                    list(run)
                del run
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    first = live(3)
    assert live(10) <= first


# Observers ---------------------------------------------------------------------------------------


class Everything(Observer):
    """Writes down what it is called for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prefilled(self, view) -> None:
        self.calls.append("prefilled")
        assert view.rows.taps.shape[1] == view.rows.last.shape[1] > 0

    def drafted(self, step) -> None:
        self.calls.append(f"drafted {step.depth}")

    def verifying(self, view) -> None:
        self.calls.append(f"verifying {view.index}")

    def verified(self, view) -> None:
        self.calls.append(f"verified {view.index}")
        nodes = len(view.draft.tree)
        assert view.verification.logits.shape[0] == view.verification.taps.shape[0] == nodes

    def accepted(self, view) -> None:
        self.calls.append(f"accepted {view.index}")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_observers_change_nothing(llama, prompt, methods, name, temperature):
    settings = replace(SHORT, temperature=temperature, seed=5)
    seen = Everything()
    watched = list(decode(llama, methods[name], prompt, settings, seen))
    alone = list(decode(llama, methods[name], prompt, settings))
    assert [r.draws for r in watched] == [r.draws for r in alone]
    assert [r.draft and r.draft.tree for r in watched] == [r.draft and r.draft.tree for r in alone]
    assert [r.stop for r in watched] == [r.stop for r in alone]


def test_observer_calls_come_in_the_order_of_a_round(llama, prompt, methods):
    seen = Everything()
    settings = replace(SHORT, max_new_tokens=5, depth=2)
    rounds = list(decode(llama, methods["confu"], prompt, settings, seen))
    assert [len(r.draws) for r in rounds] == [1, 1, 1, 1, 1], "the prompt gives no hits"
    wanted = ["prefilled"]
    for index, depth in ((1, 2), (2, 2), (3, 1), (4, 0)):  # the last token cannot be drafted
        wanted += [f"drafted {level}" for level in range(1, depth + 1)]
        wanted += [f"verifying {index}", f"verified {index}", f"accepted {index}"]
    assert seen.calls == wanted


class FakeTime:
    """A clock that stands still unless told, so that times are exact."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(decoding, "time", fake)
    return fake


def test_seconds_of_a_round(clock):
    watch = Clock()
    with watch.phase("draft"):
        clock.now += 2
    clock.now += 0.5
    with watch.phase("verify"):
        clock.now += 4
    with watch.aside():
        clock.now += 1000
    with watch.phase("draft"):
        clock.now += 1
    spent = watch.lap()
    assert (spent.draft, spent.verify, spent.rest, spent.total) == (3, 4, 0.5, 7.5)
    assert watch.lap().total == 0


def test_time_of_observers_and_of_the_reader_is_not_counted(llama, prompt, methods, clock):
    class Slow(Observer):
        def prefilled(self, view) -> None:
            clock.now += 1000

        verifying = verified = accepted = prefilled

    for round in decode(llama, methods["confu"], prompt, SHORT, Slow()):
        assert round.seconds.total == 0
        clock.now += 5000  # the reader of the generator takes its time


def test_a_slow_draft_observer_is_not_counted(llama, prompt, methods, clock):
    """`drafted` is called inside the draft, and its time is still not the draft's."""

    class Slow(Observer):
        def drafted(self, step) -> None:
            clock.now += 1000

    for round in decode(llama, methods["eagle3"], prompt, SHORT, Slow()):
        assert round.seconds.total == 0


def test_an_observer_reads_the_rounds_seconds_so_far(llama, prompt, methods, clock, monkeypatch):
    """At `accepted` the round is over but for the observer, so its times are the round's."""
    verify = type(llama).verify

    def slow(self, *arguments):
        clock.now += 3
        return verify(self, *arguments)

    monkeypatch.setattr(type(llama), "verify", slow)
    seen = []

    class Reader(Observer):
        def accepted(self, view) -> None:
            seen.append(view.seconds)
            clock.now += 1000

    rounds = list(decode(llama, methods["confu"], prompt, SHORT, Reader()))
    assert seen == [round.seconds for round in rounds[1:]]
    assert all((s.draft, s.verify, s.rest) == (0, 3, 0) for s in seen)


def test_real_seconds_add_up(llama, prompt, methods):
    start = time.perf_counter()
    rounds = list(decode(llama, methods["confu"], prompt, SHORT))
    wall = time.perf_counter() - start
    total = sum(round.seconds.total for round in rounds)
    assert 0.5 * wall < total <= wall
    assert all(round.seconds.verify > 0 for round in rounds)
    assert all(round.seconds.draft > 0 for round in rounds[1:])


# Settings ----------------------------------------------------------------------------------------

BAD = {
    "max_new_tokens": ([0, -1], "at least 1"),
    "temperature": ([-0.1, 0.009, 5.1, math.nan, math.inf], "0 (greedy) or between 0.01 and 5"),
    "top_p": ([0.0, -0.5, 1.01, math.nan], "above 0 and at most 1"),
    "nodes": ([0, 257, -3], "between 1 (root only) and 256"),
    "depth": ([-1, 17], "between 0 and 16"),
    "top_k": ([0, 65], "between 1 and 64"),
    "contemplate": ([0.0, -0.25, 1.01, math.nan], "above 0 and at most 1"),
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in BAD for value in BAD[field][0]]
)
def test_every_bad_setting_gives_one_sentence_with_the_range(llama, prompt, field, value):
    settings = replace(SHORT, **{field: value})
    with pytest.raises(SettingsError) as caught:
        next(decode(llama, PLAIN, prompt, settings))
    message = str(caught.value)
    assert BAD[field][1] in message
    assert str(value) in message
    assert message.count("\n") == 0
    assert message.endswith(".")
    with pytest.raises(SettingsError):
        check_settings(settings)


@pytest.mark.parametrize(
    "good",
    [
        {"max_new_tokens": 1},
        {"temperature": 5.0},
        {"temperature": 0.01},
        {"top_p": 1e-9},
        {"nodes": 1},
        {"nodes": 256},
        {"depth": 0},
        {"depth": 16},
        {"top_k": 1},
        {"top_k": 64},
        {"contemplate": 1e-9},
        {"seed": -(1 << 70)},
    ],
)
def test_extremes_that_are_allowed_work(llama, prompt, methods, good):
    settings = replace(Settings(max_new_tokens=3, nodes=4, temperature=0.5), **good)
    wanted = tokens(decode(llama, PLAIN, prompt, settings))
    for name in ("eagle3", "confu"):
        assert tokens(decode(llama, methods[name], prompt, settings)) == wanted
    assert 1 <= len(wanted) <= 3


def test_prompts_without_room_are_refused(llama):
    for ids in ([], [5] * llama.context, [5] * (llama.context + 3)):
        with pytest.raises(SettingsError, match=f"{len(ids)} tokens leaves no room"):
            next(decode(llama, PLAIN, ids, SHORT))
    rounds = list(decode(llama, PLAIN, [5] * (llama.context - 1), SHORT))
    assert (len(tokens(rounds)), rounds[-1].stop) == (1, "context")


def test_a_prompt_of_one_token(llama, methods):
    wanted = tokens(decode(llama, PLAIN, [7], SHORT))
    assert len(wanted) == 14
    for name in ("eagle3", "confu"):
        assert tokens(decode(llama, methods[name], [7], SHORT)) == wanted


def test_same_run_twice_is_the_same(llama, prompt, methods):
    settings = replace(SHORT, temperature=1.0, seed=8)
    for name in ("eagle3", "confu"):
        one, two = (list(decode(llama, methods[name], prompt, settings)) for _ in range(2))
        assert [r.draws for r in one] == [r.draws for r in two]
        assert [r.draft and r.draft.tree for r in one] == [r.draft and r.draft.tree for r in two]
