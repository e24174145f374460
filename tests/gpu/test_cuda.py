"""What only a GPU shows. `scripts/gpu_check.sh` runs these; elsewhere they skip and are counted."""

from __future__ import annotations

import random

import pytest
import torch

from confu_core import presets
from confu_core.bench.questions import OWN, load_questions, spread
from confu_core.checkpoints import save_checkpoint
from confu_core.compare import Engine, load_engine
from confu_core.methods import PLAIN
from confu_core.target import Target
from confu_core.trace import Settings
from confu_core.train.data import Conversation, batches
from confu_core.train.init import new_contemplation, new_head
from confu_core.train.loop import TrainSettings, parameter_groups, total_loss
from confu_core.train.losses import DraftTrainee
from tests.fakes import method, tiny_contemplation, tiny_head, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.gpu

NEAR_TIE = 0.5  # logits; more than bfloat16 can move a margin


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target and both heads on disk, to be loaded onto the GPU as real ones are."""
    root = tmp_path_factory.mktemp("gpu")
    tiny_model().save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    target = load_engine(str(root / "target"), "cpu").target
    head = tiny_head(target)
    save_checkpoint(root / "eagle3", head, None, target, {})
    save_checkpoint(root / "confu", head, tiny_contemplation(target, head), target, {})
    return root


def engine_on(device: str, folder, dtype: str = "float32") -> Engine:
    heads = {name: folder / name for name in ("eagle3", "confu")}
    return load_engine(str(folder / "target"), device, None, dtype, heads)


def on_gpu(dtype: torch.dtype) -> Target:
    return Target(tiny_model().to("cuda", dtype), tiny_tokenizer(), "tiny")


def run(engine: Engine, **settings):
    *_, last = engine.compare("The user and the hen", Settings(**settings))
    return last.trace


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_three_methods_write_one_text(folder, temperature):
    trace = run(engine_on("cuda", folder), max_new_tokens=60, temperature=temperature, seed=3)
    assert trace.target.device == "cuda" and not trace.differences()
    assert all(lane.error is None for lane in trace.lanes.values())


def test_the_gpu_writes_what_the_cpu_writes(folder):
    one, two = (run(engine_on(device, folder), max_new_tokens=40) for device in ("cpu", "cuda"))
    assert one.lanes["plain"].tokens[:8] == two.lanes["plain"].tokens[:8]


def test_memory_is_flat_over_many_runs(folder):
    engine = engine_on("cuda", folder)
    run(engine, max_new_tokens=20)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(20):
        events = engine.compare("The hen", Settings(max_new_tokens=20, seed=number))
        for _ in range(5 if number % 3 == 0 else 10**6):  # a third are left in the middle
            if next(events, None) is None:
                break
        events.close()
    assert torch.cuda.memory_allocated() == before


def test_a_dropped_model_gives_its_memory_back(folder):
    before = torch.cuda.memory_allocated()
    engine = engine_on("cuda", folder)
    assert torch.cuda.memory_allocated() > before
    del engine
    presets.free_memory()
    assert torch.cuda.memory_allocated() == before


def test_near_ties_in_bfloat16_are_measured(default_target, trained, record_property):
    """Texts may differ from plain decoding's only where the target's two best are nearly tied."""
    engine = load_engine(None, "cuda", None, "bfloat16")
    differing = []
    questions = spread(load_questions(OWN), 6)
    for question in questions:
        *_, last = engine.compare(question.turns[0], Settings(max_new_tokens=48))
        differing += last.trace.differences()
    margins = sorted(found.margin for found in differing)
    record_property("margins", margins)
    print(f"{len(differing)} texts of {2 * len(questions)} differ; margins {margins}")
    assert all(margin < NEAR_TIE for margin in margins)


def test_the_default_target_is_lossless_in_float32(default_target, trained):
    engine = load_engine(None, "cuda")
    *_, last = engine.compare("Name three rivers.", Settings(max_new_tokens=48))
    found = last.trace.differences()
    assert all(difference.margin < 1e-3 for difference in found)


@pytest.mark.parametrize("confu", [False, True], ids=["eagle3", "confu"])
def test_a_training_step_learns(confu):
    target = on_gpu(torch.bfloat16)
    dice = random.Random(0)
    texts = [tuple(dice.randrange(target.vocab) for _ in range(48)) for _ in range(4)]
    conversations = [Conversation(ids, 8, "") for ids in texts]
    head = new_head(target, torch.arange(0, 200, 2)).to("cuda")
    part = None
    if confu:
        part = new_contemplation(target, head, conversations, 0).to("cuda")
    trainee = DraftTrainee(target, head, part).to("cuda")
    settings = TrainSettings(steps=8)
    optimiser = torch.optim.AdamW(parameter_groups(head, part, settings))
    losses = []
    for _ in range(8):
        optimiser.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            batch = next(batches(conversations, 10**6, seed=None))
            loss = total_loss(trainee(batch, 3, random.Random(0), 3, True), settings)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_random_heads_in_half_precision_end_with_finite_numbers():
    target = on_gpu(torch.float16)
    head = tiny_head(target).to("cuda", torch.float16)
    methods = {"plain": PLAIN, "eagle3": method(head)}
    *_, last = Engine(target, methods, {}).compare(
        "The hen", Settings(max_new_tokens=24, temperature=5.0), ("plain", "eagle3")
    )
    assert all(lane.error is None for lane in last.trace.lanes.values())
