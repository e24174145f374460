"""Targets and heads by hub id, from a hub of our own: fetched once, watched, named as asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from confu_core.hub import fetch, is_hub_id
from confu_core.published import export_head
from tests import fakes, families
from tests.hub import Hub

ROOT = Path(__file__).resolve().parents[2]
# A process of its own: the hub's library reads its address when it is imported.
PROGRAM = """
import json
from confu_core import load_engine
told = []
engine = load_engine("someone/target", "cpu", lambda *pair: told.append(pair),
                     heads={"eagle3": "someone/head"})
info = engine.methods["eagle3"]
print(json.dumps([told, engine.target.name, engine.method("eagle3").checkpoint.name, info.notes]))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Llama-3-like target and an EAGLE-3 head in SpecForge's layout, as two repositories."""
    from confu_core.checkpoints import save_checkpoint

    root = tmp_path_factory.mktemp("hub")
    target = families.target("llama3")
    families.save("llama3", root / "someone" / "target")
    save_checkpoint(root / "ours", fakes.tiny_head(target), None, target, {})
    export_head(root / "ours", root / "someone" / "head", "specforge", target)
    (root / "someone" / "target" / "original").mkdir()
    (root / "someone" / "target" / "original" / "copy.safetensors").write_bytes(b"twice")
    (root / "someone" / "head" / "pytorch_model.bin").write_bytes(b"never asked for")
    hub = Hub(root)
    yield hub
    hub.close()


def python(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=hub.environment(home),
        timeout=300,
        check=False,
    )


def test_what_is_fetched_is_told_byte_by_byte_and_fetched_once(hub, tmp_path):
    done = python(hub, tmp_path, "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    told, target, head, notes = json.loads(done.stdout.splitlines()[-1])
    assert (target, head) == ("someone/target", "someone/head")
    assert notes[0].startswith("specforge layout")
    for name in ("someone/target", "someone/head"):
        shares = [share for message, share in told if message.startswith(f"fetching {name}, ")]
        assert shares == sorted(shares) and shares[0] > 0 and shares[-1] == 1.0
    assert told[-1] == ["ready", 1.0]
    weights = [name for name in hub.asked if name.endswith(".safetensors")]
    assert sorted(weights) == ["model.safetensors", "model.safetensors"]
    assert "pytorch_model.bin" not in hub.asked

    again = python(hub, tmp_path, "-c", PROGRAM)
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout.splitlines()[-1])[0]
    assert not [message for message, _ in told if message.startswith("fetching")]
    assert [name for name in hub.asked if name.endswith(".safetensors")] == weights


def test_compare_by_hub_ids_and_without_a_confu_head(hub, tmp_path):
    model = ["--target", "someone/target", "--eagle3", "someone/head", "--device", "cpu"]
    command = ["-m", "confu_core", "compare", "The hen", *model, "--max-new-tokens", "6"]
    done = python(hub, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert "--- EAGLE-3" in done.stdout and "--- ConFu" not in done.stdout
    assert "same text: yes, token for token" in done.stdout


def test_what_the_hub_does_not_have_is_said(hub, tmp_path):
    for options, words in (
        (["--target", "someone/nothing"], "'someone/nothing' could not be loaded"),
        (["--target", "someone/target", "--eagle3", "someone/none"], "'someone/none' is neither"),
    ):
        command = ["-m", "confu_core", "run", "The hen", "--method", "plain", *options]
        done = python(hub, tmp_path, *command, "--device", "cpu")
        assert done.returncode == 1 and words in done.stderr


def test_names_that_can_be_on_the_hub(tmp_path):
    assert is_hub_id("owner/name")
    assert not any(map(is_hub_id, ("name", "a/b/c", "./name", "/name", "~/name", tmp_path)))


def test_what_goes_wrong_while_watching_is_left_to_the_loading(monkeypatch):
    def broken(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", broken)
    told = []
    fetch("someone/target", ("*",), lambda *pair: told.append(pair))
    fetch("no hub id", ("*",), lambda *pair: told.append(pair))
    assert told == []
