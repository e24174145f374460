"""Losslessness: whatever is drafted, the text is the target's own, token for token.

The judge is `tests/reference.py`: a loop that reads the whole text anew for every token through the
Hugging Face model's own forward, and shares no code with the loop under test but the noise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from confu_core.decoding import decode
from confu_core.methods import PLAIN
from confu_core.prompt import chat_ids
from confu_core.trace import Settings
from tests import fakes, reference

LENGTH = 14
SAMPLINGS = {
    "greedy": Settings(max_new_tokens=LENGTH),
    "0.7": Settings(max_new_tokens=LENGTH, temperature=0.7, seed=5),
    "1.0": Settings(max_new_tokens=LENGTH, temperature=1.0, seed=5),
    "top-p": Settings(max_new_tokens=LENGTH, temperature=1.0, top_p=0.8, seed=5),
    "another seed": Settings(max_new_tokens=LENGTH, temperature=1.0, seed=-3),
    "ends early": Settings(max_new_tokens=LENGTH, temperature=1.0, seed=1),
}
# (nodes, depth, top_k)
SHAPES = {
    "root alone": (1, 5, 8),
    "one child": (2, 5, 8),
    "chain": (8, 6, 1),
    "eight": (8, 5, 4),
    "thirty": (30, 5, 8),
    "sixty": (60, 4, 10),
    "more than candidates": (60, 1, 3),
    "wider than the vocabulary": (256, 2, 64),
    "depth 0": (30, 0, 8),
    "depth 1": (30, 1, 8),
    "deepest": (256, 16, 5),
}


def tokens(rounds) -> list[int]:
    return [token for round in rounds for token in round.token_ids]


def run(target, method, prompt, settings) -> list[int]:
    return tokens(decode(target, method, prompt, settings))


@pytest.fixture(scope="module")
def wanted(llama, prompt):
    """The right text for every way of drawing."""
    return {
        name: reference.plain_text(llama, prompt, settings) for name, settings in SAMPLINGS.items()
    }


def test_the_ways_of_drawing_differ(wanted):
    """Otherwise the equalities below would say little."""
    assert len({tuple(text) for text in wanted.values()}) == len(SAMPLINGS)
    assert all(len(set(text)) > 3 for text in wanted.values())
    assert [name for name, text in wanted.items() if len(text) < LENGTH] == ["ends early"]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_equals_the_reference(llama, prompt, wanted, sampling):
    assert run(llama, PLAIN, prompt, SAMPLINGS[sampling]) == wanted[sampling]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["eagle3", "confu"])
def test_every_tree_shape_greedy_and_sampled(llama, prompt, head, part, wanted, kind, shape):
    method = fakes.method(head, part if kind == "confu" else None)
    nodes, depth, top_k = SHAPES[shape]
    for sampling in ("greedy", "1.0"):
        settings = replace(SAMPLINGS[sampling], nodes=nodes, depth=depth, top_k=top_k)
        assert run(llama, method, prompt, settings) == wanted[sampling], sampling


@pytest.mark.parametrize("share", [0.5, 0.25, 0.01])
def test_every_share_of_contemplate_tokens(llama, prompt, head, part, wanted, share):
    """Sparse contemplation changes trees, never the text; also with long accepted paths."""
    for sampling in ("greedy", "1.0"):
        settings = replace(SAMPLINGS[sampling], nodes=20, depth=4, top_k=4, contemplate=share)
        often_right = fakes.half_right(prompt + wanted[sampling], llama.vocab, head=head, part=part)
        for method in (fakes.method(head, part), often_right):
            assert run(llama, method, prompt, settings) == wanted[sampling], sampling


@pytest.mark.parametrize(
    ("sampling", "seed"), [("greedy", 5), ("greedy", 6), ("0.7", 6), ("top-p", 5)]
)
def test_random_heads(llama, prompt, wanted, sampling, seed):
    """Other weights, a peaked head, and switches of the ablation."""
    head = fakes.tiny_head(llama, seed, draft_vocab=40, peak=40.0 if seed == 6 else 1.0)
    parts = [
        None,
        fakes.tiny_contemplation(llama, head, seed, scale=3.0),
        fakes.tiny_contemplation(llama, head, seed, contemplate_experts=1, future_experts=1),
        fakes.tiny_contemplation(llama, head, seed, future_entry=False),
        fakes.tiny_contemplation(llama, head, seed, future_query=False),
        fakes.tiny_contemplation(llama, head, seed, soft_prompts=0),
        fakes.tiny_contemplation(llama, head, seed, adapter_rank=3, read_outs=3),
    ]
    for part in parts:
        text = run(llama, fakes.method(head, part), prompt, SAMPLINGS[sampling])
        assert text == wanted[sampling], part and part.shape


def test_absurd_contemplate_weights_change_nothing(llama, prompt, head, wanted):
    part = fakes.tiny_contemplation(llama, head, scale=1000.0)
    assert run(llama, fakes.method(head, part), prompt, SAMPLINGS["greedy"]) == wanted["greedy"]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_other_kinds_of_target(kind):
    target = fakes.tiny_target(kind, seed=1, hidden_size=40, head_dim=10)
    prompt = chat_ids(target, "and the")
    head = fakes.tiny_head(target)
    part = fakes.tiny_contemplation(target, head)
    for settings in (SAMPLINGS["greedy"], SAMPLINGS["1.0"]):
        wanted = reference.plain_text(target, prompt, settings)
        for method in (PLAIN, fakes.method(head), fakes.method(head, part)):
            assert run(target, method, prompt, settings) == wanted, method.name


@pytest.mark.parametrize("sampling", ["greedy", "1.0", "top-p"])
@pytest.mark.parametrize("seed", [0, 1])
def test_drafts_that_are_often_right(llama, prompt, head, part, sampling, seed):
    """Long accepted paths through wide trees, with and without contemplate tokens."""
    settings = replace(SAMPLINGS[sampling], max_new_tokens=30, nodes=20, depth=5, top_k=4)
    wanted = reference.plain_text(llama, prompt, settings)
    for extra in ({}, {"head": head, "part": part}):
        method = fakes.half_right(prompt + wanted, llama.vocab, seed, **extra)
        rounds = list(decode(llama, method, prompt, settings))
        assert tokens(rounds) == wanted
        lengths = {len(round.draws) for round in rounds[1:]}
        assert len(lengths) >= 3, f"want short and long paths, got {lengths}"


# Known hit rates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_oracle_gains_depth_plus_one_per_pass(llama, prompt, depth, temperature):
    count = 1 + 4 * (depth + 1)  # the prefill's token, then four full rounds
    settings = Settings(
        max_new_tokens=count, temperature=temperature, seed=9, nodes=60, depth=depth, top_k=3
    )
    text = prompt + reference.plain_text(llama, prompt, settings, stops=frozenset())
    assert not llama.stop_ids & set(text[len(prompt) :]), "choose another seed"
    rounds = list(decode(llama, fakes.oracle(text), prompt, settings))
    assert [len(round.draws) for round in rounds] == [1, *[depth + 1] * 4]
    assert tokens(rounds) == text[len(prompt) :]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_always_wrong_draft_gains_one_per_pass(llama, prompt, temperature):
    settings = Settings(
        max_new_tokens=12, temperature=temperature, seed=9, nodes=30, depth=4, top_k=3
    )
    text = prompt + reference.plain_text(llama, prompt, settings, stops=frozenset())
    rounds = list(decode(llama, fakes.always_wrong(text, llama.vocab), prompt, settings))
    assert [len(round.draws) for round in rounds] == [1] * 12
    assert all(round.acceptance.path == () for round in rounds[1:])
    assert tokens(rounds) == text[len(prompt) :]


# The real target ---------------------------------------------------------------------------------

REAL_PROMPTS = (
    "Explain why the sky is blue in three sentences.",
    "Wie heißt du? 😀",
    "Write a Python function that adds two numbers.",
)


@pytest.fixture(scope="module")
def real_texts(default_target):
    """transformers' own greedy text of each prompt, 20 tokens."""
    texts = {}
    for prompt in REAL_PROMPTS:
        ids = chat_ids(default_target, prompt)
        with torch.inference_mode():
            full = default_target.model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=20,
                pad_token_id=2,
            )
        texts[prompt] = (ids, full[0, len(ids) :].tolist())
    return texts


@pytest.mark.target
@pytest.mark.parametrize("prompt", REAL_PROMPTS)
def test_real_target_plain_equals_generate(default_target, real_texts, prompt):
    ids, wanted = real_texts[prompt]
    with torch.inference_mode():
        assert run(default_target, PLAIN, ids, Settings(max_new_tokens=20)) == wanted


@pytest.mark.target
def test_real_target_random_heads_equal_generate(default_target, real_texts):
    ids, wanted = real_texts[REAL_PROMPTS[0]]
    head = fakes.tiny_head(default_target, draft_vocab=500)
    part = fakes.tiny_contemplation(default_target, head)
    for method in (fakes.method(head), fakes.method(head, part)):
        settings = Settings(max_new_tokens=10, nodes=8, depth=2, top_k=4)
        with torch.inference_mode():
            assert run(default_target, method, ids, settings) == wanted[:10], method.name


@pytest.mark.target
def test_real_target_trained_heads(default_target, trained, real_texts):
    """Trained heads write the same text, greedy and sampled, and accept more than nothing."""
    ids, wanted = real_texts[REAL_PROMPTS[0]]
    sampled = Settings(max_new_tokens=20, temperature=0.7, seed=3, nodes=16)
    with torch.inference_mode():
        drawn = run(default_target, PLAIN, ids, sampled)
        for name, method in trained.items():
            settings = Settings(max_new_tokens=20, nodes=16)
            rounds = list(decode(default_target, method, ids, settings))
            assert tokens(rounds) == wanted, name
            assert len(rounds) <= 16, f"{name} took {len(rounds) - 1} passes for 19 tokens"
            assert run(default_target, method, ids, sampled) == drawn, name


@pytest.fixture(scope="module")
def drawn_plainly(default_target):
    """Plain decoding's 16 tokens at a temperature and seed, each decoded once."""
    texts: dict[tuple[float, int], list[int]] = {}
    ids = chat_ids(default_target, REAL_PROMPTS[2])

    def text(temperature: float, seed: int) -> tuple[list[int], list[int]]:
        if (temperature, seed) not in texts:
            settings = Settings(max_new_tokens=16, temperature=temperature, seed=seed)
            with torch.inference_mode():
                texts[temperature, seed] = run(default_target, PLAIN, ids, settings)
        return ids, texts[temperature, seed]

    return text


@pytest.mark.target
@pytest.mark.parametrize("nodes", [1, 8, 30, 60, "auto"])
@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (0.7, 1), (1.0, 2)])
def test_trained_heads_at_every_size_and_temperature(
    default_target, trained, drawn_plainly, temperature, seed, nodes
):
    ids, wanted = drawn_plainly(temperature, seed)
    settings = Settings(max_new_tokens=16, temperature=temperature, seed=seed, nodes=nodes)
    for name, method in trained.items():
        with torch.inference_mode():
            assert run(default_target, method, ids, settings) == wanted, name
