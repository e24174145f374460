"""Tiny random targets with what the large families have: real config classes, real code paths.

Llama-3: scaled rope, several stop ids, a template that writes the beginning-of-text token, and a
tokenizer that would add it once more. Qwen-3: normed queries and keys, head width unlike hidden /
heads, tied output, a template without a default system prompt, a padded vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from confu_core.target import Target
from tests import fakes

BEGIN, HEADER_START, HEADER_END = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
TURN_END, MESSAGE_END = "<|eot_id|>", "<|eom_id|>"
LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = fakes.tiny_tokenizer()
    names = [BEGIN, HEADER_START, HEADER_END, TURN_END, MESSAGE_END]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = BEGIN, TURN_END, None
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.convert_tokens_to_ids(BEGIN))]
    )
    tokenizer.chat_template = LLAMA3_TEMPLATE
    return tokenizer


def llama3_model(seed: int = 0, **config) -> torch.nn.Module:
    tokenizer = llama3_tokenizer()
    stops = tokenizer.convert_tokens_to_ids([TURN_END, MESSAGE_END, fakes.SPECIALS[0]])
    fields = {
        "vocab_size": len(tokenizer),
        "rope_parameters": LLAMA3_ROPE,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": stops,
        "pad_token_id": None,
    }
    model = fakes.tiny_model("llama", seed, **(fields | config))
    model.generation_config = GenerationConfig(eos_token_id=stops)
    return model


def qwen3_model(seed: int = 0, **config) -> torch.nn.Module:
    fields = {
        "head_dim": 12,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    return fakes.tiny_model("qwen3", seed, **(fields | config))


FAMILIES = {
    "llama3": (llama3_model, llama3_tokenizer),
    "qwen3": (qwen3_model, fakes.tiny_tokenizer),
}


def target(family: str, seed: int = 0, **config) -> Target:
    """A tiny target of a family."""
    model, tokenizer = FAMILIES[family]
    return Target(model(seed, **config), tokenizer(), f"tiny-{family}-{seed}")


def save(family: str, folder: Path, seed: int = 0, **config) -> None:
    """The same as a Hugging Face model folder."""
    model, tokenizer = FAMILIES[family]
    model(seed, **config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
