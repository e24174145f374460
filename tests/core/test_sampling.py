"""Drawing: exact distributions, noise that is a pure function of the place, nothing infinite."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from confu_core.acceptance import Limits, accept
from confu_core.sampling import Sampler, gumbel_noise, keep_top_p
from confu_core.tree import DraftTree
from tests import reference

DRAWS = 1800
WAYS = [(1.0, 1.0), (0.7, 1.0), (0.4, 0.8), (1.3, 0.6)]  # temperature, top-p
# Target logits after each token of a four-letter alphabet: a tiny world with exact answers.
WORLD = torch.tensor(
    [[1.2, 0.1, -0.4, 0.6], [0.0, 0.9, 0.3, -1.0], [-0.5, 0.2, 1.1, 0.8], [0.7, -0.2, 0.4, 0.0]]
)
# Below root 0: children 3 and 1; below 3: children 0 and 2; below 1: child 1.
TREE = DraftTree((0, 3, 1, 0, 2, 1), (-1, 0, 0, 1, 1, 2), (0, 1, 1, 2, 2, 2), (0.0,) * 6)


def p_value(counts: list[int], probs: list[float]) -> float:
    """Chi-square against exact probabilities; impossible outcomes must not occur at all."""
    impossible = [n for n, p in zip(counts, probs, strict=True) if p == 0]
    assert sum(impossible) == 0
    pairs = [(n, p) for n, p in zip(counts, probs, strict=True) if p > 0]
    if len(pairs) == 1:
        return 1.0
    total = sum(counts)
    return stats.chisquare([n for n, _ in pairs], [p * total for _, p in pairs]).pvalue


def walk(seed: int, temperature: float, top_p: float, position: int = 10) -> list[int]:
    sampler = Sampler(temperature, top_p, seed)
    logits = WORLD[list(TREE.token_ids)]
    limits = Limits(frozenset(), 99, "length")
    return [d.token_id for d in accept(TREE, logits, position, sampler, limits).draws]


@pytest.mark.parametrize(("temperature", "top_p"), WAYS)
def test_tokens_of_a_walk_have_the_target_distribution(temperature, top_p):
    """First token, inner token and bonus token, each alone, against exact probabilities."""
    walks = [walk(seed, temperature, top_p) for seed in range(DRAWS)]

    def expected(token: int) -> list[float]:
        return reference.probabilities(WORLD[token].tolist(), temperature, top_p)

    def check(draws: list[int], token: int, what: str) -> None:
        assert len(draws) > 100, what
        counts = [draws.count(t) for t in range(4)]
        assert p_value(counts, expected(token)) > 0.001, (what, counts, expected(token))

    check([w[0] for w in walks], 0, "first token")
    # The walk goes on below 3 and 1; everything else is a bonus token that ends it.
    check([w[1] for w in walks if w[0] == 3], 3, "second token after an accepted 3")
    assert {len(w) for w in walks if w[0] in (0, 2)} <= {1}
    assert {len(w) for w in walks if w[0] == 3} <= {2, 3}
    check([w[2] for w in walks if w[:2] == [3, 0]], 0, "bonus token below a leaf")
    if top_p == 1.0:
        check([w[1] for w in walks if w[0] == 1], 1, "second token where the tree has one child")


def test_the_tree_does_not_bias_the_draw():
    """With one seed the first token is the same whatever the tree proposes."""
    plain = DraftTree.root_only(0)
    limits = Limits(frozenset(), 99, "length")
    for seed in range(300):
        alone = accept(plain, WORLD[[0]], 10, Sampler(1.0, 1.0, seed), limits).draws[0].token_id
        assert walk(seed, 1.0, 1.0)[0] == alone


def test_noise_is_a_pure_function_of_seed_position_and_id():
    first = gumbel_noise(7, 12, 500)
    assert torch.equal(first, gumbel_noise(7, 12, 500))
    assert torch.equal(first[:100], gumbel_noise(7, 12, 100)), "must not depend on the vocabulary"
    state = torch.get_rng_state()
    gumbel_noise(7, 13, 500)
    assert torch.equal(state, torch.get_rng_state()), "must not touch the global generator"


def test_noise_is_the_same_on_every_machine():
    """Pinned: a seed in a link must give the same text tomorrow and elsewhere."""
    found = gumbel_noise(42, 17, 4).double().tolist()

    def pinned(seed: int, position: int, token: int) -> float:
        """SplitMix64 in plain Python integers."""
        golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

        def mix(x: int) -> int:
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
            return x ^ (x >> 31)

        key = mix((mix((seed * golden + 1) & mask) + (position + 1) * golden) & mask)
        bits = mix((key + (token + 1) * golden) & mask) >> 11
        return -math.log(-math.log((bits + 0.5) * 2.0**-53))

    assert found == pytest.approx([pinned(42, 17, t) for t in range(4)], abs=1e-6)


def test_seeds_positions_and_ids_are_independent():
    base = gumbel_noise(0, 0, 20_000).double()
    others = {
        "next seed": gumbel_noise(1, 0, 20_000),
        "negative seed": gumbel_noise(-1, 0, 20_000),
        "seed of 64 bits": gumbel_noise(1 << 63, 0, 20_000),
        "next position": gumbel_noise(0, 1, 20_000),
        "seed and position swapped": gumbel_noise(1, 0, 20_000),
        "next id": base.roll(1),
    }
    for what, other in others.items():
        correlation = float(torch.corrcoef(torch.stack((base, other.double())))[0, 1])
        assert abs(correlation) < 0.03, (what, correlation)
    along = torch.stack([gumbel_noise(0, p, 8) for p in range(3000)]).double()
    between = torch.corrcoef(along.t())
    assert float((between - torch.eye(8)).abs().max()) < 0.08
    # Of one id along positions, too: no pattern from round to round.
    lagged = torch.corrcoef(torch.stack((along[:-1, 0], along[1:, 0])))[0, 1]
    assert abs(float(lagged)) < 0.06


def test_noise_is_gumbel():
    noise = torch.cat([gumbel_noise(3, p, 2000) for p in range(5)]).double().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 0.001


def test_different_seeds_write_different_texts():
    assert len({tuple(walk(seed, 1.0, 1.0)) for seed in range(50)}) > 5


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 0.1, 5.0])
@pytest.mark.parametrize("logits", ["flat", "steep", "huge", "half"])
def test_everything_is_finite(temperature, logits):
    values = {
        "flat": torch.zeros(1000),
        "steep": torch.linspace(-60, 60, 1000),
        "huge": torch.linspace(-3e4, 3e4, 1000),
        "half": torch.linspace(-30, 11, 1000).half().float(),
    }[logits]
    for top_p in (1.0, 0.9, 1e-9):
        draw = Sampler(temperature, top_p, 5).draw(values, 3)
        assert math.isfinite(draw.margin)
        assert draw.margin >= 0
        assert 0 <= draw.token_id < 1000
        if logits != "flat" and temperature <= 0.01:
            assert draw.token_id == 999


def test_greedy_takes_the_arg_max_and_its_lead():
    draw = Sampler(0.0, 1.0, 5).draw(torch.tensor([1.0, 4.0, 3.25, -2.0]), 3)
    assert (draw.token_id, draw.margin) == (1, 0.75)


def test_temperature_divides_before_top_p_cuts():
    """At T = 2 two tokens are needed for 0.7; the raw logits would need one alone."""
    logits = torch.tensor([2.0, 0.0, 0.0])  # 0.79 at T = 1, 0.58 at T = 2
    drawn = {Sampler(2.0, 0.7, seed).draw(logits, 0).token_id for seed in range(200)}
    assert len(drawn) == 2
    assert {Sampler(1.0, 0.7, seed).draw(logits, 0).token_id for seed in range(200)} == {0}


@pytest.mark.parametrize(
    ("probs", "top_p", "kept"),
    [
        ([0.5, 0.25, 0.125, 0.125], 0.5, {0}),  # reached exactly: nothing more
        ([0.5, 0.25, 0.125, 0.125], 0.51, {0, 1}),
        ([0.5, 0.25, 0.125, 0.125], 0.75, {0, 1}),
        ([0.125, 0.25, 0.5, 0.125], 0.75, {1, 2}),
        ([0.5, 0.25, 0.125, 0.125], 1e-9, {0}),
        ([0.5, 0.25, 0.125, 0.125], 0.999, {0, 1, 2, 3}),
    ],
)
def test_nucleus(probs, top_p, kept):
    cut = keep_top_p(torch.tensor(probs).log(), top_p)
    assert set(torch.isfinite(cut).nonzero().flatten().tolist()) == kept
    assert torch.equal(cut[sorted(kept)], torch.tensor(probs).log()[sorted(kept)])


@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.97])
def test_nucleus_of_a_large_vocabulary(spread, top_p):
    """Flat and steep distributions over more tokens than a short-list would hold."""
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * spread
    wanted = {
        t for t, p in enumerate(reference.probabilities(logits.tolist(), 1.0, top_p)) if p > 0
    }
    found = set(torch.isfinite(keep_top_p(logits, top_p)).nonzero().flatten().tolist())
    # float32 sums may put one token of the border on the other side
    assert len(found ^ wanted) <= 1 + len(wanted) // 500
