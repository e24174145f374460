"""The benchmark: question files, spreading, pooled figures, ratios, and a real tiny run."""

from __future__ import annotations

import json

import pytest

from confu_core.bench.profile import profile
from confu_core.bench.questions import Question, load_questions, spread
from confu_core.bench.run import Row, figures, markdown, ratios, run, summary
from confu_core.compare import Engine
from confu_core.errors import DataError
from confu_core.methods import PLAIN
from confu_core.trace import Settings
from tests.fakes import method


def row(question: str, name: str, tokens: int, passes: int, seconds: float = 1.0) -> Row:
    return Row(
        question=question,
        group="qa",
        method=name,
        tokens=tokens,
        passes=passes,
        target_rows=30 * passes,
        seconds=seconds,
        draft_seconds=0.25 * seconds,
        verify_seconds=0.5 * seconds,
        rest_seconds=0.25 * seconds,
        same=True,
        margin=None,
    )


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
    "line", ["<html>", "[]", '{"category": "qa", "turns": []}', question_line(1, "qa")[:-3]]
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


def test_figures_pool_totals():
    found = figures([row("1", "eagle3", 10, 5, 1.0), row("2", "eagle3", 30, 5, 3.0)])
    assert found["tau"] == 4.0  # 40 tokens in 10 passes, not the mean of 2 and 6
    assert found["tau_question_mean"] == 4.0
    assert found["tokens_per_second"] == 10.0
    assert found["ms_per_pass"] == {"draft": 100.0, "verify": 200.0, "rest": 100.0}


def test_ratios_compare_question_by_question():
    plain = [row(str(n), "plain", 10, 10, 2.0) for n in range(5)]
    double = [row(str(n), "eagle3", 10, 5, 1.0) for n in range(5)]
    found = ratios(plain, double)
    assert (found["n"], found["tau"], found["speed"]) == (5, 2.0, 2.0)
    assert found["tau_interval"] == [2.0, 2.0]  # every question says the same


def test_ratio_intervals_hold_the_truth_of_a_mixed_sample():
    plain = [row(str(n), "plain", 10, 10) for n in range(20)]
    mixed = [row(str(n), "eagle3", 10, 5 if n % 2 else 10) for n in range(20)]
    low, high = ratios(plain, mixed)["tau_interval"]
    assert low < 10 / 7.5 < high
    assert high - low > 0.1


@pytest.fixture
def engine(llama, head, part):
    methods = {"plain": PLAIN, "eagle3": method(head), "confu": method(head, part)}
    return Engine(llama, methods, {})


def test_a_real_run_has_equal_texts_and_counts_every_token(engine):
    questions = [Question("1", "qa", ("The hen",)), Question("2", "rag", ("in the user",))]
    settings = Settings(max_new_tokens=12, nodes=8, depth=3, top_k=3)
    seen = []
    rows, failed = run(
        engine,
        questions,
        ["plain", "eagle3", "confu"],
        settings,
        lambda done, total, fresh: seen.append((done, total, len(fresh))),
    )
    assert seen == [(1, 2, 3), (2, 2, 3)] and not failed
    assert all(r.same for r in rows)
    by_question = {q.id: {r.tokens for r in rows if r.question == q.id} for q in questions}
    assert all(len(tokens) == 1 for tokens in by_question.values())  # all methods, same count
    assert all(r.tau == 1.0 for r in rows if r.method == "plain")
    result = summary(rows, settings, ["plain", "eagle3", "confu"])
    assert set(result) == {"settings", "overall", "groups", "ratios", "rows"}
    assert result["overall"]["plain"]["tau"] == 1.0
    assert set(result["ratios"]) == {"eagle3 / plain", "confu / plain", "confu / eagle3"}
    assert (
        result["overall"]["confu"]["rows_per_pass"] > result["overall"]["eagle3"]["rows_per_pass"]
    )
    assert json.loads(json.dumps(result)) == result
    assert "| eagle3 | 2 |" in markdown(result)


def test_a_question_beyond_the_context_is_left_out_for_all(engine):
    seen = []
    rows, failed = run(
        engine,
        [Question("1", "qa", ("word " * 400,))],
        ["plain", "eagle3"],
        Settings(max_new_tokens=4),
        lambda done, total, fresh: seen.append(len(fresh)),
    )
    assert rows == [] and seen == [0]
    assert "Shorten the prompt" in failed["1"]


def test_profile_reports_every_phase(engine):
    rows = profile(engine, ["plain", "confu"], "The hen", Settings(max_new_tokens=6, nodes=4), 1)
    assert [r["method"] for r in rows] == ["plain", "confu"]
    assert rows[0]["draft_ms"] < rows[1]["draft_ms"]
    assert all(0 < r["rest_share"] < 1 and r["first_token_ms"] > 0 for r in rows)
