"""`app.py`: which models it offers, by its options and by the Space that it runs on."""

import importlib.util
from pathlib import Path

import pytest

from confu_core.presets import DEFAULT, PRESETS

FILE = Path(__file__).resolve().parents[2] / "app.py"


@pytest.fixture(scope="module")
def start():
    """The file as a module; the package of the same name lies beside it."""
    spec = importlib.util.spec_from_file_location("start", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    module.demo.close(verbose=False)


def names(start, *arguments) -> list[str]:
    return [choice.name for choice in start.choices(start.parse(list(arguments)))]


def test_the_default_comes_first_and_every_preset_is_offered(start):
    assert names(start) == list(PRESETS) and names(start)[0] == DEFAULT
    assert list(start.demo.runs.slot.choices) == list(PRESETS)
    assert start.demo.runs.slot.state.phase == "idle"  # nothing loads before somebody comes


def test_a_preset_can_be_the_first(start, monkeypatch):
    assert names(start, "--preset", "qwen3-4b")[0] == "qwen3-4b"
    assert sorted(names(start, "--preset", "qwen3-4b")) == sorted(PRESETS)
    monkeypatch.setenv("CONFU_PRESET", "qwen3-8b")
    assert names(start)[0] == "qwen3-8b"


@pytest.mark.parametrize("option", ["--target", "--eagle3", "--confu"])
def test_a_model_of_ones_own_stands_beside_the_presets(start, option):
    assert names(start, option, "some/where") == ["own", *PRESETS]


def test_a_zero_gpu_space_offers_one(start, monkeypatch):
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert names(start, "--preset", "qwen3-4b") == ["qwen3-4b"]


def test_an_unknown_preset_is_an_error_at_once(start, monkeypatch, capsys):
    monkeypatch.setenv("CONFU_PRESET", "junk")
    with pytest.raises(SystemExit):
        start.parse([])
    assert "there is no preset 'junk'" in capsys.readouterr().err
