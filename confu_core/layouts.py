"""How published EAGLE-3 heads are written: names of tensors, fields of `config.json`, four layouts.

| layout | written by | the draft layer is | config |
|---|---|---|---|
| official | EAGLE's authors | `midlayer.` | LlamaForCausalLM |
| specforge | SpecForge, AngelSlim, SGLang's team | `midlayer.` | LlamaForCausalLMEagle3 |
| speculators | vLLM's speculators | `layers.0.` | `speculators_model_type` |
| nemo | NeMo AutoModel | `model.layers.0.` | LlamaEagle3... |

Everything here is names and numbers (pitfalls 2); `published.py` loads and writes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from confu_core.errors import CheckpointError
from confu_core.heads import DraftShape
from confu_core.rotary import SCALINGS, check_scaling

Config = dict[str, Any]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
UNPREFIXED = ("lm_head", "d2t", "t2d")
EAGLE_ROPE_BASE = 10000.0  # what EAGLE uses where a config names none


@dataclass(frozen=True)
class Layout:
    """One way to write a head.

    layer, top: what stands before the names of the draft layer's tensors, and of the others.
    convention: how its heads count the layers that they read, where all do it alike.
    norm_output: what the config field of that name means: "recycled" hands on the state after the
        final norm (EAGLE-3.1), "before lm_head" is what every head does (SpecForge); None if we
        do not know. As their own code has it.
    """

    name: str
    layer: str
    top: str
    convention: str | None = None
    norm_output: Literal["recycled", "before lm_head"] | None = None

    def file_name(self, name: str) -> str:
        """The name in a file of a tensor of `DraftHead`."""
        module = name.split(".")[0]
        if module in ATTENTION:
            return f"{self.layer}self_attn.{name}"
        if module in MLP:
            return f"{self.layer}mlp.{name}"
        if module in LAYER_NORMS:
            return f"{self.layer}{name}"
        return name if module in UNPREFIXED else f"{self.top}{name}"


OFFICIAL = Layout("official", "midlayer.", "", norm_output="recycled")
SPECFORGE = Layout("specforge", "midlayer.", "", norm_output="before lm_head")
SPECULATORS = Layout("speculators", "layers.0.", "", "input", "recycled")
NEMO = Layout("nemo", "model.layers.0.", "model.", norm_output="recycled")


def detect(config: Config, tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Which layout this is, by config and names together.

    Raises:
        CheckpointError: the two disagree, or it is no EAGLE-3 head; says what it looks like.
    """
    _refuse_others(config, tensors)
    architecture = next(iter(config.get("architectures") or []), None)
    if any(name.startswith("midlayer.") for name in tensors):
        by_names = "midlayer"
    elif any(name.startswith(NEMO.layer) for name in tensors):
        by_names = NEMO.name
    elif any(name.startswith(SPECULATORS.layer) for name in tensors):
        by_names = SPECULATORS.name
    else:
        raise CheckpointError(
            "The tensors are named as in no layout of EAGLE-3 heads: there is no "
            f"{SPECFORGE.layer}*, {SPECULATORS.layer}* or {NEMO.layer}*. Choose an EAGLE-3 head."
        )
    if "speculators_model_type" in config:
        by_config = SPECULATORS.name
    elif str(architecture).startswith("LlamaEagle3"):
        by_config = NEMO.name
    else:
        by_config = "midlayer"
    if by_names != by_config:
        raise CheckpointError(
            f"The head's tensors are named as in the {by_names} layout, but its config is of the "
            f"{by_config} layout (architecture {architecture!r}). One of the two files does not "
            "belong here."
        )
    if by_names != "midlayer":
        return SPECULATORS if by_names == SPECULATORS.name else NEMO
    if architecture in (None, "LlamaForCausalLM"):
        return OFFICIAL
    if architecture == "LlamaForCausalLMEagle3":
        return SPECFORGE
    # Named alike by more programs than we know; the meaning of `norm_output` is then unknown too.
    return replace(SPECFORGE, name=f"specforge, as {architecture}", norm_output=None)


def _refuse_others(config: Config, tensors: Mapping[str, torch.Tensor]) -> None:
    def refuse(what: str) -> None:
        raise CheckpointError(f"This is {what}, not an EAGLE-3 head. Choose an EAGLE-3 head.")

    words = [*config, *map(str, config.get("architectures") or [])]
    if any("medusa" in word.lower() for word in (*words, *tensors)):
        refuse("a Medusa head")
    if any(name.endswith("mask_hidden") for name in tensors):
        refuse("a head for parallel drafting (mask_hidden)")
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        refuse(f"a speculators head of the kind {kind!r}")
    fusing = [name for name in tensors if name.split(".")[-2:-1] == ["fc"]]
    if "model.embed_tokens.weight" in tensors and not fusing:
        refuse("a whole language model")
    ends = {name.rpartition("layers.0.")[2] for name in tensors}
    if "self_attn.q_proj.weight" in ends and "input_layernorm.weight" not in ends:
        refuse("an EAGLE-1 or EAGLE-2 head")


def listed_taps(config: Config) -> tuple[int, ...] | None:
    """The layers that a config names, as bare numbers."""
    inner = config.get("eagle_config") or {}
    if not inner.get("use_aux_hidden_state", True):
        raise CheckpointError(
            "The head's config says use_aux_hidden_state: false. Such a head reads one state of "
            "the target, not several, and is not supported."
        )
    name = "eagle_aux_hidden_state_layer_ids"
    numbers = config.get(name) or inner.get(name)
    return tuple(int(number) for number in numbers) if numbers else None


def shape_of(
    layout: Layout, config: Config, names: Iterable[str], taps: tuple[int, ...]
) -> tuple[DraftShape, list[str]]:
    """Everything that changes the arithmetic, from a config and from which tensors there are.

    Returns:
        the shape, and what was assumed because the config is silent.

    Raises:
        CheckpointError: a field is missing, or asks for what is not supported.
    """
    inner = config.get("transformer_layer_config") if layout is SPECULATORS else config
    if not isinstance(inner, dict):
        raise CheckpointError("The head's config lacks its transformer_layer_config.")
    layers = inner.get("num_hidden_layers", 1)
    if layers != 1:
        raise CheckpointError(f"The head has {layers} layers; EAGLE-3 heads of one are supported.")
    if inner.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"The head uses {inner['hidden_act']!r}; only 'silu' is supported.")
    if inner.get("mlp_bias"):
        raise CheckpointError("The head's MLP has biases (mlp_bias), which are not supported.")
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise CheckpointError("The head's config asks for fc_norm and norm_before_fc, not one.")
    if config.get("norm_output") and layout.norm_output is None:
        raise CheckpointError(
            "The head's config says norm_output, which means two things in two programs, and "
            f"its architecture {config.get('architectures')} is of neither."
        )
    if layout.norm_output == "before lm_head" and not config.get("norm_output", True):
        raise CheckpointError("The head has no norm before lm_head (norm_output: false).")
    theta, scaling, assumed = rope_of(inner)
    names = set(names)
    hidden, heads = _whole(inner, "hidden_size"), _whole(inner, "num_attention_heads")
    vocab = _whole(inner, "vocab_size")
    shape = DraftShape(
        hidden=hidden,
        target_hidden=config.get("target_hidden_size") or hidden,
        heads=heads,
        kv_heads=inner.get("num_key_value_heads") or heads,
        head_dim=inner.get("head_dim") or hidden // heads,
        intermediate=_whole(inner, "intermediate_size"),
        vocab=vocab,
        draft_vocab=config.get("draft_vocab_size") or vocab,
        rms_eps=float(inner.get("rms_norm_eps") or 1e-6),
        rope_theta=theta,
        tap_layers=taps,
        rope_scaling=scaling,
        qk_norm=layout.file_name("q_norm.weight") in names,
        attention_bias=bool(inner.get("attention_bias")),
        fc_bias=bool(config.get("bias")),
        fc_norm=bool(config.get("fc_norm")),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_before_residual=bool(config.get("norm_before_residual")),
        recycle_normed=layout.norm_output == "recycled" and bool(config.get("norm_output")),
        own_embedding=layout.file_name("embed_tokens.weight") in names,
    )
    if not inner.get("rms_norm_eps"):
        assumed.append("rms_norm_eps 1e-6, since the config names none")
    if layout is SPECULATORS and "norm_before_residual" not in config:
        # speculators' own default; vLLM takes true here, so somebody may mean that.
        assumed.append("norm_before_residual false, since the config does not say")
    return shape, assumed


def rope_of(config: Config) -> tuple[float, dict | None, list[str]]:
    """Base, scaling and what was assumed, from the fields of transformers 4 or 5.

    Version 4 wrote `rope_theta` and `rope_scaling` (with `type` or `rope_type`), version 5 writes
    one `rope_parameters`. Nothing is ever taken from the target.
    """
    fields = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = fields.get("rope_theta") or config.get("rope_theta")
    assumed = [] if theta else ["rope base 10000, as in EAGLE, since the config names none"]
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if fields.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("The head turns a part of each head only (partial_rotary_factor).")
    if kind == "default":
        return float(theta or EAGLE_ROPE_BASE), None, assumed
    scaling = {"rope_type": kind, **{name: fields.get(name) for name in SCALINGS.get(kind, ())}}
    check_scaling(scaling)
    return float(theta or EAGLE_ROPE_BASE), scaling, assumed


def _whole(config: Config, name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"The head's config says {name}: {value!r}; a whole number is needed there."
        )
    return value


@dataclass(frozen=True)
class Served:
    """What an exported config says of the target that the head belongs to."""

    name: str
    kind: str
    architectures: list[str]
    vocab: int
    context: int
    bos: int | None
    eos: int | list[int] | None


def config_of(layout: Layout, shape: DraftShape, served: Served, dtype: str) -> Config:
    """A `config.json` in a layout that can be written.

    Raises:
        CheckpointError: the layout has no field for a variant of this head.
    """
    _refuse_inexpressible(layout, shape)
    layer: Config = {
        "model_type": "qwen3" if shape.qk_norm else "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_eps,
        "vocab_size": served.vocab,
        # A shorter limit than the target's has crashed engines on long texts.
        "max_position_embeddings": served.context,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    common: Config = {"draft_vocab_size": shape.draft_vocab, "tie_word_embeddings": False}
    if shape.target_hidden != shape.hidden:
        common["target_hidden_size"] = shape.target_hidden
    if layout is SPECFORGE:
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            **layer,
            **common,
            "bos_token_id": served.bos,
            "eos_token_id": served.eos,
            "target_model_type": served.kind,
            "fc_norm": shape.fc_norm,
            "norm_output": True,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [entry - 1 for entry in shape.tap_layers],
                "use_aux_hidden_state": True,
            },
        }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": "eagle3",
        **common,
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": list(shape.tap_layers),
        "norm_before_residual": shape.norm_before_residual,
        "norm_before_fc": shape.norm_before_fc,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.recycle_normed,
        "torch_dtype": dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": served.name, "architectures": served.architectures},
        },
    }


def _refuse_inexpressible(layout: Layout, shape: DraftShape) -> None:
    fields = ["attention_bias", "fc_bias"]
    if layout is SPECFORGE:
        fields += ["qk_norm", "norm_before_fc", "norm_before_residual", "recycle_normed"]
    variants = [name for name in fields if getattr(shape, name)]
    if variants:
        raise CheckpointError(
            f"The head has {', '.join(variants)}, which the {layout.name} layout has no field for."
        )


WRITABLE = {layout.name: layout for layout in (SPECFORGE, SPECULATORS)}
