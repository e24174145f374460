"""Where a round's time goes, and what an observer costs; measured inside one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from confu_core.bench.laps import laps, recorded_ratio
from confu_core.compare import Engine
from confu_core.decoding import Round
from confu_core.prompt import chat_ids
from confu_core.trace import Settings


@torch.inference_mode()
def profile(
    engine: Engine, methods: Sequence[str], prompt: str, settings: Settings, repeats: int
) -> list[dict]:
    """Median milliseconds per round and phase, methods interleaved.

    `rest` is the loop's own overhead: everything that is not the target's or the draft's forward
    pass. `rest_share` is its share of the round. `recorded_ratio`: see `laps.py`.

    Returns:
        One row per method.
    """
    target = engine.target
    ids = chat_ids(target, prompt)
    runs: dict[str, list[Round]] = {name: [] for name in methods}
    seconds: dict[tuple[str, bool], list[list[float]]] = {}
    for repeat in range(repeats + 1):
        for name in methods:
            for recorded in (False, True):
                rounds, times = laps(target, engine.method(name), ids, settings, recorded)
                if repeat:  # the first repeat warms caches up
                    runs[name] += rounds if not recorded else ()
                    seconds.setdefault((name, recorded), []).append(times)
    rows = []
    for name in methods:
        free = [r for r in runs[name] if r.index]

        def median(phase: str, rounds: list) -> float:
            return statistics.median(1000 * getattr(r.seconds, phase) for r in rounds)

        total = median("total", free)
        prefills = [r for r in runs[name] if not r.index]
        rows.append(
            {
                "method": name,
                "rounds": len(free),
                "first_token_ms": round(median("total", prefills), 1),
                "draft_ms": round(median("draft", free), 2),
                "verify_ms": round(median("verify", free), 2),
                "rest_ms": round(median("rest", free), 3),
                "total_ms": round(total, 2),
                "rest_share": round(
                    sum(r.seconds.rest for r in free) / sum(r.seconds.total for r in free), 4
                ),
                "recorded_ratio": recorded_ratio(seconds[name, False], seconds[name, True]),
            }
        )
    return rows
