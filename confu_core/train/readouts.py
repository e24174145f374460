"""How much the future token's own words count, fitted for acceptance when training is over (ours).

The loss trains the read-outs' weights for likelihood: a sum of two opinions that are not
independent is too sure of itself, so they stay small. Acceptance only asks which tokens rank first,
and for that they may be larger.
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerate import Accelerator

from confu_core.train.data import Conversation
from confu_core.train.loop import evaluate
from confu_core.train.losses import DraftTrainee

FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0)
TEXTS = 60  # conversations that it is fitted on


def fit_read_outs(
    trainee: DraftTrainee, conversations: Sequence[Conversation], accelerator: Accelerator
) -> dict[str, list[float]]:
    """Multiply the read-outs' weights, in place, by the factor with the best acceptance: the sum of
    the implied taus of a chain and of a tree of width 8.

    Args:
        conversations: text that was not trained on, since a head knows the other by heart in part
            and asks for less advice there; a sample is taken.

    Returns:
        For the record: each factor's two taus by its name, and the factor `chosen`, alone.
    """
    weight = trainee.contemplation.read_out_weight
    trained = weight.detach().clone()
    sample = list(conversations[:: max(1, round(len(conversations) / TEXTS))])
    found: dict[str, list[float]] = {}
    for factor in FACTORS:
        weight.data.copy_(factor * trained)
        report = evaluate(trainee, sample, accelerator)
        found[str(factor)] = [report["tau_chain"], report["tau_top8"]]
    best = max(FACTORS, key=lambda factor: sum(found[str(factor)]))
    weight.data.copy_(best * trained)
    return found | {"chosen": [best]}
