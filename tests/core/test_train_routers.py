"""Routers in training: kept in balance, and renewed where they collapsed."""

from __future__ import annotations

import pytest
import torch

from confu_core.heads import ExpertMixture
from confu_core.train.init import renew_routers
from confu_core.train.losses import router_imbalance
from tests import fakes


def test_imbalance_of_routers_by_hand():
    even = torch.eye(4)
    assert float(router_imbalance(even)) == pytest.approx(0.0, abs=1e-6)
    assert float(router_imbalance(even[:1].expand(5, -1))) == pytest.approx(3.0)
    half = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    assert float(router_imbalance(half)) == pytest.approx(1.0)


def test_balance_spreads_a_router_and_no_balance_does_not():
    """Descent on the imbalance alone brings a router that prefers one expert back to all."""
    torch.manual_seed(0)
    mixture = ExpertMixture(12, 6, 4, 2)
    with torch.no_grad():
        mixture.router.bias.copy_(torch.tensor([2.0, 0.0, 0.0, 0.0]))
    states = torch.randn(200, 12)
    before = float(router_imbalance(mixture(states)[1]).detach())
    optimiser = torch.optim.Adam(mixture.router.parameters(), lr=0.02)
    for _ in range(150):
        optimiser.zero_grad()
        router_imbalance(mixture(states)[1]).backward()
        optimiser.step()
    assert before > 0.5 and float(router_imbalance(mixture(states)[1]).detach()) < 0.05


def test_renewed_mixtures_give_what_they_gave_and_use_all_experts():
    llama = fakes.tiny_target()
    part = fakes.tiny_contemplation(llama, fakes.tiny_head(llama))
    future = len(part.future.experts)
    mixture, states = part.contemplate, torch.randn(50, 3 * llama.hidden)
    experts = len(mixture.experts)
    with torch.no_grad():  # collapsed onto expert 1
        mixture.experts.normal_()
        mixture.router.weight.zero_()
        mixture.router.bias.zero_()[1] = 50.0
        before = mixture(states)[0]
        usage = {
            "contemplate_experts": [0.0, 1.0, *[0.0] * (experts - 2)],
            "future_experts": [1.0 / future] * future,
        }
        renew_routers(part, usage, seed=3)
        after, weights = mixture(states)
    assert float((after - before).square().mean().sqrt()) < 0.2 * float(
        before.square().mean().sqrt()
    )
    assert (weights.mean(0) > 0).all()
    assert float(router_imbalance(weights)) < 1.0
