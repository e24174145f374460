"""The benchmark: methods interleaved prompt by prompt in one run, so that a drifting machine hits
all alike; figures as ratios with intervals, never across runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

from confu_core.bench.questions import Question
from confu_core.compare import Engine
from confu_core.errors import PromptError
from confu_core.events import Finished
from confu_core.trace import Settings, Trace

RESAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One question by one method. `tokens` and `seconds` leave the prefill out; `same` is whether
    the text equals plain decoding's (None if plain did not run); `margin` is the target's lead at
    the first difference."""

    question: str
    group: str
    method: str
    tokens: int
    passes: int
    target_rows: int
    seconds: float
    draft_seconds: float
    verify_seconds: float
    rest_seconds: float
    same: bool | None
    margin: float | None

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def run(
    engine: Engine,
    questions: Sequence[Question],
    methods: Sequence[str],
    settings: Settings,
    report: Callable[[int, int, list[Row]], None],
) -> tuple[list[Row], dict[str, str]]:
    """Run every method on the first turn of every question.

    Args:
        report: called after each question with (done, total, its rows).

    Returns:
        The rows, and for each question that failed why. A question that fails for one method
        (too long, out of memory) is left out for all, so that no figure compares unequal sets.
    """
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for done, question in enumerate(questions, 1):
        fresh: list[Row] = []
        try:
            trace = _trace(engine, question.turns[0], methods, settings)
            errors = [lane.error for lane in trace.lanes.values() if lane.error]
            if errors:
                failed[question.id] = errors[0]
            else:
                fresh = list(_rows(question, trace))
        except PromptError as error:
            failed[question.id] = str(error)
        rows += fresh
        report(done, len(questions), fresh)
    return rows, failed


def _trace(engine: Engine, prompt: str, methods: Sequence[str], settings: Settings) -> Trace:
    for event in engine.compare(prompt, settings, methods):
        if isinstance(event, Finished):
            return event.trace
    raise RuntimeError("the race ended without its last event")


def _rows(question: Question, trace: Trace) -> Iterator[Row]:
    first = next(iter(trace.lanes))
    differences = {found.lane_b: found for found in trace.differences()}
    for name, lane in trace.lanes.items():
        rounds = lane.rounds[1:]
        found = differences.get(name)
        yield Row(
            question=question.id,
            group=question.group,
            method=name,
            tokens=sum(len(r.tokens) for r in rounds),
            passes=len(rounds),
            target_rows=sum(r.target_rows for r in rounds),
            seconds=sum(r.seconds.total for r in rounds),
            draft_seconds=sum(r.seconds.draft for r in rounds),
            verify_seconds=sum(r.seconds.verify for r in rounds),
            rest_seconds=sum(r.seconds.rest for r in rounds),
            same=None if len(trace.lanes) == 1 else name == first or found is None,
            margin=found.margin if found else None,
        )


def summary(rows: Sequence[Row], settings: Settings, methods: Sequence[str]) -> dict:
    """`{settings, overall: {METHOD: figures}, groups: {GROUP: {METHOD: figures}}, ratios, rows}`.

    Ratios compare methods question by question: `tau` of each later method over each earlier one,
    and speed over plain decoding, with 95 % bootstrap intervals over questions.
    """
    groups = sorted({row.group for row in rows})
    return {
        "settings": asdict(settings) | {"methods": list(methods)},
        "overall": {name: figures([r for r in rows if r.method == name]) for name in methods},
        "groups": {
            group: {
                name: figures([r for r in rows if r.method == name and r.group == group])
                for name in methods
            }
            for group in groups
        },
        "ratios": {
            f"{later} / {earlier}": ratios(
                [r for r in rows if r.method == earlier], [r for r in rows if r.method == later]
            )
            for index, later in enumerate(methods)
            for earlier in methods[:index]
        },
        "rows": [asdict(row) for row in rows],
    }


def figures(rows: Sequence[Row]) -> dict:
    """Pooled figures of one method: totals over totals, so long answers weigh as they cost."""
    passes, tokens = sum(r.passes for r in rows), sum(r.tokens for r in rows)
    seconds = sum(r.seconds for r in rows)
    if not passes:
        return {"n": len(rows)}
    return {
        "n": len(rows),
        "tau": round(tokens / passes, 4),
        "tau_question_mean": round(sum(r.tau for r in rows) / len(rows), 4),
        "tokens": tokens,
        "passes": passes,
        "tokens_per_second": round(tokens / seconds, 2),
        "ms_per_pass": {
            phase: round(1000 * sum(getattr(r, f"{phase}_seconds") for r in rows) / passes, 2)
            for phase in ("draft", "verify", "rest")
        },
        "rows_per_pass": round(sum(r.target_rows for r in rows) / passes, 1),
        "same_text": f"{sum(bool(r.same) for r in rows)}/{len(rows)}"
        if rows[0].same is not None
        else "not compared",
        "differing": [difference(r) for r in rows if r.same is False],
    }


def difference(row: Row) -> dict:
    """A differing text: which question, and how near the tie was."""
    return {"question": row.question, "margin": row.margin}


def ratios(earlier: Sequence[Row], later: Sequence[Row]) -> dict:
    """Pooled ratios of tau and of tokens per second, with bootstrap intervals over questions."""
    pairs = list(zip(earlier, later, strict=True))

    def pooled(sample: Sequence[tuple[Row, Row]]) -> tuple[float, float]:
        def total(side: int, name: str) -> float:
            return sum(getattr(pair[side], name) for pair in sample)

        tau = (total(1, "tokens") / total(1, "passes")) / (total(0, "tokens") / total(0, "passes"))
        speed = (total(1, "tokens") / total(1, "seconds")) / (
            total(0, "tokens") / total(0, "seconds")
        )
        return tau, speed

    pairs = [pair for pair in pairs if pair[0].passes and pair[1].passes]
    if not pairs:
        return {"n": 0}
    dice = random.Random(0)
    draws = [pooled(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    result: dict = {"n": len(pairs)}
    for index, name in enumerate(("tau", "speed")):
        values = sorted(draw[index] for draw in draws)
        low, high = values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES)]
        result[name] = round(pooled(pairs)[index], 4)
        result[f"{name}_interval"] = [round(low, 4), round(high, 4)]
    return result


def markdown(result: dict) -> str:
    """The result as Markdown tables."""
    lines = [
        "| method | n | tau | tokens/s | draft ms | verify ms | rest ms | rows/pass | same text |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, f in result["overall"].items():
        if "tau" not in f:
            continue
        ms = f["ms_per_pass"]
        lines.append(
            f"| {name} | {f['n']} | {f['tau']:.2f} | {f['tokens_per_second']:.1f} | "
            f"{ms['draft']:.1f} | {ms['verify']:.1f} | {ms['rest']:.1f} | {f['rows_per_pass']:.1f} "
            f"| {f['same_text']} |"
        )
    lines += ["", "| ratio | n | tau | 95 % | tokens/s | 95 % |", "|---|---|---|---|---|---|"]
    for name, r in result["ratios"].items():
        if r["n"]:
            tau, speed = r["tau_interval"], r["speed_interval"]
            lines.append(
                f"| {name} | {r['n']} | {r['tau']:.3f} | {tau[0]:.3f} to {tau[1]:.3f} | "
                f"{r['speed']:.3f} | {speed[0]:.3f} to {speed[1]:.3f} |"
            )
    names = list(result["overall"])
    lines += ["", "| tau by group | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for group, by_method in result["groups"].items():
        values = [f"{by_method[n]['tau']:.2f}" if "tau" in by_method[n] else "-" for n in names]
        lines.append(f"| {group} | " + " | ".join(values) + " |")
    return "\n".join(lines)
