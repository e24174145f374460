"""The training loop, one for every method: EAGLE-3, its continuation, ConFu and its ablations.

A run lives in a folder: `settings.json`, `log.jsonl`, the latest state (weights, optimiser, step),
and the best head so far, chosen by held-out acceptance and not by loss. A killed run continues
with the same losses: the data order and every random draw depend only on (seed, step).
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from confu_core.checkpoints import parts
from confu_core.errors import CheckpointError
from confu_core.heads import Contemplation, DraftHead
from confu_core.target import Target
from confu_core.train.data import Batch, Conversation, batches
from confu_core.train.losses import DraftTrainee, Unrolled, chain_starts
from confu_core.train.store import Store

READ_OUT_WEIGHT = 0.3  # of the read-outs' own loss (ours; the paper has no auxiliary loss)
READ_OUT_DECAY = 0.5  # each further read-out weighs half of the one before
DEPTH_WEIGHT = 0.8  # weight of depth k in the loss is 0.8 ** k (EAGLE-3)


@dataclass(frozen=True)
class TrainSettings:
    """What one run does. Learning rates are peaks; the schedule is warm-up, then cosine to 5 %.

    steps: optimiser steps. batch_tokens: padded tokens per step and process.
    unroll: train-time-test steps; the first quarter of the run uses 2.
    contemplate_rate: for soft prompts, experts, gate, entry bias and read-out weight.
    adapter_rate: for the adapters of contemplate rows.
    anchor_every: one anchor per so many starts. replicate: anchors serve later starts too.
    router_balance: weight of the routers' imbalance in the loss (ours, against collapse).
    """

    steps: int
    batch_tokens: int = 2048
    unroll: int = 5
    rate: float = 1e-3
    contemplate_rate: float = 1e-2
    adapter_rate: float = 3e-3
    warmup: int = 50
    clip: float = 1.0
    seed: int = 0
    anchor_every: int = 3
    replicate: bool = True
    evaluate_every: int = 200
    router_balance: float = 0.05


def train(
    target: Target,
    head: DraftHead,
    contemplation: Contemplation | None,
    conversations: list[Conversation],
    held_out: list[Conversation],
    settings: TrainSettings,
    folder: Path,
    mixed_precision: str = "bf16",
    store: Store | None = None,
) -> Iterator[dict]:
    """Train in place, yielding each logged row: `{step, loss, ...}` or `{step, held_out: ...}`.

    store: keeps what the target read; memory by default.

    After the last step `head` and `contemplation` hold the best weights by held-out acceptance.
    """
    accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision=mixed_precision)
    trainee = DraftTrainee(target, head, contemplation, store).to(target.device)
    optimiser = torch.optim.AdamW(
        parameter_groups(head, contemplation, settings), betas=(0.9, 0.95), weight_decay=0.0
    )
    wrapped, optimiser = accelerator.prepare(trainee, optimiser)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser.optimizer, lambda step: rate_factor(step, settings)
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(asdict(settings), indent=2))
    first, best = restore(folder, trainee, optimiser.optimizer, schedule)
    log = folder / "log.jsonl"
    index, count = accelerator.process_index, accelerator.num_processes
    clock, positions = time.perf_counter(), 0
    for step, batch in stream(conversations, settings, first, index, count):
        wrapped.train()
        unroll = 2 if step < settings.steps // 4 else settings.unroll
        dice = random.Random(f"{settings.seed}/{step}/{index}")
        with accelerator.autocast():
            result = wrapped(
                batch, min(unroll, settings.unroll), dice, settings.anchor_every, settings.replicate
            )
        loss = total_loss(result, settings)
        optimiser.zero_grad()
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(wrapped.parameters(), settings.clip)
        optimiser.step()
        schedule.step()
        positions += result.counts[0]
        done = step + 1
        if done % 20 == 0 and accelerator.is_main_process:
            now = time.perf_counter()
            row = {
                "step": done,
                "loss": round(loss.item(), 4),
                "losses": [round(value.item(), 3) for value in result.losses],
                "gradient_norm": round(float(norm), 3),
                "positions_per_second": round(positions / (now - clock)),
                "seconds": round(now - clock, 1),
            }
            if result.imbalance is not None:
                row["router_imbalance"] = round(result.imbalance.item(), 3)
            if result.read_out_losses:
                row["read_out_losses"] = [round(x.item(), 3) for x in result.read_out_losses]
                row["read_out_weight"] = [
                    round(x, 3) for x in contemplation.read_out_weight.tolist()
                ]
            clock, positions = now, 0
            _write(log, row)
            yield row
        if done % settings.evaluate_every == 0 or done == settings.steps:
            if accelerator.is_main_process:
                report = evaluate(trainee, held_out, accelerator)
                row = {"step": done, "held_out": report}
                _write(log, row)
                if report["tau_top8"] > best:
                    best = report["tau_top8"]
                    save_file(_weights(trainee), folder / "best.safetensors")
                save_state(folder, trainee, optimiser.optimizer, schedule, done, best)
                yield row
            accelerator.wait_for_everyone()
            clock = time.perf_counter()
    modules = parts(head, contemplation)
    modules.load_state_dict(load_file(folder / "best.safetensors"))


def total_loss(result: Unrolled, settings: TrainSettings) -> torch.Tensor:
    """Depth-weighted mean of the losses, so its scale does not depend on the number of steps; the
    read-out's own loss and the routers' imbalance come on top."""
    weights = [DEPTH_WEIGHT**k for k in range(len(result.losses))]
    loss = sum(w * loss for w, loss in zip(weights, result.losses, strict=True)) / sum(weights)
    if result.read_out_losses:
        shares = [READ_OUT_DECAY**j for j in range(len(result.read_out_losses))]
        told = sum(w * x for w, x in zip(shares, result.read_out_losses, strict=True)) / sum(shares)
        loss = loss + READ_OUT_WEIGHT * told
    if result.imbalance is not None:
        loss = loss + settings.router_balance * result.imbalance
    return loss


def parameter_groups(
    head: DraftHead, contemplation: Contemplation | None, settings: TrainSettings
) -> list[dict]:
    """Whole matrices learn at `rate`, routers too; what shapes the future token at
    `contemplate_rate`. A router reads hundreds of standardised numbers: at the fast rate one step
    moved its scores by several units, and it was saturated before experts differed."""
    groups = [{"params": list(head.parameters()), "lr": settings.rate}]
    if contemplation is not None:
        # Lists, not sets: a resumed optimiser finds its state by a parameter's place.
        slow = [contemplation.project.weight, contemplation.project_norm.weight]
        for mixture in (contemplation.contemplate, contemplation.future):
            slow += list(mixture.router.parameters()) if mixture.router else []
        adapting = list(contemplation.adapters.parameters()) if contemplation.adapters else []
        slow += [contemplation.turns] if contemplation.shape.read_outs else []
        others = {id(parameter) for parameter in slow + adapting}
        fast = [p for p in contemplation.parameters() if id(p) not in others]
        groups += [
            {"params": slow, "lr": settings.rate},
            {"params": fast, "lr": settings.contemplate_rate},
        ]
        if adapting:
            groups.append({"params": adapting, "lr": settings.adapter_rate})
    return groups


def rate_factor(step: int, settings: TrainSettings) -> float:
    """Linear warm-up, then cosine from 1 to 0.05."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def stream(
    conversations: list[Conversation], settings: TrainSettings, first: int, index: int, count: int
) -> Iterator[tuple[int, Batch]]:
    """Batches of steps `first`.. for process `index` of `count`; epochs follow one another."""
    step, epoch = 0, 0
    while step < settings.steps:
        epoch_batches = batches(conversations, settings.batch_tokens, settings.seed * 1000 + epoch)
        for number, batch in enumerate(epoch_batches):
            if number % count != index:
                continue
            if step >= settings.steps:
                return
            if step >= first:
                yield step, batch
            step += 1
        epoch += 1


@torch.no_grad()
def evaluate(
    trainee: DraftTrainee,
    held_out: list[Conversation],
    accelerator: Accelerator | None = None,
    steps: int = 5,
) -> dict:
    """Held-out agreement per depth, with fresh futures (lag 0) at every start.

    Returns:
        n starts; `top1`, `top8`: share of starts where the draft's best / best 8 hold the token
        that followed, per depth; `loss` per depth; `tau_chain`, `tau_top8`: 1 + the sum over
        depths of the share of chains agreeing up to there. With contemplation, per mixture, the
        mean weight of each expert, the same by task group, and the entropy of the mean in bits.
    """
    was_training = trainee.training
    trainee.eval()
    dice = random.Random(0)
    top1, top8, losses = [], [], []
    weights: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for batch in batches(held_out, 4096, seed=None):
        if accelerator is not None:
            with accelerator.autocast():
                result = trainee(batch, steps, dice, 1, False)
        else:
            result = trainee(batch, steps, dice, 1, False)
        top1.append(torch.stack(result.top1))
        top8.append(torch.stack(result.top8))
        losses.append(torch.stack(result.losses))
        if result.router_weights is not None:
            counts = chain_starts(batch.answer)[1].sum(1).tolist()  # anchors of each row
            for row, (number, count) in enumerate(zip(batch.numbers, counts, strict=True)):
                rows = tuple(w[row, :count].float().cpu() for w in result.router_weights)
                weights.setdefault(held_out[number].kind, []).append(rows)
    trainee.train(was_training)
    hits1, hits8 = torch.cat(top1, dim=1).float(), torch.cat(top8, dim=1).float()

    def rounded(values: torch.Tensor, digits: int = 4) -> list[float]:
        return [round(value, digits) for value in values.tolist()]

    report = {
        "n": hits1.shape[1],
        "top1": rounded(hits1.mean(1)),
        "top8": rounded(hits8.mean(1)),
        "loss": rounded(torch.stack(losses).mean(0)),
        "tau_chain": round(1 + float(hits1.cumprod(0).mean(1).sum()), 4),
        "tau_top8": round(1 + float(hits8.cumprod(0).mean(1).sum()), 4),
    }
    for index, name in enumerate(("contemplate_experts", "future_experts")):
        groups = {kind: torch.cat([r[index] for r in rows]) for kind, rows in weights.items()}
        if groups:
            mean = torch.cat(list(groups.values())).mean(0)
            report[name] = rounded(mean, 3)
            report[f"{name}_by_group"] = {k: rounded(groups[k].mean(0), 3) for k in sorted(groups)}
            report[f"{name}_entropy"] = round(
                float(torch.special.entr(mean).sum()) / math.log(2), 2
            )
    return report


def _weights(trainee: DraftTrainee) -> dict[str, torch.Tensor]:
    modules = parts(trainee.head, trainee.contemplation)
    return {name: t.detach().cpu().contiguous() for name, t in modules.state_dict().items()}


def save_state(
    folder: Path,
    trainee: DraftTrainee,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    step: int,
    best: float,
) -> None:
    """All that is needed to go on, replaced in one rename: a kill leaves the old or the new."""
    tensors = {f"weights.{name}": tensor for name, tensor in _weights(trainee).items()}
    for number, state in optimiser.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimiser.{number}.{name}"] = value.detach().cpu().clone()
    facts = {"step": step, "best": best, "schedule": schedule.last_epoch}
    fresh = folder / "state.new"
    save_file(tensors, fresh, metadata={"facts": json.dumps(facts)})
    fresh.replace(folder / "state.safetensors")


def restore(
    folder: Path,
    trainee: DraftTrainee,
    optimiser: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> tuple[int, float]:
    """The next step and the best held-out figure so far; (0, 0.0) for a fresh folder."""
    path = folder / "state.safetensors"
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {
        n.removeprefix("weights."): t for n, t in tensors.items() if n.startswith("weights.")
    }
    try:
        parts(trainee.head, trainee.contemplation).load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} belongs to a run with other shapes. Choose another folder. ({error})"
        ) from error
    plain = optimiser.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, number, field = name.split(".")
            plain["state"].setdefault(int(number), {})[field] = tensor
    optimiser.load_state_dict(plain)
    schedule.last_epoch = facts["schedule"]
    for group, base, factor in zip(
        optimiser.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(facts["schedule"])
    return facts["step"], facts["best"]


def _write(log: Path, row: dict) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
