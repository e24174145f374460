"""The player's JavaScript: its own tests in Node, and what Python puts around it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from app import player

HERE = Path(__file__).parent
NODE = shutil.which("node")


@pytest.mark.skipif(
    NODE is None, reason="Node is not installed: the player's own tests are left out"
)
def test_player_arithmetic_in_node():
    done = subprocess.run(
        [NODE, "--test", str(HERE / "player.test.js")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif(NODE is None, reason="Node is not installed")
def test_bundle_is_valid_javascript(tmp_path):
    script = tmp_path / "bundle.js"
    script.write_text(player.source() + f"\nconst assets = {player.assets()};", encoding="utf-8")
    subprocess.run([NODE, "--check", str(script)], check=True, timeout=60)


def test_nothing_a_model_wrote_can_become_markup():
    for name in player.SCRIPTS:
        code = player._read(name)
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in code, f"{forbidden} in {name}"


def test_the_player_asks_nobody():
    everything = player.source() + player.assets()
    for word in ("fetch(", "XMLHttpRequest", "WebSocket", "import(", "https://", "http://"):
        found = everything.replace("http://www.w3.org/2000/svg", "")
        assert word not in found, word


def test_source_can_be_saved_inside_a_script_element():
    assert "</script" not in player.source() and "<" not in player.assets()
