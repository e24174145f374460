"""Training equals decoding: an unrolled training step gives the states of a cached decoding chain.

Catches errors of mask, position, shift and recycling at once, with and without a future token.
"""

from __future__ import annotations

import random

import pytest
import torch

from confu_core.contemplation import ContemplatePlan, Contemplator
from confu_core.drafter import EagleDrafter
from confu_core.train.anchors import sample_anchors
from confu_core.train.data import Conversation, collate
from confu_core.train.losses import DraftTrainee, chain_starts
from tests.fakes import tiny_contemplation

STEPS = 4
LENGTH, ANSWER = 26, 9


@pytest.fixture(scope="module")
def batch(llama):
    dice = random.Random(5)
    rows = [
        Conversation(tuple(dice.randrange(5, llama.vocab) for _ in range(length)), start, "")
        for length, start in ((LENGTH, ANSWER), (LENGTH - 6, 12))
    ]
    return collate(rows, [0, 1])


@torch.no_grad()
def unrolled_states(trainee: DraftTrainee, batch) -> list[torch.Tensor]:
    """States (B, M, H) of every training step."""
    states = []
    step = trainee._step

    def recording(*arguments):
        states.append(step(*arguments))
        return states[-1]

    trainee._step = recording
    trainee.eval()(batch, STEPS, random.Random(1), anchor_every=1, replicate=False)
    return states


@torch.no_grad()
def decoded_states(llama, head, part, batch, row: int, start: int) -> list[torch.Tensor]:
    """The same chain by the decoder's own parts: prefill, contemplate, take in, expand."""
    ids = batch.ids[row].tolist()
    cache = llama.new_cache(64, fixed=part.shape.soft_prompts if part else 0)
    prefix = llama.prefill(cache, ids[: start + 1])
    future = None
    if part is not None:
        contemplator = Contemplator(part, head)
        # What a round would know: the router saw the state that training's lag points at.
        anchors = sample_anchors(
            *chain_starts(batch.answer), every=1, dice=random.Random(1), replicate=False
        )
        lagged = int(anchors.router_positions[row][anchors.positions[row].tolist().index(start)])
        cache.set_fixed(part.soft_keys, part.soft_values)
        embedding, weights = part.contemplate(prefix.taps[0, lagged])
        taps = llama.contemplate(cache, embedding)
        contemplator._state = prefix.taps[0, start]
        future = contemplator._future(ContemplatePlan((0,), embedding, weights), taps, 0, 0)
    drafter = EagleDrafter(head, part, llama, nodes=8, top_k=1, capacity=64)
    state = drafter._take_in(prefix.taps[0], ids[1 : start + 2], future, grow=True)
    states = [state[0]]
    for k in range(1, STEPS):
        if start + 1 + k >= int(batch.lengths[row]):
            break
        token = torch.tensor([ids[start + 1 + k]])
        lineage = torch.ones(1, k, dtype=torch.bool)
        state = drafter._expand(token, state, lineage, start + k, future)
        states.append(state[0])
    return states


@pytest.mark.parametrize(
    "switches",
    [
        None,
        {},
        {"future_entry": False},
        {"future_query": False},
        {"soft_prompts": 0, "contemplate_experts": 1, "future_experts": 1},
    ],
    ids=["eagle3", "confu", "query only", "entry only", "static, no soft prompts"],
)
def test_unrolled_training_equals_a_decoding_chain(llama, head, batch, switches):
    part = None if switches is None else tiny_contemplation(llama, head, **switches)
    trained = unrolled_states(DraftTrainee(llama, head, part), batch)
    starts, valid = chain_starts(batch.answer)
    checked = 0
    for row in range(len(starts)):
        for column, start in enumerate(starts[row].tolist()):
            if not valid[row, column]:
                continue
            for k, state in enumerate(decoded_states(llama, head, part, batch, row, start)):
                torch.testing.assert_close(trained[k][row, column], state, rtol=1e-4, atol=1e-4)
                checked += 1
    assert checked > 60


def test_the_first_start_is_the_first_round_of_decoding(batch):
    starts, valid = chain_starts(batch.answer)
    # It pairs the last prompt token's features with the first answer token.
    assert starts[:, 0].tolist() == [ANSWER - 1, 12 - 1]
    # The last start predicts the last token, which must be an answer token too.
    assert [int(s[v].max()) for s, v in zip(starts, valid, strict=True)] == [LENGTH - 3, LENGTH - 9]
