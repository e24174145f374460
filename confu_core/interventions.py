"""Interventions: what the user asked to change about ConFu, made ready for a run.

Running a prompt again with the future token withheld, taken from another prompt, or with one expert
forced is the causal evidence that it matters. The text stays the same; tree and tau change.
"""

from __future__ import annotations

import torch

from confu_core.contemplation import Changes, FutureToken
from confu_core.errors import SettingsError
from confu_core.methods import Method, with_changes
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.trace import Intervention


def intervene(target: Target, method: Method, intervention: Intervention) -> Method:
    """ConFu with one thing changed.

    Raises:
        SettingsError: the method does not contemplate, or there is no such expert.
        PromptError: the donor prompt is empty or too long.
    """
    part = method.checkpoint.contemplation if method.checkpoint else None
    if part is None:
        raise SettingsError("Only ConFu has a future token to change; choose the ConFu method.")
    match intervention.change:
        case "remove future":
            changes = Changes(remove=True)
        case "swap future":
            changes = Changes(future=first_future(target, method, intervention.donor or ""))
        case "force contemplate expert":
            count = part.shape.contemplate_experts
            changes = Changes(contemplate_expert=_expert(intervention.expert, count))
        case "force future expert":
            count = part.shape.future_experts
            changes = Changes(future_expert=_expert(intervention.expert, count))
    return with_changes(method, changes)


def _expert(expert: int | None, count: int) -> int:
    if expert is None or not 0 <= expert < count:
        raise SettingsError(f"Expert is {expert}, but must be between 0 and {count - 1}.")
    return expert


@torch.inference_mode()
def first_future(target: Target, method: Method, prompt: str) -> FutureToken:
    """The future token that a prompt gives before its first answer token."""
    ids = chat_ids(target, prompt)
    contemplator = method.contemplator()
    cache = target.new_cache(len(ids) + 1, fixed=contemplator.soft_prompts)
    return contemplator.begin(target, cache, target.prefill(cache, ids))
