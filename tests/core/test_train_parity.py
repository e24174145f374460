"""Training equals decoding: an unrolled training step gives the states of a cached decoding chain.

Catches errors of mask, position, shift and recycling at once, with and without a future token.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from confu_core.budget import FixedBudget
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
        seen = llama.contemplate(cache, embedding, part.adapters)
        contemplator._state = prefix.taps[0, start]
        plan = ContemplatePlan((0,), embedding, weights)
        future = contemplator._future(plan, seen.taps, seen.last, 0, 0)
    drafter = EagleDrafter(head, part, llama, budget=FixedBudget(8), top_k=1, capacity=64)
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
        {"adapter_rank": 3, "read_outs": 3, "read_out_temperature": 1.7},
    ],
    ids=["eagle3", "confu", "query only", "entry only", "static, no soft prompts", "confu+"],
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


def test_read_outs_add_the_same_logits_in_training_and_decoding(llama, head, batch):
    """An f of any age speaks of the same tokens as in decoding, and of none behind them."""
    part = tiny_contemplation(llama, head, read_outs=3, adapter_rank=3, read_out_temperature=1.7)
    trainee = DraftTrainee(llama, head, part).eval()
    starts, valid = chain_starts(batch.answer)
    anchors = sample_anchors(starts, valid, 3, random.Random(2), True)
    anchors = replace(anchors, router_positions=anchors.positions)
    zero = torch.zeros(*starts.shape, head.shape.hidden)
    ages = set()
    with torch.no_grad():
        rows = trainee.futures_of(batch, anchors, starts)
        plain = head.logits(zero[valid])
        for k in range(4):
            added = trainee._pool(trainee._opinions(zero, valid, k, rows)) - plain
            number = -1
            for row in range(len(starts)):
                for column, start in enumerate(starts[row][valid[row]].tolist()):
                    number += 1
                    anchor = int(anchors.of_start[row, column])
                    wanted = torch.zeros(head.shape.draft_vocab)
                    if anchor >= 0:
                        place = int(anchors.positions[row, anchor])
                        ages.add(start - place)
                        contemplator = Contemplator(part, head)
                        cache = llama.new_cache(64, fixed=part.shape.soft_prompts)
                        prefix = llama.prefill(cache, batch.ids[row, : place + 1].tolist())
                        future = contemplator.begin(llama, cache, prefix)
                        if k + start - place < 3:
                            wanted = future.read_out[k + start - place] / 1.7
                    torch.testing.assert_close(added[number], wanted, rtol=1e-3, atol=1e-3)
    assert len(ages) > 2
