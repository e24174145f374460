"""Recipes for large targets: formulas against what torch counts, and the dry run."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from confu_core.__main__ import main
from confu_core.errors import DataError
from confu_core.sizes import TargetShape
from confu_core.target import Target
from confu_core.train import dryrun, store
from confu_core.train.data import Conversation, batches
from confu_core.train.features import FeatureReader
from confu_core.train.init import new_contemplation, new_head
from confu_core.train.loop import TrainSettings, total_loss
from confu_core.train.losses import DraftTrainee
from confu_core.train.plan import (
    STAGES,
    Step,
    estimate,
    load_plan,
    recipe_names,
    step_of,
)
from tests.fakes import tiny_target

LENGTH, ANSWER, COUNT, DRAFT_VOCAB, UNROLL, EVERY, SOFT = 64, 48, 6, 120, 3, 2, 5


def test_there_is_a_recipe_for_each_target():
    assert recipe_names() == ["llama-3.1-8b", "llama-3.2-3b", "qwen3-4b"]


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_fit_their_machine_and_take_hours(name):
    plan = load_plan(name)
    assert plan.machine.gpus == 8 and plan.licence
    for stage in STAGES:
        found = estimate(plan, stage)
        assert 15 < found.memory_gb < plan.machine.memory_gb
        assert 0.5 < found.hours < 24 and 2 < found.epochs < 20


def test_the_size_in_a_recipes_name_is_the_one_that_is_counted():
    sizes = {name: round(load_plan(name).shape.parameters / 1e9) for name in recipe_names()}
    assert sizes == {"llama-3.1-8b": 8, "llama-3.2-3b": 3, "qwen3-4b": 4}


def test_time_follows_from_operations_and_machine():
    plan = load_plan("qwen3-4b")
    found = estimate(plan, "eagle3")
    faster = replace(plan, machine=replace(plan.machine, peak_tflops=2 * plan.machine.peak_tflops))
    assert estimate(faster, "eagle3").hours == pytest.approx(found.hours / 2)
    fewer = replace(plan, machine=replace(plan.machine, gpus=4))
    assert estimate(fewer, "eagle3").flops == pytest.approx(found.flops / 2)
    assert estimate(fewer, "eagle3").hours == pytest.approx(found.hours)


# ---- Formulas against a real step ----------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def real(request):
    """A tiny target, conversations of equal length, and the step that describes them."""
    target = tiny_target(request.param, hidden_size=64, intermediate_size=96, head_dim=16)
    dice = random.Random(0)
    texts = [tuple(dice.randrange(target.vocab) for _ in range(LENGTH)) for _ in range(COUNT)]
    conversations = [Conversation(ids, LENGTH - ANSWER, "") for ids in texts]
    starts = COUNT * (ANSWER - 1)
    step = Step(
        target=TargetShape.from_config(target.model.config.to_dict()),
        draft_vocab=DRAFT_VOCAB,
        tokens=COUNT * LENGTH,
        length=LENGTH,
        starts=starts,
        unroll=UNROLL,
    )
    return target, conversations, step


def trainee_of(target, conversations, confu: bool) -> DraftTrainee:
    vocabulary = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    head = new_head(target, vocabulary)
    part = None
    if confu:
        part = new_contemplation(target, head, conversations, 0, soft_prompts=SOFT)
    trainee = DraftTrainee(target, head, part)
    trainee.known[:] = True  # every start counts, whatever a random target would say
    return trainee


def loss_of(trainee, conversations) -> torch.Tensor:
    batch = next(batches(conversations, 10**6, seed=None))
    result = trainee(batch, UNROLL, random.Random(0), EVERY, True)
    return total_loss(result, TrainSettings(steps=1))


def described(step: Step, confu: bool) -> Step:
    return replace(step, anchors=step.starts / EVERY, soft_prompts=SOFT) if confu else step


@pytest.mark.parametrize("confu", [False, True], ids=["eagle3", "confu"])
def test_operations_are_those_that_torch_counts(real, confu):
    target, conversations, step = real
    trainee = trainee_of(target, conversations, confu)
    with FlopCounterMode(display=False) as counter:
        loss_of(trainee, conversations).backward()
    formula = described(step, confu).flops
    assert formula == pytest.approx(counter.get_total_flops(), rel=0.2)


@pytest.mark.parametrize("confu", [False, True], ids=["eagle3", "confu"])
def test_memory_for_backward_is_near_what_is_saved(real, confu):
    """In bfloat16, as a run is."""
    shared, conversations, step = real
    model = copy.deepcopy(shared.model).to(torch.bfloat16)
    target = Target(model, shared.tokenizer, "tiny")
    trainee = trainee_of(target, conversations, confu)
    mine = {p.data_ptr() for p in [*trainee.parameters(), *target.model.parameters()]}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        loss = loss_of(trainee, conversations)
    assert loss.requires_grad
    rows = described(step, confu).memory(0, 1, 0)
    formula = sum(value for name, value in rows.items() if name.startswith("saved"))
    assert 0.5 < formula / sum(saved.values()) < 2


def test_features_stay_only_as_far_as_there_is_room(real, monkeypatch):
    target, conversations, _ = real
    trainee = trainee_of(target, conversations, False).train()
    batch = next(batches(conversations, 10**6, seed=None))
    full = trainee.reader.read(batch, remember=False)
    each = trainee.reader.store._bytes // COUNT
    again = trainee.reader.read(batch, remember=False)
    assert torch.equal(full.taps, again.taps)
    monkeypatch.setattr(store, "KEPT_BYTES", each)
    bounded = FeatureReader(target, store.Memory())
    for _ in range(2):
        assert torch.equal(bounded.read(batch, remember=False).taps, full.taps)
    assert len(bounded.store._kept) == 1


# ---- The dry run ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", recipe_names())
def test_first_steps_of_the_stand_in_learn(name, stage):
    plan, told = load_plan(name), []
    losses = dryrun.first_steps(plan, stage, told.append)
    assert len(losses) == dryrun.STEPS and losses[-1] < losses[0]
    assert plan.config["model_type"] in told[0]


def test_the_stand_in_keeps_the_familys_switches():
    plan = load_plan("llama-3.1-8b")
    config = dryrun.stand_in_config(plan)
    assert config["rope_parameters"]["rope_type"] == "llama3"
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 8
    target = dryrun._target(config, "stand-in", seed=0)
    qwen = dryrun._target(dryrun.stand_in_config(load_plan("qwen3-4b")), "stand-in", seed=0)
    assert not hasattr(target.model.model.layers[0].self_attn, "q_norm")
    assert hasattr(qwen.model.model.layers[0].self_attn, "q_norm")


def test_a_dry_run_tells_size_memory_time_and_steps(capsys):
    assert main(["train", "confu", "--recipe", "llama-3.2-3b", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "target meta-llama/Llama-3.2-3B-Instruct: 3.21 billion parameters, frozen",
        "features (1, 4, 9216), logits (1, 4, 32000)",
        "contemplation:",
        "memory, in all:",
        "hours on 8 x A100 80 GB",
        "first steps of a llama stand-in",
        "dry run: all is well",
    ):
        assert words in printed


def test_what_does_not_fit_is_said_and_exit_code_1(capsys):
    arguments = ["--recipe", "llama-3.1-8b", "--dry-run", "--batch-tokens", "65536"]
    assert main(["train", "eagle3", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "does NOT fit: choose a smaller --batch-tokens" in printed


def recipe_file(tmp_path, change) -> str:
    value = json.loads(json.dumps(_raw("qwen3-4b")))
    change(value)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return str(path)


def _raw(name: str) -> dict:
    from confu_core.train.plan import RECIPES

    return json.loads((RECIPES / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["train"]["eagle3"].update(stepz=3), "does not know: stepz"),
        (lambda v: v.pop("machine"), "is not a training recipe"),
        (lambda v: v["config"].pop("vocab_size"), "vocab_size"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path, capsys, change, message):
    path = recipe_file(tmp_path, change)
    assert main(["train", "eagle3", "--recipe", path, "--dry-run"]) == 1
    assert message in capsys.readouterr().err


def test_a_recipe_sets_defaults_and_options_win(monkeypatch, tmp_path):
    seen = {}

    def stop(options):
        seen.update(vars(options))

    monkeypatch.setattr("confu_core.__main__._dry_run", stop)
    main(["train", "confu", "--recipe", "qwen3-4b", "--dry-run", "--steps", "7"])
    assert seen["steps"] == 7 and seen["target"] == "Qwen/Qwen3-4B"
    assert seen["unroll"] == 5 and seen["contemplate_rate"] == 3e-3


def test_a_run_without_data_says_what_it_needs(capsys):
    assert main(["train", "eagle3", "--steps", "3"]) == 1
    assert "needs --data, --run-folder, --save." in capsys.readouterr().err
    assert main(["train", "eagle3", "--dry-run"]) == 1
    assert "name one with --recipe" in capsys.readouterr().err
    with pytest.raises(DataError, match="one of: llama-3"):
        load_plan("llama-99")


def test_the_step_of_a_stage_counts_its_anchors():
    plan = load_plan("qwen3-4b")
    assert step_of(plan, "eagle3").anchors == 0
    confu = step_of(plan, "confu")
    assert confu.anchors == pytest.approx(confu.starts / 3)
    assert confu.starts == pytest.approx(8192 * 300 / 400)
