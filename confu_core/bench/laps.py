"""Rounds by the clock on the wall: what a recorder adds to them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from confu_core.decoding import Round, decode
from confu_core.methods import Method
from confu_core.recording import Recorder
from confu_core.target import Target
from confu_core.trace import Settings


@torch.inference_mode()
def laps(
    target: Target, method: Method, prompt_ids: list[int], settings: Settings, recorded: bool
) -> tuple[list[Round], list[float]]:
    """One run: its rounds, and the seconds from each to the next.

    A round's own `seconds` leave out what observers do; these do not, and a recorded round's plain
    record is made within them.
    """
    recorder = Recorder(target, method, settings, None) if recorded else None
    rounds, seconds, start = [], [], time.perf_counter()
    for round in decode(target, method, prompt_ids, settings, recorder):
        if recorder:
            recorder.record(round)
        now = time.perf_counter()
        rounds.append(round)
        seconds.append(now - start)
        start = now
    return rounds, seconds


def recorded_ratio(alone: Sequence[Sequence[float]], watched: Sequence[Sequence[float]]) -> float:
    """How many times as long rounds take when they are recorded.

    Args:
        alone, watched: seconds per round of several runs of one prompt and one seed, which all go
            through the same rounds. Of each round the fastest run counts, since what else a machine
            does can only add. Round 0, the prompt, is left out.
    """
    fastest = [
        sum(min(times) for times in list(zip(*runs, strict=True))[1:]) for runs in (alone, watched)
    ]
    return round(fastest[1] / fastest[0], 3)
