"""The largest of long rows: always what `topk` finds."""

from __future__ import annotations

import pytest
import torch

from confu_core import ranking
from confu_core.ranking import largest


def numbers(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(length + rows))


@pytest.mark.parametrize("length", [8, 97, 512, 1000, 1024, 8192, 49152, 128256])
@pytest.mark.parametrize("rows, count", [(1, 2), (8, 8), (30, 1)])
def test_values_and_places_are_those_of_topk(monkeypatch, length, rows, count):
    monkeypatch.setattr(ranking, "FEW", 0)  # also where the detour would not pay
    x = numbers(rows, length)
    best, places = largest(x, count)
    wanted = x.topk(count, dim=-1)
    assert torch.equal(best, wanted.values) and torch.equal(places, wanted.indices)


def test_all_of_the_largest_in_one_block_and_at_the_ends():
    x = numbers(8, 8192)
    x[0, 100:108] += 100  # eight in one block
    x[1, 0] = x[1, -1] = 100.0
    best, places = largest(x, 8)
    assert sorted(places[0].tolist()) == list(range(100, 108))
    assert sorted(places[1, :2].tolist()) == [0, 8191]
    assert torch.equal(best, x.topk(8, dim=-1).values)


def test_equal_numbers_are_each_taken_once():
    """Half precision has many: the values are `topk`'s, the places differ from each other."""
    x = numbers(8, 8192).bfloat16().float().round()
    best, places = largest(x, 8)
    assert torch.equal(best, x.topk(8, dim=-1).values)
    assert torch.equal(x.gather(1, places), best)
    assert all(len(set(row)) == 8 for row in places.tolist())


def test_the_detour_is_taken(monkeypatch):
    """Else the tests above would compare `topk` with itself."""
    x, lengths = numbers(8, 8192), []
    topk = torch.Tensor.topk

    def noted(self, *args, **kwargs):
        lengths.append(self.shape[-1])
        return topk(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "topk", noted)
    largest(x, 8)
    assert lengths == [8192 // 64, 8 * 64]


def test_what_is_not_a_number_comes_first():
    """The sampler finds it by the margin."""
    x = numbers(1, 49152)
    x[0, 40000] = float("nan")
    assert torch.isnan(largest(x, 2)[0][0, 0])
