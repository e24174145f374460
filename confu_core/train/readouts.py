"""How the future token's own words are mixed in, fitted when training is over (ours).

The loss trains the read-outs' weights for likelihood: a sum of two opinions that are not
independent is too sure of itself, so they stay small. Acceptance only asks which tokens rank first,
and for that they may be larger. How sure the sum may be is a second number, its temperature: trees
and the automatic budget take the draft's probabilities at their word.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator

from confu_core.train.data import Conversation, batches
from confu_core.train.losses import DraftTrainee, Opinions

FACTORS = (1.0, 1.5, 2.0, 2.5, 3.0)
TEMPERATURES = (1.0, 1.1, 1.2, 1.3, 1.5)
TEXTS = 60  # conversations that both are fitted on
DEPTHS = 5
WIDTH = 8


class _Trials:
    """All factors and temperatures tried on the same opinions: states do not depend on them.

    hits: per factor and depth, whether the best guess, and one of the best `WIDTH`, is the token
    that followed. losses: per factor, temperature and depth, its negative log-probability in nats
    where a read-out reaches and the draft's vocabulary holds it.
    """

    def __init__(self, trainee: DraftTrainee) -> None:
        self._weight = trainee.contemplation.read_out_weight
        self._vocabulary = trainee.vocabulary
        self.hits = {factor: [[] for _ in range(DEPTHS)] for factor in FACTORS}
        self.losses = {(f, t): [[] for _ in range(DEPTHS)] for f in FACTORS for t in TEMPERATURES}

    def judge(self, depth: int, known: Opinions, followed: torch.Tensor) -> None:
        """For `DraftTrainee.forward`. followed: (n,) token ids."""
        right = self._vocabulary == followed.unsqueeze(-1)  # (n, D)
        named = right[known.told].any(-1)
        for factor in FACTORS:
            logits = known.draft.float()
            if known.read_out is not None:
                weight = factor * self._weight[known.number].unsqueeze(-1)
                pooled = logits[known.told] + weight * known.read_out.float()
                logits = logits.index_copy(0, known.told.nonzero().squeeze(-1), pooled)
                mine = pooled[right[known.told]]  # (named,) logits of what followed
                for temperature in TEMPERATURES:
                    rest = (pooled[named] / temperature).logsumexp(-1)
                    self.losses[factor, temperature][depth].append(rest - mine / temperature)
            best = logits.topk(WIDTH, dim=-1).indices
            found = right.gather(1, best)  # (n, WIDTH)
            self.hits[factor][depth].append(torch.stack((found[:, 0], found.any(-1))))

    def taus(self, factor: float) -> list[float]:
        """The implied taus of a chain and of a tree of that width, as `evaluate` has them."""
        hits = torch.stack(
            [torch.cat(parts, dim=1) for parts in self.hits[factor]]
        )  # (depth, 2, n)
        return [round(1 + float(row.float().cumprod(0).mean(1).sum()), 4) for row in hits.unbind(1)]

    def loss(self, factor: float, temperature: float) -> float:
        """The mean loss at each depth that read-outs reach, summed."""
        depths = [torch.cat(parts) for parts in self.losses[factor, temperature] if parts]
        return round(sum(float(values.mean()) for values in depths), 4)


@torch.no_grad()
def fit_read_outs(
    trainee: DraftTrainee, conversations: Sequence[Conversation], accelerator: Accelerator
) -> dict[str, dict[str, list[float]]]:
    """Multiply the read-outs' weights, in place, by the factor with the best acceptance: the sum of
    the implied taus of a chain and of a tree of width 8. Then set the temperature with the least
    loss; it changes no ranking, so the factor stays the best.

    Args:
        conversations: text that was not trained on, since a head knows the other by heart in part
            and asks for less advice there; a sample is taken.

    Returns:
        For the record, `factor` and `temperature`: under each value tried, the two taus or the loss
        summed over the depths that read-outs reach; under `chosen` the value, alone.
    """
    trainee.eval()
    sample = list(conversations[:: max(1, round(len(conversations) / TEXTS))])
    trials, dice = _Trials(trainee), random.Random(0)
    for batch in batches(sample, 4096, seed=None):
        with accelerator.autocast():
            trainee(batch, DEPTHS, dice, 1, False, trials.judge)
    taus = {str(factor): trials.taus(factor) for factor in FACTORS}
    factor = max(FACTORS, key=lambda factor: sum(taus[str(factor)]))
    losses = {str(t): [trials.loss(factor, t)] for t in TEMPERATURES}
    temperature = min(TEMPERATURES, key=lambda temperature: losses[str(temperature)])
    part = trainee.contemplation
    part.read_out_weight.mul_(factor)
    part.shape = replace(part.shape, read_out_temperature=temperature)
    return {
        "factor": taus | {"chosen": [factor]},
        "temperature": losses | {"chosen": [temperature]},
    }
