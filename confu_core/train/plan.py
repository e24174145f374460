"""A training plan for a large target: what it needs and how long it takes, before a GPU is rented.

A recipe file holds a target's published shape, the machine, the amount of text and the options of
`train` for both stages. The estimates below are formulas over those numbers: arithmetic is counted
(a test compares it with what torch counts in a real step), memory is counted for what is kept and
estimated for what autograd saves (a test compares that too), time is arithmetic over the machine's
peak at an assumed utilisation. Standard library only.

Letters as in `sizes.py`; T text positions of a step on one GPU, t positions of a conversation, M
starts, A anchors, U unrolled steps, D draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confu_core.errors import DataError
from confu_core.sizes import TargetShape, eagle3_parameters

RECIPES = Path(__file__).parent / "recipes"
STAGES = ("eagle3", "confu")
# Bytes per trained parameter: float32 weight, gradient, two moments of AdamW; its bfloat16 copy.
TRAINED_BYTES = 4 + 4 + 8 + 2
BUCKET_BYTES = 4  # more, where several GPUs exchange gradients
KEPT_BYTES = 8_000_000_000  # of features that stay in memory; more would fill any GPU
RESERVE = 2_000_000_000  # libraries, and memory that lies in pieces (ours, generous)


@dataclass(frozen=True)
class Machine:
    """The GPUs of one node. peak_tflops: dense bfloat16, as the maker states it; utilisation: the
    share of it that a step is assumed to reach."""

    name: str
    gpus: int
    memory_gb: float
    peak_tflops: float
    utilisation: float


@dataclass(frozen=True)
class Text:
    """How much text, in conversations of so many tokens of which the target wrote so many."""

    conversations: int
    tokens: int
    answer_tokens: int
    source: str


@dataclass(frozen=True)
class Plan:
    """A recipe, checked. `options` are those of `train`, by stage."""

    name: str
    target: str
    licence: str
    config: Mapping[str, Any]
    machine: Machine
    text: Text
    options: Mapping[str, Mapping[str, Any]]

    @property
    def shape(self) -> TargetShape:
        return TargetShape.from_config(dict(self.config))


def recipe_names() -> list[str]:
    """The recipes that come with the program."""
    return sorted(path.stem for path in RECIPES.glob("*.json"))


def load_plan(source: str) -> Plan:
    """Read a recipe, by the name of one that comes with the program or by its file.

    Raises:
        DataError: there is none, or a field is missing or of the wrong kind.
    """
    shipped = RECIPES / f"{source}.json"
    path = shipped if source in recipe_names() else Path(source)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        options = {stage: dict(value["train"][stage]) for stage in STAGES}
        for stage in STAGES:
            for name in ("steps", "batch_tokens", "unroll", "draft_vocab"):
                int(options[stage][name])
        return Plan(
            path.stem,
            value["target"],
            value["licence"],
            value["config"],
            Machine(**value["machine"]),
            Text(**value["text"]),
            options,
        )
    except OSError as error:
        raise DataError(
            f"There is no recipe {source!r}. Name a file, or one of: {', '.join(recipe_names())}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a training recipe: {error!r}.") from error


# ---- One step ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One optimiser step on one GPU, in numbers. `unroll` may be a mean."""

    target: TargetShape
    draft_vocab: int
    tokens: int
    length: float
    starts: float
    unroll: float
    anchors: float = 0.0
    soft_prompts: int = 0
    read: bool = True

    @property
    def target_flops(self) -> float:
        """Pass A: the frozen target reads T positions, causally, and its choices and labels."""
        shape = self.target
        if not self.read:
            return 0.0
        layers = shape.layers * (2 * shape.layer_matrices + 2 * shape.query_width * self.length)
        return self.tokens * layers + 2 * self.starts * shape.vocab * shape.hidden

    @property
    def draft_flops(self) -> float:
        """The head: text once, then U steps from every start, forward and backward."""
        shape, hidden = self.target, self.target.hidden
        labels = 2 * self.starts * self.draft_vocab * hidden
        # Frozen features need no gradient, so fuse costs two thirds of what the rest does.
        fuse = 2 * 2 * self.tokens * 3 * hidden * hidden
        keys_values = 2 * 2 * hidden * shape.kv_width * 2
        text = fuse + 3 * self.tokens * keys_values
        queries_and_rest = (
            2 * hidden * shape.query_width
            + shape.query_width * hidden
            + 3 * hidden * shape.intermediate
            + self.draft_vocab * hidden
        )
        attention = 4 * shape.query_width * self.length  # over the whole text, masked
        each = 3 * (2 * queries_and_rest + attention)
        own = 3 * keys_values * max(0.0, self.unroll - 1)
        return labels + text + self.starts * (self.unroll * each + own)

    @property
    def contemplate_flops(self) -> float:
        """Pass B: the target on A contemplate tokens, forward and back to their inputs; and what
        the draft does with the future token: one more entry per start, one more matrix per step."""
        if not self.anchors:
            return 0.0
        shape, hidden = self.target, self.target.hidden
        seen = self.length + self.soft_prompts
        layer = 2 * 2 * shape.layer_matrices + 3 * 4 * shape.query_width * seen
        fuse = 3 * 2 * 3 * hidden * hidden
        entry = 3 * 2 * 2 * hidden * shape.kv_width * 2
        steer = 3 * 2 * hidden * hidden
        return self.anchors * (shape.layers * layer + fuse) + self.starts * (
            entry + self.unroll * steer
        )

    @property
    def flops(self) -> float:
        return self.target_flops + self.draft_flops + self.contemplate_flops

    def memory(self, trained: int, gpus: int, text_tokens: int) -> dict[str, float]:
        """Bytes on one GPU, by what they are for.

        Args:
            trained: parameters of the head and, if it trains, of the contemplating part.
            text_tokens: of all the text, whose features stay as far as there is room for them
                (not with contemplation, which needs keys and values too).
        """
        shape, hidden = self.target, self.target.hidden
        # Keys and values of the text, as pass A left them and as pass B joins them.
        text_rows = 2 * 2 * shape.layers * shape.kv_width * 2 if self.anchors else 0
        per_start = (
            2 * self.draft_vocab
            + 6 * shape.heads * self.length
            + 8 * shape.intermediate
            + 24 * hidden
            + 8 * shape.query_width
        )
        per_anchor = shape.layers * (
            6 * shape.intermediate + 24 * hidden + 8 * shape.query_width + 2 * shape.heads
        )
        return {
            "target, bfloat16": shape.bytes("bfloat16"),
            "trained weights, gradients, optimiser": trained
            * (TRAINED_BYTES + (BUCKET_BYTES if gpus > 1 else 0)),
            "features of the text": self.tokens * (2 * 4 * hidden + text_rows),
            "features that stay": 0
            if self.anchors
            else min(KEPT_BYTES, text_tokens / gpus * (8 * hidden + 8)),
            "saved for backward, draft": self.starts * self.unroll * per_start,
            "saved for backward, contemplation": self.anchors * per_anchor,
            "logits and labels at their peak": self.starts
            * max(6 * shape.vocab, 10 * self.draft_vocab),
            "reserve": RESERVE,
        }


# ---- A stage -------------------------------------------------------------------------------------


def step_of(plan: Plan, stage: str, unroll: float | None = None) -> Step:
    """The step of a stage on one GPU; `unroll` as at its end unless it is given."""
    options = plan.options[stage]
    share = plan.text.answer_tokens / plan.text.tokens
    starts = options["batch_tokens"] * share
    confu = stage == "confu"
    return Step(
        target=plan.shape,
        draft_vocab=options["draft_vocab"],
        tokens=options["batch_tokens"],
        length=plan.text.tokens,
        starts=starts,
        unroll=options["unroll"] if unroll is None else unroll,
        anchors=starts / options.get("anchor_every", 3) if confu else 0.0,
        soft_prompts=options.get("soft_prompts", 16) if confu else 0,
    )


@dataclass(frozen=True)
class Estimate:
    """A stage in numbers. epochs: how often the text is read; hours: at the machine's assumed
    utilisation; memory: bytes on one GPU by purpose, at the last and largest unroll."""

    stage: str
    tokens: int
    epochs: float
    flops: float
    hours: float
    memory: dict[str, float]
    trained: int

    @property
    def memory_gb(self) -> float:
        return sum(self.memory.values()) / 1e9


def estimate(plan: Plan, stage: str, extra: int = 0) -> Estimate:
    """What a stage needs. The first quarter unrolls 2 steps, the rest all of them (`loop.py`).

    Args:
        extra: parameters of the contemplating part, which has no formula here.
    """
    options, machine = plan.options[stage], plan.machine
    mean_unroll = 0.25 * min(2, options["unroll"]) + 0.75 * options["unroll"]
    flops = step_of(plan, stage, mean_unroll).flops * options["steps"] * machine.gpus
    tokens = options["steps"] * options["batch_tokens"] * machine.gpus
    speed = machine.gpus * machine.peak_tflops * 1e12 * machine.utilisation
    trained = eagle3_parameters(plan.shape, options["draft_vocab"]) + extra
    text_tokens = plan.text.conversations * plan.text.tokens
    return Estimate(
        stage=stage,
        tokens=tokens,
        epochs=tokens / text_tokens,
        flops=flops,
        hours=flops / speed / 3600,
        memory=step_of(plan, stage).memory(trained, machine.gpus, text_tokens),
        trained=trained,
    )
