"""Where a round's time goes, and what an observer costs; measured inside one run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from confu_core.bench.recorder import recorder_shares
from confu_core.compare import Engine
from confu_core.decoding import Round, decode
from confu_core.prompt import chat_ids
from confu_core.trace import Settings


@torch.inference_mode()
def profile(
    engine: Engine, methods: Sequence[str], prompt: str, settings: Settings, repeats: int
) -> list[dict]:
    """Median milliseconds per round and phase, methods interleaved.

    `rest` is the loop's own overhead: everything that is not the target's or the draft's forward
    pass. `rest_share` is its share of the round; `recorder_share` is what a recorder
    adds to it.

    Returns:
        One row per method.
    """
    target = engine.target
    ids = chat_ids(target, prompt)
    runs: dict[str, list[Round]] = {name: [] for name in methods}
    shares: dict[str, list[float]] = {name: [] for name in methods}
    for repeat in range(repeats + 1):
        for name in methods:
            method = engine.method(name)
            alone = list(decode(target, method, ids, settings))
            watched = recorder_shares(target, method, ids, settings)
            if repeat:  # the first repeat warms caches up
                runs[name] += alone
                shares[name] += watched
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
                "recorder_share": round(statistics.median(shares[name]), 4),
            }
        )
    return rows
