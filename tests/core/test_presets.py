"""Presets: sizes that are counted right, refusals, and loading from plain folders."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from confu_core import presets
from confu_core.__main__ import main
from confu_core.checkpoints import save_checkpoint
from confu_core.compare import load_target
from confu_core.errors import CheckpointError, DataError, SettingsError, TargetError
from confu_core.heads import DraftHead, DraftShape
from confu_core.presets import PRESETS, Machine, refusal
from confu_core.sizes import TargetShape, eagle3_parameters
from tests.fakes import tiny_head, tiny_model, tiny_tokenizer

GPU = Machine("cuda", 80_000_000_000, False)
BIG = PRESETS["qwen3-14b"]


def config_of(shape: TargetShape) -> AutoConfig:
    """The real configuration class of a shape."""
    return AutoConfig.for_model(
        shape.kind,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied,
    )


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_real_class(name):
    shape = PRESETS[name].shape
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(shape))
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_every_kind(kind, tied):
    model = tiny_model(kind, head_dim=16, tie_word_embeddings=tied)
    if kind == "qwen2":  # derives its head width
        model = tiny_model(kind, head_dim=None, tie_word_embeddings=tied)
    shape = TargetShape.from_config(model.config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_parameters_of_a_head():
    shape = TargetShape("llama", 8, 32, 4, 2, 16, 48, 300, tied=True)
    head = DraftHead(DraftShape(32, 32, 4, 2, 16, 48, 300, 77, 1e-5, 500.0, (2, 4, 5)))
    assert eagle3_parameters(shape, 77) == sum(p.numel() for p in head.parameters())


def test_the_default_presets_shape_is_the_default_targets(default_target):
    found = TargetShape.from_config(default_target.model.config.to_dict())
    assert found == PRESETS[presets.DEFAULT].shape
    assert found.parameters == sum(p.numel() for p in default_target.model.parameters())


def test_a_config_that_lacks_a_field_is_named():
    with pytest.raises(DataError, match="num_hidden_layers"):
        TargetShape.from_config({"num_attention_heads": 4, "model_type": "llama"})


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(SettingsError, match=r"Choose: smollm2-135m-instruct, qwen3-1\.7b"):
        presets.find("gpt-17")


def test_public_targets_have_no_confu_head():
    for preset in PRESETS.values():
        assert preset.has("plain") and preset.has("eagle3")
        assert preset.has("confu") == (preset.target is None)


def test_what_cannot_run_is_refused_with_what_to_do():
    assert refusal(BIG, GPU) == ""
    assert "machine has 16 GB. Choose a smaller one" in refusal(
        BIG, Machine("cpu", 16_000_000_000, False)
    )
    free = Machine("cpu", 16_000_000_000, True)
    assert "Duplicate the Space with a GPU" in refusal(PRESETS["qwen3-1.7b"], free)
    assert refusal(PRESETS[presets.DEFAULT], free) == ""
    assert refusal(BIG, Machine("mps", None, False)) == ""


def test_packed_weights_need_less():
    """Qwen3-14B in bfloat16 does not fit on a GPU of 24 GB; packed it does, and that is said."""
    gpu = Machine("cuda", 24_000_000_000, False)
    plain = refusal(BIG, gpu)
    assert "needs about 33 GB" in plain and "or --bits 4, which needs about 14 GB." in plain
    assert refusal(BIG, gpu, bits=8) == refusal(BIG, gpu, bits=4) == ""
    assert "needs about 62 GB" in refusal(BIG, gpu, dtype="float32")
    small = Machine("cuda", 8_000_000_000, False)
    assert refusal(BIG, small, bits=4).endswith("this machine has 8.0 GB. Choose a smaller one.")


@pytest.mark.parametrize("how", [{"bits": 3}, {"dtype": "int8"}])
def test_what_is_not_offered_is_refused_before_anything_is_counted(how):
    assert "not supported. Choose" in refusal(BIG, GPU, **how)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_of_packed_weights(kind, bits):
    """Every linear layer of a block is packed, and nothing else."""
    model = tiny_model(kind, head_dim=16, tie_word_embeddings=False)
    linear = [m for m in model.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    packed = sum(m.weight.numel() for m in linear)
    rest = sum(p.numel() for p in model.parameters()) - packed
    each = {4: 0.5 + 4 / 64, 8: 1}[bits]
    shape = TargetShape.from_config(model.config.to_dict())
    assert shape.bytes("float16", bits) == 2 * rest + round(each * packed)


def test_a_space_is_known_by_its_variable(monkeypatch):
    monkeypatch.delenv("SPACE_ID", raising=False)
    assert not presets.this_machine("cpu").space
    monkeypatch.setenv("SPACE_ID", "someone/confu")
    machine = presets.this_machine("cpu")
    assert machine.space and machine.device == "cpu" and machine.memory > 1_000_000_000


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A preset whose target and EAGLE-3 head are tiny local folders."""
    root = tmp_path_factory.mktemp("preset")
    tiny_model("qwen3").save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    target = load_target(str(root / "target"), "cpu", "float32", lambda message, fraction: None)
    save_checkpoint(root / "eagle3", tiny_head(target), None, target, {})
    shape = TargetShape.from_config(target.model.config.to_dict())
    heads = {"eagle3": str(root / "eagle3")}
    return presets.Preset("tiny", "Tiny", str(root / "target"), shape, 48, "float32", heads)


def test_loading_a_preset_brings_its_head_and_leaves_confu_out(local):
    told = []
    engine = presets.load(local, "cpu", lambda message, fraction: told.append(fraction))
    assert [name for name, info in engine.methods.items() if info.available] == ["plain", "eagle3"]
    assert "no ConFu head" in engine.methods["confu"].reason
    assert told[-1] == 1.0 and told == sorted(told)


def test_what_is_dropped_before_a_load_is_gone_after_it(local):
    gc.disable()  # only the load itself may collect
    try:
        engine = presets.load(local, "cpu")
        engine.again = engine  # a cycle, as real models have them
        gone = weakref.ref(engine.target.model)
        del engine
        presets.load(local, "cpu")
        assert gone() is None
    finally:
        gc.enable()


def test_a_preset_that_does_not_fit_is_not_loaded(local):
    huge = dataclasses.replace(local, shape=dataclasses.replace(local.shape, layers=10**9))
    with pytest.raises(SettingsError, match="Choose a smaller one"):
        presets.load(huge, "cpu")


def test_a_licence_and_a_note_stand_in_the_error(local):
    gated = dataclasses.replace(local, target="no/where/at/all", gate="Some Licence")
    with pytest.raises(TargetError, match="accept it on the model's hub page"):
        presets.load(gated, "cpu")
    noted = dataclasses.replace(local, heads={"eagle3": "./absent"}, note="Convert it first.")
    with pytest.raises(CheckpointError, match="Convert it first"):
        presets.load(noted, "cpu")


def test_packing_counts_when_a_preset_is_loaded(local, monkeypatch):
    """What does not fit whole gets as far as the packing itself."""
    room = Machine("cpu", local.memory_bytes(bits=4), False)
    monkeypatch.setattr(presets, "this_machine", lambda device: room)
    with pytest.raises(SettingsError, match="or --bits 4"):
        presets.load(local, "cpu")
    monkeypatch.setattr("confu_core.target.is_bitsandbytes_available", lambda: False)
    with pytest.raises(TargetError, match="pip install bitsandbytes"):
        presets.load(local, "cpu", bits=4)


def test_commands_take_a_preset(local, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", local)
    arguments = ["--preset", "tiny", "--device", "cpu", "--max-new-tokens", "6"]
    assert main(["compare", "The hen", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "--- EAGLE-3" in printed and "--- ConFu" not in printed
    assert main(["compare", "The hen", *arguments, "--target", local.target]) == 1
    assert "--preset names a target too" in capsys.readouterr().err
    assert main(["run", "The hen", "--preset", "none-such"]) == 1
    assert "There is no preset 'none-such'" in capsys.readouterr().err


def test_the_list_of_presets_says_what_each_takes(capsys):
    assert main(["presets"]) == 0
    printed = capsys.readouterr().out
    assert "| qwen3-1.7b | Qwen/Qwen3-1.7B | AngelSlim/Qwen3-1.7B_eagle3 | none | 3.7 GB" in printed
    assert "| smollm2-135m-instruct | SmolLM2-135M-Instruct | ships | ships | 0.1 GB" in printed
    assert "accept the Llama 3.1 Community License" in printed
    assert main(["presets", "--bits", "4"]) == 0
    packed = capsys.readouterr().out
    assert "| 33 GB | bfloat16 |" in printed
    assert "| 14 GB | bfloat16, 4-bit weights |" in packed
    default = [line for line in packed.splitlines() if f"| {presets.DEFAULT} |" in line]
    assert default[0] in printed, "the default target is never packed here"
