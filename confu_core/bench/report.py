"""Results as Markdown: the tables that a run prints, and the page that is written from files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from confu_core.bench.facts import place_lines
from confu_core.bench.figures import NEAR_TIE, PHASES, RESAMPLES, faults
from confu_core.bench.lanes import BASELINE
from confu_core.bench.questions import Question
from confu_core.bench.rows import Row


def tables(result: dict) -> str:
    """The tables of every setting, then the places where texts differ and what was left out."""
    parts = []
    for cell in result["cells"]:
        parts += [_heading(cell), *_cell_tables(cell)]
    parts += [_differences(result)]
    if result["left_out"]:
        parts.append(_left_out(result["left_out"]))
    return "\n\n".join(parts)


def document(results: Sequence[tuple[Path, dict]], command: str) -> str:
    """The page `docs/benchmarks.md`, from result files.

    Args:
        command: the one that writes the page, so that a reader (and a test) can repeat it.
    """
    parts = ["# Benchmarks", f"Written by `{command}`; do not edit.", READING]
    for path, result in results:
        parts += [f"## {path.stem}", _facts(result["settings"], result), tables(result)]
    return "\n\n".join(parts) + "\n"


def progress(done: int, total: int, seconds: float, question: Question, rows: Sequence[Row]) -> str:
    """One line per question: tau by method over all its settings, and the time that is left.

    Args:
        seconds: since the first of the `done` questions began.
    """
    shown = []
    for name in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == name]
        tau = sum(row.tokens for row in own) / max(1, sum(row.passes for row in own))
        shown.append(f"{name} {tau:.2f}")
    left = seconds / done * (total - done) / 60
    return (
        f"{done}/{total} {question.group} {question.id}: {', '.join(shown) or 'left out'} "
        f"({left:.1f} min left)"
    )


READING = f"""How to read the tables:

- All lanes of a table ran in one process, interleaved prompt by prompt, one answer at a time.
  Compare within a table only.
- **tau**: tokens gained per target pass, the bonus token included; nothing after the end token
  counts. The pass that reads the prompt is left out.
- **speed-up**: tokens per second over plain decoding's, measured from the first token to the end.
  **Whole call** counts the prompt too. Peers (`transformers...`) are timed by the same clock at the
  same two moments, the first token and the end of the call, and work on the same model object.
- Figures are totals over totals. Brackets are 95 % bootstrap intervals over questions ({RESAMPLES}
  draws; a question brings all its turns and seeds); n is the number of questions.
- **Acceptance by depth**: of the rounds in which the walk came to a node at depth k - 1 that had
  children in the tree, the share in which it went on to depth k.
- **Same text**: answers equal to the first lane's (plain decoding's, if it runs), token for token.
  Where the target's lead is below {NEAR_TIE:g} logits, rounding alone can decide. Such near ties
  are listed; any other difference in float32 makes the run fail. In half precision passes of
  different shape round far more differently, so texts part there, and are listed only.
- Two-turn questions are chats. For every lane the second prompt holds the first lane's first
  answer.
- Lanes are the heads of `checkpoints/`, but for an ablation's, which its command names by folder:
  how those were trained stands in [training.md](training.md)."""


def _facts(settings: dict, result: dict) -> str:
    asked = settings["questions"]
    seeds = ", ".join(map(str, settings["seeds"]))
    shares = ", ".join(f"{share:g}" for share in settings["contemplate_shares"])
    lines = [
        *place_lines(settings),
        f"- Questions: {asked['count']} of `{asked['file']}` (sha256 {asked['sha256'][:16]}), at "
        f"most {settings['max_new_tokens']} new tokens. Seeds: {seeds}. Top-p "
        f"{settings['top_p']:g}",
        f"- Trees: depth {settings['depth']}, top-k {settings['top_k']}; nodes count the root. "
        f"Share of nodes with a contemplate token: {shares}",
    ]
    if settings["assistant"]:
        lines.append(f"- Assistant of `transformers-assisted`: {settings['assistant']}")
    unexplained = len(faults(result))
    if unexplained:
        lines.append(f"- **{unexplained} answers differ by more than a near tie.**")
    return "\n".join(lines)


def _heading(cell: dict) -> str:
    return f"### Temperature {cell['temperature']:g}, {cell['nodes']} nodes"


def _cell_tables(cell: dict) -> list[str]:
    overall = cell["overall"]
    known = {name: found for name, found in overall.items() if "tau" in found}
    if not known:
        return ["No answer took a pass after the prompt's own."]
    parts = [
        table(
            (
                *("method", "n", "tau", "speed-up", "tokens/s"),
                *("whole call: speed-up", "tokens/s", "same text"),
            ),
            (
                (
                    name,
                    found["n"],
                    _with_interval(found, "tau"),
                    _with_interval(found, "speedup"),
                    f"{found['tokens_per_second']:.1f}",
                    _with_interval(found, "call_speedup"),
                    f"{found['call_tokens_per_second']:.1f}",
                    found["same_text"],
                )
                for name, found in known.items()
            ),
        ),
        table(
            ("method, ms", "first token", "pass", *PHASES, "rows per pass"),
            (
                (
                    name,
                    f"{found['ms_first_token']:.0f}",
                    *(_number(found["ms_per_pass"][phase], 1) for phase in ("all", *PHASES)),
                    _number(found["rows_per_pass"], 1),
                )
                for name, found in known.items()
            ),
        ),
    ]
    pairs = {
        name: found
        for name, found in cell["ratios"].items()
        if found["n"] and not name.endswith(f"/ {BASELINE}")
    }
    if pairs:
        compared = ("tau", "speed", "call_speed")
        parts.append(
            table(
                ("ratio", "n", "tau", "tokens/s", "whole call, tokens/s"),
                (
                    (name, found["n"], *(_with_interval(found, key, 3) for key in compared))
                    for name, found in pairs.items()
                ),
            )
        )
    by_group = {"tau by group": "tau"}
    if BASELINE in known:
        by_group["speed-up by group"] = "speedup"
    for title, key in by_group.items():
        parts.append(
            table(
                (title, "n", *known),
                (
                    (
                        group,
                        max(found["n"] for found in lanes.values()),
                        *(_with_interval(lanes[name], key) for name in known),
                    )
                    for group, lanes in cell["groups"].items()
                ),
            )
        )
    drafting = {name: found["acceptance"] for name, found in known.items() if found["acceptance"]}
    if drafting:
        deepest = max(map(len, drafting.values()))
        parts.append(
            table(
                ("acceptance by depth", *range(1, deepest + 1)),
                (
                    (
                        name,
                        *(f"{level['share']:.3f} of {level['offered']}" for level in levels),
                        *("-" for _ in range(deepest - len(levels))),
                    )
                    for name, levels in drafting.items()
                ),
            )
        )
    return parts


def table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, head))} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _differences(result: dict) -> str:
    found = result["differences"]
    if not found:
        lanes = [lane for cell in result["cells"] for lane in cell["overall"].values()]
        compared = any(lane["identical"] for lane in lanes)
        return "All texts are identical, token for token." if compared else "No texts to compare."
    return table(
        (
            *("differing text: question", "turn", "method", "temperature", "seed", "nodes"),
            *("token", "margin", "near tie"),
        ),
        (
            (
                *(d["question"], d["turn"], d["method"], f"{d['temperature']:g}", d["seed"]),
                "-" if d["nodes"] is None else d["nodes"],
                d["token"],
                "unknown" if d["margin"] is None else f"{d['margin']:.2g}",
                "yes" if d["near_tie"] else "no",
            )
            for d in found
        ),
    )


def _left_out(left_out: dict[str, str]) -> str:
    return "\n".join(
        [
            f"{len(left_out)} questions were left out for all methods:",
            "",
            *(f"- {question}: {reason}" for question, reason in left_out.items()),
        ]
    )


def _with_interval(found: dict, name: str, digits: int = 2) -> str:
    value, interval = found.get(name), found.get(f"{name}_interval")
    text = _number(value, digits)
    if value is None or interval is None or interval[0] == interval[1]:
        return text
    return f"{text} ({interval[0]:.{digits}f} to {interval[1]:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
