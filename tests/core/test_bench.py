"""The benchmark: questions, lanes, the grid, rows that survive a kill, figures with known answers,
peers, pages, and real tiny runs."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from confu_core.__main__ import main
from confu_core.bench import scaling
from confu_core.bench.facts import place_of, settings_of
from confu_core.bench.figures import (
    NEAR_TIE,
    acceptance,
    bootstrap,
    faults,
    figures,
    ratios,
    summary,
)
from confu_core.bench.journal import Journal, journal_path
from confu_core.bench.lanes import (
    Answer,
    OwnLane,
    count_depths,
    first_difference,
    load_methods,
    order_lanes,
    own_lanes,
)
from confu_core.bench.peers import Peer, peers
from confu_core.bench.profile import profile
from confu_core.bench.questions import OWN, Question, load_questions, spread
from confu_core.bench.report import document, progress, tables
from confu_core.bench.results import read_result, write_result
from confu_core.bench.rows import Row, read_row
from confu_core.bench.run import Grid, ask, run
from confu_core.compare import Engine
from confu_core.errors import DataError, SettingsError, TargetError
from confu_core.methods import PLAIN
from confu_core.prompt import chat_ids
from confu_core.trace import Settings
from tests.core.test_main import options
from tests.fakes import method, tiny_model, tiny_target, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")


def row(question: str, name: str, tokens: int, passes: int, seconds: float = 1.0, **more) -> Row:
    plain = Row(
        question=question,
        group="qa",
        turn=1,
        method=name,
        temperature=0.0,
        seed=0,
        nodes=None if name == "plain" else 30,
        prompt_tokens=20,
        first_tokens=1,
        first_seconds=0.5,
        tokens=tokens,
        passes=passes,
        seconds=seconds,
        draft_seconds=0.25 * seconds,
        verify_seconds=0.5 * seconds,
        rest_seconds=0.25 * seconds,
        target_rows=30 * passes,
        same=True,
    )
    return dataclasses.replace(plain, **more)


SETTINGS = {
    "methods": ["plain", "eagle3"],
    "peers": [],
    "temperatures": [0.0],
    "node_budgets": [30],
    "target": {"dtype": "float32"},
}


# --- questions


def write(path, *lines):
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def question_line(number: int, category: str) -> str:
    return json.dumps({"question_id": number, "category": category, "turns": ["a", "b"]})


def test_eight_categories_are_one_group(tmp_path):
    path = write(tmp_path / "q", question_line(1, "coding"), question_line(2, "rag"))
    assert [q.group for q in load_questions(path)] == ["mt_bench", "rag"]
    assert load_questions(path)[0].turns == ("a", "b")


@pytest.mark.parametrize(
    "line",
    [
        "<html>",
        "[]",
        '{"category": "qa", "turns": []}',
        question_line(1, "qa")[:-3],
        question_line(1, "rag"),  # an id that stood before
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = write(tmp_path / "q", question_line(1, "qa"), line)
    with pytest.raises(DataError, match="line 2"):
        load_questions(path)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_questions(tmp_path / "absent")
    with pytest.raises(DataError, match="no questions"):
        load_questions(write(tmp_path / "q", ""))


def test_spread_takes_the_same_share_of_each_group():
    questions = [Question(f"{group}{n}", group, ("x",)) for group in "abc" for n in range(10)]
    chosen = spread(questions, 7)
    assert [q.id for q in chosen] == ["a0", "a3", "a6", "b0", "b5", "c0", "c5"]
    assert spread(questions, None) == questions


def test_our_own_questions_are_eight_per_group_and_of_real_lengths():
    questions = load_questions(OWN)
    assert Counter(q.group for q in questions) == dict.fromkeys(GROUPS, 8)
    assert len({turn for q in questions for turn in q.turns}) == sum(
        len(q.turns) for q in questions
    )
    assert sum(len(q.turns) == 2 for q in questions if q.group == "mt_bench") >= 3
    for q in questions:
        if q.group in ("summarization", "rag"):
            assert 150 <= len(q.turns[0].split()) <= 400, q.id


# --- lanes


class Scripted:
    """A lane whose answer is a function of the prompt; it takes a second per token.

    It remembers what it was asked.
    """

    drafts_tree = True

    def __init__(self, name: str, write=lambda ids, settings: [5, 6, 7], samples: bool = True):
        self.name = name
        self.samples = samples
        self.drafts_tree = name != "plain"
        self.asked: list[tuple[tuple[int, ...], Settings]] = []
        self._write = write

    def answer(self, prompt_ids, settings):
        self.asked.append((tuple(prompt_ids), settings))
        tokens = tuple(self._write(prompt_ids, settings))
        return Answer(
            token_ids=tokens,
            margins=(0.5,) * len(tokens),
            first_tokens=1,
            passes=len(tokens) - 1,
            first_seconds=2.0,
            seconds=float(len(tokens) - 1),
            phases=(0.0, len(tokens) - 1.0, 0.0),
            target_rows=len(tokens) - 1,
        )


def round_of(parents: list[int], path: tuple[int, ...], draws: int):
    return SimpleNamespace(
        draft=SimpleNamespace(tree=SimpleNamespace(parents=parents)),
        acceptance=SimpleNamespace(path=path),
        draws=(None,) * draws,
    )


def test_acceptance_by_depth_counts_only_what_was_offered():
    tree = [-1, 0, 0, 1, 3]  # 1 and 2 below the root, 3 below 1, 4 below 3
    offered, accepted = count_depths(
        [
            round_of(tree, (1, 3, 4), 4),  # to the end of the tree, and a bonus token
            round_of(tree, (1,), 2),  # depth 2 was offered and refused
            round_of(tree, (2,), 2),  # node 2 has no children: depth 2 was not offered
            round_of(tree, (1, 3), 2),  # the run ended on node 3: depth 3 was not drawn
            round_of(tree, (), 1),  # the root's children were refused
            round_of([-1], (), 1),  # there were none
        ]
    )
    assert offered == (5, 3, 1)
    assert accepted == (4, 2, 1)


def test_acceptance_is_pooled_over_rows_of_different_depth():
    rows = [
        row("1", "eagle3", 9, 3, offered=(3, 2), accepted=(2, 1)),
        row("2", "eagle3", 9, 3, offered=(1,), accepted=(1,)),
    ]
    assert acceptance(rows) == [
        {"depth": 1, "offered": 4, "accepted": 3, "share": 0.75},
        {"depth": 2, "offered": 2, "accepted": 1, "share": 0.5},
    ]


def answer(tokens: list[int], margins: list[float] | None = None) -> Answer:
    told = tuple(margins if margins is not None else [1.0] * len(tokens))
    return Answer(tuple(tokens), told, 1, 1, 1.0, 1.0)


def test_the_first_difference_and_the_smaller_margin():
    a = answer([1, 2, 3], [1.0, 0.2, 1.0])
    assert first_difference(a, answer([1, 2, 3])) is None
    assert first_difference(a, answer([1, 9, 3], [1.0, 0.1, 1.0])) == (1, 0.1)
    assert first_difference(a, answer([1, 9, 3], [])) == (1, 0.2)  # a peer tells no margin
    assert first_difference(a, answer([1, 2])) == (2, 1.0)  # it ended where the other went on
    assert first_difference(answer([1], []), answer([2], [])) == (0, None)


def test_plain_decoding_goes_first_and_names_are_single():
    lanes = [Scripted("confu"), Scripted("plain"), Scripted("eagle3")]
    assert [lane.name for lane in order_lanes(lanes)] == ["plain", "confu", "eagle3"]
    for wrong in ([], [Scripted("plain"), Scripted("plain")]):
        with pytest.raises(SettingsError):
            order_lanes(wrong)


@pytest.fixture
def engine(llama, head, part):
    methods = {"plain": PLAIN, "eagle3": method(head), "confu": method(head, part)}
    return Engine(llama, methods, {})


def test_a_lane_says_what_the_loop_says(engine, prompt):
    from confu_core.decoding import decode

    settings = Settings(max_new_tokens=12, nodes=8, depth=3, top_k=3)
    found = OwnLane("eagle3", engine.method("eagle3"), engine.target).answer(prompt, settings)
    rounds = list(decode(engine.target, engine.method("eagle3"), prompt, settings))
    assert found.token_ids == tuple(t for r in rounds for t in r.token_ids)
    assert len(found.margins) == len(found.token_ids) == 12
    assert (found.first_tokens, found.passes) == (1, len(rounds) - 1)
    assert found.target_rows == sum(r.target_rows for r in rounds[1:])
    assert 0 < sum(found.phases) <= found.seconds
    assert found.offered[0] <= found.passes


def test_several_shares_of_contemplate_tokens_are_lanes_of_their_own(engine, prompt):
    methods = load_methods(engine, None, ())
    assert list(methods) == ["plain", "eagle3", "confu"]
    lanes = own_lanes(methods, engine.target, (1.0, 0.25))
    assert [lane.name for lane in lanes] == ["plain", "eagle3", "confu-1", "confu-0.25"]
    settings = Settings(max_new_tokens=8, nodes=8, depth=3, top_k=3)
    dense, sparse = (lane.answer(prompt, settings) for lane in lanes[2:])
    assert dense.token_ids == sparse.token_ids
    assert sparse.target_rows / sparse.passes < dense.target_rows / dense.passes


@pytest.mark.parametrize("entry", ["static", "=folder", "static=", "plain=folder"])
def test_one_more_head_needs_a_free_name_and_a_folder(engine, entry):
    with pytest.raises(SettingsError, match="NAME=FOLDER"):
        load_methods(engine, None, [entry])


# --- the grid and its run


def grid(temperatures=(0.0,), nodes=(30,), seeds=(0,), **base) -> Grid:
    return Grid(Settings(**base), temperatures, nodes, seeds)


def silent(*_) -> None:
    """No report."""


def test_a_grid_runs_one_seed_at_temperature_0_and_plain_decoding_once(llama):
    plain, tree = Scripted("plain"), Scripted("eagle3")
    rows = ask(llama, [plain, tree], QUESTIONS[0], grid((0.0, 0.7), (30, 60), (3, 4)))
    places = [(r.method, r.temperature, r.seed, r.nodes) for r in rows]
    assert places == [
        (name, temperature, seed, nodes)
        for temperature, seed in ((0.0, 3), (0.7, 3), (0.7, 4))
        for name, nodes in (("plain", None), ("eagle3", 30), ("eagle3", 60))
    ]
    assert len(plain.asked) == 3 and len(tree.asked) == 6
    assert {(s.temperature, s.seed, s.nodes) for _, s in tree.asked} == {
        (t, s, n) for t, s in ((0.0, 3), (0.7, 3), (0.7, 4)) for n in (30, 60)
    }


def test_a_lane_that_cannot_sample_alike_runs_at_temperature_0_only(llama):
    peer = Scripted("peer", samples=False)
    rows = ask(llama, [Scripted("plain"), peer], QUESTIONS[0], grid((0.0, 1.0)))
    assert [r.temperature for r in rows if r.method == "peer"] == [0.0]


def test_the_first_lane_moves_round_from_question_to_question(llama):
    order: list[str] = []
    lanes = []
    for name in ("plain", "a", "b"):
        lanes.append(Scripted(name, lambda ids, settings, name=name: order.append(name) or [5]))
    for number, question in enumerate(QUESTIONS):
        rows = ask(llama, lanes, question, grid(), first=number)
        assert [r.method for r in rows] == ["plain", "a", "b"]  # rows keep the order of lanes
    assert order == ["plain", "a", "b", "a", "b", "plain", "b", "plain", "a"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": (30, 30)}, "given twice"),
        ({"temperatures": (0.7, -1.0)}, "Temperature is -1"),
        ({"nodes": (30, 0)}, "Tree size is 0"),
    ],
)
def test_a_grid_that_cannot_run_is_refused_before_it_runs(changes, message):
    with pytest.raises(SettingsError, match=message):
        grid(**changes)


def test_every_second_prompt_holds_the_reference_lanes_first_answer(llama):
    """All lanes read one history, also where a lane wrote another text."""
    one, two = llama.tokenizer.encode("ab"), llama.tokenizer.encode("xy")
    plain, other = Scripted("plain", lambda *_: one), Scripted("eagle3", lambda *_: two)
    question = Question("1", "mt_bench", ("Write.", "Again."))
    rows = ask(llama, [plain, other], question, grid())
    assert [(r.turn, r.method, r.same) for r in rows] == [
        (1, "plain", True),
        (1, "eagle3", False),
        (2, "plain", True),
        (2, "eagle3", False),
    ]
    chat = [
        {"role": "user", "content": "Write."},
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "Again."},
    ]
    for lane in (plain, other):
        assert [ids for ids, _ in lane.asked] == [
            tuple(chat_ids(llama, "Write.")),
            tuple(chat_ids(llama, chat)),
        ]


def test_a_chat_without_a_template_keeps_its_history():
    target = tiny_target()
    target.tokenizer.chat_template = None
    turns = ("Write.", "ab", "Again.")
    chat = [{"role": "user", "content": text} for text in turns]
    assert target.tokenizer.decode(chat_ids(target, chat)) == "Write.\n\nab\n\nAgain."
    assert target.tokenizer.decode(chat_ids(target, "Write.")) == "Write."


QUESTIONS = [Question(str(n), group, ("The hen",)) for n, group in enumerate(("qa", "rag", "qa"))]


def test_a_question_beyond_the_context_is_left_out_for_all(llama, tmp_path):
    """Also where only its second turn is too long."""
    lane = Scripted("plain")
    long = "word " * 400
    questions = [QUESTIONS[0], Question("7", "qa", (long,)), Question("8", "qa", ("Hi", long))]
    journal = Journal(tmp_path / "rows", SETTINGS, resume=False)
    seen = []

    def report(done, total, question, rows):
        seen.append(progress(done, total, 60.0, question, rows))

    run(llama, [lane], questions, grid(), journal, report)
    assert [r.question for r in journal.rows] == ["0"]
    assert set(journal.left_out) == {"7", "8"}
    assert all("Shorten the prompt" in reason for reason in journal.left_out.values())
    assert "left out" in seen[1] and "plain 1.00" in seen[0]
    result = summary(SETTINGS, journal.rows, journal.left_out)
    assert "2 questions were left out" in tables(result) and "- 7: The prompt has" in tables(result)
    assert Journal(tmp_path / "rows", SETTINGS, resume=True).left_out == journal.left_out


def test_progress_tells_tau_and_the_time_that_is_left():
    rows = [row("1", "plain", 4, 4), row("1", "eagle3", 6, 3)]
    line = progress(1, 4, 60.0, Question("1", "qa", ("x",)), rows)
    assert line == "1/4 qa 1: plain 1.00, eagle3 2.00 (3.0 min left)"


def test_running_out_of_memory_stops_with_advice(llama):
    def full(ids, settings):
        if settings.max_new_tokens > 8:  # not in the warm-up
            raise torch.OutOfMemoryError("full")
        return [5]

    journal = Journal(None, SETTINGS, resume=False)
    with pytest.raises(SettingsError, match="--resume keeps what is done"):
        run(llama, [Scripted("plain", full)], QUESTIONS, grid(), journal, silent)


# --- rows that survive a kill


class Killed(Exception):
    pass


def scripted_lanes():
    """Lanes whose answers differ by prompt and settings, the same in every run."""

    def by_settings(ids, settings):
        return [5] * (3 + len(ids) % 3 + settings.nodes // 30 + int(10 * settings.temperature))

    return [Scripted("plain", by_settings), Scripted("eagle3", by_settings)]


def many() -> list[Question]:
    return [Question(str(n), "qa", ("The hen" + " ha" * n,)) for n in range(5)]


def test_a_run_that_was_killed_goes_on_and_equals_a_whole_run(llama, tmp_path):
    wide = grid((0.0, 0.7), (30, 60))
    settings = SETTINGS | {"temperatures": [0.0, 0.7], "node_budgets": [30, 60]}
    whole = Journal(None, settings, resume=False)
    run(llama, scripted_lanes(), many(), wide, whole, silent)

    path = tmp_path / "rows.jsonl"

    def kill(done, *_):
        if done == 2:
            raise Killed

    with pytest.raises(Killed):
        run(llama, scripted_lanes(), many(), wide, Journal(path, settings, resume=False), kill)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"question": "2", "rows": [{"ques')  # cut in the middle of a line
    resumed = Journal(path, settings, resume=True)
    lanes, seen = scripted_lanes(), []
    run(llama, lanes, many(), wide, resumed, lambda *args: seen.append(args[2].id))
    assert seen == ["2", "3", "4"]
    assert resumed.rows == whole.rows
    assert summary(settings, resumed.rows, {}) == summary(settings, whole.rows, {})
    assert Journal(path, settings, resume=True).rows == whole.rows
    run(llama, lanes, many(), wide, Journal(path, settings, resume=True), kill)  # nothing to do


def journal_file(path: Path) -> Path:
    journal = Journal(path, SETTINGS, resume=False)
    for number in range(3):
        journal.add(str(number), [row(str(number), "plain", 5, 5)])
    return path


def damage(path: Path, line: int, old: str, new: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert old in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(old, new, 1)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "old", "new"),
    [
        (1, '"settings"', '"set'),
        (1, '"settings"', '"other"'),
        (2, '"tokens": 5', '"tokens": "five"'),
        (2, '"tokens": 5', '"tokens": -5'),
        (2, '"tokens": 5', '"tokens": true'),
        (3, '"seconds": 1.0', '"seconds": NaN'),
        (3, '"seconds": 1.0', '"seconds": -1.0'),
        (3, '"seconds": 1.0, ', ""),
        (3, '"same": true', '"same": 1'),
        (3, '"offered": []', '"offered": [1]'),
        (3, '"offered": [], "accepted": []', '"offered": [0], "accepted": [0]'),
        (3, '"offered": [], "accepted": []', '"offered": [1], "accepted": [2]'),
        (3, '"seconds": 1.0', '"seconds": 1e999'),
        (4, "}]}", ""),
        (4, '"rows": [', '"rows": [7, '),
        (4, '"rows"', '"lines"'),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, old, new):
    path = journal_file(tmp_path / "rows.jsonl")
    damage(path, line, old, new)
    with pytest.raises(DataError, match=f"line {line}"):
        Journal(path, SETTINGS, resume=True)


def test_rows_are_never_overwritten_and_other_settings_are_refused(tmp_path):
    path = journal_file(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="--resume"):
        Journal(path, SETTINGS, resume=False)
    other = SETTINGS | {"node_budgets": [60], "target": {"dtype": "bfloat16"}}
    with pytest.raises(DataError, match=r"node_budgets was \[30\], is \[60\].*target.dtype was"):
        Journal(path, other, resume=True)
    moved = SETTINGS | {"commit": "abc", "load_at_start": 2.0, "command": "bench --resume"}
    assert len(Journal(path, moved, resume=True).rows) == 3


def test_a_file_that_was_killed_before_its_first_line_starts_afresh(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"settings": {"meth')
    assert Journal(path, SETTINGS, resume=True).rows == []
    assert json.loads(path.read_text(encoding="utf-8")) == {"settings": SETTINGS}


def test_a_row_survives_its_file():
    one = row("1", "eagle3", 9, 3, offered=(3, 2), accepted=(2, 1), same=False, margin=0.5)
    assert read_row(json.loads(json.dumps(dataclasses.asdict(one))), "here") == one


# --- figures


def test_figures_pool_totals():
    found = figures([row("1", "eagle3", 10, 5, 1.0), row("2", "eagle3", 30, 5, 3.0)], None)
    assert found["tau"] == 4.0  # 40 tokens in 10 passes, not the mean of 2 and 6
    assert found["tau_question_mean"] == 4.0
    assert found["tokens_per_second"] == 10.0
    assert found["call_tokens_per_second"] == 8.4  # 42 tokens in 5 seconds
    assert found["ms_first_token"] == 500.0
    phases = {"all": 400.0, "draft": 100.0, "verify": 200.0, "rest": 100.0}
    assert found["ms_per_pass"] == phases
    assert found["rows_per_pass"] == 30.0
    assert (found["n"], found["identical"], found["same_text"]) == (2, True, "2/2")
    assert found["speedup"] is None  # no plain decoding to compare with
    assert "tau_by_seed" not in found


def test_speedup_is_over_plain_decoding_from_the_first_token_on():
    plain = [row(str(n), "plain", 10, 10, 2.0) for n in range(4)]
    fast = [row(str(n), "eagle3", 10, 5, 1.0) for n in range(4)]
    found = figures(fast, plain)
    assert (found["speedup"], found["speedup_interval"]) == (2.0, [2.0, 2.0])
    assert found["call_speedup"] == round(2.5 / 1.5, 4)
    assert figures(plain, plain)["speedup"] == 1.0


def test_a_lane_that_tells_no_phases_has_none():
    blind = {"draft_seconds": None, "verify_seconds": None, "rest_seconds": None}
    found = figures([row("1", "peer", 10, 5, target_rows=None, **blind)], None)
    assert found["ms_per_pass"] == {"all": 200.0, "draft": None, "verify": None, "rest": None}
    assert found["rows_per_pass"] is None


def test_seeds_are_pooled_and_told_apart():
    rows = [row("1", "eagle3", 10, 5), row("1", "eagle3", 10, 10, seed=1)]
    found = figures(rows, None)
    assert found["tau"] == round(20 / 15, 4)
    assert found["tau_by_seed"] == {"0": 2.0, "1": 1.0}
    assert (found["n"], found["answers"]) == (1, 2)


def test_ratios_compare_question_by_question():
    plain = [row(str(n), "plain", 10, 10, 2.0) for n in range(5)]
    double = [row(str(n), "eagle3", 10, 5, 1.0) for n in range(5)]
    found = ratios(plain, double)
    assert (found["n"], found["tau"], found["speed"]) == (5, 2.0, 2.0)
    assert found["tau_interval"] == [2.0, 2.0]  # every question says the same


def test_an_answer_that_ended_with_the_prompts_pass_tells_nothing():
    plain = [row("1", "plain", 10, 10), row("2", "plain", 0, 0, 0.0)]
    tree = [row("1", "eagle3", 10, 5), row("2", "eagle3", 0, 0, 0.0)]
    assert ratios(plain, tree)["n"] == 1
    assert ratios(plain, tree)["tau_interval"] is None  # one question has no spread
    assert ratios(plain[1:], tree[1:]) == {"n": 0}
    assert "tau" not in figures(tree[1:], plain[1:])


def test_ratio_intervals_hold_the_truth_of_a_mixed_sample():
    plain = [row(str(n), "plain", 10, 10) for n in range(20)]
    mixed = [row(str(n), "eagle3", 10, 5 if n % 2 else 10) for n in range(20)]
    low, high = ratios(plain, mixed)["tau_interval"]
    assert low < 10 / 7.5 < high
    assert high - low > 0.1


def test_the_bootstrap_has_the_spread_that_theory_says():
    """The mean of n values has the standard error s / sqrt(n); 95 % are 1.96 of them each way."""
    dice = np.random.default_rng(1)
    values = np.stack((dice.normal(10.0, 2.0, 400), np.ones(400)), axis=1)
    value, (low, high) = bootstrap(values, lambda t: t[0] / t[1])
    assert value == round(values[:, 0].mean(), 4)
    expected = 2 * 1.96 * values[:, 0].std() / 20
    assert abs((high - low) / expected - 1) < 0.1


def test_a_question_is_drawn_with_all_its_turns():
    """Two turns that say opposite things about one question leave no spread over questions."""
    turns = [
        row(str(n), "eagle3", 10, passes, turn=turn)
        for n in range(8)
        for turn, passes in ((1, 5), (2, 10))
    ]
    plain = [dataclasses.replace(r, method="plain", passes=10) for r in turns]
    assert ratios(plain, turns)["tau_interval"] == [1.3333, 1.3333]


def test_cells_hold_every_setting_and_the_first_stands_at_the_top():
    settings = SETTINGS | {"temperatures": [0.0, 1.0], "node_budgets": [30, 60]}
    rows = [row(str(n), "plain", 10, 10, temperature=t) for n in range(2) for t in (0.0, 1.0)]
    for nodes, passes in ((30, 5), (60, 4)):
        for t in (0.0, 1.0):
            more = {"nodes": nodes, "temperature": t}
            rows += [row(str(n), "eagle3", 10, passes, **more) for n in range(2)]
    result = summary(settings, rows, {})
    assert set(result) == {
        *("settings", "overall", "groups", "ratios", "cells", "differences", "left_out")
    }
    places = [(cell["temperature"], cell["nodes"]) for cell in result["cells"]]
    assert places == [(0.0, 30), (0.0, 60), (1.0, 30), (1.0, 60)]
    assert [c["overall"]["eagle3"]["tau"] for c in result["cells"]] == [2.0, 2.5, 2.0, 2.5]
    assert all(c["overall"]["plain"]["tau"] == 1.0 for c in result["cells"])
    for name in ("overall", "groups", "ratios"):
        assert result[name] == result["cells"][0][name]
    assert result["groups"]["qa"]["eagle3"]["n"] == 2


def test_rows_that_are_missing_or_twice_there_are_refused():
    rows = [row(str(n), name, 5, 5) for n in range(2) for name in ("plain", "eagle3")]
    summary(SETTINGS, rows, {})
    with pytest.raises(DataError, match=r"Question 1 lacks the row .*eagle3"):
        summary(SETTINGS, rows[:-1], {})
    with pytest.raises(DataError, match=r"Question 1 holds the row .* twice"):
        summary(SETTINGS, [*rows, rows[-1]], {})


@pytest.mark.parametrize(
    ("margin", "temperature", "dtype", "wrong"),
    [
        (2 * NEAR_TIE, 0.0, "float32", True),
        (NEAR_TIE / 2, 0.0, "float32", False),
        (2 * NEAR_TIE, 0.4, "float32", False),  # the margin was taken after temperature
        (None, 0.0, "float32", True),
        (2 * NEAR_TIE, 0.0, "bfloat16", False),
    ],
)
def test_a_differing_text_is_a_fault_unless_rounding_explains_it(margin, temperature, dtype, wrong):
    same = {"temperature": temperature}
    differing = same | {"same": False, "differs_at": 3, "margin": margin}
    rows = [row("1", "plain", 5, 5, **same), row("1", "eagle3", 5, 5, **differing)]
    settings = SETTINGS | {"temperatures": [temperature], "target": {"dtype": dtype}}
    result = summary(settings, rows, {})
    assert bool(faults(result)) is wrong
    (found,) = result["differences"]
    assert (found["question"], found["token"], found["margin"]) == ("1", 3, margin)
    assert result["overall"]["eagle3"]["identical"] is False
    assert result["overall"]["eagle3"]["same_text"] == "0/1"
    assert "near tie" in tables(result)


# --- real runs


def result_of(engine, lanes, questions, space: Grid) -> tuple[dict, list[Row]]:
    settings = settings_of(space, lanes, questions, OWN, (1.0,), None)
    settings |= place_of(engine.target, load_methods(engine, None, ()), "bench")
    journal = Journal(None, settings, resume=False)
    run(engine.target, lanes, questions, space, journal, silent)
    return summary(settings, journal.rows, journal.left_out), journal.rows


def test_a_real_run_has_equal_texts_and_counts_every_token(engine):
    questions = [
        Question("1", "qa", ("The hen",)),
        Question("2", "mt_bench", ("in the user", "and the cat")),
    ]
    space = grid((0.0, 0.7), (4, 8), (0, 1), max_new_tokens=12, depth=3, top_k=3)
    lanes = order_lanes(own_lanes(load_methods(engine, None, ()), engine.target, (1.0,)))
    result, rows = result_of(engine, lanes, questions, space)
    assert all(r.same for r in rows) and result["differences"] == []
    counts: dict[tuple, set[int]] = {}
    for r in rows:
        key = (r.question, r.turn, r.temperature, r.seed)
        counts.setdefault(key, set()).add(r.tokens)
    assert len(counts) == 3 * 3  # three turns; temperature 0, and 0.7 with two seeds
    assert all(len(tokens) == 1 for tokens in counts.values())  # all methods, same count
    assert all(r.tau == 1.0 for r in rows if r.method == "plain")
    assert len(result["cells"]) == 4
    assert set(result["ratios"]) == {"eagle3 / plain", "confu / plain", "confu / eagle3"}
    overall = result["overall"]
    assert overall["plain"]["tau"] == 1.0 and overall["confu"]["identical"] is True
    assert overall["confu"]["rows_per_pass"] > overall["eagle3"]["rows_per_pass"]
    assert json.loads(json.dumps(result)) == result
    text = tables(result)
    assert "All texts are identical" in text and "### Temperature 0.7, 8 nodes" in text


@pytest.fixture(scope="module")
def unpadded():
    """A target whose embedding has no padding rows: `generate` would name them."""
    return tiny_target(vocab_size=len(tiny_tokenizer()))


def test_peers_write_plain_decodings_text_on_the_same_weights(unpadded, tmp_path):
    tiny_model(vocab_size=len(tiny_tokenizer())).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    lanes = [OwnLane("plain", PLAIN, unpadded), *peers(unpadded, str(tmp_path))]
    names = ["plain", "transformers", "transformers-lookup", "transformers-assisted"]
    assert [lane.name for lane in lanes] == names
    questions = [Question(str(n), "qa", (f"the user and the hen {n} " * 4,)) for n in range(4)]
    rows = [r for q in questions for r in ask(unpadded, lanes, q, grid(max_new_tokens=24))]
    assert all(r.same for r in rows), [(r.question, r.method) for r in rows if not r.same]
    by_name = {name: [r for r in rows if r.method == name] for name in names}
    for name in names:  # every token is counted once
        assert [r.tokens + r.first_tokens for r in by_name[name]] == [
            r.tokens + r.first_tokens for r in by_name["plain"]
        ]
        assert all(r.seconds > 0 and r.first_seconds > 0 for r in by_name[name])
    assert all(r.tau == 1.0 for r in by_name["transformers"])
    assert [r.passes for r in by_name["transformers"]] == [r.passes for r in by_name["plain"]]
    # The assistant is the target itself, so every guess is right; the library stops drafting after
    # the first unsure one, and a random model is never sure.
    assert all(r.tau > 1.6 for r in by_name["transformers-assisted"])


def test_a_peer_counts_passes_as_the_model_sees_them(unpadded):
    """Prompt lookup on a text that repeats itself: passes are forward calls, counted by a hook."""
    ids = chat_ids(unpadded, "the user and the hen " * 6)
    peer = Peer("lookup", unpadded, prompt_lookup_num_tokens=4)
    calls: list[int] = []
    hook = unpadded.model.register_forward_hook(lambda *_: calls.append(1))
    found = peer.answer(ids, Settings(max_new_tokens=40))
    hook.remove()
    assert found.passes == len(calls) - 1
    assert len(found.token_ids) == 40 or found.token_ids[-1] in unpadded.stop_ids


def test_a_peer_stops_where_the_loop_stops(unpadded):
    """At the context's end, and at the first stop token."""
    long = chat_ids(unpadded, "x" * 220)
    own = OwnLane("plain", PLAIN, unpadded)
    peer = Peer("transformers", unpadded)
    settings = Settings(max_new_tokens=100)
    assert peer.answer(long, settings).token_ids == own.answer(long, settings).token_ids
    short = chat_ids(unpadded, "The hen")
    written = own.answer(short, settings).token_ids
    stopping = tiny_target(vocab_size=len(tiny_tokenizer()))
    stopping.stop_ids = frozenset({written[3]})
    wanted = written[: written.index(written[3]) + 1]
    assert OwnLane("plain", PLAIN, stopping).answer(short, settings).token_ids == wanted
    assert Peer("transformers", stopping).answer(short, settings).token_ids == wanted


def test_an_assistant_of_another_vocabulary_or_place_is_refused(unpadded, tmp_path):
    with pytest.raises(TargetError, match="could not be loaded"):
        peers(unpadded, str(tmp_path / "absent"))
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["hen"])
    tiny_model(num_hidden_layers=2).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="another vocabulary"):
        peers(unpadded, str(tmp_path))


# --- results and pages


@pytest.fixture(scope="module")
def small(llama, head):
    """A small result with two settings and one near tie."""
    engine = Engine(llama, {"plain": PLAIN, "eagle3": method(head)}, {})
    lanes = [Scripted("plain"), Scripted("eagle3", lambda ids, s: [5, 6, 7 + s.nodes // 60])]
    space = grid((0.0,), (30, 60))
    settings = settings_of(space, lanes, QUESTIONS, OWN, (1.0,), None)
    settings |= {"methods": ["plain", "eagle3"], "peers": []}
    settings |= place_of(llama, load_methods(engine, None, ()), "python -m confu_core bench")
    journal = Journal(None, settings, resume=False)
    run(llama, lanes, QUESTIONS, space, journal, silent)
    return summary(settings, journal.rows, {"9": "too long"}), journal.rows


def test_a_result_file_holds_all_and_its_figures_come_from_its_rows(small, tmp_path):
    result, rows = small
    path = tmp_path / "small.json"
    write_result(path, result, rows)
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored == json.loads(json.dumps(result)) | {"rows": stored["rows"]}
    assert len(stored["rows"]) == len(rows) == 9
    machine = stored["settings"]["machine"]
    assert set(machine) == {"cpu", "cores", "threads", "system"} and machine["cores"] >= 1
    assert stored["settings"]["heads"]["eagle3"]["sha256"] == "0" * 64
    assert read_result(path) == result
    edited = path.read_text(encoding="utf-8").replace('"tau": 1.0', '"tau": 9.0')
    assert edited.count('"tau": 9.0') > 3
    path.write_text(edited, encoding="utf-8")
    assert read_result(path) == result


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"tokens": 2', '"tokens": null', "row 1: tokens is None"),
        ('"settings"', '"other"', "lacks 'settings'"),
        ('"node_budgets"', '"budgets"', "the settings lack 'node_budgets'"),
        ("\n ]\n}\n", "", "cannot be read: .*line"),
    ],
)
def test_a_damaged_result_is_refused_by_place(small, tmp_path, old, new, message):
    path = tmp_path / "small.json"
    write_result(path, *small)
    text = path.read_text(encoding="utf-8")
    assert old in text
    # rows stand last: of what stands in both, damage the row
    at = text.index(old, text.index('"rows": [')) if '"tokens"' in old else text.index(old)
    path.write_text(text[:at] + new + text[at + len(old) :], encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_result(path)


def check_tables(text: str) -> int:
    """Demand that every row of a table has as many cells as its head; how many tables there are."""
    found = re.findall(r"^\|(.*)\|\n\|([-|]+)\|\n((?:\|.*\|\n)+)", text + "\n", flags=re.M)
    for head, rule, body in found:
        width = head.count("|")
        assert rule.count("|") == width
        assert all(line.count("|") - 2 == width for line in body.splitlines())
    return len(found)


def test_lanes_of_different_depth_share_a_table():
    rows = [
        row("1", "plain", 9, 9),
        row("1", "eagle3", 9, 3, offered=(3, 2), accepted=(2, 1)),
        row("1", "confu", 9, 3, offered=(4,), accepted=(1,)),
    ]
    text = tables(summary(SETTINGS | {"methods": ["plain", "eagle3", "confu"]}, rows, {}))
    assert "| eagle3 | 0.667 of 3 | 0.500 of 2 |\n| confu | 0.250 of 4 | - |" in text
    assert check_tables(text) > 4


def test_the_page_names_machine_command_heads_and_every_figure(small, tmp_path, capsys):
    path, page = tmp_path / "small.json", tmp_path / "page.md"
    write_result(path, *small)
    assert main(["bench", "--report", str(path), "--write", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    result = small[0]
    command = f"python -m confu_core bench --report {path} --write {page}"
    assert text == document([(path, result)], command)
    settings = result["settings"]
    for fact in (
        settings["machine"]["cpu"],
        f"torch {settings['versions']['torch']}",
        f"transformers {settings['versions']['transformers']}",
        settings["target"]["fingerprint"],
        "0" * 16,
        "float32",
        "3 of `prompts.jsonl`",
        "`python -m confu_core bench`",
        "| eagle3 | 3 | 1.00 | 1.00 |",
        "- 9: too long",
        "3 answers differ by more than a near tie",
    ):
        assert fact in text, fact
    assert check_tables(text) > 6
    assert main(["bench", "--report", str(path)]) == 0
    assert capsys.readouterr().out.startswith("# Benchmarks")


def test_the_page_in_the_docs_is_what_its_command_writes():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    command = re.search(r"Written by `(python -m confu_core bench --report (.+) --write .+)`", text)
    files = [Path(name) for name in command[2].split()]
    assert text == document([(name, read_result(ROOT / name)) for name in files], command[1])


# --- the command


def bench(folders, *more: str) -> int:
    return main(["bench", *options(folders), "--nodes", "8", "--depth", "3", *more])


def question_file(tmp_path) -> str:
    lines = [
        {"question_id": n, "category": category, "turns": ["The hen", "Again"][: 1 + (n == 2)]}
        for n, category in enumerate(("qa", "rag", "writing"))
    ]
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def test_bench_runs_a_grid_with_peers_and_resumes(folders, tmp_path, capsys):
    out = tmp_path / "result.json"
    common = ["--prompts", question_file(tmp_path), "--json", str(out), "--max-new-tokens", "6"]
    varied = ["--temperature", "0,0.7", "--nodes", "4,8", "--seed", "0,1", "--peers"]
    extra = ["--also", f"again={folders / 'eagle3'}"]
    code = bench(folders, *common, *varied, *extra)
    printed = capsys.readouterr()
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["settings"]["methods"] == ["plain", "eagle3", "confu", "again"]
    assert result["settings"]["peers"] == ["transformers", "transformers-lookup"]
    assert [(c["temperature"], c["nodes"]) for c in result["cells"]] == [
        *((0.0, 4), (0.0, 8), (0.7, 4), (0.7, 8))
    ]
    assert "transformers" in result["overall"]
    assert "transformers" not in result["cells"][2]["overall"]
    for name in ("eagle3", "again"):  # one head under two names
        assert result["overall"][name]["tau"] == result["overall"]["eagle3"]["tau"]
    assert "min left)" in printed.err and "### Temperature 0.7, 8 nodes" in printed.out
    # The tiny target's padding rows are real to `generate`; our own lanes must be equal.
    own = [d for d in result["differences"] if "transformers" not in d["method"]]
    assert own == [] and code == bool(result["differences"])
    assert bench(folders, *common, *varied, *extra) == 1
    assert "--resume" in capsys.readouterr().err
    assert bench(folders, *common, *varied, *extra, "--resume") == code
    assert json.loads(out.read_text(encoding="utf-8")) == result
    assert bench(folders, *common, *varied, "--resume") == 1
    assert "methods was" in capsys.readouterr().err


def test_a_differing_text_is_not_exit_code_0(folders, tmp_path, capsys, monkeypatch):
    whole = OwnLane.answer

    def wrong(lane, prompt_ids, settings):
        found = whole(lane, prompt_ids, settings)
        if lane.name != "confu":
            return found
        return dataclasses.replace(found, token_ids=(*found.token_ids[:-1], 7))

    monkeypatch.setattr(OwnLane, "answer", wrong)
    out = tmp_path / "result.json"
    assert bench(folders, "--prompts", question_file(tmp_path), "--json", str(out)) == 1
    printed = capsys.readouterr()
    assert "error: confu differs at token 9 of question 0" in printed.err
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["overall"]["confu"]["same_text"] == "0/4"
    assert journal_path(out).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --json"),
        (["--write", "page.md"], "--report"),
        (["--prompts", "absent.jsonl"], "cannot be read"),
        (["--report", "absent.json"], "cannot be read"),
        (["--temperature", "0,9"], "Temperature is 9"),
    ],
)
def test_bench_refuses_in_one_sentence(arguments, message, capsys):
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


# --- profile and scaling


def test_profile_reports_every_phase(engine):
    rows = profile(engine, ["plain", "confu"], "The hen", Settings(max_new_tokens=6, nodes=4), 1)
    assert [r["method"] for r in rows] == ["plain", "confu"]
    assert rows[0]["draft_ms"] < rows[1]["draft_ms"]
    assert all(0 < r["rest_share"] < 1 and r["first_token_ms"] > 0 for r in rows)


def test_scaling_measures_every_point_once_and_ends_at_the_context(engine):
    methods = load_methods(engine, None, ())
    settings = Settings(depth=2, top_k=3)
    points = scaling.measure(engine.target, methods, (16, 64, 9999), (1, 6), 3, settings, silent)
    longest = engine.target.context - ((3 + 1) * 3 + 1)
    assert [(p["method"], p["context"], p["nodes"]) for p in points] == [
        (name, context, None if name == "plain" else nodes)
        for context in (16, 64, longest)
        for nodes in (1, 6)
        for name in ("plain", "eagle3", "confu")
        if name != "plain" or nodes == 1
    ]
    by_place = {(p["method"], p["context"], p["nodes"]): p for p in points}
    assert by_place["confu", 16, 6]["target_rows"] == 2 * by_place["eagle3", 16, 6]["target_rows"]
    for p in points:
        low, high = p["round_ms_quartiles"]
        assert 0 < low <= p["round_ms"] <= high
    # keys and values of 8 layers, 2 heads of width 8, float32, for every token more
    growth = (
        by_place["plain", 64, None]["target_cache_bytes"]
        - by_place["plain", 16, None]["target_cache_bytes"]
    )
    assert growth == (64 - 16) * 2 * 8 * 2 * 8 * 4
    assert growth == 48 * scaling.bytes_of(engine.target.new_cache(1))
    assert by_place["plain", 16, None]["draft_cache_bytes"] == 0
    assert by_place["eagle3", 64, 6]["draft_cache_bytes"] > 0
    with pytest.raises(SettingsError, match="Choose fewer rounds"):
        scaling.measure(engine.target, methods, (16,), (1,), 500, settings, silent)


def test_a_long_run_goes_past_stop_tokens_and_counts_every_token(engine, monkeypatch):
    monkeypatch.setattr(scaling, "WINDOW", 40)
    methods = load_methods(engine, None, ())
    settings = Settings(nodes=6, depth=2, top_k=3)
    stopping = copy.copy(engine.target)
    stopping.stop_ids = frozenset(range(stopping.vocab))
    found = scaling.long_run(stopping, methods, 120, settings, silent)
    for name in methods:
        own = [w for w in found if w["method"] == name]
        assert [w["from_token"] for w in own] == [0, 40, 80]
        assert sum(w["tokens"] for w in own) == 119  # the prefill gave the first
        for w in own:
            assert w["ms_per_round"] == pytest.approx(w["ms_per_token"] * w["tau"], rel=0.01)
    plain = [w for w in found if w["method"] == "plain"]
    assert [w["tokens"] for w in plain] == [39, 40, 40]
    assert all(w["tau"] == 1.0 for w in plain)
    with pytest.raises(SettingsError, match="does not fit"):
        scaling.long_run(engine.target, methods, 5000, settings, silent)


def test_scaling_writes_its_part_of_a_page_and_nothing_else(folders, tmp_path, capsys):
    page, out = tmp_path / "page.md", tmp_path / "scaling.json"
    page.write_text("# Performance\n\nBefore.\n", encoding="utf-8")
    common = [word for word in options(folders) if word not in ("--max-new-tokens", "10")]
    arguments = ["scaling", *common, "--contexts", "16,32", "--nodes", "1,6", "--rounds", "2"]
    arguments += ["--depth", "2", "--top-k", "3", "--long", "20", "--write", str(page)]
    assert main([*arguments, "--json", str(out)]) == 0
    first = page.read_text(encoding="utf-8")
    assert first.startswith("# Performance\n\nBefore.\n\n## Scaling\n")
    assert first.count("| confu | 16 |") == 2 and "| 0 |" in first
    assert capsys.readouterr().out.strip() in first
    assert set(json.loads(out.read_text(encoding="utf-8"))) == {
        *("settings", "weight_bytes", "bytes_per_token", "points", "long_run")
    }
    page.write_text(first + "\nAfter.\n", encoding="utf-8")
    scaling.write_section(page, "new")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# Performance\n\nBefore.\n") and text.endswith("\nAfter.\n")
    assert text.count(scaling.BEGIN) == 1 and "new" in text and "confu" not in text
