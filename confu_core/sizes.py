"""How large a model is, counted from its published shape: parameters and bytes, no tensor.

Presets say with it what must be downloaded, training plans what fits and how long it takes.
Standard library only.

Letters: L layers, Ht target width, Hq = heads x head width, Hk = key/value heads x head width,
I MLP width, V vocabulary, H draft width, D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from confu_core.errors import DataError

# Bytes of one number.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The same where weights are packed, with bitsandbytes' float32 scale of every 64 numbers of 4 bits.
PACKED = {4: 0.5 + 4 / 64, 8: 1.0}


@dataclass(frozen=True)
class TargetShape:
    """What decides a Llama- or Qwen-type model's size, under short names."""

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TargetShape:
        """From the fields of a Hugging Face `config.json`.

        Raises:
            DataError: a field is missing.
        """
        try:
            heads = config["num_attention_heads"]
            return cls(
                kind=config["model_type"],
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                heads=heads,
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                intermediate=config["intermediate_size"],
                vocab=config["vocab_size"],
                tied=config["tie_word_embeddings"],
            )
        except KeyError as error:
            raise DataError(
                f"The model's config has no field {error}. Copy it from the model's config.json."
            ) from error

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer's matrices: 2 Ht Hq + 2 Ht Hk + 3 Ht I."""
        attention = 2 * self.hidden * (self.query_width + self.kv_width)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        """All parameters, a tied output matrix once."""
        extra = {"qwen2": self.query_width + 2 * self.kv_width, "qwen3": 2 * self.head_dim}
        layer = self.layer_matrices + 2 * self.hidden + extra.get(self.kind, 0)
        tables = (1 if self.tied else 2) * self.vocab * self.hidden
        return self.layers * layer + self.hidden + tables

    def bytes(self, dtype: str, bits: int | None = None) -> int:
        """Bytes of the weights in a precision; with `bits` those of the layers' matrices are packed
        into 4 or 8, while embedding, output and norms keep the precision."""
        if bits is None:
            return self.parameters * BYTES[dtype]
        packed = self.layers * self.layer_matrices
        return (self.parameters - packed) * BYTES[dtype] + round(packed * PACKED[bits])


def eagle3_parameters(target: TargetShape, draft_vocab: int) -> int:
    """Parameters of an EAGLE-3 head of the target's width and heads (`heads.DraftHead`)."""
    hidden = target.hidden
    fuse = hidden * 3 * hidden
    queries_keys_values = 2 * hidden * (target.query_width + 2 * target.kv_width)
    rest = hidden * target.query_width + 3 * hidden * target.intermediate + 4 * hidden
    return fuse + queries_keys_values + rest + draft_vocab * hidden
