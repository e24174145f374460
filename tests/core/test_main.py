"""The command line, on a tiny target in a folder: what it prints, and how it fails."""

from __future__ import annotations

import json

import pytest

from confu_core.__main__ import main
from confu_core.trace import Trace


def options(folders) -> list[str]:
    return [
        *("--target", str(folders / "target")),
        *("--eagle3", str(folders / "eagle3")),
        *("--confu", str(folders / "confu")),
        *("--device", "cpu", "--max-new-tokens", "10"),
    ]


@pytest.mark.parametrize("command", [["train", "eagle3"], ["ablate"]])
def test_training_takes_one_device(folders, tmp_path, capsys, command):
    paths = [f"--{name}={tmp_path / name}" for name in ("data", "run-folder", "save")]
    model = ["--target", str(folders / "target"), "--device", "spread", "--steps", "1"]
    assert main([*command, *paths, *model]) == 1
    assert "Training needs the target on one device" in capsys.readouterr().err


def test_the_target_writes_the_same_text_when_it_is_spread(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("confu_core.train.synth.ANSWER_TOKENS", 9)
    prompts = tmp_path / "prompts"
    prompts.write_text("The hen\nand the user of the hen\nand\n", encoding="utf-8")
    for device in ("cpu", "spread"):
        files = ["--prompts", str(prompts), "--out", str(tmp_path / device)]
        model = ["--target", str(folders / "target"), "--device", device, "--dtype", "float32"]
        assert main(["synth", *files, *model]) == 0
    texts = [(tmp_path / device).read_text(encoding="utf-8") for device in ("cpu", "spread")]
    assert texts[0] == texts[1] and len(texts[0].splitlines()) == 3


def test_compare_prints_three_equal_texts_and_writes_both_files(folders, tmp_path, capsys):
    figures, out = tmp_path / "figures.json", tmp_path / "run.json"
    files = ["--json", str(figures), "--trace", str(out)]
    assert main(["compare", "The hen", *files, *options(folders)]) == 0
    printed = capsys.readouterr().out
    assert "same text: yes, token for token" in printed
    assert "| EAGLE-3 | 10 |" in printed
    trace = Trace.from_json(out.read_text(encoding="utf-8"))
    assert list(trace.lanes) == ["plain", "eagle3", "confu"]
    assert [len(lane.tokens) for lane in trace.lanes.values()] == [10, 10, 10]
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert set(found) == {"prompt", "settings", "identical", "methods"}
    assert found["identical"] is True
    fields = {"text", "tokens", "tau", "target_passes", "seconds"}
    assert all(set(method) == fields for method in found["methods"].values())
    assert found["methods"]["plain"]["target_passes"] == 9  # the prefill gives the first token


@pytest.mark.parametrize("name", ["plain", "eagle3", "confu"])
def test_run_streams_the_text_that_compare_shows(folders, tmp_path, capsys, name):
    out = tmp_path / "run.json"
    arguments = ["run", "The hen", "--method", name, "--trace", str(out), *options(folders)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    trace = Trace.from_json(out.read_text(encoding="utf-8"))
    assert printed.out == trace.lanes[name].text + "\n"
    assert "10 tokens" in printed.err


def test_a_lane_that_fails_is_not_exit_code_0(folders, capsys, monkeypatch):
    import torch

    from confu_core.drafter import EagleDrafter

    def full(*arguments, **others):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(EagleDrafter, "draft", full)
    assert main(["compare", "The hen", *options(folders)]) == 1
    assert "ran out of memory" in capsys.readouterr().out
    assert main(["run", "The hen", "--method", "confu", *options(folders)]) == 1
    assert "ran out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("source", ["no/where/at/all", "./absent"])
def test_a_head_that_is_nowhere_is_named(folders, capsys, source):
    where = ["--target", str(folders / "target"), "--eagle3", source]
    assert main(["compare", "The hen", *where]) == 1
    assert "There is no folder" in capsys.readouterr().err


def test_compare_leaves_out_a_method_without_a_head(folders, capsys):
    short = [o for o in options(folders) if o not in ("--confu", str(folders / "confu"))]
    assert main(["compare", "The hen", *short]) == 0
    assert "--- ConFu" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "Tree size is 0, but must be between 1"),
        (["--temperature", "-1"], "Temperature is -1"),
        (["--methods", "medusa"], "Method 'medusa' is not available"),
        (["--dtype", "int8"], "Precision 'int8' is not supported"),
    ],
)
def test_errors_are_one_sentence_and_exit_code_1(folders, capsys, arguments, message):
    assert main(["compare", "The hen", *options(folders), *arguments]) == 1
    errors = capsys.readouterr().err.strip().splitlines()
    assert (message in errors[-1] and errors[-1].startswith("error: ")) or message in errors[-1]
    assert not any("Traceback" in line for line in errors)


def test_an_empty_prompt_is_refused(folders, capsys):
    assert main(["compare", "  ", *options(folders)]) == 1
    assert "The prompt is empty" in capsys.readouterr().err


def test_a_confu_head_is_not_an_eagle3_head(folders, capsys):
    wrong = ["--target", str(folders / "target"), "--eagle3", str(folders / "confu")]
    assert main(["compare", "The hen", *wrong]) == 1
    assert "not one for 'eagle3'" in capsys.readouterr().err


def test_bench_writes_what_it_prints(folders, tmp_path, capsys):
    questions = tmp_path / "q.jsonl"
    questions.write_text(
        json.dumps({"question_id": 1, "category": "qa", "turns": ["The hen"]}), encoding="utf-8"
    )
    out = tmp_path / "bench.json"
    arguments = ["bench", "--prompts", str(questions), "--json", str(out), *options(folders)]
    assert main(arguments) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["overall"]["plain"]["tau"] == 1.0
    assert f"| confu | 1 | {result['overall']['confu']['tau']:.2f} |" in capsys.readouterr().out
