"""From rows to figures: tau, speeds, ratios with intervals, acceptance by depth, equal texts.

All figures are pooled, totals over totals, so long answers weigh as they cost. Intervals are 95 %
bootstrap intervals over questions: a question is drawn with all its turns and seeds, and a ratio is
taken between lanes on the same questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from confu_core.bench.lanes import BASELINE
from confu_core.bench.rows import ADVICE, Row
from confu_core.errors import DataError

RESAMPLES = 2000
PHASES = ("draft", "verify", "rest")
# A float32 logit of a pass over one row and of a pass over many differ by about 1e-5 to 1e-4. Where
# the target's lead is below this (logits, before temperature), arithmetic alone may decide (ours).
NEAR_TIE = 1e-3


def summary(settings: dict, rows: Sequence[Row], left_out: dict[str, str]) -> dict:
    """Everything that a result file holds but the rows.

    Args:
        settings: with "methods", "peers", "temperatures" and "node_budgets".

    Returns:
        settings; overall {METHOD: figures}, groups {GROUP: {METHOD: figures}} and ratios of the
        first setting; cells, the same for every temperature and node budget, seeds pooled;
        differences, every answer whose text is not the reference's; left_out {question: why}.

    Raises:
        DataError: rows are missing, so that figures would compare unequal sets.
    """
    _check_complete(rows)
    cells = [
        {"temperature": temperature, "nodes": nodes} | _cell(settings, rows, temperature, nodes)
        for temperature in settings["temperatures"]
        for nodes in settings["node_budgets"]
    ]
    first = {name: cells[0][name] for name in ("overall", "groups", "ratios")}
    differences = [difference(row) for row in rows if row.same is False]
    return (
        {"settings": settings}
        | first
        | {"cells": cells, "differences": differences, "left_out": left_out}
    )


def _cell(settings: dict, rows: Sequence[Row], temperature: float, nodes: int) -> dict:
    here = [r for r in rows if r.temperature == temperature and r.nodes in (None, nodes)]
    present = {row.method for row in here}
    methods = [n for n in (*settings["methods"], *settings["peers"]) if n in present]
    by_method = {name: [r for r in here if r.method == name] for name in methods}
    groups = sorted({row.group for row in here})
    return {
        "overall": _compare(by_method),
        "groups": {
            group: _compare(
                {name: [r for r in own if r.group == group] for name, own in by_method.items()}
            )
            for group in groups
        },
        "ratios": {
            f"{later} / {earlier}": ratios(by_method[earlier], by_method[later])
            for index, later in enumerate(methods)
            for earlier in methods[:index]
        },
    }


def _compare(by_method: dict[str, list[Row]]) -> dict:
    baseline = by_method.get(BASELINE)
    return {name: figures(rows, baseline) for name, rows in by_method.items()}


def figures(rows: Sequence[Row], baseline: Sequence[Row] | None) -> dict:
    """Figures of one lane. `speedup` is None without plain decoding to compare with.

    tau: tokens gained per target pass, bonus token included, the prompt's own pass left out.
    speedup: of tokens per second after the first token. call_...: of whole calls, prompt included.
    ms_per_pass: None per phase for a lane that cannot tell.
    """
    passes, tokens = sum(r.passes for r in rows), sum(r.tokens for r in rows)
    found: dict = {
        "n": len({r.question for r in rows}),
        "answers": len(rows),
        "identical": None if rows[0].same is None else all(r.same for r in rows),
        "same_text": "not compared"
        if rows[0].same is None
        else f"{sum(bool(r.same) for r in rows)}/{len(rows)}",
    }
    if not passes:
        return found
    seconds, first = sum(r.seconds for r in rows), sum(r.first_seconds for r in rows)
    tau, tau_interval = bootstrap(_totals(rows, rows)[0], lambda own: own[0] / own[1])
    found |= {
        "tau": tau,
        "tau_interval": tau_interval,
        "tau_question_mean": round(sum(r.tau for r in rows) / len(rows), 4),
        "tokens": tokens,
        "passes": passes,
        "tokens_per_second": round(tokens / seconds, 2),
        "call_tokens_per_second": round(
            (tokens + sum(r.first_tokens for r in rows)) / (seconds + first), 2
        ),
        "ms_first_token": round(1000 * first / len(rows), 1),
        "ms_per_pass": {"all": round(1000 * seconds / passes, 2)}
        | {phase: _ms(rows, phase, passes) for phase in PHASES},
        "rows_per_pass": None
        if rows[0].target_rows is None
        else round(sum(r.target_rows for r in rows) / passes, 1),
        "acceptance": acceptance(rows),
    }
    seeds = sorted({r.seed for r in rows})
    if len(seeds) > 1:
        found["tau_by_seed"] = {
            str(seed): round(
                sum(r.tokens for r in rows if r.seed == seed)
                / max(1, sum(r.passes for r in rows if r.seed == seed)),
                4,
            )
            for seed in seeds
        }
    found["speedup"] = found["speedup_interval"] = None
    found["call_speedup"] = found["call_speedup_interval"] = None
    if baseline:
        ratio = ratios(baseline, rows)
        for ours, theirs in (("speedup", "speed"), ("call_speedup", "call_speed")):
            found[ours] = ratio.get(theirs)
            found[f"{ours}_interval"] = ratio.get(f"{theirs}_interval")
    return found


def _ms(rows: Sequence[Row], phase: str, passes: int) -> float | None:
    values = [getattr(row, f"{phase}_seconds") for row in rows]
    return None if None in values else round(1000 * sum(values) / passes, 2)


def acceptance(rows: Sequence[Row]) -> list[dict]:
    """Share of offered levels that were accepted, by depth (see `lanes.count_depths`)."""
    deepest = max((len(row.offered) for row in rows), default=0)
    found = []
    for index in range(deepest):
        offered = sum(row.offered[index] for row in rows if index < len(row.offered))
        accepted = sum(row.accepted[index] for row in rows if index < len(row.accepted))
        found.append(
            {
                "depth": index + 1,
                "offered": offered,
                "accepted": accepted,
                "share": round(accepted / offered, 4),
            }
        )
    return found


def ratios(earlier: Sequence[Row], later: Sequence[Row]) -> dict:
    """Pooled ratios of tau, of decoding speed and of the speed of whole calls, with intervals.

    Questions without a pass by either lane (the prompt's own pass ended them) tell nothing.
    """
    a, b = _totals(earlier, later)
    found: dict = {"n": len(a)}
    if not len(a):
        return found
    both = np.concatenate((a, b), axis=1)  # (n, 10): the earlier lane's five totals, the later's
    statistics: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "tau": lambda t: (t[5] / t[6]) / (t[0] / t[1]),
        "speed": lambda t: (t[5] / t[7]) / (t[0] / t[2]),
        "call_speed": lambda t: (t[8] / t[9]) / (t[3] / t[4]),
    }
    for name, statistic in statistics.items():
        found[name], found[f"{name}_interval"] = bootstrap(both, statistic)
    return found


def _totals(a: Sequence[Row], b: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Totals by question (n, 5) of two lanes, for the questions in which both made passes: tokens,
    passes, seconds, tokens of the whole call, seconds of the whole call."""

    def by_question(rows: Sequence[Row]) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for row in rows:
            call_tokens = row.tokens + row.first_tokens
            call_seconds = row.seconds + row.first_seconds
            one = np.array([row.tokens, row.passes, row.seconds, call_tokens, call_seconds])
            found[row.question] = found.get(row.question, 0) + one
        return found

    left, right = by_question(a), by_question(b)
    names = [name for name in left if left[name][1] and right[name][1]]
    shape = (len(names), 5)
    return (
        np.array([left[name] for name in names]).reshape(shape),
        np.array([right[name] for name in names]).reshape(shape),
    )


def bootstrap(
    totals: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> tuple[float, list[float] | None]:
    """A statistic of summed totals, and its 95 % interval when the n questions are drawn anew.

    Args:
        totals: (n, k), one row per question.
        statistic: of sums (k, ...) -> (...).

    Returns:
        The value and the interval; None with fewer than two questions.
    """
    value = round(float(statistic(totals.sum(axis=0))), 4)
    if len(totals) < 2:
        return value, None
    dice = np.random.default_rng(0)
    picks = dice.integers(len(totals), size=(RESAMPLES, len(totals)))
    draws = statistic(totals[picks].sum(axis=1).T)
    return value, [round(float(bound), 4) for bound in np.quantile(draws, (0.025, 0.975))]


def difference(row: Row) -> dict:
    """An answer that is not the reference's: where, and how near the tie was."""
    return {
        "question": row.question,
        "turn": row.turn,
        "method": row.method,
        "temperature": row.temperature,
        "seed": row.seed,
        "nodes": row.nodes,
        "token": row.differs_at,
        "margin": row.margin,
        "near_tie": is_near_tie(row),
    }


def is_near_tie(row: Row) -> bool:
    """Whether arithmetic alone can explain a difference. Margins are taken after temperature."""
    return row.margin is not None and row.margin * (row.temperature or 1.0) < NEAR_TIE


def faults(result: dict) -> list[dict]:
    """Differences that rounding does not explain. In half precision none is counted: there, passes
    of different shape differ by far more, and ties are common."""
    if result["settings"]["target"]["dtype"] != "float32":
        return []
    return [found for found in result["differences"] if not found["near_tie"]]


def _check_complete(rows: Sequence[Row]) -> None:
    """Every question was run by the same lanes in the same settings, every turn once."""
    seen: dict[str, set] = {}
    turns: dict[str, set[int]] = {}
    for row in rows:
        key = (row.turn, row.method, row.temperature, row.seed, row.nodes)
        if key in seen.setdefault(row.question, set()):
            raise DataError(f"Question {row.question} holds the row {key} twice. {ADVICE}")
        seen[row.question].add(key)
        turns.setdefault(row.question, set()).add(row.turn)
    everything = {key[1:] for keys in seen.values() for key in keys}
    for question, keys in seen.items():
        for turn in turns[question]:
            missing = {(turn, *lane) for lane in everything} - keys
            if missing:
                raise DataError(
                    f"Question {question} lacks the row {min(missing, key=str)}. {ADVICE}"
                )
