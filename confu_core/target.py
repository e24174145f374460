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

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from confu_core import masks
from confu_core.cache import KVCache
from confu_core.errors import TargetError
from confu_core.tree import DraftTree

SUPPORTED_TYPES = ("llama", "qwen2", "qwen3")
MIN_LAYERS = 7  # below this EAGLE-3's three taps are not three different layers


class Memory(Protocol):
    """Where a pass puts its keys and values, and what it can then reach."""

    def extend(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one layer's new keys and values (B, K, R, D); return those in view (B, K, S, D)."""


@dataclass(frozen=True)
class Rows:
    """What a pass leaves behind for each row.

    taps: (B, R, 3 Ht), the residual stream on entry to three layers, low to high (EAGLE-3).
    last: (B, R, Ht), the final state after the target's last norm; `Target.logits` reads it.
    """

    taps: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True)
class Verification:
    """What one verification pass says: logits (N, V) float32 and taps (N, 3 Ht) per node, and taps
    (C, 3 Ht) per contemplate token."""

    logits: torch.Tensor
    taps: torch.Tensor
    contemplate_taps: torch.Tensor


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
        self.context: int = config.max_position_embeddings
        # Residual stream on *entry* to these layers, as EAGLE counts them.
        self.tap_layers: tuple[int, int, int] = (2, self.layers // 2, self.layers - 3)
        self.stop_ids: frozenset[int] = _stop_ids(model, tokenizer)

    @classmethod
    def load(
        cls, source: str | Path, device: str | torch.device = "cpu", dtype=torch.float32
    ) -> Target:
        """Load a Hugging Face causal LM from a folder or a hub id.

        Raises:
            TargetError: not found, not readable, or of a kind that is not supported.
        """
        transformers_logging.disable_progress_bar()  # callers report progress in their own way
        try:
            _check_supported(AutoConfig.from_pretrained(source), str(source))
            model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise TargetError(
                f"The target {str(source)!r} could not be loaded: {error} "
                "Give a folder with a Hugging Face model, a hub id, or nothing for the default."
            ) from error
        return cls(model, tokenizer, str(source))

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

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
        return self.model.get_output_embeddings()(last)[..., : self.vocab].float()

    def run(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        may_attend: torch.Tensor | None,
        memory: Memory,
    ) -> Rows:
        """One pass over rows that are already embedded.

        Args:
            inputs: (B, R, Ht).
            positions: (B, R) or (1, R), the text position of each row.
            may_attend: (B or 1, R, S) boolean; None means causal over these rows alone, and for a
                single row everything in view.
            memory: holds keys and values; S is what it returns in view.
        """
        body = self.model.model
        batch, rows, _ = inputs.shape
        groups = self.heads // self.kv_heads
        # (B, R, D) each; the model's own module, so every kind of rope scaling is right
        cos, sin = body.rotary_emb(inputs, positions)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        mask = None
        if may_attend is not None:
            # The G query heads of a key/value head become extra rows, so keys are never copied.
            mask = masks.additive(may_attend, inputs.dtype).unsqueeze(1).repeat(1, 1, groups, 1)

        x = inputs
        taps = []
        for index, layer in enumerate(body.layers):
            if index in self.tap_layers:
                taps.append(x)
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            q = attention.q_proj(normed).view(batch, rows, self.heads, self.head_dim)
            k = attention.k_proj(normed).view(batch, rows, self.kv_heads, self.head_dim)
            v = attention.v_proj(normed).view(batch, rows, self.kv_heads, self.head_dim)
            if hasattr(attention, "q_norm"):  # Qwen-3
                q, k = attention.q_norm(q), attention.k_norm(k)
            q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            keys, values = memory.extend(index, k, v)  # (B, K, S, D)
            mixed = attend(q, keys, values, mask, causal=may_attend is None)
            x = x + attention.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return Rows(taps=torch.cat(taps, dim=-1), last=body.norm(x))

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
    ) -> Verification:
        """Score a whole draft tree in one pass. Its rows stay pending until `cache.commit`.

        Args:
            contemplate_nodes: nodes that carry a contemplate token, which stands one position
                behind its node: the slot of the token that it contemplates (ours).
            contemplate_embedding: (Ht,) shared by all of them.
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
        rows = self.run(inputs.unsqueeze(0), positions.unsqueeze(0), mask, cache)
        return Verification(
            logits=self.logits(rows.last[0, :nodes]),
            taps=rows.taps[0, :nodes],
            contemplate_taps=rows.taps[0, nodes:],
        )

    def contemplate(self, cache: KVCache, embedding: torch.Tensor) -> torch.Tensor:
        """One contemplate token behind the committed text: its taps (3 Ht,). Leaves no trace."""
        cache.open(1, see_fixed=True)
        position = torch.tensor([[cache.length]], device=self.device)
        rows = self.run(embedding.to(self.dtype).view(1, 1, -1), position, None, cache)
        cache.drop_pending()
        return rows.taps[0, 0]


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
    if getattr(config, "use_sliding_window", False):
        raise TargetError(f"{name!r} uses sliding-window attention, which cannot be rolled back.")
    if config.num_hidden_layers < MIN_LAYERS:
        raise TargetError(
            f"{name!r} has {config.num_hidden_layers} layers; EAGLE-3 reads three different ones, "
            f"which takes at least {MIN_LAYERS}."
        )


def _stop_ids(model, tokenizer) -> frozenset[int]:
    stops = model.generation_config.eos_token_id if model.generation_config else None
    stops = stops if isinstance(stops, list) else [stops]
    return frozenset(i for i in (*stops, tokenizer.eos_token_id) if i is not None)
