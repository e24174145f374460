"""The walk through the tree, and every way in which a run ends."""

from __future__ import annotations

import random

import pytest
import torch

from confu_core.acceptance import Acceptance, Limits, accept, stop_reason
from confu_core.decoding import decode
from confu_core.methods import PLAIN
from confu_core.sampling import Sampler
from confu_core.target import Target
from confu_core.trace import Settings
from confu_core.tree import DraftTree
from tests import fakes, reference

VOCAB = 20
SEED = 7  # its sixteen tokens are all different and none is a stop id
NO_LIMITS = Limits(frozenset(), 999, "length")


def wants(*token_ids: int) -> torch.Tensor:
    """Logits whose arg max per node is given."""
    return torch.nn.functional.one_hot(torch.tensor(token_ids), VOCAB).float() * 3


def ids(acceptance: Acceptance) -> list[int]:
    return [draw.token_id for draw in acceptance.draws]


def test_walk_equals_the_reference_on_random_trees():
    dice = random.Random(1)
    greedy = Sampler(0.0, 1.0, 0)
    lengths = set()
    for _ in range(300):
        parents, tokens, depths = [-1], [dice.randrange(6)], [0]
        for _ in range(dice.randint(0, 20)):
            parent = dice.randrange(len(parents))
            token = dice.randrange(6)
            if (parent, token) not in set(zip(parents, tokens, strict=True)):
                parents.append(parent)
                tokens.append(token)
                depths.append(depths[parent] + 1)
        wanted = [dice.randrange(6) for _ in parents]
        tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens))
        found = accept(tree, wants(*wanted), 7, greedy, NO_LIMITS)
        path, bonus = reference.walk(tokens, parents, wanted)
        assert list(found.path) == path
        assert ids(found) == [*(tokens[n] for n in path), bonus]
        assert found.last_node == (path[-1] if path else 0)
        assert found.stop is None
        lengths.add(len(path))
    assert len(lengths) >= 4


CHAIN = DraftTree((9, 1, 2, 3, 4), (-1, 0, 1, 2, 3), (0, 1, 2, 3, 4), (0.0,) * 5)
AGREES = wants(1, 2, 3, 4, 5)  # all four drafted tokens, then bonus 5


@pytest.mark.parametrize("index", range(5))
def test_a_stop_id_ends_the_walk_wherever_it_stands(index):
    """Index 0 to 3 on the path, 4 as the bonus token; nothing behind it is drawn."""
    stop = [1, 2, 3, 4, 5][index]
    limits = Limits(frozenset({17, stop}), 999, "length")
    found = accept(CHAIN, AGREES, 7, Sampler(0.0, 1.0, 0), limits)
    assert ids(found) == [1, 2, 3, 4, 5][: index + 1]
    assert found.stop == "eos"
    assert found.path == (1, 2, 3, 4)[: index + 1]


@pytest.mark.parametrize("room", range(1, 8))
@pytest.mark.parametrize("name", ["length", "context"])
def test_room_is_used_up_exactly(room, name):
    found = accept(CHAIN, AGREES, 7, Sampler(0.0, 1.0, 0), Limits(frozenset(), room, name))
    assert len(found.draws) == min(room, 5)
    assert found.stop == (name if room <= 5 else None)


def test_a_stop_id_at_the_last_place_counts_as_eos():
    limits = Limits(frozenset({2}), 2, "length")
    assert accept(CHAIN, AGREES, 7, Sampler(0.0, 1.0, 0), limits).stop == "eos"
    assert stop_reason(2, 1, limits) == "eos"
    assert stop_reason(3, 1, limits) is None
    assert stop_reason(3, 2, limits) == "length"


def test_positions_of_the_draws():
    """Each draw uses the noise of the place where its token will stand, on and off the path."""
    flat = torch.zeros(5, VOCAB)
    for seed in range(40):
        sampler = Sampler(1.0, 1.0, seed)
        found = accept(CHAIN, flat, 30, sampler, NO_LIMITS)
        for step, draw in enumerate(found.draws):
            assert draw == sampler.draw(flat[0], 31 + step)
    # a side branch: depth, not node number, gives the position
    tree = DraftTree((9, 1, 2, 3), (-1, 0, 0, 2), (0, 1, 1, 2), (0.0,) * 4)
    sampler = Sampler(1.0, 1.0, 3)
    logits = torch.zeros(4, VOCAB)
    logits[0, 2] = logits[2, 3] = 99
    found = accept(tree, logits, 30, sampler, NO_LIMITS)
    assert found.path == (2, 3)
    assert found.draws[2] == sampler.draw(logits[3], 33)


def test_margin_is_the_lead_over_the_second_choice():
    logits = wants(1, 0, 0, 0, 0)
    logits[0, 8] = 2.5
    assert accept(CHAIN, logits, 7, Sampler(0.0, 1.0, 0), NO_LIMITS).draws[0].margin == 0.5


# Runs --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(llama, prompt):
    """Prompt and 16 sampled tokens, all different, without a natural end."""
    settings = Settings(max_new_tokens=16, temperature=1.0, seed=SEED)
    made = reference.plain_text(llama, prompt, settings, stops=frozenset())
    assert len(set(made)) == 16
    return prompt + made


def stopping_at(*token_ids: int) -> Target:
    """The tiny target with other stop ids."""
    model = fakes.tiny_model()
    model.generation_config.eos_token_id = list(token_ids)
    target = Target(model, fakes.tiny_tokenizer(), "stopping")
    target.stop_ids = frozenset(token_ids)
    return target


def sampled(count: int, **changes) -> Settings:
    sizes = {"nodes": 12, "depth": 3, "top_k": 2} | changes
    return Settings(max_new_tokens=count, temperature=1.0, seed=SEED, **sizes)


@pytest.mark.parametrize("contemplates", [False, True])
@pytest.mark.parametrize("index", range(13))
def test_a_run_ends_with_the_stop_token(text, prompt, head, part, index, contemplates):
    """The stop token at every index: first token (0), each place of an accepted path of three
    and bonus place of each round. The passes are as few as possible, and nothing follows."""
    start = len(prompt)
    target = stopping_at(text[start + index], 294)
    extra = {"head": head, "part": part} if contemplates else {}
    rounds = list(decode(target, fakes.oracle(text, **extra), prompt, sampled(16)))
    made = [token for round in rounds for token in round.token_ids]
    assert made == text[start : start + index + 1]
    assert [round.stop for round in rounds] == [None] * (len(rounds) - 1) + ["eos"]
    assert len(rounds) == 1 + -(-index // 4), "one prefill, then four tokens a pass"


@pytest.mark.parametrize("count", range(1, 15))
@pytest.mark.parametrize("kind", ["plain", "oracle", "confu"])
def test_exactly_max_new_tokens(llama, text, prompt, head, part, count, kind):
    method = {
        "plain": PLAIN,
        "oracle": fakes.oracle(text),
        "confu": fakes.method(head, part),
    }[kind]
    rounds = list(decode(llama, method, prompt, sampled(count)))
    made = [token for round in rounds for token in round.token_ids]
    assert made == text[len(prompt) : len(prompt) + count]
    assert rounds[-1].stop == "length"
    if kind == "oracle":
        assert len(rounds) == 1 + -(-(count - 1) // 4)
    for round in rounds[1:]:  # no tree deeper than what could still be gained
        left = count - (round.position - len(prompt))
        assert max(round.draft.tree.depths) <= left - 1


@pytest.mark.parametrize("kind", ["plain", "eagle3", "confu", "oracle"])
@pytest.mark.parametrize("room", [1, 2, 7])
def test_the_context_ends_a_run(text, prompt, head, part, kind, room):
    """No position at or beyond the context is ever used, and the stop says why."""
    target = fakes.tiny_target(max_position_embeddings=len(prompt) + room)
    method = {
        "plain": PLAIN,
        "eagle3": fakes.method(head),
        "confu": fakes.method(head, part),
        "oracle": fakes.oracle(text),
    }[kind]
    rounds = list(decode(target, method, prompt, sampled(50)))
    made = [token for round in rounds for token in round.token_ids]
    assert made == text[len(prompt) : len(prompt) + room]
    assert rounds[-1].stop == "context"


def test_a_limit_equal_to_the_context_counts_as_length(text, prompt):
    target = fakes.tiny_target(max_position_embeddings=len(prompt) + 5)
    assert list(decode(target, PLAIN, prompt, sampled(5)))[-1].stop == "length"


@pytest.mark.parametrize("stops", [{0, 2}, {0}])
def test_several_stop_ids(llama, prompt, head, stops):
    """Whichever comes first ends the run; the target's own text decides."""
    target = fakes.tiny_target()
    target.stop_ids = frozenset(stops)
    ended = set()
    for seed in (1, 8):  # whose texts reach 0 or 2 within 14 tokens
        settings = Settings(max_new_tokens=14, temperature=1.0, seed=seed, nodes=8, depth=2)
        wanted = reference.plain_text(target, prompt, settings)
        found = list(decode(target, fakes.method(head), prompt, settings))
        assert [t for r in found for t in r.token_ids] == wanted
        if wanted[-1] in stops:
            assert found[-1].stop == "eos"
            ended.add(wanted[-1])
    assert ended == stops
