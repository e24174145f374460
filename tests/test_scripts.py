"""The shell scripts for a GPU, as far as a CPU runs them: well-formed, and the whole path small."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_strict_and_executable(path):
    assert "\nset -euo pipefail\n" in path.read_text(encoding="utf-8")
    assert os.access(path, os.X_OK)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path):
    beside = Path(sys.executable).with_name("shellcheck")  # where pip puts it
    program = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (requirements-dev.txt has it)")
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny target with room for long prompts, and both heads, as folders."""
    from tests.fakes import write_models

    return write_models(tmp_path_factory.mktemp("models"), max_position_embeddings=8192)


def call(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / script), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHON": sys.executable, "CONFU_HOME": "/nonexistent"},
        timeout=1500,
        check=False,
    )


def test_gpu_check_writes_a_report(folders, tmp_path):
    model = [
        part for name in ("target", "eagle3", "confu") for part in (f"--{name}", folders / name)
    ]
    done = call("gpu_check.sh", "--cpu-smoke", "--out", str(tmp_path), *map(str, model))
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stdout + report
    assert report.count("exit code 0") == 4
    assert "skipped" in report and "no CUDA device" in report
    assert "first_token_ms" in report
    for dtype in ("float32", "bfloat16"):
        result = json.loads((tmp_path / f"bench-{dtype}.json").read_text(encoding="utf-8"))
        assert result["overall"]["plain"]["tau"] == 1.0


def test_gpu_train_writes_text_trains_and_goes_on(folders, tmp_path):
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = ["eagle3", "--cpu-smoke", "--seconds", "1200", "--target", str(folders / "target")]
    arguments += ["--out", str(out), "--work", str(work)]
    done = call("gpu_train.sh", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((out / "checkpoint" / "config.json").read_text(encoding="utf-8"))
    assert config["kind"] == "eagle3"
    packed = b"".join(path.read_bytes() for path in sorted(out.glob("text.jsonl.gz.*")))
    text = gzip.decompress(packed)
    assert text == (work / "text.jsonl").read_bytes() and len(text.splitlines()) >= 48
    assert all(p.stat().st_size < 16_000_000 for p in out.rglob("*") if p.is_file())
    first = (out / "log.jsonl").read_text(encoding="utf-8")

    # A training that was cut short goes on where it was, with the same text and steps.
    (work / "eagle3-1" / "done").unlink()
    shutil.rmtree(out)
    again = call("gpu_train.sh", *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "run 1:" in again.stdout and (out / "checkpoint" / "config.json").is_file()
    assert (out / "log.jsonl").read_text(encoding="utf-8") == first
    assert (work / "text.jsonl").read_bytes() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--junk"], "Unknown option --junk"), (["confu"], "name one with --start")],
)
def test_gpu_train_refuses_what_it_does_not_understand(arguments, message):
    done = call("gpu_train.sh", *arguments)
    assert done.returncode == 2 and message in done.stderr
