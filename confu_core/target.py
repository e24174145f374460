"""The target: a frozen Llama- or Qwen-type language model, run one pass at a time.

The pass is written out here instead of calling the model's own `forward`, because speculation
needs what that hides: a tree mask, a cache that keeps a path by index, the residual stream at
three layers, rows that are not tokens, and logits only where they are wanted. The weights, the
layers' submodules and the rotary embedding are the model's own, so `tests/core/test_target.py`
can demand the same numbers.

Sizes: B sequences, R rows of a pass, S slots in view, Ht target width, L layers, V vocabulary,
K key/value heads, G query heads per key/value head, D head width.
"""

from __future__ import annotations

import copy
import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
)
from transformers.utils import is_bitsandbytes_available
from transformers.utils import logging as transformers_logging

from confu_core import masks
from confu_core.cache import KVCache
from confu_core.errors import TargetError
from confu_core.fused import fuse
from confu_core.tree import DraftTree

SUPPORTED_TYPES = ("llama", "qwen2", "qwen3")
MIN_LAYERS = 7  # below this EAGLE-3's three taps are not three different layers
# Their frequencies change with the length of the text, so keys that stand in a cache go stale.
MOVING_ROPES = ("dynamic", "longrope")
SPREAD = "spread"  # as a device: over all GPUs, by accelerate's `device_map="auto"`


class Adapters(Protocol):
    """Changes to the target's linear layers, in the groups of `fused.Block` ("qkv", "out",
    "gate_up", "down"): what is added for inputs (..., in) to outputs (..., out)."""

    def __call__(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor: ...


class Memory(Protocol):
    """Where a pass puts its keys and values, and what it can then reach."""

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one layer's new keys and values (B, K, R, D); return those in view (B, K, S, D)."""


@dataclass(frozen=True)
class Rows:
    """What a pass leaves behind for each row.

    taps: (B, R, 3 Ht), the residual stream on entry to three layers, low to high (EAGLE-3). Some
        published heads read another number of layers; 3 stands for it here and elsewhere.
    last: (B, R, Ht), the final state after the target's last norm; `Target.logits` reads it.
    """

    taps: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Verification:
    """What one verification pass says: logits (N, V) float32 and taps (N, 3 Ht) per node, and taps
    (C, 3 Ht) and final states (C, Ht) per contemplate token."""

    logits: torch.Tensor
    taps: torch.Tensor
    contemplate_taps: torch.Tensor
    contemplate_last: torch.Tensor


class Target:
    """A frozen causal language model with the passes that speculation needs.

    Nothing of a run is kept here: caches belong to runs, so several runs can share one target.
    """

    def __init__(self, model: torch.nn.Module, tokenizer, name: str) -> None:
        config = model.config
        _check_supported(config, name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.layers: int = config.num_hidden_layers
        self.hidden: int = config.hidden_size
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.head_dim: int = getattr(config, "head_dim", None) or self.hidden // self.heads
        # Ids beyond the tokenizer are padding of the matrix: never proposed, never emitted.
        self.vocab: int = min(config.vocab_size, len(tokenizer))
        self.intermediate: int = config.intermediate_size
        self.context: int = config.max_position_embeddings
        # Residual stream on *entry* to these layers, as EAGLE counts them.
        self.tap_layers: tuple[int, ...] = (2, self.layers // 2, self.layers - 3)
        self.stop_ids: frozenset[int] = _stop_ids(model, tokenizer)
        # The model's weights, laid out for small passes.
        self._fused = fuse(self.model)

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        bits: int | None = None,
    ) -> Target:
        """Load a Hugging Face causal LM from a folder or a hub id.

        Args:
            device: of torch, or "spread" for all GPUs together.
            bits: 4 or 8 packs the weights of the layers (bitsandbytes); None leaves them.

        Raises:
            TargetError: not found, not readable, too large, or of a kind that is not supported.
        """
        transformers_logging.disable_progress_bar()  # callers report progress in their own way
        placement = {"device_map": "auto" if device == SPREAD else {"": str(device)}}
        if bits is not None:
            placement["quantization_config"] = _packing(bits, dtype)
        try:
            _check_supported(AutoConfig.from_pretrained(source), str(source))
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **placement)
            tokenizer = AutoTokenizer.from_pretrained(source)
        # ImportError: the checkpoint is packed in a way whose library is not installed
        except (OSError, ValueError, ImportError) as error:
            raise _not_loaded(source, error) from error
        if device == SPREAD:
            _keep_rows_together(model, str(source))
        return cls(model, tokenizer, str(source))

    @classmethod
    def outline(cls, source: str | Path) -> Target:
        """The target without its weights: sizes, vocabulary, fingerprint. It cannot run.

        Raises:
            TargetError: as `load`.
        """
        try:
            config = AutoConfig.from_pretrained(source)
            _check_supported(config, str(source))
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise _not_loaded(source, error) from error
        with suppress(OSError):  # optional; without it the stop ids of the config hold
            model.generation_config = GenerationConfig.from_pretrained(source)
        return cls(model, tokenizer, str(source))

    def with_taps(self, layers: tuple[int, ...]) -> Target:
        """The same target, read on entry to other layers (ascending). Shares everything else."""
        if layers == self.tap_layers:
            return self
        other = copy.copy(self)
        other.tap_layers = layers
        return other

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def precision(self) -> str:
        """The precision it computes in, and that of packed weights: "bfloat16, 4-bit weights"."""
        name = str(self.dtype).removeprefix("torch.")
        packed = getattr(self.model.config, "quantization_config", None)
        if packed is None:
            return name
        if isinstance(packed, BitsAndBytesConfig):
            return f"{name}, {4 if packed.load_in_4bit else 8}-bit weights"
        return f"{name}, packed weights"

    def fingerprint(self) -> str:
        """Sixteen hex digits that a head records, so that it is refused for another target.

        Covers shape and vocabulary, not the weights: a finetune with the same tokenizer may share
        a head (its acceptance then tells how well).
        """
        vocabulary = sorted(self.tokenizer.get_vocab().items(), key=lambda item: item[1])
        facts = [self.model.config.model_type, self.layers, self.hidden, self.vocab, vocabulary]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def new_cache(self, capacity: int, fixed: int = 0, batch: int = 1) -> KVCache:
        """A cache for one run of this target (see `KVCache`)."""
        return KVCache(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            fixed=fixed,
            batch=batch,
            device=self.device,
            dtype=self.dtype,
        )

    def wait(self) -> None:
        """Wait until the device has done what it was given, so that a clock reads true."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (...) -> input embeddings (..., Ht)."""
        return self.model.get_input_embeddings()(token_ids)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Final states (..., Ht) -> next-token logits (..., V), float32 for sampling."""
        return self._fused.output(last)[..., : self.vocab].float()

    def run(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        may_attend: torch.Tensor | None,
        memory: Memory,
        adapters: Adapters | None = None,
        adapted_from: int = 0,
    ) -> Rows:
        """One pass over rows that are already embedded.

        Args:
            inputs: (B, R, Ht).
            positions: (B, R) or (1, R), the text position of each row.
            may_attend: (B or 1, R, S) boolean; None means causal over these rows alone, and for a
                single row everything in view.
            memory: holds keys and values; S is what it returns in view.
            adapters: changes to the linear layers for rows from `adapted_from` on.
        """
        batch, rows, _ = inputs.shape
        groups = self.heads // self.kv_heads
        # (B, R, D) each; the model's own module, so every kind of rope scaling is right
        cos, sin = self.model.model.rotary_emb(inputs, positions)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        mask = None
        if may_attend is not None:
            # The G query heads of a key/value head become extra rows, so keys are never copied.
            mask = masks.additive(may_attend, inputs.dtype).unsqueeze(1).repeat(1, 1, groups, 1)

        def adapt(layer: int, group: str, x: torch.Tensor, y: torch.Tensor) -> None:
            # not +=, which would also write the sum back onto itself
            y[:, adapted_from:].add_(adapters(layer, group, x[:, adapted_from:]))

        turned = self.heads + self.kv_heads  # heads of queries and keys, which stand side by side
        x = inputs
        taps = []
        for index, block in enumerate(self._fused.blocks):
            if index in self.tap_layers:
                taps.append(x)
            normed = block.norm_in(x)
            y = block.qkv(normed)
            if adapters is not None:
                adapt(index, "qkv", normed, y)
            y = y.view(batch, rows, -1, self.head_dim).transpose(1, 2)  # (B, K·G + 2 K, R, D)
            qk, v = y[:, :turned], y[:, turned:]
            if block.q_norm is not None:
                q, k = block.q_norm(qk[:, : self.heads]), block.k_norm(qk[:, self.heads :])
                qk = torch.cat((q, k), dim=1)
            qk = rotate(qk, cos, sin)
            keys, values = memory.extend(index, qk[:, self.heads :], v)  # (B, K, S, D)
            mixed = attend(qk[:, : self.heads], keys, values, mask, causal=may_attend is None)
            mixed = mixed.transpose(1, 2).reshape(batch, rows, -1)
            y = block.out(mixed)
            if adapters is not None:
                adapt(index, "out", mixed, y)
            x = x + y
            normed = block.norm_mid(x)
            y = block.gate_up(normed)
            if adapters is not None:
                adapt(index, "gate_up", normed, y)
            gate, up = y[..., : self.intermediate], y[..., self.intermediate :]
            inner = block.activate(gate) * up
            y = block.down(inner)
            if adapters is not None:
                adapt(index, "down", inner, y)
            x = x + y
        return Rows(taps=torch.cat(taps, dim=-1), last=self._fused.norm(x))

    def prefill(self, cache: KVCache, token_ids: list[int]) -> Rows:
        """Run the prompt through an empty cache and commit it. Rows are (1, P, ...)."""
        ids = torch.tensor([token_ids], device=self.device)
        cache.open(len(token_ids))
        positions = torch.arange(len(token_ids), device=self.device).unsqueeze(0)
        rows = self.run(self.embed(ids), positions, None, cache)
        cache.commit(list(range(len(token_ids))))
        return rows

    def verify(
        self,
        cache: KVCache,
        tree: DraftTree,
        contemplate_nodes: tuple[int, ...] = (),
        contemplate_embedding: torch.Tensor | None = None,
        adapters: Adapters | None = None,
    ) -> Verification:
        """Score a whole draft tree in one pass. Its rows stay pending until `cache.commit`.

        Args:
            contemplate_nodes: nodes that carry a contemplate token, which stands one position
                behind its node: the slot of the token that it contemplates (ours).
            contemplate_embedding: (Ht,) shared by all of them.
            adapters: for the contemplate tokens' rows.
        """
        nodes, contemplate = len(tree), len(contemplate_nodes)
        cache.open(nodes + contemplate, see_fixed=contemplate > 0)
        inputs = self.embed(torch.tensor(tree.token_ids, device=self.device))  # (N, Ht)
        depths = [*tree.depths, *(tree.depths[node] + 1 for node in contemplate_nodes)]
        if contemplate:
            extra = contemplate_embedding.to(inputs.dtype).expand(contemplate, -1)
            inputs = torch.cat((inputs, extra))  # (N + C, Ht)
        positions = cache.length + torch.tensor(depths, device=self.device)
        mask = None
        if nodes + contemplate > 1:
            mask = masks.verify_mask(tree.ancestors, contemplate_nodes, cache.length, cache.fixed)
            mask = mask.unsqueeze(0).to(self.device)
        rows = self.run(
            inputs.unsqueeze(0),
            positions.unsqueeze(0),
            mask,
            cache,
            adapters if contemplate else None,
            adapted_from=nodes,
        )
        return Verification(
            logits=self.logits(rows.last[0, :nodes]),
            taps=rows.taps[0, :nodes],
            contemplate_taps=rows.taps[0, nodes:],
            contemplate_last=rows.last[0, nodes:],
        )

    def contemplate(
        self, cache: KVCache, embedding: torch.Tensor, adapters: Adapters | None = None
    ) -> Rows:
        """One contemplate token behind the committed text: its Rows, (3 Ht,) and (Ht,). Leaves no
        trace."""
        cache.open(1, see_fixed=True)
        position = torch.tensor([[cache.length]], device=self.device)
        inputs = embedding.to(self.dtype).view(1, 1, -1)
        rows = self.run(inputs, position, None, cache, adapters)
        cache.drop_pending()
        return Rows(rows.taps[0, 0], rows.last[0, 0])


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool = False,
) -> torch.Tensor:
    """Grouped-query attention without copying keys.

    Args:
        q: (B, K·G, R, D); keys, values: (B, K, S, D).
        mask: additive (B or 1, 1, G·R, S), the R rows repeated G times; or None.
        causal: with no mask, rows see themselves and earlier rows only (then S = R).

    Returns:
        (B, K·G, R, D)
    """
    batch, heads, rows, width = q.shape
    if causal and rows > 1:
        return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
    grouped = q.reshape(batch, keys.shape[1], -1, width)  # (B, K, G·R, D)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return mixed.reshape(batch, heads, rows, width)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding in the half-split convention of Llama and Qwen."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def _check_supported(config, name: str) -> None:
    if config.model_type not in SUPPORTED_TYPES:
        raise TargetError(
            f"{name!r} is a {config.model_type!r} model. Supported kinds: "
            f"{', '.join(SUPPORTED_TYPES)}."
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise TargetError(
            f"{name!r} has layers with sliding-window attention, which forget what a rejected "
            "draft would have to bring back. Choose a target that attends to its whole text."
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in MOVING_ROPES:
        raise TargetError(
            f"{name!r} uses {rope!r} rope scaling, which changes with the length of the text, so "
            "that drafting would change its answers. Choose a target with another scaling."
        )
    if config.num_hidden_layers < MIN_LAYERS:
        raise TargetError(
            f"{name!r} has {config.num_hidden_layers} layers; EAGLE-3 reads three different ones, "
            f"which takes at least {MIN_LAYERS}."
        )


def _stop_ids(model, tokenizer) -> frozenset[int]:
    stops = model.generation_config.eos_token_id if model.generation_config else None
    stops = stops if isinstance(stops, list) else [stops]
    return frozenset(i for i in (*stops, tokenizer.eos_token_id) if i is not None)


def _not_loaded(source: str | Path, error: Exception) -> TargetError:
    return TargetError(
        f"The target {str(source)!r} could not be loaded: {error} "
        "Give a folder with a Hugging Face model, a hub id, or nothing for the default."
    )


def _packing(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """How transformers packs weights on loading."""
    if bits not in (4, 8):
        raise TargetError(f"{bits}-bit targets are not supported. Choose 4 or 8 bits.")
    if not is_bitsandbytes_available():
        raise TargetError(
            f"Packing a target in {bits} bits needs the bitsandbytes package, which is not "
            "installed. Install it (pip install bitsandbytes), or leave --bits out."
        )
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)


def _keep_rows_together(model: torch.nn.Module, name: str) -> None:
    """Make a model that accelerate spread over several devices look like one on one device.

    Weights stay where they are; the rows of a pass and the cache stay on the embedding's device
    and visit the layers' norms and projections. That costs some twenty small copies per layer, and
    lets every other room know one device only.
    """
    from accelerate.hooks import remove_hook_from_submodules

    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if len(places) > 1 and places & {"cpu", "disk"}:
        raise TargetError(
            f"{name!r} does not fit into the GPUs of this machine. Choose --dtype bfloat16, "
            "--bits 4, or a smaller target."
        )
    remove_hook_from_submodules(model)  # they move rows without bringing them back
    home = model.get_input_embeddings().weight.device
    body = model.model
    body.rotary_emb.to(home)
    visited = [body.norm, model.get_output_embeddings()]
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        visited += [layer.input_layernorm, layer.post_attention_layernorm]
        visited += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        visited += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if hasattr(attention, "q_norm"):
            visited += [attention.q_norm, attention.k_norm]
    for module in visited:
        place = next(module.parameters()).device
        if place != home:
            module.register_forward_pre_hook(lambda _, rows, place=place: (rows[0].to(place),))
            module.register_forward_hook(lambda _, rows, result: result.to(home))
