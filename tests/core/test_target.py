"""The target's pass is written out by hand; it must give the Hugging Face model's own numbers."""

from __future__ import annotations

import pytest
import torch

from confu_core.errors import TargetError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.tree import DraftTree
from tests import fakes, reference

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


def test_sliding_windows_are_refused():
    assert "sliding" in refused("qwen2", use_sliding_window=True, sliding_window=16, head_dim=None)


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
    made.model.save_pretrained(tmp_path)
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
