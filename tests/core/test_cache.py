"""The cache moves rows and never grows. Values are small integers, so every slot has a name."""

from __future__ import annotations

import pytest
import torch

from confu_core.cache import KVCache
from confu_core.errors import SettingsError

LAYERS, HEADS, WIDTH = 2, 3, 4


def new(capacity: int = 10, fixed: int = 0, batch: int = 1) -> KVCache:
    return KVCache(
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=WIDTH,
        capacity=capacity,
        fixed=fixed,
        batch=batch,
    )


def rows(*names: float, batch: int = 1) -> torch.Tensor:
    """(B, K, R, D): row r is filled with its name; sequence b adds 1000 b, head k adds k / 10."""
    out = torch.tensor(names, dtype=torch.float32).view(1, 1, -1, 1)
    out = out + torch.arange(batch).view(-1, 1, 1, 1) * 1000
    return (out + torch.arange(HEADS).view(1, -1, 1, 1) / 10).expand(-1, -1, -1, WIDTH).clone()


def push(cache: KVCache, *names: float, see_fixed: bool = False, batch: int = 1):
    """One pass: keys are the names, values their negatives, layer 1 adds 100. Returns the views."""
    cache.open(len(names), see_fixed)
    views = []
    for layer in range(LAYERS):
        named = rows(*names, batch=batch) + 100 * layer
        views.append(cache.extend(layer, named, -named))
    return views


def names(view: torch.Tensor) -> list[float]:
    return view[0, 0, :, 0].tolist()


def test_a_pass_sees_committed_pending_and_its_own_rows():
    cache = new()
    push(cache, 1, 2)
    cache.commit([0, 1])
    push(cache, 3)
    views = push(cache, 4, 5)
    assert names(views[0][0]) == [1, 2, 3, 4, 5]
    assert names(views[1][0]) == [101, 102, 103, 104, 105]
    assert torch.equal(views[0][1], -views[0][0])
    assert (cache.length, cache.pending) == (2, 3)


def test_commit_keeps_a_path_by_index_in_all_layers_heads_and_sequences():
    cache = new(batch=2)
    push(cache, 1, 2, batch=2)
    cache.commit([0, 1])
    push(cache, 10, 11, 12, 13, 14, batch=2)
    cache.commit([0, 2, 4])
    keys, values = cache.committed()
    assert (cache.length, cache.pending) == (5, 0)
    for layer in range(LAYERS):
        wanted = rows(1, 2, 10, 12, 14, batch=2) + 100 * layer
        assert torch.equal(keys[layer], wanted)
        assert torch.equal(values[layer], -wanted)


def test_overlapping_moves_do_not_smear():
    cache = new()
    push(cache, 0, 1, 2, 3, 4, 5)
    cache.commit([1, 2, 3, 5])
    assert names(cache.committed()[0][0]) == [1, 2, 3, 5]


def test_dropped_rows_are_gone_from_view():
    cache = new()
    push(cache, 1, 2)
    cache.commit([0])
    assert names(push(cache, 9)[0][0]) == [1, 9]
    cache.drop_pending()
    assert names(push(cache, 7)[0][0]) == [1, 7]
    cache.commit([])
    assert names(cache.committed()[0][0]) == [1]


def test_keep_rolls_back_and_refuses_what_is_not_there():
    cache = new()
    push(cache, 1, 2, 3)
    cache.commit([0, 1, 2])
    push(cache, 4)
    cache.keep(2)
    assert (cache.length, cache.pending) == (2, 0)
    assert names(push(cache, 8)[0][0]) == [1, 2, 8]
    cache.keep(0)
    assert names(push(cache, 6)[0][0]) == [6]
    for length in (-1, 1):
        with pytest.raises(ValueError, match="cannot keep"):
            cache.keep(length)


def test_fixed_slots_stand_in_front_and_only_for_those_who_may_see_them():
    cache = new(fixed=2)
    fixed = torch.arange(2.0).add(50).view(1, 1, 2, 1).expand(LAYERS, HEADS, 2, WIDTH)
    cache.set_fixed(fixed, -fixed)
    push(cache, 1, 2)
    cache.commit([0, 1])
    assert names(push(cache, 3)[0][0]) == [1, 2, 3]
    cache.drop_pending()
    view = push(cache, 3, see_fixed=True)
    assert names(view[0][0]) == [50, 51, 1, 2, 3]
    assert names(view[1][1]) == [-50, -51, -101, -102, -103]
    cache.commit([0])
    assert names(cache.committed()[0][0]) == [1, 2, 3], "fixed slots are never part of the text"


def test_never_reallocates_and_gives_views():
    cache = new(capacity=6)
    first = push(cache, 1, 2)[0][0]
    cache.commit([0, 1])
    later = push(cache, 3, 4, 5, 6)[0][0]
    assert first.data_ptr() == later.data_ptr()
    assert first.untyped_storage().data_ptr() == cache.committed()[1].untyped_storage().data_ptr()


def test_overflow_is_one_sentence_and_changes_nothing():
    cache = new(capacity=4)
    push(cache, 1, 2, 3)
    cache.commit([0, 1, 2])
    with pytest.raises(SettingsError, match="needs 5 cache slots, but 4 were reserved"):
        cache.open(2)
    assert (cache.length, cache.pending) == (3, 0)
    assert names(push(cache, 4)[0][0]) == [1, 2, 3, 4]
