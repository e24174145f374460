"""What a recorder costs: its time against the round's own, moment by moment."""

from __future__ import annotations

import time

import torch

from confu_core.decoding import decode
from confu_core.methods import Method
from confu_core.recording import Recorder
from confu_core.target import Target
from confu_core.trace import Settings


@torch.inference_mode()
def recorder_shares(
    target: Target, method: Method, prompt_ids: list[int], settings: Settings
) -> list[float]:
    """For each round of one run but the prompt's: the seconds that making its record takes, over
    the round's own, in which no observer's time is.

    Both are taken within a tenth of a second. Two runs, one recorded and one not, differ by more
    than the recorder on a machine that others use.
    """
    recorder = Recorder(target, method, settings, None)
    shares = []
    for round in decode(target, method, prompt_ids, settings, recorder):
        start = time.perf_counter()
        recorder.record(round)
        spent = time.perf_counter() - start
        if round.index:
            shares.append(spent / round.seconds.total)
    return shares
