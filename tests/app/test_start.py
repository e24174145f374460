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


@pytest.mark.parametrize(
    "option", ["--target", "--eagle3", "--confu", "--confu-lite", "--taps", "--dtype"]
)
def test_a_model_of_ones_own_stands_beside_the_presets(start, option):
    assert names(start, option, "some/where") == ["own", *PRESETS]


@pytest.fixture
def published(folders, tmp_path):
    """The folder's EAGLE-3 head as others publish it."""
    from confu_core.compare import load_target
    from confu_core.published import export_head

    target = load_target(str(folders / "target"), "cpu", "float32", lambda message, fraction: None)
    export_head(folders / "eagle3", tmp_path / "published", "specforge", target)
    return tmp_path / "published"


def loaded(start, *arguments):
    """The engine of the first model that the options name."""
    first, *_ = start.choices(start.parse([*arguments, "--device", "cpu"]))
    return first.load(lambda message, fraction: None)


def test_a_target_with_a_published_head_loads_with_the_taps_that_were_named(
    start, folders, published
):
    own = ["--target", str(folders / "target"), "--eagle3", str(published)]
    engine = loaded(start, *own, "--taps", "input:1,3,6", "--dtype", "bfloat16")
    assert [n for n, info in engine.methods.items() if info.available] == ["plain", "eagle3"]
    assert engine.method("eagle3").checkpoint.head.shape.tap_layers == (1, 3, 6)
    assert engine.target.precision == "bfloat16"
    assert loaded(start, *own).target.precision == "float32"


def test_a_presets_own_head_can_be_replaced(start, folders, monkeypatch):
    """The way for a head whose published form had to be converted first."""
    from dataclasses import replace

    from confu_core.sizes import TargetShape

    shape = TargetShape("llama", 8, 32, 4, 2, 8, 48, 300, tied=False)
    preset = replace(
        PRESETS["qwen3-4b"],
        target=str(folders / "target"),
        shape=shape,
        dtype="float32",
        heads={"eagle3": "no/where"},
    )
    monkeypatch.setitem(PRESETS, "qwen3-4b", preset)
    engine = loaded(start, "--preset", "qwen3-4b", "--eagle3", str(folders / "eagle3"))
    assert engine.target.name == str(folders / "target")
    assert engine.methods["eagle3"].available and not engine.methods["confu"].available


def test_packing_is_for_the_large_targets(start):
    first, *others = start.choices(start.parse(["--bits", "4"]))
    assert (first.name, first.bits) == (DEFAULT, None)
    assert all(choice.bits == 4 for choice in others)
    whole = start.choices(start.parse(["--preset", "qwen3-14b"]))[0]
    packed = start.choices(start.parse(["--preset", "qwen3-14b", "--bits", "4"]))[0]
    assert "33 GB of memory" in whole.about("en") and "14 GB of memory" in packed.about("en")


def test_a_target_and_a_preset_are_one_too_many(start, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        start.parse(["--preset", "qwen3-4b", "--target", "some/where"])
    assert "--preset names a target too" in capsys.readouterr().err
    monkeypatch.setenv("CONFU_PRESET", "qwen3-4b")
    assert names(start, "--target", "some/where")[0] == "own"  # what is typed wins


def test_a_zero_gpu_space_offers_one(start, monkeypatch):
    monkeypatch.setenv("SPACES_ZERO_GPU", "true")
    assert names(start, "--preset", "qwen3-4b") == ["qwen3-4b"]


def test_an_unknown_preset_is_an_error_at_once(start, monkeypatch, capsys):
    monkeypatch.setenv("CONFU_PRESET", "junk")
    with pytest.raises(SystemExit):
        start.parse([])
    assert "there is no preset 'junk'" in capsys.readouterr().err
