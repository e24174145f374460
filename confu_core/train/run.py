"""One training run from text files to a checkpoint folder with its model card."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from confu_core.checkpoints import load_checkpoint, save_checkpoint
from confu_core.errors import DataError, SettingsError
from confu_core.heads import Contemplation, DraftHead
from confu_core.target import Target
from confu_core.train.card import write_card
from confu_core.train.data import coverage, draft_vocabulary, load_conversations
from confu_core.train.futures import fit_basis
from confu_core.train.init import new_contemplation, new_head, renew_routers
from confu_core.train.loop import TrainSettings, evaluate, train
from confu_core.train.losses import DraftTrainee
from confu_core.train.profile import Profile, profile
from confu_core.train.readouts import fit_read_outs
from confu_core.train.store import open_store


@dataclass(frozen=True)
class Recipe:
    """What to train, from what, on what.

    method: "eagle3" or "confu". data: JSON-lines files of conversations. start: a checkpoint to
    continue from (ConFu always starts from an EAGLE-3 head); None begins a new EAGLE-3 head.
    run: folder of the run's state and log. save: checkpoint folder to write at the end.
    switches: fields of `ContemplationShape` for ablations. renew_routers: begin the routers of a
    ConFu head anew. features: where what the target read is kept (`open_store`). command: for the
    model card.
    """

    method: str
    data: tuple[Path, ...]
    settings: TrainSettings
    run: Path
    save: Path
    start: Path | None = None
    draft_vocab: int = 8192
    switches: tuple[tuple[str, int | bool], ...] = ()
    renew_routers: bool = False
    precision: str = "bf16"
    features: str = "memory"
    command: str = ""


def run(target: Target, recipe: Recipe, report: Callable[[dict], None]) -> None:
    """Train, choose the best weights by held-out acceptance, save them with a model card.

    Raises:
        DataError: too little text. SettingsError: ConFu without a head to start from.
    """
    conversations, held_out = load_conversations(target, list(recipe.data))
    if len(conversations) < 2 or not held_out:
        raise DataError(
            f"Only {len(conversations)} conversations to train on and {len(held_out)} held out. "
            "Write more text with `python -m confu_core synth`."
        )
    head, contemplation, start_facts = _modules(target, recipe, conversations)
    facts = {
        "command": recipe.command,
        "settings": asdict(recipe.settings),
        "precision": recipe.precision,
        "start": recipe.start.name if recipe.start else None,
        "start_facts": start_facts,
        "conversations": len(conversations),
        "answer_tokens": sum(len(c.ids) - c.answer_start for c in conversations),
        "held_out_conversations": len(held_out),
        "data_sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in recipe.data
        },
        "draft_vocabulary_coverage": round(
            coverage(held_out, head.target_ids(torch.arange(head.shape.draft_vocab))), 4
        ),
    }
    tokens = sum(len(c.ids) for c in [*conversations, *held_out])
    store, size = open_store(recipe.features, target, tokens, contemplation is not None)
    if is_main_process():
        report(facts)
        report({"features": size})
    for row in train(
        target,
        head,
        contemplation,
        conversations,
        held_out,
        recipe.settings,
        recipe.run,
        recipe.precision,
        store,
    ):
        report(row)
    if not is_main_process():
        return
    # From the log, since an earlier session of this run may have found the best weights.
    log = (recipe.run / "log.jsonl").read_text(encoding="utf-8").splitlines()
    reports = [row for row in map(json.loads, log) if "held_out" in row]
    best = max(reports, key=lambda row: row["held_out"]["tau_top8"])
    seconds = sum(row.get("seconds", 0) for row in map(json.loads, log))
    facts |= {
        "chosen_step": best["step"],
        "held_out": best["held_out"],
        "minutes": round(seconds / 60, 1),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s), torch "
        f"{torch.__version__}",
    }
    if contemplation is not None and contemplation.shape.read_outs:
        trainee = DraftTrainee(target, head, contemplation, store)
        accelerator = Accelerator(cpu=target.device.type == "cpu", mixed_precision=recipe.precision)
        facts["read_outs"] = fit_read_outs(trainee, held_out, accelerator)
        facts["held_out"] = evaluate(trainee, held_out, accelerator)
    save_checkpoint(recipe.save, head, contemplation, target, facts)
    if contemplation is not None:
        fit_basis(target, head, contemplation, held_out).save(recipe.save / "basis.json")
    write_card(recipe.save)


def profile_run(target: Target, recipe: Recipe, steps: int) -> Profile:
    """Where the time of this recipe's steps goes. No head is written."""
    conversations, _ = load_conversations(target, list(recipe.data))
    head, contemplation, _ = _modules(target, recipe, conversations)
    tokens = sum(len(c.ids) for c in conversations)
    store, _ = open_store(recipe.features, target, tokens, contemplation is not None)
    trainee = DraftTrainee(target, head, contemplation, store)
    return profile(trainee, conversations, recipe.settings, steps)


def process_device() -> str:
    """The device of this process under `accelerate launch`, which sets these variables: a GPU of
    its own if there are any. "auto" for a process alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return "auto"


def is_main_process() -> bool:
    """Whether this process is the one that reports and saves."""
    return os.environ.get("RANK", "0") == "0"


def _modules(
    target: Target, recipe: Recipe, conversations: list
) -> tuple[DraftHead, Contemplation | None, dict | None]:
    """The modules to train, and the training record of the head that they start from."""
    seed = recipe.settings.seed
    torch.manual_seed(seed)
    if recipe.start is None:
        if recipe.method == "confu":
            raise SettingsError("ConFu starts from an EAGLE-3 head: name one with --start FOLDER.")
        size = min(recipe.draft_vocab, target.vocab)
        vocabulary = draft_vocabulary(conversations, size, set(target.stop_ids))
        return new_head(target, vocabulary), None, None
    start = load_checkpoint(recipe.start, target, torch.float32)
    head, contemplation = start.head.requires_grad_(True), start.contemplation
    if contemplation is not None:
        contemplation.requires_grad_(True)
        if recipe.renew_routers:
            renew_routers(contemplation, start.facts["held_out"], seed)
    elif recipe.method == "confu":
        contemplation = new_contemplation(
            target, head, conversations, seed, **dict(recipe.switches)
        )
    return head, contemplation, start.facts
