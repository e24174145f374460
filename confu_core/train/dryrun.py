"""A training run without the model: shapes at full size without memory, then one real step, small.

Before hours of GPUs are spent: the recipe's target is built by its real class on torch's "meta"
device, where tensors have shapes and no numbers, a head is made for it, and a text is read through
both. Then a stand-in of the same family and with the same switches, but small, takes the first
training steps in earnest.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from confu_core.errors import DataError
from confu_core.heads import Contemplation, ContemplationShape, DraftHead
from confu_core.presets import gigabytes
from confu_core.target import Target
from confu_core.train.data import Conversation, batches
from confu_core.train.features import TextMemory
from confu_core.train.init import new_contemplation, new_head
from confu_core.train.loop import TrainSettings, parameter_groups, total_loss
from confu_core.train.losses import DraftTrainee
from confu_core.train.plan import Plan, estimate

# The stand-in: sizes that show a mix-up of any two of them.
STAND_IN = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
STAND_IN_DRAFT_VOCAB = 96
STEPS = 6


class Vocabulary:
    """Stands in for a tokenizer where only its size is asked for."""

    eos_token_id = None
    chat_template = None

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def dry_run(plan: Plan, stage: str, report: Callable[[str], None]) -> bool:
    """Check a stage of a recipe, telling what was found.

    Returns:
        Whether everything fits.

    Raises:
        DataError: the shapes of the recipe contradict each other.
    """
    extra = check_shapes(plan, stage, report)
    fits = tell_estimate(plan, stage, extra, report)
    first_steps(plan, stage, report)
    report("dry run: all is well" if fits else "dry run: it does not fit")
    return fits


def check_shapes(plan: Plan, stage: str, report: Callable[[str], None]) -> int:
    """Build target, head and contemplation of full size without memory, and read a text of no
    numbers with them. Gives the parameters of the contemplating part."""
    draft_vocab = plan.options[stage]["draft_vocab"]
    try:
        with torch.device("meta"):
            target = _target(dict(plan.config), plan.target)
            head = new_head(target, torch.arange(draft_vocab))
            part = _contemplation(target, head, plan, stage)
            taps, logits = _read(target, head)
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"The shapes of recipe {plan.name!r} do not fit: {error}") from error
    counted = sum(p.numel() for p in target.model.parameters())
    if counted != plan.shape.parameters:
        raise DataError(
            f"Recipe {plan.name!r}: its class has {counted} parameters, the formula says "
            f"{plan.shape.parameters}. Copy the config from the model's config.json."
        )
    trained = sum(p.numel() for p in head.parameters())
    extra = sum(p.numel() for p in part.parameters()) if part is not None else 0
    report(f"target {plan.target}: {counted / 1e9:.2f} billion parameters, frozen ({plan.licence})")
    report(f"draft head: {trained / 1e6:.0f} million parameters, features {taps}, logits {logits}")
    if part is not None:
        report(f"contemplation: {extra / 1e6:.0f} million parameters")
    return extra


def _target(config: dict, name: str, seed: int | None = None) -> Target:
    """A target of this config by its real class; random weights if there is a seed."""
    settings = AutoConfig.for_model(config.pop("model_type"), **config)
    settings._attn_implementation = "eager"
    if seed is not None:
        torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    return Target(model, Vocabulary(settings.vocab_size), name)


def _contemplation(target: Target, head: DraftHead, plan: Plan, stage: str) -> Contemplation | None:
    if stage != "confu":
        return None
    options = plan.options[stage]
    switches = {name: options[name] for name in ("soft_prompts",) if name in options}
    if "experts" in options:
        switches |= dict.fromkeys(("contemplate_experts", "future_experts"), options["experts"])
    return Contemplation(
        ContemplationShape(
            layers=target.layers,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            target_hidden=target.hidden,
            hidden=head.shape.hidden,
            rms_eps=head.shape.rms_eps,
            **switches,
        )
    )


def _read(target: Target, head: DraftHead) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of features (1, 4, 3 Ht) and draft logits (1, 4, D) of a text of four tokens."""
    ids = torch.zeros(1, 4, dtype=torch.long)
    positions = torch.arange(4).unsqueeze(0)
    rows = target.run(target.embed(ids), positions, None, TextMemory(remember=False))
    logits = head.logits(head.fuse(rows.taps))
    return tuple(rows.taps.shape), tuple(logits.shape)


def tell_estimate(plan: Plan, stage: str, extra: int, report: Callable[[str], None]) -> bool:
    """Text, memory and time of the stage. Gives whether the memory suffices."""
    found, machine, text = estimate(plan, stage, extra), plan.machine, plan.text
    options = plan.options[stage]
    report(
        f"text: {text.conversations} conversations of {text.tokens} tokens, {text.answer_tokens} "
        f"of them answer; {text.source}"
    )
    report(
        f"steps: {options['steps']} of {options['batch_tokens']} tokens on each of {machine.gpus} "
        f"GPUs, {found.tokens / 1e6:.0f} million in all, {found.epochs:.1f} times the text"
    )
    for purpose, count in found.memory.items():
        report(f"memory, {purpose}: {gigabytes(count)} GB")
    fits = found.memory_gb <= machine.memory_gb
    verdict = "fits" if fits else "does NOT fit: choose a smaller --batch-tokens"
    report(
        f"memory, in all: {found.memory_gb:.0f} of {machine.memory_gb:.0f} GB per GPU, {verdict}"
    )
    report(
        f"time: {found.flops:.2e} operations, {found.hours:.1f} hours on {machine.name} at "
        f"{machine.utilisation:.0%} (assumed) of {machine.peak_tflops:.0f} TFLOP/s each"
    )
    return fits


def stand_in_config(plan: Plan) -> dict:
    """The recipe's config with the stand-in's sizes: same family, switches and rope scaling."""
    config = dict(plan.config) | STAND_IN
    rope = dict(config.get("rope_parameters") or {})
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = STAND_IN["max_position_embeddings"] // 4
        config["rope_parameters"] = rope
    return config


def first_steps(plan: Plan, stage: str, report: Callable[[str], None]) -> list[float]:
    """Train the stand-in on one batch for a few steps, by the real modules and the real loss.

    Raises:
        DataError: a loss or a gradient is not finite, or the loss does not fall.
    """
    target = _target(stand_in_config(plan), f"stand-in for {plan.target}", seed=0)
    conversations = _conversations()
    head = new_head(target, torch.arange(0, 3 * STAND_IN_DRAFT_VOCAB, 3))
    part = None
    if stage == "confu":
        wanted = _contemplation(target, head, plan, stage).shape
        part = new_contemplation(
            target,
            head,
            conversations,
            0,
            contemplate_experts=wanted.contemplate_experts,
            future_experts=wanted.future_experts,
            soft_prompts=wanted.soft_prompts,
        )
    options = plan.options[stage]
    settings = TrainSettings(
        steps=STEPS,
        unroll=options["unroll"],
        rate=options.get("rate", 1e-3),
        contemplate_rate=options.get("contemplate_rate", 1e-2),
    )
    trainee = DraftTrainee(target, head, part)
    optimiser = torch.optim.AdamW(parameter_groups(head, part, settings), weight_decay=0.0)
    batch = next(batches(conversations, 10_000, seed=None))
    losses = []
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = total_loss(trainee(batch, settings.unroll, random.Random(0), 3, True), settings)
        loss.backward()
        faults = [n for n, p in trainee.named_parameters() if not _sound(p)]
        if faults or not loss.isfinite():
            raise DataError(
                f"Recipe {plan.name!r}: the first step of the stand-in gave no sound gradient for "
                f"{', '.join(faults) or 'the loss'}."
            )
        losses.append(loss.item())
        optimiser.step()
    if losses[-1] >= losses[0]:
        raise DataError(
            f"Recipe {plan.name!r}: the stand-in's loss went from {losses[0]:.3f} to "
            f"{losses[-1]:.3f} in {STEPS} steps on one batch. Choose a lower --rate."
        )
    report(
        f"first steps of a {target.model.config.model_type} stand-in "
        f"({sum(p.numel() for p in target.model.parameters())} parameters): loss "
        + ", ".join(f"{loss:.3f}" for loss in losses)
    )
    return losses


def _sound(parameter: torch.nn.Parameter) -> bool:
    return parameter.grad is not None and bool(parameter.grad.isfinite().all())


def _conversations() -> list[Conversation]:
    """Texts of random tokens, which a head can learn by heart."""
    dice, size = random.Random(0), STAND_IN["vocab_size"]
    texts = [tuple(dice.randrange(size) for _ in range(40)) for _ in range(4)]
    return [Conversation(text, 8, "") for text in texts]
