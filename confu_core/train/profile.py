"""Where a training step's time goes, and its operations against those that it needs.

Needed is what `plan.Step` counts: pass A over the real tokens, the unrolled draft forward and back,
pass B over the anchors. Done is what torch counts while the same step runs; more than needed are
padding, recomputation and masked-out attention.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from confu_core.bench.report import table
from confu_core.sizes import TargetShape
from confu_core.train.data import Batch, Conversation, batches
from confu_core.train.loop import TrainSettings, parameter_groups, total_loss
from confu_core.train.losses import DraftTrainee, chain_starts
from confu_core.train.plan import Step
from confu_core.train.store import Memory

PHASES = ("target reads", "contemplation", "draft", "backward", "optimiser")


def _attention(q: tuple[int, ...], k: tuple[int, ...], *_, **__) -> int:
    """Operations of attention forward, from shapes: q (B, heads, R, D), k (B, ., S, D)."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3]


def _attention_backward(_, q: tuple[int, ...], k: tuple[int, ...], *__, **___) -> int:
    return 5 * _attention(q, k) // 2  # five products for two


# torch's counter does not know the kernel that it takes on a CPU.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Profile:
    """Of some steps together: seconds by phase, supervised starts, operations done and needed."""

    steps: int
    starts: int
    seconds: dict[str, float]
    done: float
    needed: float

    def markdown(self) -> str:
        """Where the time went, and the sentence about operations."""
        total = sum(self.seconds.values())
        shares = table(
            ("phase of a step", "ms", "share"),
            (
                (name, f"{1000 * seconds / self.steps:.0f}", f"{seconds / total:.0%}")
                for name, seconds in self.seconds.items()
            ),
        )
        return (
            f"{shares}\n\n{self.starts / total:.0f} starts/s over {self.steps} steps; "
            f"{self.done / self.steps:.3g} operations a step, {self.done / self.needed:.2f} times "
            f"what is needed ({self.needed / self.steps:.3g})."
        )


class _Watch:
    """Wraps calls and adds up their seconds."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    def timed(self, phase: str, call: Callable) -> Callable:
        def wrapped(*arguments, **options):
            start = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds[phase] += time.perf_counter() - start
            return result

        return wrapped


def profile(
    trainee: DraftTrainee, conversations: list[Conversation], settings: TrainSettings, steps: int
) -> Profile:
    """Run a step to warm up, then `steps` timed ones and the same ones again, counted. Trains."""
    head, part = trainee.head, trainee.contemplation
    optimiser = torch.optim.AdamW(parameter_groups(head, part, settings), weight_decay=0.0)
    watch = _Watch()
    read, futures, step = trainee.reader.read, trainee._futures, optimiser.step

    def run(batch: Batch) -> None:
        with torch.autocast(trainee.target.device.type, torch.bfloat16):
            result = trainee(
                batch, settings.unroll, random.Random(0), settings.anchor_every, settings.replicate
            )
        loss = total_loss(result, settings)
        optimiser.zero_grad()
        watch.timed("backward", loss.backward)()
        watch.timed("optimiser", step)()

    stream = batches(conversations, settings.batch_tokens, settings.seed)
    warm, *timed = (batch for _, batch in zip(range(steps + 1), stream, strict=False))
    run(warm)
    watch.seconds = dict.fromkeys(PHASES, 0.0)
    trainee.reader.read = watch.timed("target reads", read)
    trainee._futures = watch.timed("contemplation", futures)
    start = time.perf_counter()
    for batch in timed:
        run(batch)
    whole = time.perf_counter() - start
    seconds = dict(watch.seconds)
    seconds["draft"] = whole - sum(seconds.values())

    trainee.reader.read, trainee._futures = read, futures
    trainee.reader.store = Memory()  # empty, so that the counted steps read as the timed ones did
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        for batch in timed:
            run(batch)
    needed = sum(_needed(trainee, batch, settings).flops for batch in timed)
    starts = sum(int(chain_starts(batch.answer)[1].sum()) for batch in timed)
    return Profile(len(timed), starts, seconds, counter.get_total_flops(), needed)


def _needed(trainee: DraftTrainee, batch: Batch, settings: TrainSettings) -> Step:
    starts = int(chain_starts(batch.answer)[1].sum())
    part = trainee.contemplation
    return Step(
        target=TargetShape.from_config(trainee.target.model.config.to_dict()),
        draft_vocab=trainee.head.shape.draft_vocab,
        tokens=int(batch.lengths.sum()),
        length=float(batch.lengths.float().mean()),
        starts=starts,
        unroll=settings.unroll,
        anchors=starts / settings.anchor_every if part else 0.0,
        soft_prompts=part.shape.soft_prompts if part else 0,
    )
