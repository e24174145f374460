"""Future tokens of recorded text, for the fixed map that the app draws."""

from __future__ import annotations

import random

import torch

from confu_core.heads import Contemplation, DraftHead
from confu_core.reading import FutureBasis
from confu_core.target import Target
from confu_core.train.anchors import sample_anchors
from confu_core.train.data import Conversation, batches
from confu_core.train.losses import DraftTrainee, chain_starts


@torch.no_grad()
def fit_basis(
    target: Target,
    head: DraftHead,
    contemplation: Contemplation,
    conversations: list[Conversation],
    every: int = 8,
) -> FutureBasis:
    """Fit the map on one future token per `every` starts of these conversations."""
    trainee = DraftTrainee(target, head, contemplation).eval()
    dice = random.Random(0)
    features, groups = [], []
    for batch in batches(conversations, 4096, seed=None):
        starts, valid = chain_starts(batch.answer)
        anchors = sample_anchors(starts, valid, every, dice, replicate=False)
        futures = trainee.futures_of(batch, anchors, starts)
        features.append(futures.feature[futures.present].float().cpu())
        for row, number in enumerate(batch.numbers):
            groups += [conversations[number].kind] * int(futures.present[row].sum())
    return FutureBasis.fit(torch.cat(features), groups)
