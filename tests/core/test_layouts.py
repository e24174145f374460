"""Published EAGLE-3 heads: every layout is written here by hand, loaded, and drafts what an
independent forward drafts; everything that does not fit is refused by name."""

from __future__ import annotations

import json
import math
import pickle
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from confu_core import published
from confu_core.__main__ import main
from confu_core.budget import FixedBudget
from confu_core.checkpoints import find_checkpoint, save_checkpoint
from confu_core.compare import load_engine
from confu_core.decoding import decode
from confu_core.errors import CheckpointError, SettingsError
from confu_core.heads import DraftHead
from confu_core.layouts import OFFICIAL, SPECFORGE, SPECULATORS
from confu_core.methods import PLAIN, with_head
from confu_core.prompt import chat_ids
from confu_core.published import export_head, load_head
from confu_core.rotary import frequencies
from confu_core.taps import TapChoice, check_taps, resolve
from confu_core.target import Target
from confu_core.trace import Settings
from tests import fakes, families, reference

WIDTH = 32  # of the tiny targets
LAYERS = 8
INPUTS, OUTPUTS = [2, 4, 5], [1, 3, 4]  # EAGLE-3's usual layers of 8, named in both ways
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


# Heads as their makers write them ------------------------------------------------------------


@dataclass
class Made:
    """A random head under the canonical names (pitfalls 2.2), and what its arithmetic is."""

    weights: dict[str, torch.Tensor]
    hidden: int = WIDTH
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 6
    intermediate: int = 40
    vocab: int = 0
    ids: list[int] = field(default_factory=list)
    eps: float = 1e-5
    theta: float = 500.0
    scaling: dict | None = None
    taps: list[int] = field(default_factory=lambda: list(INPUTS))
    norm_before_residual: bool = False
    recycle: bool = False

    @property
    def config(self) -> dict:
        """The fields that every family has."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": self.eps,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
        }


def make(target: Target, seed: int = 0, variants: tuple[str, ...] = (), **sizes) -> Made:
    """A random head for a target, with variants: fc_norm, norm_before_fc, qk_norm,
    attention_bias, fc_bias, own_embedding, whole_vocabulary, norm_before_residual, recycle."""
    made = Made({}, vocab=target.model.config.vocab_size, **sizes)
    dice = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=dice)

    def norm(width: int) -> torch.Tensor:
        return 0.5 + torch.rand(width, generator=dice)

    h, i = made.hidden, made.intermediate
    q, kv = made.heads * made.head_dim, made.kv_heads * made.head_dim
    states = len(made.taps) * WIDTH
    if "whole_vocabulary" in variants:
        made.ids = list(range(made.vocab))
    else:
        picks = torch.randperm(target.vocab, generator=dice)[:40].tolist()
        made.ids = sorted({*picks, *greedy_ids(target)})
    d = len(made.ids)
    layer = "midlayer."
    made.weights = {
        "fc.weight": random(h, states),
        layer + "hidden_norm.weight": norm(h),
        layer + "input_layernorm.weight": norm(h),
        layer + "post_attention_layernorm.weight": norm(h),
        layer + "self_attn.q_proj.weight": random(q, 2 * h),
        layer + "self_attn.k_proj.weight": random(kv, 2 * h),
        layer + "self_attn.v_proj.weight": random(kv, 2 * h),
        layer + "self_attn.o_proj.weight": random(h, q),
        layer + "mlp.gate_proj.weight": random(i, h),
        layer + "mlp.up_proj.weight": random(i, h),
        layer + "mlp.down_proj.weight": random(h, i),
        "norm.weight": norm(h),
        "lm_head.weight": random(d, h),
    }
    if d < made.vocab:
        known = torch.zeros(made.vocab, dtype=torch.bool)
        known[made.ids] = True
        made.weights["d2t"] = torch.tensor(made.ids) - torch.arange(d)
        made.weights["t2d"] = known
    if "fc_norm" in variants:
        made.weights |= {f"fc_norm.{n}.weight": norm(WIDTH) for n in range(len(made.taps))}
    if "norm_before_fc" in variants:
        made.weights["input_norm.weight"] = norm(states)
    if "qk_norm" in variants:
        for name in ("q_norm", "k_norm"):
            made.weights[f"{layer}self_attn.{name}.weight"] = norm(made.head_dim)
    if "attention_bias" in variants:
        for name, width in (("q", q), ("k", kv), ("v", kv), ("o", h)):
            made.weights[f"{layer}self_attn.{name}_proj.bias"] = random(width)
    if "fc_bias" in variants:
        made.weights["fc.bias"] = random(h)
    if "own_embedding" in variants:
        made.weights["embed_tokens.weight"] = random(made.vocab, h)
    made.norm_before_residual = "norm_before_residual" in variants
    made.recycle = "recycle" in variants
    return made


GREEDY: dict[str, list[int]] = {}


def greedy_ids(target: Target) -> list[int]:
    """What the target writes, so that a random head has a chance to hit."""
    if target.name not in GREEDY:
        settings = Settings(max_new_tokens=12)
        GREEDY[target.name] = reference.plain_text(
            target, chat_ids(target, "and the"), settings, frozenset()
        )
    return GREEDY[target.name]


def write(folder: Path, config: dict, tensors: dict, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    return folder


def official(folder: Path, made: Made, **config) -> Path:
    """EAGLE's own: `midlayer.*`, no taps in the config; its pickle converted."""
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    if "d2t" in made.weights:
        fields["draft_vocab_size"] = len(made.ids)
    fields |= made.config | {"rope_theta": made.theta} | config
    return write(folder, fields, made.weights, "pytorch_model.safetensors")


def specforge(folder: Path, made: Made, **config) -> Path:
    """SpecForge: the same names, outputs of layers in `eagle_config`, left-over target fields."""
    fields = made.config | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(made.ids),
        "rope_theta": made.theta,
        "rope_scaling": made.scaling,
        "norm_output": True,
        "fc_norm": "fc_norm.0.weight" in made.weights,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in made.taps],
            "use_aux_hidden_state": True,
        },
    }
    return write(folder, fields | config, made.weights)


def speculators(folder: Path, made: Made, **config) -> Path:
    """vLLM's speculators: `layers.0.*`, the layer's fields nested, inputs of layers."""
    rope = {"rope_type": "default", **(made.scaling or {}), "rope_theta": made.theta}
    fields = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(made.ids),
        "eagle_aux_hidden_state_layer_ids": made.taps,
        "norm_before_residual": made.norm_before_residual,
        "norm_before_fc": "input_norm.weight" in made.weights,
        "fc_norm": "fc_norm.0.weight" in made.weights,
        "norm_output": made.recycle,
        "target_hidden_size": WIDTH,
        "tie_word_embeddings": False,
        "transformer_layer_config": made.config
        | {
            "model_type": "qwen3"
            if "midlayer.self_attn.q_norm.weight" in made.weights
            else "llama",
            "attention_bias": "midlayer.self_attn.q_proj.bias" in made.weights,
            "rope_parameters": rope,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/a-target", "architectures": []},
        },
    }
    named = {name.replace("midlayer.", "layers.0."): t for name, t in made.weights.items()}
    return write(folder, fields | config, named)


def nemo(folder: Path, made: Made, **config) -> Path:
    """NeMo AutoModel: `model.` before all but `lm_head` and the maps."""
    fields = made.config | {
        "architectures": ["LlamaEagle3DraftModel"],
        "draft_vocab_size": len(made.ids),
        "rope_theta": made.theta,
        "eagle_aux_hidden_state_layer_ids": made.taps,
    }
    bare = ("lm_head.weight", "d2t", "t2d")
    named = {
        name if name in bare else "model." + name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in made.weights.items()
    }
    return write(folder, fields | config, named)


WRITERS = {"official": official, "specforge": specforge, "speculators": speculators, "nemo": nemo}


# An independent forward ------------------------------------------------------------------------


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def angles(made: Made) -> torch.Tensor:
    """Radians per position, by transformers."""
    rope = {"rope_type": "default", "rope_theta": made.theta} | (made.scaling or {})
    if rope["rope_type"] == "default":
        steps = torch.arange(0, made.head_dim, 2) / made.head_dim
        return 1 / made.theta**steps
    config = LlamaConfig(head_dim=made.head_dim, rope_parameters=rope)
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config)[0]


def turned(x: torch.Tensor, position: int, per_position: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2)
    cos, sin = (position * per_position).cos(), (position * per_position).sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@torch.no_grad()
def expected_chain(
    made: Made,
    embedding: torch.Tensor,
    states: list[torch.Tensor],
    ids: list[int],
    steps: int,
    emittable: int,
) -> tuple[list[int], list[float]]:
    """What the head drafts greedily after `ids` (prompt and root): tokens, cumulative log-probs.

    states: per tap (P, Ht), the target's hidden states of the prompt. emittable: ids from here on
    only pad the target's matrices.
    """
    w, per_position = made.weights, angles(made)
    embedding = w.get("embed_tokens.weight", embedding)

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = w[name + ".weight"] @ x
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def fused(position: int) -> torch.Tensor:
        taps = [state[position] for state in states]
        if "fc_norm.0.weight" in w:
            taps = [normed(t, w[f"fc_norm.{n}.weight"], made.eps) for n, t in enumerate(taps)]
        joined = torch.cat(taps)
        if "input_norm.weight" in w:
            joined = normed(joined, w["input_norm.weight"], made.eps)
        return linear("fc", joined)

    def attention_input(token: int, u: torch.Tensor) -> torch.Tensor:
        e = normed(embedding[token], w["midlayer.input_layernorm.weight"], made.eps)
        return torch.cat((e, normed(u, w["midlayer.hidden_norm.weight"], made.eps)))

    def per_head(name: str, x: torch.Tensor) -> list[torch.Tensor]:
        parts = list(linear(f"midlayer.self_attn.{name}_proj", x).split(made.head_dim))
        scale = w.get(f"midlayer.self_attn.{name}_norm.weight")
        return parts if scale is None else [normed(part, scale, made.eps) for part in parts]

    entries = []

    def remember(x: torch.Tensor, position: int) -> None:
        keys = [turned(key, position, per_position) for key in per_head("k", x)]
        entries.append((keys, per_head("v", x)))

    prompt = len(ids) - 1
    for position in range(prompt):
        u = fused(position)
        remember(attention_input(ids[position + 1], u), position)
    tokens, scores, token, score = [], [], ids[-1], 0.0
    for step in range(steps):
        position = prompt - 1 + step
        x = attention_input(token, u)
        if step > 0:
            remember(x, position)
        mixed = []
        for number, query in enumerate(per_head("q", x)):
            group = number * made.kv_heads // made.heads
            query = turned(query, position, per_position) / math.sqrt(made.head_dim)
            weights = torch.stack([query @ keys[group] for keys, _ in entries]).softmax(0)
            mixed.append(weights @ torch.stack([values[group] for _, values in entries]))
        residual = u
        if made.norm_before_residual:
            residual = normed(u, w["midlayer.hidden_norm.weight"], made.eps)
        a = residual + linear("midlayer.self_attn.o_proj", torch.cat(mixed))
        y = normed(a, w["midlayer.post_attention_layernorm.weight"], made.eps)
        gate = linear("midlayer.mlp.gate_proj", y)
        up = linear("midlayer.mlp.up_proj", y)
        g = a + linear("midlayer.mlp.down_proj", gate * gate.sigmoid() * up)
        final = normed(g, w["norm.weight"], made.eps)
        tokens_to_name = sum(number < emittable for number in made.ids)
        log_probs = linear("lm_head", final)[:tokens_to_name].log_softmax(0)
        best = int(log_probs.argmax())
        token, score = made.ids[best], score + float(log_probs[best])
        tokens.append(token)
        scores.append(score)
        u = final if made.recycle else g
    return tokens, scores


def drafted_chain(target: Target, folder: Path, made: Made, ids: list[int], steps: int, taps=None):
    """What the loaded head drafts, by the loop's own drafter."""
    method = with_head("eagle3", load_head(folder, target, taps and TapChoice.parse(taps)))
    view = method.reading(target)
    budget = FixedBudget(steps + 1)
    drafter = method.drafter(view, budget=budget, top_k=1, capacity=len(ids) + steps)
    with torch.inference_mode():
        rows = view.prefill(view.new_cache(len(ids)), ids[:-1])
        return drafter.draft(rows.taps[0], ids[1:], None, steps, None).tree


def assert_drafts_as_expected(target, folder, made, taps=None) -> None:
    steps = 4
    ids = [*chat_ids(target, "the user and the hen"), greedy_ids(target)[0]]
    tree = drafted_chain(target, folder, made, ids, steps, taps)
    with torch.no_grad():
        hidden = target.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    embedding = target.model.get_input_embeddings().weight
    states = [hidden[tap][0] for tap in made.taps]
    tokens, scores = expected_chain(made, embedding, states, ids, steps, target.vocab)
    assert list(tree.token_ids[1:]) == tokens
    assert tree.scores[1:] == pytest.approx(scores, abs=2e-4)


# Fixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {family: families.target(family, seed=2) for family in families.FAMILIES}


@pytest.fixture(scope="module")
def llama(targets) -> Target:
    return targets["llama3"]


def refusal(folder: Path, target: Target, taps: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_head(folder, target, taps and TapChoice.parse(taps))
    return str(caught.value)


# Layouts and variants draft what they should ---------------------------------------------------


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_layout_loads_and_drafts_right(tmp_path, targets, family, layout):
    target = targets[family]
    made = make(target)
    folder = WRITERS[layout](tmp_path / layout, made)
    assert_drafts_as_expected(target, folder, made)
    loaded = load_head(folder, target)
    assert (loaded.name, loaded.kind, loaded.contemplation) == (layout, "eagle3", None)
    assert f"{layout} layout; reads the states on entry to layers 2, 4, 5" in loaded.notes[0]
    assert loaded.facts == {"published": layout}, "the page shows it as a trained head"
    assert len(loaded.sha256) == 64
    assert not any(p.requires_grad for p in loaded.head.parameters())


VARIANTS = {
    "a norm per state": (specforge, {"variants": ("fc_norm",)}, {}),
    "one norm before fc": (speculators, {"variants": ("norm_before_fc",)}, {}),
    "the normed residual": (speculators, {"variants": ("norm_before_residual",)}, {}),
    "post-norm states": (speculators, {"variants": ("recycle",)}, {}),
    "post-norm states, official": (official, {"variants": ("recycle",)}, {"norm_output": True}),
    "EAGLE-3.1 by NeMo": (
        nemo,
        {"variants": ("recycle", "fc_norm", "own_embedding")},
        {"norm_output": True, "fc_norm": True},
    ),
    "all of speculators": (
        speculators,
        {"variants": ("norm_before_fc", "norm_before_residual", "recycle", "qk_norm")},
        {},
    ),
    "normed queries": (speculators, {"variants": ("qk_norm",)}, {}),
    "attention biases": (speculators, {"variants": ("attention_bias",)}, {}),
    "a bias of fc": (official, {"variants": ("fc_bias",)}, {"bias": True}),
    "own embedding": (nemo, {"variants": ("own_embedding",)}, {}),
    "narrower than the target": (
        speculators,
        {"variants": ("own_embedding",), "hidden": 24},
        {},
    ),
    "the whole vocabulary": (official, {"variants": ("whole_vocabulary",)}, {}),
    "four taps": (speculators, {"taps": [1, 2, 4, 6]}, {}),
    "llama-3 rope, old fields": (specforge, {"scaling": LLAMA3_ROPE}, {}),
    "llama-3 rope, new fields": (speculators, {"scaling": LLAMA3_ROPE}, {}),
    "linear rope, oldest fields": (
        specforge,
        {"scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    "plain rope as a dict": (
        specforge,
        {},
        {"rope_scaling": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "no rope fields": (official, {"theta": 10000.0}, {"rope_theta": None}),
    "heads of hidden / heads": (official, {"head_dim": 8}, {"head_dim": None}),
    "a tied flag left over from the target": (official, {}, {"tie_word_embeddings": True}),
    "an architecture that we do not know": (specforge, {}, {"architectures": ["SomeEagle3LM"]}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_drafts_right(tmp_path, targets, name):
    writer, sizes, config = VARIANTS[name]
    if name == "an architecture that we do not know":
        config = config | {"norm_output": False}
    target = targets["qwen3"]
    made = make(target, seed=3, **sizes)
    assert_drafts_as_expected(target, writer(tmp_path / "head", made, **config), made)


def test_the_variants_matter(tmp_path, targets):
    """Without its flag a variant drafts something else, so the equalities above can fail."""
    target = targets["qwen3"]
    made = make(target, seed=3)
    ids = [*chat_ids(target, "the user and the hen"), greedy_ids(target)[0]]
    scores = {
        drafted_chain(target, folder, made, ids, 4).scores
        for folder in (
            speculators(tmp_path / "plain", made),
            speculators(tmp_path / "residual", made, norm_before_residual=True),
            speculators(tmp_path / "recycled", made, norm_output=True),
            official(tmp_path / "base", made, rope_theta=10000.0),
            specforge(tmp_path / "scaled", made, rope_scaling=LLAMA3_ROPE),
        )
    }
    assert len(scores) == 5


def test_what_a_config_leaves_out_is_said(tmp_path, llama):
    made = make(llama)
    loaded = load_head(official(tmp_path / "x", made, rope_theta=None, rms_norm_eps=None), llama)
    text = "\n".join(loaded.notes)
    assert "the config names none: EAGLE-3's usual ones" in text
    assert "rope base 10000, as in EAGLE, since the config names none" in text
    assert loaded.head.shape.rope_theta == 10000.0, "never the target's"
    said = "norm_before_residual false, since the config does not say"
    assert said not in text
    folder = speculators(tmp_path / "y", made)
    assert said not in load_head(folder, llama).notes
    config = json.loads((folder / "config.json").read_text())
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    assert said in load_head(folder, llama).notes


def test_tied_output_rows_of_the_draft_itself(tmp_path, llama):
    """`tie_word_embeddings` counts only where there is no output matrix and no map."""
    made = make(llama, variants=("whole_vocabulary", "own_embedding"))
    made.weights["lm_head.weight"] = made.weights["embed_tokens.weight"]
    written = Made(**(vars(made) | {"weights": dict(made.weights)}))
    del written.weights["lm_head.weight"]
    folder = official(tmp_path / "tied", written, tie_word_embeddings=True)
    assert_drafts_as_expected(llama, folder, made)
    untied = official(tmp_path / "untied", written)
    assert "missing lm_head.weight" in refusal(untied, llama)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_frequencies_are_those_of_transformers(kind):
    scaling = {
        "default": None,
        "linear": {"rope_type": "linear", "factor": 2.0},
        "llama3": LLAMA3_ROPE | {"original_max_position_embeddings": 64},
    }[kind]
    made = Made({}, head_dim=32, theta=700.0, scaling=scaling)
    found = frequencies(32, 700.0, scaling)
    torch.testing.assert_close(found, angles(made).float(), rtol=1e-5, atol=0)


def test_half_precision_files_load_into_the_targets_precision(tmp_path, llama):
    made = make(llama)
    made.weights = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in made.weights.items()
    }
    loaded = load_head(specforge(tmp_path / "x", made), llama)
    assert {p.dtype for p in loaded.head.parameters()} == {torch.float32}
    assert loaded.head.d2t.dtype == torch.int64


def test_several_files_of_one_head(tmp_path, llama):
    made = make(llama)
    folder = specforge(tmp_path / "x", made)
    whole = load_file(folder / "model.safetensors")
    first = {name: whole.pop(name) for name in list(whole)[:5]}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file(whole, folder / "model-00002-of-00002.safetensors")
    (folder / "model.safetensors").unlink()
    assert_drafts_as_expected(llama, folder, made)
    save_file(first, folder / "again.safetensors")
    assert "so does another file" in refusal(folder, llama)


# Losslessness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", WRITERS)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_loaded_heads_are_lossless(tmp_path, targets, family, layout):
    """All three methods, greedy and sampled, write what plain re-computation writes."""
    target = targets[family]
    prompt = chat_ids(target, "and the")
    head = load_head(WRITERS[layout](tmp_path / layout, make(target)), target)
    ours = fakes.tiny_head(target, vocabulary={*greedy_ids(target), *range(3, 200, 9)})
    methods = {
        "plain": PLAIN,
        "eagle3": with_head("eagle3", head),
        "confu": fakes.method(ours, fakes.tiny_contemplation(target, ours)),
    }
    for temperature in (0.0, 1.0):
        settings = Settings(max_new_tokens=10, temperature=temperature, nodes=16, depth=3, top_k=4)
        wanted = reference.plain_text(target, prompt, settings)
        for name, method in methods.items():
            rounds = list(decode(target, method, prompt, settings))
            assert [t for r in rounds for t in r.token_ids] == wanted, name


def test_heads_of_other_layers_are_lossless_side_by_side(tmp_path, targets):
    """A head's layers are its own: one target serves heads that read different ones."""
    target = targets["qwen3"]
    prompt = chat_ids(target, "and the")
    settings = Settings(max_new_tokens=8, nodes=8, depth=3, top_k=3)
    wanted = reference.plain_text(target, prompt, settings)
    made = make(target, taps=[1, 3, 6, 7])
    other = with_head("eagle3", load_head(speculators(tmp_path / "x", made), target))
    usual = fakes.method(fakes.tiny_head(target))
    for method in (other, usual, other):
        rounds = list(decode(target, method, prompt, settings))
        assert [t for r in rounds for t in r.token_ids] == wanted
    assert target.tap_layers == (2, 4, 5)


def test_padding_of_the_targets_vocabulary_is_never_drafted(tmp_path, targets):
    """D = V counts rows that the tokenizer has no tokens for; here they would win every draft."""
    target = targets["qwen3"]
    made = make(target, variants=("whole_vocabulary", "own_embedding"))
    assert made.vocab > target.vocab
    made.weights["lm_head.weight"][target.vocab :] = 40 * made.weights["lm_head.weight"][:1].sign()
    loaded = load_head(official(tmp_path / "x", made), target)
    assert loaded.head.shape.vocab == loaded.head.shape.draft_vocab == target.vocab
    assert loaded.head.embed_tokens.weight.shape[0] == target.vocab
    assert any(f"{fakes.PADDING} draft tokens left out" in note for note in loaded.notes)
    settings = Settings(max_new_tokens=6, nodes=12, depth=2, top_k=12)
    method = with_head("eagle3", loaded)
    for round in decode(target, method, chat_ids(target, "and"), settings):
        assert not round.draft or max(round.draft.tree.token_ids) < target.vocab


# Strict loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", WRITERS)
def test_missing_extra_and_misshapen_tensors_are_named(tmp_path, llama, layout):
    made = make(llama)
    folder = WRITERS[layout](tmp_path / "x", made)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    norm = next(n for n in tensors if n.endswith("post_attention_layernorm.weight"))
    down = next(n for n in tensors if n.endswith("down_proj.weight"))
    prefix = norm.removesuffix("post_attention_layernorm.weight")
    del tensors[norm]
    tensors[down] = torch.zeros(40, 32)
    tensors[prefix + "surprise"] = torch.zeros(2)
    save_file(tensors, path)
    message = refusal(folder, llama)
    assert f"missing {norm}" in message
    assert f"unexpected {prefix}surprise" in message
    assert f"{down} has shape (40, 32), expected (32, 40)" in message


@pytest.mark.parametrize("name", ["d2t", "t2d", "lm_head.weight", "fc.weight", "norm.weight"])
def test_no_tensor_may_be_missing(tmp_path, llama, name):
    made = make(llama)
    del made.weights[name]
    assert f"missing {name}" in refusal(specforge(tmp_path / "x", made), llama)


def test_a_bias_must_be_announced(tmp_path, llama):
    made = make(llama, variants=("fc_bias",))
    assert "unexpected fc.bias" in refusal(official(tmp_path / "x", made), llama)
    made = make(llama)
    assert "missing fc.bias" in refusal(official(tmp_path / "y", made, bias=True), llama)


def change_maps(name: str, d2t: torch.Tensor, t2d: torch.Tensor, ids: list[int]) -> dict:
    if name == "target ids instead of offsets":
        return {"d2t": torch.tensor(ids)}
    if name == "one id twice":
        return {"d2t": torch.cat((d2t[:1], d2t[:1] - 1, d2t[2:]))}
    if name == "beyond the vocabulary":
        return {"d2t": d2t + len(t2d)}
    if name == "negative":
        return {"d2t": d2t - d2t[0] - 1}
    if name == "not whole numbers":
        return {"d2t": d2t.float()}
    if name == "another token marked":
        moved = t2d.clone()
        moved[ids[3]], moved[next(i for i in range(len(t2d)) if not t2d[i])] = False, True
        return {"t2d": moved}
    return {"t2d": t2d.roll(1)}


@pytest.mark.parametrize(
    "name",
    [
        "target ids instead of offsets",
        "one id twice",
        "beyond the vocabulary",
        "negative",
        "not whole numbers",
        "another token marked",
        "all marks moved",
    ],
)
def test_damaged_vocabulary_maps(tmp_path, llama, name):
    made = make(llama)
    made.weights |= change_maps(name, made.weights["d2t"], made.weights["t2d"], made.ids)
    message = refusal(specforge(tmp_path / "x", made), llama)
    assert "vocabulary maps are damaged" in message
    assert f"{len(made.ids)} of {made.vocab} ids" in message


# Fields that change what a head is, and the words of the refusal.
REFUSED_CONFIGS = {
    "two layers": (official, {"num_hidden_layers": 2}, "has 2 layers"),
    "another activation": (official, {"hidden_act": "gelu"}, "'gelu'"),
    "biases of the MLP": (official, {"mlp_bias": True}, "mlp_bias"),
    "one tap by decree": (
        specforge,
        {"eagle_config": {"use_aux_hidden_state": False}},
        "use_aux_hidden_state",
    ),
    "moving rope": (specforge, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "half a rope": (
        specforge,
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "lacks its number low_freq_factor",
    ),
    "a part of each head": (
        specforge,
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor",
    ),
    "no norm at the output": (specforge, {"norm_output": False}, "no norm before lm_head"),
    "norm_output of nobody": (
        specforge,
        {"architectures": ["SomeEagle3LM"]},
        "means two things",
    ),
    "two norms before fc": (official, {"fc_norm": True, "norm_before_fc": True}, "not one"),
    "no width": (official, {"hidden_size": None}, "hidden_size: None"),
    "nothing nested": (speculators, {"transformer_layer_config": None}, "transformer_layer_config"),
    "another kind of speculator": (speculators, {"speculators_model_type": "eagle"}, "'eagle'"),
    "names of one, config of another": (
        specforge,
        {"speculators_model_type": "eagle3"},
        "named as in the midlayer layout, but its config is of the speculators layout",
    ),
    "the other way round": (
        speculators,
        {"speculators_model_type": "eagle3", "architectures": ["LlamaForCausalLM"]},
        None,
    ),
    "names of speculators, config of NeMo": (
        nemo,
        {"architectures": ["LlamaForCausalLM"]},
        "named as in the nemo layout",
    ),
    "a Medusa head": (official, {"medusa_num_heads": 3}, "a Medusa head"),
    "another width of the target": (official, {"target_hidden_size": 64}, "width 64"),
    "another vocabulary": (official, {"vocab_size": 999}, "vocabulary 999"),
    "another kind of target": (official, {"target_model_type": "qwen3"}, "kind qwen3"),
    "another verifier": (
        speculators,
        {"speculators_config": {"verifier": {"architectures": ["Gemma3ForCausalLM"]}}},
        "Gemma3ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_configs_that_are_refused(tmp_path, llama, name):
    writer, config, words = REFUSED_CONFIGS[name]
    folder = writer(tmp_path / "x", make(llama), **config)
    if words is None:
        load_head(folder, llama)  # an architecture beside speculators' own field says nothing
        return
    assert words in refusal(folder, llama)


def test_a_narrow_head_needs_its_own_embedding(tmp_path, llama):
    made = make(llama, hidden=24)
    assert "embed_tokens.weight" in refusal(speculators(tmp_path / "x", made), llama)


def others() -> dict[str, tuple[dict, dict, str]]:
    """Files that are no EAGLE-3 heads: tensors, config, what they are called."""
    attention = {"layers.0.self_attn.q_proj.weight": torch.zeros(32, 32)}
    layer = {"model.layers.0.input_layernorm.weight": torch.zeros(32)}
    return {
        "EAGLE-1": (
            attention | {"fc.weight": torch.zeros(32, 64)},
            {"architectures": ["LlamaForCausalLM"]},
            "an EAGLE-1 or EAGLE-2 head",
        ),
        "Medusa": ({"medusa_head.0.linear.weight": torch.zeros(2, 2)}, {}, "a Medusa head"),
        "a language model": (
            layer | {"model.embed_tokens.weight": torch.zeros(9, 32)},
            {"architectures": ["LlamaForCausalLM"]},
            "a whole language model",
        ),
        "parallel drafting": (
            {"midlayer.mask_hidden": torch.zeros(32)},
            {},
            "parallel drafting (mask_hidden)",
        ),
        "something else": ({"x": torch.zeros(1)}, {}, "no layout of EAGLE-3 heads"),
    }


@pytest.mark.parametrize("name", others())
def test_other_files_are_refused_by_name(tmp_path, llama, name):
    tensors, config, words = others()[name]
    assert words in refusal(write(tmp_path / "x", config, tensors), llama)


def test_damaged_and_empty_folders(tmp_path, llama):
    assert "no config.json" in refusal(tmp_path / "nothing", llama)
    folder = specforge(tmp_path / "x", make(llama))
    (folder / "model.safetensors").write_bytes(b"nonsense" * 9)
    assert "not a readable safetensors file" in refusal(folder, llama)
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder, llama)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        assert "is damaged" in refusal(folder, llama)


# Pickles ---------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


def test_pickles_are_refused_unopened(tmp_path, llama):
    folder = specforge(tmp_path / "x", make(llama))
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    message = refusal(folder, llama)
    assert "can run code" in message
    assert "weights_only=True" in message


def test_the_command_that_the_refusal_names_converts(tmp_path, llama):
    """Also with a space and a quote in the path, and with tensors that share memory."""
    made = make(llama)
    folder = official(tmp_path / "a head's", made)
    (folder / "pytorch_model.safetensors").unlink()
    shared = torch.cat((made.weights["norm.weight"], torch.zeros(8)))
    tensors = made.weights | {"norm.weight": shared[: made.hidden]}
    torch.save(tensors, folder / "pytorch_model.bin")
    command = shlex.split(refusal(folder, llama).splitlines()[-1])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert_drafts_as_expected(llama, folder, made)


def test_a_hub_head_of_pickles_says_how_to_go_on(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"hf download someone/head --local-dir HEAD"):
        find_checkpoint("someone/head")


# Taps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "convention", "depth", "wanted"),
    [
        (None, None, 30, (2, 15, 27)),
        ((2, 15, 27), None, 30, (2, 15, 27)),
        ((1, 14, 26), None, 30, (2, 15, 27)),
        ((1, 17, 33), None, 36, (2, 18, 34)),  # see below
        ((2, 30, 58), None, 61, (2, 30, 58)),
        ((1, 29, 57), None, 61, (2, 30, 58)),
        ((3, 9, 20), "input", 30, (3, 9, 20)),
        ((1, 14, 26), "input", 30, (2, 15, 27)),
    ],
)
def test_both_ways_of_counting(listed, convention, depth, wanted):
    if depth == 36:  # these are 36 layers' outputs only if the last is L - 4
        listed = (1, 17, 32)
        wanted = (2, 18, 33)
    assert resolve(listed, convention, depth, None).layers == wanted


def test_unclear_taps_are_asked_for(tmp_path, llama):
    """Numbers that are usual in neither way are not guessed."""
    made = make(llama, taps=[1, 3, 6])
    folder = specforge(tmp_path / "x", made)
    message = refusal(folder, llama)
    assert "layers 0,2,5" in message
    assert "--taps input" in message
    assert "--taps output" in message
    assert_drafts_as_expected(llama, folder, made, taps="output")
    made.taps = [0, 2, 5]
    assert_drafts_as_expected(llama, folder, made, taps="input")
    made.taps = [2, 3, 7]
    assert_drafts_as_expected(llama, folder, made, taps="output:1,2,6")


def test_a_choice_without_layers_to_count(tmp_path, llama):
    folder = official(tmp_path / "x", make(llama))
    assert "--taps output:A,B,C" in refusal(folder, llama, "output")


@pytest.mark.parametrize(
    ("taps", "words"),
    [
        ("input:2,4,8", "0 to 7"),
        ("output:2,4,7", "0 to 7"),
        ("input:2,4", "at least 3 different"),
        ("input:2,4,4", "at least 3 different"),
        ("input:4,2,5", "ascending"),
        ("input:1,2,4,5", "reads 3 states of width 32, but 4 layers are named: 1, 2, 4, 5"),
    ],
)
def test_unusable_taps(tmp_path, llama, taps, words):
    assert words in refusal(official(tmp_path / "x", make(llama)), llama, taps)


def test_a_head_of_four_states_without_numbers(tmp_path, llama):
    made = make(llama, taps=[1, 2, 4, 6])
    message = refusal(official(tmp_path / "x", made), llama)
    assert "reads 4 states of width 32, but 3 layers are named" in message


@pytest.mark.parametrize("text", ["", "in", "input:a,b", "2,4,5", "output:1,,2"])
def test_unreadable_choices(text):
    with pytest.raises(SettingsError, match="input or output"):
        TapChoice.parse(text)


def test_our_own_heads_need_no_choice(tmp_path, llama):
    save_checkpoint(tmp_path / "x", fakes.tiny_head(llama), None, llama, {})
    assert load_head(tmp_path / "x", llama).notes == ()
    assert "Leave --taps out" in refusal(tmp_path / "x", llama, "input")


class KnowingHead(DraftHead):
    """Knows the target's choices by heart, but only when it sees the states on entry to `true`
    layers: a lookup by the high one of them. Anything else makes it guess wrong. `knows`: the
    share of the text that it knows, from its end."""

    def __init__(self, shape, target: Target, true: tuple[int, ...], knows: float = 1.0) -> None:
        super().__init__(shape)
        self.true, self.knows, self.target = true, knows, target

    def study(self, ids: list[int]) -> None:
        view = self.target.with_taps(self.true)
        with torch.inference_mode():
            rows = view.prefill(view.new_cache(len(ids)), ids)
            self.states = rows.taps[0].split(self.target.hidden, dim=-1)[-1]
            choices = self.target.logits(rows.last[0]).argmax(-1)
        self.after_next = torch.cat((choices[1:], choices[:1]))
        self.first = round((1 - self.knows) * len(ids))

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        return taps.split(self.target.hidden, dim=-1)[-1]

    def finish(self, u: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        return u

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        distance = (g.unsqueeze(1) - self.states).abs().amax(-1)
        place = distance.argmin(-1)
        known = (distance.amin(-1) < 1e-4) & (place >= self.first)
        token = torch.where(known, self.after_next[place], (self.after_next[place] + 1) % 7)
        return 50.0 * torch.nn.functional.one_hot(token, self.shape.draft_vocab)


def knowing(target: Target, read: tuple[int, ...], true: tuple[int, ...], knows: float = 1.0):
    from confu_core import taps

    made = fakes.tiny_head(target, vocabulary=range(target.vocab))
    shape = made.shape.__class__(**(vars(made.shape) | {"tap_layers": read}))
    head = KnowingHead(shape, target, true, knows).requires_grad_(False)
    ids = chat_ids(target, taps.QUESTION)
    ids += target.tokenizer.encode(taps.ANSWER, add_special_tokens=False)[: taps.PLACES]
    head.study(ids[: target.context])
    return head


def test_right_layers_pass_the_check(llama):
    found = check_taps(llama, knowing(llama, (2, 4, 5), (2, 4, 5)))
    assert (found.agreement, found.warning) == (1.0, None)
    assert found.places > 60


def test_expected_acceptance_is_that_of_speculative_sampling(llama):
    """A head that is sure of the target's own choice is kept as often as the target makes it."""
    from confu_core import taps

    found = check_taps(llama, knowing(llama, (2, 4, 5), (2, 4, 5)))
    prompt = chat_ids(llama, taps.QUESTION)
    ids = prompt + llama.tokenizer.encode(taps.ANSWER, add_special_tokens=False)
    ids = ids[: llama.context]
    with torch.inference_mode():
        rows = llama.prefill(llama.new_cache(len(ids)), ids)
        chances = llama.logits(rows.last[0, len(prompt) - 1 : -1]).softmax(-1).amax(-1)
    assert len(chances) == found.places
    assert found.acceptance == pytest.approx(float(chances.mean()), rel=1e-4)


@pytest.mark.parametrize("read", [(3, 5, 6), (1, 3, 4)])
def test_layers_off_by_one_are_noticed(llama, read):
    found = check_taps(llama, knowing(llama, read, (2, 4, 5)))
    assert found.agreement < 0.5
    assert "look wrong" in found.warning
    assert "--taps input:2,4,5" in found.warning


def test_a_small_lead_is_no_evidence(llama):
    """A head that is right at a few places with the layers beside is not accused of them."""
    found = check_taps(llama, knowing(llama, (3, 5, 6), (2, 4, 5), knows=0.03))
    assert "look wrong" not in (found.warning or "")


def test_a_head_that_knows_nothing_is_noticed(llama):
    found = check_taps(llama, knowing(llama, (2, 4, 5), (2, 4, 5), knows=0.0))
    assert "no better than chance" in found.warning


def test_the_check_sees_both_ends_of_the_stack(llama):
    """Layers beside the first or behind the last do not exist; the others are tried."""
    found = check_taps(llama, knowing(llama, (0, 4, 7), (0, 4, 7)))
    assert (found.agreement, found.warning) == (1.0, None)


@pytest.mark.target
def test_the_check_on_the_real_head(tmp_path, default_target, trained):
    """The committed head, written in SpecForge's layout, read right and off by one."""
    source = Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct" / "eagle3"
    export_head(source, tmp_path / "x", "specforge", default_target)
    right = load_head(tmp_path / "x", default_target)
    assert right.warnings == ()
    assert right.head.shape == trained["eagle3"].checkpoint.head.shape
    for layers in ((3, 16, 28), (1, 14, 26)):
        wrong = load_head(tmp_path / "x", default_target, TapChoice("input", layers))
        assert len(wrong.warnings) == 1
        assert "--taps input:2,15,27" in wrong.warnings[0]


# Export ----------------------------------------------------------------------------------------


@pytest.fixture
def ours(tmp_path, targets) -> Path:
    """A head of our own, in half precision, for a target with a padded vocabulary."""
    target = targets["qwen3"]
    head = fakes.tiny_head(target, vocabulary={*greedy_ids(target), *range(3, 200, 9)})
    save_checkpoint(tmp_path / "ours", head, None, target, {})
    return tmp_path / "ours"


LAYER = (
    *("hidden_norm", "input_layernorm", "post_attention_layernorm"),
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@pytest.mark.parametrize(
    ("layout", "prefix"), [("specforge", "midlayer."), ("speculators", "layers.0.")]
)
def test_exported_files_are_what_the_layout_says(tmp_path, targets, ours, layout, prefix):
    target = targets["qwen3"]
    export_head(ours, tmp_path / "out", layout, target)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    bare = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == bare | {f"{prefix}{name}.weight" for name in LAYER}
    padded = target.model.config.vocab_size
    ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["t2d"].shape == (padded,)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert tensors["fc.weight"].dtype == torch.float16
    stored = load_file(next(ours.glob("*.safetensors")))
    assert torch.equal(tensors[f"{prefix}mlp.up_proj.weight"], stored["draft.up_proj.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if layout == "specforge":
        assert config["architectures"] == ["LlamaForCausalLMEagle3"]
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == OUTPUTS
        assert config["eos_token_id"] == [0, 2]
        assert config["target_model_type"] == "qwen3"
        inner = config
    else:
        assert config["speculators_model_type"] == "eagle3"
        assert config["eagle_aux_hidden_state_layer_ids"] == INPUTS
        verifier = config["speculators_config"]["verifier"]
        assert verifier == {"name_or_path": target.name, "architectures": ["Qwen3ForCausalLM"]}
        inner = config["transformer_layer_config"]
    assert config["draft_vocab_size"] == len(ids)
    assert config["torch_dtype"] == "float16"
    wanted = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "num_hidden_layers": 1,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "rope_scaling": None,
        "vocab_size": padded,
        "max_position_embeddings": target.context,
        "tie_word_embeddings": False,
    }
    assert {name: inner[name] for name in wanted} == wanted


@pytest.mark.parametrize("layout", ["specforge", "speculators"])
def test_our_heads_survive_the_round_trip(tmp_path, targets, ours, layout):
    """Exported and loaded again, they draft the same trees."""
    target = targets["qwen3"]
    export_head(ours, tmp_path / "out", layout, target)
    settings = Settings(max_new_tokens=8, nodes=12, depth=3, top_k=4)
    prompt = chat_ids(target, "and the")
    trees = [
        [r.draft and r.draft.tree for r in decode(target, with_head("x", head), prompt, settings)]
        for head in (load_head(ours, target), load_head(tmp_path / "out", target))
    ]
    assert trees[0] == trees[1]


@pytest.mark.parametrize(
    ("writer", "layout", "sizes"),
    [
        (official, "speculators", {}),
        (nemo, "specforge", {"variants": ("own_embedding",)}),
        (speculators, "specforge", {"variants": ("fc_norm",)}),
        (specforge, "speculators", {"scaling": LLAMA3_ROPE}),
        (
            speculators,
            "speculators",
            {"variants": ("qk_norm", "norm_before_fc", "norm_before_residual", "recycle")},
        ),
        (speculators, "speculators", {"taps": [1, 2, 4, 6]}),
        (official, "specforge", {"variants": ("whole_vocabulary",)}),
    ],
)
def test_published_heads_change_layout_unharmed(tmp_path, targets, writer, layout, sizes):
    target = targets["qwen3"]
    made = make(target, seed=5, **sizes)
    folder = writer(tmp_path / "in", made)
    export_head(folder, tmp_path / "out", layout, target)
    assert_drafts_as_expected(target, tmp_path / "out", made)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert ("d2t" in written) == ("d2t" in made.weights)


@pytest.mark.parametrize(
    ("variants", "config", "words"),
    [
        (("norm_before_residual",), {}, "norm_before_residual"),
        (("recycle",), {}, "recycle_normed"),
        (("qk_norm",), {}, "qk_norm"),
        (("attention_bias",), {}, "attention_bias"),
    ],
)
def test_a_layout_without_a_field_refuses_the_variant(tmp_path, llama, variants, config, words):
    folder = speculators(tmp_path / "in", make(llama, variants=variants), **config)
    with pytest.raises(CheckpointError, match=f"{words}.*specforge layout has no field"):
        export_head(folder, tmp_path / "out", "specforge", llama)
    assert not (tmp_path / "out").exists()


def test_a_confu_head_is_not_exported(tmp_path, llama):
    head = fakes.tiny_head(llama)
    save_checkpoint(tmp_path / "x", head, fakes.tiny_contemplation(llama, head), llama, {})
    with pytest.raises(CheckpointError, match="is a ConFu head, and the engines serve EAGLE-3"):
        export_head(tmp_path / "x", tmp_path / "out", "specforge", llama)


def test_export_for_another_target_is_refused(tmp_path, targets, ours):
    with pytest.raises(CheckpointError, match="was trained for 'tiny-qwen3-2'"):
        export_head(ours, tmp_path / "out", "specforge", targets["llama3"])


def test_export_never_writes_into_a_folder_in_use(tmp_path, targets, ours):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="not empty"):
        export_head(ours, tmp_path / "out", "specforge", targets["qwen3"])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_layout_names_are_those_of_the_commands():
    assert set(published.WRITABLE) == {SPECFORGE.name, SPECULATORS.name}
    assert OFFICIAL.file_name("q_proj.weight") == "midlayer.self_attn.q_proj.weight"


# From the command line -------------------------------------------------------------------------


def test_export_and_serve_from_the_command_line(tmp_path, targets, ours, capsys):
    families.save("qwen3", tmp_path / "target", seed=2)
    place = ["--target", str(tmp_path / "target")]
    out = tmp_path / "out"
    assert main(["export", str(ours), str(out), "--layout", "specforge", *place]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    common = ["--device", "cpu", "--max-new-tokens", "6", "--nodes", "8", "--depth", "2"]
    assert main(["compare", "and the", "--eagle3", str(out), *place, *common]) == 0
    printed = capsys.readouterr()
    assert "same text: yes, token for token" in printed.out
    assert "--- ConFu" not in printed.out
    assert "EAGLE-3: specforge layout; reads the states on entry to layers 2, 4, 5" in printed.err
    assert "warning: EAGLE-3: This head guesses no better than chance" in printed.err
    config = json.loads((out / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 2, 5]
    (out / "config.json").write_text(json.dumps(config))
    assert main(["compare", "and the", "--eagle3", str(out), *place, *common]) == 1
    assert "Say which: --taps input, or --taps output" in capsys.readouterr().err
    named = ["--taps", "output", "--eagle3", str(out), *place, *common]
    assert main(["compare", "and the", *named]) == 0
    assert "layers 1, 3, 6 (asked for as outputs)" in capsys.readouterr().err


def test_heads_are_called_as_they_were_asked_for(tmp_path, targets, monkeypatch):
    """A hub head is stored under a hash; what people see is its id, and what was found out."""
    import huggingface_hub

    families.save("qwen3", tmp_path / "target", seed=2)
    folder = speculators(tmp_path / "0123abcd", make(targets["qwen3"]))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    engine = load_engine(str(tmp_path / "target"), "cpu", heads={"eagle3": "someone/head"})
    assert engine.method("eagle3").checkpoint.name == "someone/head"
    info = engine.methods["eagle3"]
    assert info.notes[0].startswith("speculators layout")
    assert len(info.warnings) == 1
    assert engine.methods["plain"].notes == ()
