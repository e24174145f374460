"""Floors and calibration: counts by hand, statistics on data with known answers, both commands."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from confu_core.__main__ import main
from confu_core.bench import calibration, limits, recorder
from confu_core.bench.limits import Machine, Work, draft_work, target_work
from confu_core.decoding import decode
from confu_core.recording import Recorder
from confu_core.sizes import TargetShape
from confu_core.trace import Seconds, Settings
from tests import fakes
from tests.core.test_main import options

# Counting ----------------------------------------------------------------------------------------


def test_work_of_a_target_pass_by_hand():
    """Two layers, width 4, two query heads and one key head of width 3, MLP 5, vocabulary 7."""
    shape = TargetShape("llama", 2, 4, 2, 1, 3, 5, 7, True)
    layer = 4 * 6 + 4 * 3 + 4 * 3 + 6 * 4 + 3 * 4 * 5  # q, k, v, o and the MLP
    work = target_work(shape, rows=3, scored=2, text=10, width=2)
    cached = 2 * 2 * 10 * 3  # keys and values, layers, tokens, width
    assert work.bytes == 2 * (2 * layer + 7 * 4 + cached)
    scores_and_mix = 2 * (2 * 3 * 13 * 6)  # each two operations, 3 rows by 13 slots by 6
    assert work.operations == 2 * 3 * 2 * layer + 2 * 2 * 7 * 4 + 2 * scores_and_mix


def test_target_counts_are_the_modules(llama):
    """What a pass reads is every matrix of the real model but the input embedding."""
    shape = TargetShape.from_config(llama.model.config.to_dict())
    matrices = [
        p.numel()
        for name, p in llama.model.named_parameters()
        if p.dim() == 2 and "embed" not in name
    ]
    assert target_work(shape, 1, 1, 0, 4).bytes == 4 * sum(matrices)


def test_draft_counts_are_the_modules(head):
    matrices = {n: p.numel() for n, p in head.named_parameters() if p.dim() == 2}
    first = draft_work(head, 1, True, 0, 4)
    later = draft_work(head, 1, False, 0, 4)
    assert first.bytes == 4 * sum(matrices.values())
    assert later.bytes == first.bytes - 4 * matrices["fc.weight"]
    assert draft_work(head, 8, False, 0, 4).bytes == later.bytes
    assert draft_work(head, 1, False, 5, 4).bytes == later.bytes + 4 * 2 * 5 * 2 * 6


def test_floor_is_the_slower_of_reading_and_computing():
    machine = Machine(bytes_per_second=100.0, operations_per_second=1000.0)
    assert machine.floor(Work(200, 500)) == 2.0
    assert machine.floor(Work(200, 5000)) == 5.0
    assert machine.floor(Work(200, 5000) + Work(200, 5000).times(2)) == 15.0


def test_the_machine_is_measured(monkeypatch):
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "PRODUCT_SIZES", (64, 96))
    found = limits.measure_machine(torch.device("cpu"), torch.float32)
    assert found.bytes_per_second > 1e6 and found.operations_per_second > 1e5


def test_what_a_recorder_adds_is_its_time_over_the_rounds_own(llama, prompt, greedy, monkeypatch):
    """A clock that moves only where something is done: 2 seconds a round, 0.5 for its record."""
    method = fakes.half_right(greedy, llama.vocab)
    settings = Settings(max_new_tokens=6, nodes=4)
    rounds = [
        replace(round, seconds=Seconds(0.5, 1.25, 0.25))
        for round in decode(llama, method, prompt, settings)
    ]
    now = [0.0]
    monkeypatch.setattr(recorder, "decode", lambda *_: iter(rounds))
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: now[0])

    def record(self, round):
        now[0] += 0.5 if round.index else 9.0

    monkeypatch.setattr(Recorder, "record", record)
    shares = recorder.recorder_shares(llama, method, prompt, settings)
    assert shares == [0.25] * (len(rounds) - 1) and len(shares) > 1


def test_the_recorder_is_told_of_every_round(llama, prompt, greedy):
    """Else it could not make the records that are timed."""
    method = fakes.half_right(greedy, llama.vocab)
    settings = Settings(max_new_tokens=6, nodes=4)
    rounds = list(decode(llama, method, prompt, settings))
    shares = recorder.recorder_shares(llama, method, prompt, settings)
    assert len(shares) == len(rounds) - 1 and all(share > 0 for share in shares)


# Calibration -------------------------------------------------------------------------------------


def test_judged_nodes_are_those_of_rounds_that_did_not_end_the_run(llama, prompt, greedy):
    settings = Settings(max_new_tokens=20, nodes=9, depth=3, top_k=3)
    rounds = list(decode(llama, fakes.half_right(greedy, llama.vocab), prompt, settings))
    assert rounds[-1].stop == "length"
    assert calibration.judged(rounds[0]) == calibration.judged(rounds[-1]) == []
    hits = 0
    for round in rounds[1:-1]:
        tree = round.draft.tree
        nodes = calibration.judged(round)
        assert [reach for reach, _ in nodes] == [math.exp(score) for score in tree.scores[1:]]
        accepted = [node for node, (_, hit) in enumerate(nodes, 1) if hit]
        assert accepted == list(round.acceptance.path)
        hits += len(accepted)
    assert hits > 3


def test_bins_by_hand():
    nodes = [(0.6, True), (0.7, False), (0.75, True), (0.2, False), (0.001, False), (1.0, True)]
    low, quarter, half, top = calibration.bins_of(nodes)
    assert (low["low"], low["high"], low["nodes"], low["accepted"]) == (0.0, 1 / 128, 1, 0.0)
    assert (quarter["low"], quarter["high"], quarter["predicted"]) == (1 / 8, 1 / 4, 0.2)
    assert half["nodes"] == 3
    assert half["predicted"] == pytest.approx((0.6 + 0.7 + 0.75) / 3, abs=1e-5)
    assert half["accepted"] == pytest.approx(2 / 3, abs=1e-5)
    assert (top["low"], top["nodes"], top["accepted"]) == (0.75, 1, 1.0)


def test_wilsons_interval_against_published_values():
    """Newcombe 1998, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for hits, count, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert calibration.wilson(hits, count) == pytest.approx((low, high), abs=1e-4)


# Commands ----------------------------------------------------------------------------------------


def test_limits_command(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "LAYOUT_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "PRODUCT_SIZES", (64, 96))
    out, page = tmp_path / "limits.json", tmp_path / "page.md"
    common = [*options(folders), "--nodes", "6", "--depth", "2", "--repeats", "1"]
    assert main(["limits", *common, "--json", str(out), "--write", str(page)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    phases = {(p["method"], p["phase"]) for p in found["phases"]}
    assert phases == {
        *(
            (name, phase)
            for name in ("plain", "eagle3", "confu")
            for phase in ("prefill", "verify")
        ),
        *((name, "draft") for name in ("eagle3", "confu")),
    }
    assert all(p["floor_ms"] >= 0 and p["measured_ms"] > 0 for p in found["phases"])
    assert {o["method"] for o in found["loop"]} == {"plain", "eagle3", "confu"}
    assert all(0 < o["rest_share"] < 1 and o["recorder_share"] > 0 for o in found["loop"])
    assert found["transformers_over_plain"]["median"] > 0
    assert [layout["rows"] for layout in found["layouts"]] == list(limits.LAYOUT_ROWS)
    assert all(x["by_input_ms"] > 0 and x["by_output_ms"] > 0 for x in found["layouts"])
    times = [p["ms"] for p in found["passes"]]
    assert found["passes"][0]["rows"] == 1 and times == sorted(times)
    text = page.read_text(encoding="utf-8")
    assert "## Floors in float32" in text and "<!-- floors in float32 -->" in text
    assert capsys.readouterr().out.strip() in text


def test_calibration_command(folders, tmp_path, capsys):
    out, svg, page = (tmp_path / name for name in ("c.json", "c.svg", "page.md"))
    common = [*options(folders), "--nodes", "9", "--depth", "2", "--temperature", "0,1"]
    files = ["--json", str(out), "--svg", str(svg), "--write", str(page)]
    prompts = tmp_path / "questions.jsonl"
    line = {"question_id": 1, "category": "qa", "turns": ["The hen"]}
    prompts.write_text(json.dumps(line) + "\n", encoding="utf-8")
    assert main(["calibration", *common, *files, "--prompts", str(prompts)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["questions"] == 1
    pairs = [(entry["method"], entry["temperature"]) for entry in found["calibration"]]
    assert pairs == [(name, heat) for heat in (0, 1) for name in ("eagle3", "confu")]
    assert all(sum(b["nodes"] for b in entry["bins"]) > 20 for entry in found["calibration"])
    picture = svg.read_text(encoding="utf-8")
    assert picture.startswith("<svg") and "confu, T = 1" in picture
    text = page.read_text(encoding="utf-8")
    assert text.startswith("## Calibration\n") and "eagle3, temperature 0:" in text
    assert capsys.readouterr().out.strip() in text
