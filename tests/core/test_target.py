"""The target's pass is written out by hand; it must give the Hugging Face model's own numbers."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from confu_core import target as rooms
from confu_core.decoding import decode
from confu_core.errors import TargetError
from confu_core.methods import PLAIN
from confu_core.prompt import chat_ids
from confu_core.sampling import Sampler
from confu_core.target import Target
from confu_core.trace import Settings
from confu_core.tree import DraftTree
from tests import fakes, families, reference

TEXT = [1, 40, 77, 123, 9, 200, 31, 5, 66, 150, 12, 88]
TREE = DraftTree(
    token_ids=(60, 7, 99, 14, 7, 230, 61, 8),
    parents=(-1, 0, 0, 1, 1, 3, 2, 5),
    depths=(0, 1, 1, 2, 2, 3, 2, 4),
    scores=(0.0,) * 8,
)
KINDS = {
    "llama": ("llama", {}),
    "llama with tied output": ("llama", {"tie_word_embeddings": True}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama3 rope scaling": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama with wide heads": ("llama", {"head_dim": 16}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 with biases": ("qwen2", {"head_dim": None}),
    "qwen3 with normed queries": ("qwen3", {"head_dim": 12}),
    "nine layers": ("llama", {"num_hidden_layers": 9}),
}


@pytest.fixture(scope="module", params=KINDS)
def target(request) -> Target:
    kind, config = KINDS[request.param]
    return fakes.tiny_target(kind, seed=3, **config)


@pytest.fixture(scope="module")
def truth(target):
    """Logits and hidden states of the text, by the model's own forward."""
    with torch.no_grad():
        output = target.model(torch.tensor([TEXT]), output_hidden_states=True, use_cache=False)
    return output


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def truth_of():
    """Checks a target's prefill against its model's own forward."""

    def check(target: Target) -> None:
        with torch.no_grad():
            wanted = target.model(torch.tensor([TEXT]), use_cache=False).logits[0]
        found = target.logits(target.prefill(target.new_cache(20), TEXT).last[0])
        close(found, wanted[:, : target.vocab].float())

    return check


def test_the_fakes_matter(target, truth):
    """A bias, a norm or a rope that did nothing would not be tested by the equalities."""
    assert float(truth.logits.std()) > 0.3
    assert truth.logits[0].argmax(-1).unique().numel() >= 2


def test_prefill_logits(target, truth):
    rows = target.prefill(target.new_cache(20), TEXT)
    close(target.logits(rows.last[0]), truth.logits[0, :, : target.vocab].float())


def test_taps_are_the_states_on_entry_to_three_layers(target, truth):
    """`hidden_states[i]` is the input of layer i and the output of layer i - 1."""
    layers = target.layers
    assert target.tap_layers == (2, layers // 2, layers - 3)
    taps = target.prefill(target.new_cache(20), TEXT).taps[0].split(target.hidden, dim=-1)
    for tap, entry in zip(taps, target.tap_layers, strict=True):
        close(tap, truth.hidden_states[entry][0])
    outputs = {}
    hooks = [
        layer.register_forward_hook(lambda m, i, out, n=n: outputs.__setitem__(n, out))
        for n, layer in enumerate(target.model.model.layers)
    ]
    with torch.no_grad():
        target.model(torch.tensor([TEXT]), use_cache=False)
    for hook in hooks:
        hook.remove()
    for tap, entry in zip(taps, target.tap_layers, strict=True):
        out = outputs[entry - 1]
        close(tap, (out[0] if isinstance(out, tuple) else out).view(len(TEXT), -1))
    # and neighbours are told apart
    assert not torch.allclose(taps[0], truth.hidden_states[1][0], atol=1e-2)
    assert not torch.allclose(taps[2], truth.hidden_states[layers - 2][0], atol=1e-2)


def test_last_state_is_normed_and_labels_equal_the_models_logits(target, truth):
    rows = target.prefill(target.new_cache(20), TEXT)
    close(rows.last[0], truth.hidden_states[-1][0])


def test_one_step(target, truth):
    cache = target.new_cache(20)
    target.prefill(cache, TEXT[:-1])
    found = target.verify(cache, DraftTree.root_only(TEXT[-1]))
    close(found.logits[0], truth.logits[0, -1, : target.vocab])
    assert found.contemplate_taps.shape == (0, 3 * target.hidden)


def test_tree_pass_equals_a_fresh_forward_of_every_path(target):
    cache = target.new_cache(40)
    target.prefill(cache, TEXT)
    found = target.verify(cache, TREE)
    for node in range(len(TREE)):
        path = [TREE.token_ids[n] for n in reference.path_to(list(TREE.parents), node)]
        close(found.logits[node], reference.full_logits(target, TEXT + path)[-1])
        close(found.taps[node], reference.full_taps(target, TEXT + path)[-1])


def test_passes_do_not_depend_on_history(target):
    """Reading twice, in two chunks, and after a dropped pass gives the same numbers."""
    cache = target.new_cache(40)
    once = target.prefill(cache, TEXT)
    target.verify(cache, TREE)
    cache.drop_pending()
    again = target.verify(cache, TREE)
    cache.keep(0)
    twice = target.prefill(cache, TEXT)
    assert torch.equal(once.taps, twice.taps)
    cache.keep(7)
    chain = DraftTree(tuple(TEXT[7:]), (-1, 0, 1, 2, 3), (0, 1, 2, 3, 4), (0.0,) * 5)
    close(target.verify(cache, chain).taps, once.taps[0, 7:])
    cache.commit([0, 1, 2, 3, 4])
    close(target.verify(cache, TREE).logits, again.logits)


# What is refused ---------------------------------------------------------------------------------


def refused(kind: str, **config) -> str:
    with pytest.raises(TargetError) as caught:
        Target(fakes.tiny_model(kind, **config), fakes.tiny_tokenizer(), "some/model")
    message = str(caught.value)
    assert "some/model" in message
    return message


def test_other_model_types_are_refused():
    message = refused("mistral")
    assert "mistral" in message
    assert "llama, qwen2, qwen3" in message


SLIDING = {"use_sliding_window": True, "sliding_window": 16}


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_sliding_windows_are_refused(kind):
    message = refused(kind, **SLIDING, max_window_layers=4)
    assert "sliding-window attention" in message
    assert "Choose a target" in message


def test_a_window_that_no_layer_has_is_no_reason(truth_of):
    """Qwen configs may switch the window on for layers that the model does not have."""
    truth_of(fakes.tiny_target("qwen3", **SLIDING, max_window_layers=8))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_moves_with_the_length_is_refused(kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope["original_max_position_embeddings"] = 64
    message = refused("llama", rope_parameters=rope)
    assert f"'{kind}' rope scaling" in message


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_shallow_targets_are_refused(layers):
    message = refused("llama", num_hidden_layers=layers)
    assert f"{layers} layers" in message
    assert "at least 7" in message


def test_seven_layers_are_enough():
    target = fakes.tiny_target(num_hidden_layers=7)
    assert target.tap_layers == (2, 3, 4)


def test_missing_target_says_what_to_give(tmp_path):
    with pytest.raises(TargetError, match=r"could not be loaded.*Give a folder"):
        Target.load(tmp_path / "nothing")


def test_damaged_target_folder(tmp_path):
    (tmp_path / "config.json").write_text("{ not json")
    with pytest.raises(TargetError, match="could not be loaded"):
        Target.load(tmp_path)


def test_saved_target_loads_to_the_same_numbers(tmp_path):
    made = fakes.tiny_target(seed=4)
    fakes.tiny_model(seed=4).save_pretrained(tmp_path)
    made.tokenizer.save_pretrained(tmp_path)
    loaded = Target.load(tmp_path)
    ids = chat_ids(loaded, "the user")
    assert ids == chat_ids(made, "the user")
    assert loaded.stop_ids == made.stop_ids == {fakes.TURN_END, fakes.END_OF_TEXT}
    assert loaded.fingerprint() == made.fingerprint()
    close(
        loaded.prefill(loaded.new_cache(60), ids).taps,
        made.prefill(made.new_cache(60), ids).taps,
    )
    assert not any(p.requires_grad for p in loaded.model.parameters())


# How it is loaded --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of one tiny model per family."""
    root = tmp_path_factory.mktemp("targets")
    for family in families.FAMILIES:
        families.save(family, root / family, seed=2)
    return root


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(saved, family, dtype):
    """Near the full-precision numbers, and every method decodes with it."""
    full, half = (Target.load(saved / family, dtype=kind) for kind in (torch.float32, dtype))
    assert half.dtype == dtype
    assert half.precision == str(dtype).removeprefix("torch.")
    prompt = chat_ids(half, "and the")
    wanted = full.logits(full.prefill(full.new_cache(60), prompt).last[0])
    found = half.logits(half.prefill(half.new_cache(60), prompt).last[0])
    assert found.dtype == torch.float32, "sampling is done in full precision"
    assert float((found - wanted).abs().mean()) < 0.05 * float(wanted.std())
    head = fakes.tiny_head(half).to(dtype)
    part = fakes.tiny_contemplation(half, head).to(dtype)
    for method in (PLAIN, fakes.method(head), fakes.method(head, part)):
        for temperature in (0.0, 1.0):
            settings = Settings(max_new_tokens=6, temperature=temperature, nodes=8, depth=2)
            rounds = list(decode(half, method, prompt, settings))
            assert sum(len(r.token_ids) for r in rounds) in range(1, 7)


def test_numbers_out_of_range_stop_with_advice():
    """A target that overflows in float16 must not go on with the first of all tokens."""
    model = fakes.tiny_model().to(torch.float16)
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.fill_(60000)
    target = Target(model, fakes.tiny_tokenizer(), "overflowing")
    with pytest.raises(TargetError, match=r"range of its precision.*bfloat16"):
        list(decode(target, PLAIN, chat_ids(target, "and"), Settings(max_new_tokens=3)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lone_survivor_of_top_p_is_in_range(temperature):
    logits = torch.tensor([0.0, 50.0, 0.0])
    assert Sampler(temperature, 0.5, 1).draw(logits, 3).token_id == 1


@pytest.mark.parametrize("family", families.FAMILIES)
def test_spread_on_a_machine_of_one_device(saved, family, truth_of):
    """The way over accelerate gives the same model."""
    spread, plain = Target.load(saved / family, "spread"), Target.load(saved / family)
    truth_of(spread)
    close(
        spread.prefill(spread.new_cache(20), TEXT).taps,
        plain.prefill(plain.new_cache(20), TEXT).taps,
    )


def spread_by_hand(model: torch.nn.Module) -> None:
    """Half of the layers, the last norm and the output on a second device, as accelerate does it;
    under a fake mode, which knows devices but holds no numbers."""
    for name, module in model.named_modules():
        second = "layers." in name and int(name.split("layers.")[1].split(".")[0]) >= 4
        second |= name in ("model.norm", "lm_head")
        place = "cuda:1" if second else "cpu"  # the first one, where the library needs no CUDA
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=place)
                    is_parameter = store is module._parameters
                    store[key] = torch.nn.Parameter(moved, False) if is_parameter else moved
    model.hf_device_map = {"first": 0, "second": 1}


@pytest.mark.parametrize("family", families.FAMILIES)
@pytest.mark.parametrize("together", [True, False])
def test_rows_of_a_spread_target_stay_on_one_device(family, together, monkeypatch):
    """No operation of a pass mixes devices, and everything it gives is where the drafts are."""
    # Laying out weights reads addresses, which fake tensors do not have.
    monkeypatch.setattr("confu_core.fused._store_by_input", lambda model: None)
    monkeypatch.setattr("confu_core.fused._is_plain", lambda module: False)
    make, tokenizer = families.FAMILIES[family]
    model = make(tie_word_embeddings=False)
    with FakeTensorMode():
        spread_by_hand(model)
        if together:
            rooms._keep_rows_together(model, "two GPUs")
        target = Target(model, tokenizer(), "two GPUs")
        cache = target.new_cache(40)
        if not together:  # the fake mode does see what would go wrong
            with pytest.raises(RuntimeError, match="found at least two devices"):
                target.prefill(cache, TEXT)
            return
        rows = target.prefill(cache, TEXT)
        found = target.verify(cache, replace(TREE))  # which keeps its mask
        # Several texts at once, as training text is written.
        several = target.new_cache(12, batch=3)
        several.open(12)
        ids = torch.tensor([TEXT] * 3)
        mask = torch.ones(3, 12, 12, dtype=torch.bool).tril()
        batch = target.run(target.embed(ids), torch.arange(12).expand(3, 12), mask, several)
        likeliest = target.logits(batch.last[:, -1]).argmax(-1)
    tensors = (rows.taps, rows.last, found.logits, found.taps, batch.last, likeliest)
    places = {tensor.device for tensor in tensors}
    assert places == {torch.device("cpu")} == {target.device}
    assert model.model.layers[5].mlp.up_proj.weight.device == torch.device("cuda:1")


@pytest.mark.parametrize("rest", ["cpu", "disk"])
def test_a_target_that_does_not_fit_is_refused(rest):
    model = fakes.tiny_model()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": rest}
    with pytest.raises(TargetError, match=r"does not fit into the GPUs.*--bits 4"):
        rooms._keep_rows_together(model, "large")


@pytest.mark.parametrize("bits", [1, 3, 16])
def test_other_numbers_of_bits_are_refused(saved, bits):
    with pytest.raises(TargetError, match="Choose 4 or 8 bits"):
        Target.load(saved / "llama3", bits=bits)


def test_packing_without_its_library_is_refused(saved, monkeypatch):
    monkeypatch.setattr(rooms, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(TargetError, match="pip install bitsandbytes"):
        Target.load(saved / "llama3", bits=4)


def test_a_packed_checkpoint_without_its_library_is_refused(tmp_path):
    """Weights that were packed before they were published."""
    families.save("llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "aqlm", "in_group_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"could not be loaded.*aqlm"):
        Target.load(tmp_path)


@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs the bitsandbytes package"
)
@pytest.mark.parametrize("bits", [4, 8])
def test_packed_targets_decode(tmp_path, bits):
    wide = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    families.save("llama3", tmp_path, **wide)
    target = Target.load(tmp_path, dtype=torch.bfloat16, bits=bits)
    assert target.precision == f"bfloat16, {bits}-bit weights"
    prompt = chat_ids(target, "and the")
    full = Target.load(tmp_path)
    wanted = full.logits(full.prefill(full.new_cache(60), prompt).last[0])
    found = target.logits(target.prefill(target.new_cache(60), prompt).last[0])
    likeness = torch.corrcoef(torch.stack((found.flatten(), wanted.flatten())))[0, 1]
    assert likeness > (0.5 if bits == 4 else 0.95)  # random weights have much to lose
    head = fakes.tiny_head(target).to(torch.bfloat16)
    part = fakes.tiny_contemplation(target, head).to(torch.bfloat16)
    for method in (PLAIN, fakes.method(head), fakes.method(head, part)):
        rounds = list(decode(target, method, prompt, Settings(max_new_tokens=5, nodes=8)))
        assert sum(len(r.token_ids) for r in rounds) in range(1, 6)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_an_outline_says_what_the_target_would(saved, family):
    outline, whole = Target.outline(saved / family), Target.load(saved / family)
    assert outline.device.type == "meta", "no weights were read"
    for name in ("layers", "hidden", "vocab", "context", "tap_layers", "stop_ids", "head_dim"):
        assert getattr(outline, name) == getattr(whole, name), name
    assert outline.fingerprint() == whole.fingerprint()


def test_other_taps_share_everything_else(target, truth):
    other = target.with_taps((1, 4, 6, 7))
    taps = other.prefill(other.new_cache(20), TEXT).taps[0].split(target.hidden, dim=-1)
    for tap, entry in zip(taps, (1, 4, 6, 7), strict=True):
        close(tap, truth.hidden_states[entry][0])
    assert target.tap_layers == (2, target.layers // 2, target.layers - 3)
    assert target.with_taps(target.tap_layers) is target
    assert other.model is target.model


# Families ----------------------------------------------------------------------------------------


def test_llama3_stops_at_any_of_its_ends(saved):
    tokenizer = families.llama3_tokenizer()
    names = [families.TURN_END, families.MESSAGE_END, fakes.SPECIALS[0]]
    ends = frozenset(tokenizer.convert_tokens_to_ids(names))
    assert Target.load(saved / "llama3").stop_ids == ends
    assert len(ends) == 3


def test_ends_are_read_from_the_config_if_there_is_nothing_else(saved, tmp_path):
    families.save("llama3", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert Target.load(tmp_path).stop_ids == Target.load(saved / "llama3").stop_ids


def test_llama3_begins_its_text_once():
    """The template writes the beginning, and the tokenizer would add it again."""
    target = families.target("llama3")
    begin = target.tokenizer.bos_token_id
    assert target.tokenizer.encode("x")[0] == begin
    first = chat_ids(target, "the hen")
    assert first.count(begin) == 1 and first[0] == begin
    turns = [
        {"role": "user", "content": "the hen"},
        {"role": "assistant", "content": "and"},
        {"role": "user", "content": "the"},
    ]
    second = chat_ids(target, turns)
    assert second.count(begin) == 1
    assert second[: len(first)] == first


def test_qwen3_gets_no_system_prompt():
    target = families.target("qwen3")
    text = target.tokenizer.decode(chat_ids(target, "the hen"))
    assert text == "<|im_start|>user\nthe hen<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("family", families.FAMILIES)
def test_families_give_their_models_numbers(family, truth_of):
    target = families.target(family, seed=5)
    truth_of(target)
    assert target.head_dim * target.heads != target.hidden or family == "llama3"


# Ids ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "wanted"), [([2, 0], {0, 2}), (0, {0, 2}), (None, {2}), ([7, 9, 0], {0, 2, 7, 9})]
)
def test_stop_ids_of_model_and_tokenizer(stops, wanted):
    model = fakes.tiny_model()
    model.generation_config.eos_token_id = stops
    assert Target(model, fakes.tiny_tokenizer(), "t").stop_ids == wanted


def test_padding_of_the_vocabulary_is_never_emitted():
    """Ids beyond the tokenizer would win every arg max here; they are not in the logits at all."""
    model = fakes.tiny_model()
    tokenizer = fakes.tiny_tokenizer()
    with torch.no_grad():
        model.lm_head.weight[len(tokenizer) :] = 50 * model.lm_head.weight[:1].sign()
        model.lm_head.weight[-1] *= -1
    target = Target(model, tokenizer, "padded")
    assert model.config.vocab_size == target.vocab + fakes.PADDING
    rows = target.prefill(target.new_cache(20), TEXT)
    assert model.lm_head(rows.last[0]).argmax(-1).max() >= target.vocab
    logits = target.logits(rows.last[0])
    assert logits.shape == (len(TEXT), target.vocab)
    close(logits, reference.full_logits(target, TEXT))


def test_fingerprint_tells_shape_and_vocabulary_apart():
    base = fakes.tiny_target()
    assert base.fingerprint() == fakes.tiny_target(seed=9).fingerprint(), "weights are not covered"
    others = [
        fakes.tiny_target(num_hidden_layers=9),
        fakes.tiny_target(hidden_size=48),
        fakes.tiny_target("qwen3"),
    ]
    other_words = fakes.tiny_tokenizer()
    other_words.add_tokens(["<new>"])
    others.append(Target(fakes.tiny_model(), other_words, "t"))
    assert len({base.fingerprint(), *(t.fingerprint() for t in others)}) == 5


@pytest.mark.target
def test_real_target_passes(default_target):
    """Prefill, taps, one step and a tree against the model's own forward."""
    ids = chat_ids(default_target, "The capital of France is")
    tree = DraftTree((260, 28, 1000, 30), (-1, 0, 0, 1), (0, 1, 1, 2), (0.0,) * 4)
    with torch.inference_mode():
        cache = default_target.new_cache(len(ids) + 8)
        rows = default_target.prefill(cache, ids)
        truth = default_target.model(torch.tensor([ids]), output_hidden_states=True)
        assert default_target.tap_layers == (2, 15, 27)
        for tap, layer in zip(rows.taps[0].split(576, -1), (2, 15, 27), strict=True):
            wanted = truth.hidden_states[layer][0]
            torch.testing.assert_close(tap, wanted, atol=2e-3, rtol=1e-4)
        logits = default_target.logits(rows.last[0])
        torch.testing.assert_close(logits, truth.logits[0], atol=1e-3, rtol=1e-4)
        found = default_target.verify(cache, tree)
        for node, path in ((0, [260]), (2, [260, 1000]), (3, [260, 28, 30])):
            wanted = reference.full_logits(default_target, ids + path)[-1]
            torch.testing.assert_close(found.logits[node], wanted, atol=1e-3, rtol=1e-4)
