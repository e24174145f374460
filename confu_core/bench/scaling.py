"""How the cost of a round grows with the length of the text and the size of the tree, what the
caches take, and whether a long run stays flat. Measured with the real loop, without stop tokens."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from confu_core.bench.facts import place_lines
from confu_core.bench.figures import PHASES
from confu_core.bench.lanes import BASELINE
from confu_core.bench.questions import OWN, load_questions
from confu_core.bench.report import table
from confu_core.cache import KVCache
from confu_core.decoding import Round, decode
from confu_core.errors import SettingsError
from confu_core.methods import Method
from confu_core.target import Target
from confu_core.trace import Settings

WINDOW = 250  # tokens of a long run that one figure covers
BEGIN, END = "<!-- scaling -->", "<!-- /scaling -->"


def measure(
    target: Target,
    methods: dict[str, Method],
    contexts: Sequence[int],
    budgets: Sequence[int],
    rounds: int,
    settings: Settings,
    report: Callable[[str], None],
) -> list[dict]:
    """The cost of a round at every context length and budget, methods interleaved.

    Args:
        contexts: prompt lengths in tokens. What does not fit the target's context is replaced by
            the longest prompt that does.
        rounds: how many are timed per point; one more goes before them, untimed.
        settings: depth and top-k are used.

    Returns:
        One entry per point: medians and quartiles in milliseconds, bytes of both caches.
    """
    endless = _endless(target)
    new_tokens = (rounds + 1) * (settings.depth + 1) + 1
    longest = target.context - new_tokens
    if longest < 1:
        raise SettingsError(
            f"{rounds} rounds need {new_tokens} tokens, more than this target's context of "
            f"{target.context}. Choose fewer rounds."
        )
    points = []
    for context in sorted({min(length, longest) for length in contexts}):
        prompt = filler(target, context)
        for nodes in budgets:
            for name, method in methods.items():
                if name == BASELINE and nodes != budgets[0]:
                    continue  # it drafts nothing
                report(f"{name}: {context} tokens, {nodes} nodes")
                asked = replace(settings, max_new_tokens=new_tokens, nodes=nodes)
                point = _point(endless, method, prompt, asked, rounds)
                budget = None if name == BASELINE else nodes
                points.append({"method": name, "context": context, "nodes": budget} | point)
    return points


@torch.inference_mode()
def _point(
    target: Target, method: Method, prompt: list[int], settings: Settings, rounds: int
) -> dict:
    with_caches, caches = _watch_caches(target, method)
    run = decode(with_caches[0], with_caches[1], prompt, settings)
    first, _warm = next(run), next(run)
    timed = [next(run) for _ in range(rounds)]
    run.close()
    totals = [1000 * round.seconds.total for round in timed]
    low, middle, high = statistics.quantiles(totals, n=4) if rounds > 1 else totals * 3
    return {
        "rounds": rounds,
        "first_token_ms": round(1000 * first.seconds.total, 2),
        "round_ms": _round(middle),
        "round_ms_quartiles": [_round(low), _round(high)],
        "phases_ms": {
            phase: _round(statistics.median(1000 * getattr(r.seconds, phase) for r in timed))
            for phase in PHASES
        },
        "target_rows": timed[-1].target_rows,
        "target_cache_bytes": caches["target"],
        "draft_cache_bytes": caches["draft"],
    }


def long_run(
    target: Target,
    methods: dict[str, Method],
    tokens: int,
    settings: Settings,
    report: Callable[[str], None],
) -> list[dict]:
    """Milliseconds per token and per round in windows of one long answer, methods interleaved
    window by window. A round counts where it begins."""
    prompt = filler(target, 64)
    if len(prompt) + tokens > target.context:
        raise SettingsError(
            f"A long run of {tokens} tokens does not fit this target's context of "
            f"{target.context}. Choose at most {target.context - len(prompt)}."
        )
    asked = replace(settings, max_new_tokens=tokens)
    endless = _endless(target)
    runs = {name: _windows(decode(endless, m, prompt, asked)) for name, m in methods.items()}
    found = []
    for start in range(0, tokens, WINDOW):
        for name, windows in runs.items():
            report(f"{name}: tokens {start} to {min(start + WINDOW, tokens)} of a long run")
            rounds = next(windows, [])
            if not rounds:
                continue  # a round before jumped over the last short window
            gained = sum(len(round.draws) for round in rounds)
            milliseconds = 1000 * sum(round.seconds.total for round in rounds)
            found.append(
                {
                    "method": name,
                    "from_token": start,
                    "tokens": gained,
                    "rounds": len(rounds),
                    "tau": round(gained / len(rounds), 3),
                    "ms_per_token": _round(milliseconds / gained),
                    "ms_per_round": _round(milliseconds / len(rounds)),
                }
            )
    return found


def _windows(run: Iterator[Round]) -> Iterator[list[Round]]:
    """The rounds of a run, cut where `WINDOW` more tokens are written. The prefill is left out."""
    rounds: list[Round] = []
    written, end = 0, WINDOW
    while True:
        with torch.inference_mode():
            round = next(run, None)
        if round is None:
            break
        if round.index:
            rounds.append(round)
        written += len(round.draws)
        if written >= end:
            yield rounds
            rounds, end = [], end + WINDOW
    if rounds:
        yield rounds


def filler(target: Target, count: int) -> list[int]:
    """`count` token ids of running text."""
    text = "\n\n".join(question.turns[0] for question in load_questions(OWN))
    ids = target.tokenizer.encode(text, add_special_tokens=False)
    return (ids * (count // len(ids) + 1))[:count]


def bytes_of(cache: KVCache) -> int:
    """What a cache takes, fixed slots included."""
    return cache.committed()[0].untyped_storage().nbytes()


def weight_bytes(target: Target) -> int:
    """What the target's weights take, packed or not; tied ones count once."""
    model = target.model
    return sum(tensor.nbytes for part in (model.parameters(), model.buffers()) for tensor in part)


def _endless(target: Target) -> Target:
    """The same target without stop tokens, so that a run lasts as long as was asked for."""
    endless = copy.copy(target)
    endless.stop_ids = frozenset()
    return endless


def _watch_caches(target: Target, method: Method) -> tuple[tuple[Target, Method], dict[str, int]]:
    """Target and method as they are, with a note of how large the caches are that a run makes."""
    found = {"target": 0, "draft": 0}
    watched = copy.copy(target)

    def new_cache(*sizes, **others) -> KVCache:
        cache = target.new_cache(*sizes, **others)
        found["target"] = bytes_of(cache)
        return cache

    def drafter(*parts, **sizes):
        made = method.drafter(*parts, **sizes)
        if hasattr(made, "cache"):
            found["draft"] = bytes_of(made.cache)
        return made

    watched.new_cache = new_cache
    return (watched, replace(method, drafter=drafter)), found


def markdown(result: dict) -> str:
    """The tables, with the facts of the run above them."""
    points, long = result["points"], result["long_run"]
    parts = ["\n".join(place_lines(result["settings"]))]
    budgets = list(dict.fromkeys(p["nodes"] for p in points if p["nodes"] is not None))
    by_place = {(p["method"], p["context"], p["nodes"]): p for p in points}
    names = list(dict.fromkeys(p["method"] for p in points))
    contexts = list(dict.fromkeys(p["context"] for p in points))

    def cost(method: str, context: int, nodes: int | None) -> str:
        point = by_place.get((method, context, nodes))
        if point is None:
            return "-"
        low, high = point["round_ms_quartiles"]
        return f"{point['round_ms']:.1f} ({low:.1f} to {high:.1f})"

    parts.append(
        table(
            (
                "ms per round: median (quartiles)",
                *("context", "no tree", *(f"{nodes} nodes" for nodes in budgets)),
            ),
            (
                (name, context, *(cost(name, context, nodes) for nodes in (None, *budgets)))
                for name in names
                for context in contexts
            ),
        )
    )
    last = {(p["method"], p["context"]): p for p in points}  # of the budget that was named last
    parts.append(
        table(
            (
                *("with the last budget", "context", "first token ms"),
                *(f"{phase} ms" for phase in PHASES),
                *("target's cache, MB", "draft's cache, MB"),
            ),
            (
                (
                    *(name, context, f"{last[name, context]['first_token_ms']:.0f}"),
                    *(f"{last[name, context]['phases_ms'][phase]:.1f}" for phase in PHASES),
                    *(
                        f"{last[name, context][f'{part}_cache_bytes'] / 1e6:.1f}"
                        for part in ("target", "draft")
                    ),
                )
                for name in names
                for context in contexts
            ),
        )
    )
    parts.append(
        f"Rounds per point: {points[0]['rounds']}. One token of text takes "
        f"{result['bytes_per_token']} bytes in the target's cache; the target's weights take "
        f"{result['weight_bytes'] / 1e6:.0f} MB."
    )
    if long:
        starts = sorted({w["from_token"] for w in long})
        by_window = {(w["method"], w["from_token"]): w for w in long}
        head = [f"{name}: ms per {unit}" for name in names for unit in ("token", "round")]
        parts.append(
            table(
                ("long run, from token", *head),
                (
                    (
                        start,
                        *(
                            f"{by_window[name, start][f'ms_per_{unit}']:.1f}"
                            if (name, start) in by_window
                            else "-"
                            for name in names
                            for unit in ("token", "round")
                        ),
                    )
                    for start in starts
                ),
            )
        )
    return "\n\n".join(parts)


def write_section(path: Path, text: str, title: str = "Scaling") -> None:
    """Put the tables between their marks in a page, or at its end where it has none yet."""
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    begin, end = f"<!-- {title.lower()} -->", f"<!-- /{title.lower()} -->"
    section = f"{begin}\n\n{text}\n\n{end}"
    if begin in page and end in page:
        before, after = page.split(begin)[0], page.split(end)[1]
        page = before + section + after
    else:
        page = f"{page}\n## {title}\n\n{section}\n".lstrip("\n")
    path.write_text(page, encoding="utf-8")


def _round(value: float) -> float:
    return round(value, 3)
