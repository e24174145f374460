"""Peers: what `transformers` itself offers, on the very same model object, as lanes of the run.

Greedy `generate`, its prompt lookup, and its assisted generation with a smaller model, each with
the library's own defaults. A streamer counts passes and their tokens: `generate` hands it the
tokens of each target pass as soon as they are known.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from confu_core.bench.lanes import Answer, Lane
from confu_core.errors import TargetError
from confu_core.target import Target
from confu_core.trace import Settings

LOOKUP_TOKENS = 10  # as in the library's own example


class _Passes(BaseStreamer):
    """Tokens and time of every target pass; the first call brings the prompt."""

    def __init__(self) -> None:
        self.gained: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.gained.append(value.numel())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to show."""


class Peer:
    """`transformers`' `generate` with greedy search on our target's own model.

    Args:
        options: what makes the peer: keyword arguments of `generate`.
    """

    drafts_tree = False
    samples = False  # its random numbers are not ours, so its text could not be compared

    def __init__(self, name: str, target: Target, **options) -> None:
        self.name = name
        self._target = target
        self._options = options

    @torch.inference_mode()
    def answer(self, prompt_ids: list[int], settings: Settings) -> Answer:
        target = self._target
        ids = torch.tensor([prompt_ids], device=target.device)
        passes = _Passes()
        began = time.perf_counter()
        answer = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=passes,
            max_new_tokens=min(settings.max_new_tokens, target.context - len(prompt_ids)),
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,  # some models come with a habit of their own
            eos_token_id=sorted(target.stop_ids),
            pad_token_id=min(target.stop_ids),
            **self._options,
        )
        tokens = answer[0, len(prompt_ids) :].tolist()
        total = time.perf_counter() - began
        first = passes.times[1] - began
        return Answer(
            token_ids=tuple(tokens),
            margins=(),
            first_tokens=passes.gained[1],
            passes=len(passes.gained) - 2,
            first_seconds=first,
            seconds=total - first,
        )


def peers(target: Target, assistant: str | None) -> list[Lane]:
    """The peers that run on this target; assisted generation where an assistant is named.

    Raises:
        TargetError: the assistant cannot be loaded or has another vocabulary.
    """
    found: list[Lane] = [
        Peer("transformers", target),
        Peer("transformers-lookup", target, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]
    if assistant is not None:
        model = _load_assistant(assistant, target)
        found.append(Peer("transformers-assisted", target, assistant_model=model))
    return found


def _load_assistant(source: str, target: Target) -> torch.nn.Module:
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype)
        vocabulary = AutoTokenizer.from_pretrained(source).get_vocab()
    except (OSError, ValueError) as error:
        raise TargetError(
            f"The assistant {str(source)!r} could not be loaded: {error} Give a folder with a "
            "Hugging Face model or a hub id, or leave --assistant out."
        ) from error
    if vocabulary != target.tokenizer.get_vocab():
        raise TargetError(
            f"The assistant {Path(source).name!r} has another vocabulary than {target.name!r}. "
            "Choose a smaller model of the same family."
        )
    return model.to(target.device).eval().requires_grad_(False)
