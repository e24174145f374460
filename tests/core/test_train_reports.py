"""What surrounds a training run: ablations, curves, request files, and several processes."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from confu_core.charts import Series, line_chart, ticks
from confu_core.checkpoints import load_checkpoint, parts, save_checkpoint
from confu_core.errors import DataError
from confu_core.train import readouts
from confu_core.train.ablate import VARIANTS, ablate, table
from confu_core.train.curve import curve, per_doubling, read_series
from confu_core.train.data import Conversation, load_conversations
from confu_core.train.loop import TrainSettings, evaluate, total_loss
from confu_core.train.losses import DraftTrainee, Opinions
from confu_core.train.profile import PHASES, profile
from confu_core.train.run import Recipe
from confu_core.train.synth import read_prompts
from tests import fakes
from tests.core.distributed_step import modules, own_batch

# Several processes -------------------------------------------------------------------------------


def test_two_processes_give_the_gradient_of_one(llama, tmp_path):
    """accelerate over two CPU processes: the mean of both batches' gradients, everywhere.

    Started by torch's launcher: `accelerate launch` starts several CPU processes only over MPI.
    """
    out = tmp_path / "gradients.safetensors"
    script = Path(__file__).with_name("distributed_step.py")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    subprocess.run(
        [*launch, str(script), str(out)],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    found = load_file(out)
    assert int(found.pop("processes")) == 2
    head, part = modules(llama)
    trainee = DraftTrainee(llama, head, part).train()
    losses = [
        total_loss(
            trainee(own_batch(llama, index), 3, random.Random(index), 2, True),
            TrainSettings(steps=1),
        )
        for index in range(2)
    ]
    (sum(losses) / 2).backward()
    wanted = {n: p.grad for n, p in parts(head, part).named_parameters() if p.grad is not None}
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


# Ablations ---------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.jsonl"
    rows = [{"user": f"request number {n}", "assistant": "the user and the hen"} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_ablation_trains_its_variants_once(llama, head, text, tmp_path):
    save_checkpoint(tmp_path / "base", head, None, llama, {})
    recipe = Recipe(
        method="confu",
        data=(text,),
        settings=TrainSettings(steps=2, batch_tokens=200, unroll=2, warmup=1),
        run=tmp_path / "runs",
        save=tmp_path / "heads",
        start=tmp_path / "base",
        precision="no",
        command="a command",
    )
    names = ["control", "static", "no-replication", "full"]
    reports = []

    def report(name, row):
        reports.append(name)

    figures = dict(ablate(llama, recipe, names, report))
    assert list(figures) == names
    assert set(reports) == set(names)
    loaded = {name: load_checkpoint(tmp_path / "heads" / name, llama) for name in names}
    assert loaded["control"].contemplation is None
    assert loaded["static"].contemplation.shape.contemplate_experts == 1
    assert loaded["full"].contemplation.adapters is not None
    assert loaded["full"].contemplation.shape.read_outs == 3
    trained = {name: head.facts["settings"]["replicate"] for name, head in loaded.items()}
    assert trained == dict.fromkeys(names, True) | {"no-replication": False}

    reports.clear()
    assert dict(ablate(llama, recipe, names, report)) == figures
    assert not reports, "what is done is not trained again"


def test_the_table_compares_with_the_control():
    row = {"tau_chain": 2.0, "tau_top8": 3.0, "top1": [0.5, 0.4, 0.3], "n": 1234}
    figures = {"control": row, "full": row | {"tau_chain": 2.1, "tau_top8": 2.97}}
    lines = table(figures).splitlines()
    assert lines[2] == (
        f"| {VARIANTS['control'].what} | 2.000 | 3.000 | 0.500 | 0.400 | 0.300 | 1,234 |"
    )
    assert "| 2.100 (+5.0 %) | 2.970 (-1.0 %) |" in lines[3]
    assert "%" not in table({"full": row})


def test_the_papers_own_data_flow_is_a_variant():
    assert VARIANTS["entry-only"].switches == {"future_query": False}
    assert VARIANTS["control"].method == "eagle3"


# Routers -----------------------------------------------------------------------------------------


def test_router_usage_per_group(llama, head):
    """Forced routers: known weights come back, padding counts for nothing, entropy in bits."""
    part = fakes.tiny_contemplation(llama, head, top_k=2)
    with torch.no_grad():
        for mixture in (part.contemplate, part.future):
            mixture.router.weight.zero_()
            mixture.router.bias.copy_(torch.arange(len(mixture.experts)) * -10.0)
            mixture.router.bias[1] = 0.0  # experts 0 and 1 in equal parts, whatever the state
    dice = random.Random(0)
    held_out = [
        Conversation(tuple(dice.randrange(5, llama.vocab) for _ in range(length)), 6, kind)
        for length, kind in ((14, "math"), (30, "qa"), (20, "math"))
    ]
    report = evaluate(DraftTrainee(llama, head, part), held_out, steps=2)
    assert report["contemplate_experts"] == [0.5, 0.5, 0, 0, 0]
    assert report["future_experts_by_group"] == {"math": [0.5, 0.5, 0, 0], "qa": [0.5, 0.5, 0, 0]}
    assert report["contemplate_experts_entropy"] == 1.0


def test_without_routers_there_is_no_usage(llama, head):
    held_out = [Conversation(tuple(range(10, 30)), 6, "math")]
    report = evaluate(DraftTrainee(llama, head, None), held_out, steps=2)
    assert not any("experts" in name for name in report)


# Curves ------------------------------------------------------------------------------------------


def log(folder: Path, *rows: dict) -> Path:
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def trained(starts: int) -> dict:
    return {"positions_per_second": starts // 10, "seconds": 10}


def judged(tau: float) -> dict:
    return {"held_out": {"tau_top8": tau, "tau_chain": 1.0}}


def test_a_curve_runs_over_runs_that_continue_one_another(tmp_path):
    first = log(tmp_path / "a", trained(100_000), judged(2.0), trained(100_000), judged(2.5))
    second = log(tmp_path / "b", trained(200_000), judged(3.0))
    points = curve([first, second])
    assert [starts for starts, _ in points] == pytest.approx([0.1, 0.2, 0.4])
    assert [tau for _, tau in points] == [2.0, 2.5, 3.0]
    assert per_doubling(points) == pytest.approx(0.5)
    assert read_series(f"both={first}+{second}", "tau_chain").points[-1] == pytest.approx((0.4, 1))


def test_bad_curves_say_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="not the folder of a training run"):
        curve([tmp_path])
    with pytest.raises(DataError, match="NAME=FOLDER"):
        read_series("just a name", "tau_top8")
    folder = log(tmp_path / "a", trained(10))
    with pytest.raises(DataError, match="not been evaluated"):
        read_series(f"a={folder}", "tau_top8")
    with pytest.raises(DataError, match="two different"):
        per_doubling([(1.0, 2.0), (1.0, 3.0)])


def test_a_chart_is_well_formed_and_escapes_names():
    lines = [Series("<b>", [(0, 1.0), (1, 2.0)]), Series("two", [(0.5, 1.5)])]
    picture = ElementTree.fromstring(line_chart(lines, title="T & t", x="x", y="y", diagonal=True))
    spoken = {node.text for node in picture.iter() if node.text and node.text.strip()}
    assert {"<b>", "two", "T & t", "x", "y"} <= spoken
    assert sum(node.tag.endswith("circle") for node in picture.iter()) == 3
    with pytest.raises(ValueError, match="at least one point"):
        line_chart([Series("none", [])], title="", x="", y="")


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.42, 3.1, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]),
        (2.0, 2.0, [2.0, 2.5, 3.0]),
    ],
)
def test_ticks_are_round_and_enclose(low, high, wanted):
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) <= 9
    if wanted[0] != 2.0:
        assert found == pytest.approx(wanted)


# Request files -----------------------------------------------------------------------------------


def test_request_files_may_be_lines_or_json(tmp_path):
    path = tmp_path / "requests"
    path.write_text('Why?\n\n{"user": "Two\\nlines", "kind": "qa"}\n{"user": "x"}\n')
    assert read_prompts(path) == [("", "Why?"), ("qa", "Two\nlines"), ("", "x")]


@pytest.mark.parametrize("line", ['{"user": 1}', '{"text": "x"}', '{"user"'])
def test_damaged_request_files_are_named(tmp_path, line):
    path = tmp_path / "requests"
    path.write_text(f"Why?\n{line}\n")
    with pytest.raises(DataError, match="line 2"):
        read_prompts(path)


def test_empty_and_missing_request_files_are_refused(tmp_path):
    path = tmp_path / "requests"
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(path)
    path.write_text("\n\n")
    with pytest.raises(DataError, match="no requests"):
        read_prompts(path)


def test_packed_text_is_the_same_text(llama, text):
    packed = text.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(text.read_bytes()))
    assert load_conversations(llama, [packed]) == load_conversations(llama, [text])
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        load_conversations(llama, [packed])


@pytest.mark.parametrize("contemplates", [False, True])
def test_a_step_does_little_more_than_it_needs(contemplates):
    """By torch's count against ours, on sizes where attention and padding weigh little."""
    llama = fakes.tiny_target()
    head = fakes.tiny_head(llama).requires_grad_(True)
    part = fakes.tiny_contemplation(llama, head).requires_grad_(True) if contemplates else None
    dice = random.Random(0)
    texts = [tuple(dice.randrange(llama.vocab) for _ in range(60)) for _ in range(12)]
    conversations = [Conversation(text, 6, "") for text in texts]
    settings = TrainSettings(steps=3, batch_tokens=240, unroll=3)
    found = profile(DraftTrainee(llama, head, part), conversations, settings, steps=2)
    assert found.steps == 2 and found.starts == 2 * 4 * 53
    assert 0.8 < found.done / found.needed < 1.5
    assert set(found.seconds) == set(PHASES) and min(found.seconds.values()) >= 0
    assert (found.seconds["contemplation"] > 0) == contemplates
    assert "times what is needed" in found.markdown()


def test_read_outs_are_fitted_as_if_each_value_were_tried_alone(llama):
    """The factor with the best sum of both taus, then the temperature with the least loss."""
    head = fakes.tiny_head(llama)
    part = fakes.tiny_contemplation(llama, head, read_outs=2)
    with torch.no_grad():
        part.read_out_weight.copy_(torch.tensor([0.5, 0.2]))
        part.turns.normal_(std=0.3)
    trained = part.read_out_weight.detach().clone()
    dice = random.Random(1)
    texts = [tuple(dice.randrange(llama.vocab) for _ in range(40)) for _ in range(6)]
    conversations = [Conversation(text, 6, "") for text in texts]
    trainee, accelerator = DraftTrainee(llama, head, part), Accelerator(cpu=True)

    alone = {}
    for factor in readouts.FACTORS:
        part.read_out_weight.data.copy_(factor * trained)
        report = evaluate(trainee, conversations, accelerator)
        alone[str(factor)] = [report["tau_chain"], report["tau_top8"]]
    part.read_out_weight.data.copy_(trained)
    found = readouts.fit_read_outs(trainee, conversations, accelerator)

    (factor,), (temperature,) = found["factor"].pop("chosen"), found["temperature"].pop("chosen")
    assert found["factor"].keys() == alone.keys()
    for factor_tried, taus in alone.items():
        assert found["factor"][factor_tried] == pytest.approx(taus, abs=2e-4)
    assert sum(alone[str(factor)]) == max(map(sum, alone.values()))
    assert found["temperature"][str(temperature)] == min(found["temperature"].values())
    assert len(set(map(tuple, alone.values()))) > 1 and len(found["temperature"]) > 3
    assert part.shape.read_out_temperature == temperature
    torch.testing.assert_close(part.read_out_weight.detach(), factor * trained)


def test_the_fitted_temperature_is_the_true_one(llama):
    """Opinions whose tokens are drawn at a temperature: that one has the least loss."""
    head = fakes.tiny_head(llama)
    part = fakes.tiny_contemplation(llama, head, read_outs=1)
    with torch.no_grad():
        part.read_out_weight.fill_(1.0)
    trainee = DraftTrainee(llama, head, part)
    trials = readouts._Trials(trainee)
    generator = torch.Generator().manual_seed(0)
    draft, read_out = (torch.randn(4000, head.shape.draft_vocab, generator=generator) * 2,) * 2
    chances = ((draft + read_out) / 1.3).softmax(-1)
    drawn = chances.multinomial(1, generator=generator).squeeze(-1)
    told = torch.ones(len(draft), dtype=torch.bool)
    known = Opinions(draft, told, read_out, torch.zeros(len(draft), dtype=torch.long))
    trials.judge(0, known, trainee.vocabulary[drawn])
    assert min(readouts.TEMPERATURES, key=lambda t: trials.loss(1.0, t)) == 1.3
