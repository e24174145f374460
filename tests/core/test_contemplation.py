"""Contemplation: it may read everything and touch nothing; and its vectors are the right ones."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
import torch

from confu_core import masks
from confu_core.contemplation import Contemplator, contemplated_count, likely_ends
from confu_core.decoding import decode
from confu_core.heads import ExpertMixture
from confu_core.probes import Observer
from confu_core.trace import Settings
from confu_core.tree import DraftTree
from tests import fakes, reference

TREE = DraftTree((60, 7, 99, 14, 8), (-1, 0, 0, 1, 3), (0, 1, 1, 2, 3), (0.0,) * 5)


def drawn(picture: str) -> list[list[bool]]:
    """A mask drawn with x for "may attend" and . for "may not"; blanks are for the eye."""
    lines = [line.replace(" ", "") for line in picture.strip().splitlines()]
    return [[letter == "x" for letter in line] for line in lines]


# Masks -------------------------------------------------------------------------------------------


def test_verify_mask_as_drawn():
    """Root with children 1 and 2, node 3 below 1; contemplate tokens on root, 2
    and 3. Columns: soft prompts, prefix, nodes, contemplate tokens."""
    picture = """
        ..    xxx     x...   ...
        ..    xxx     xx..   ...
        ..    xxx     x.x.   ...
        ..    xxx     xx.x   ...
        xx    xxx     x...   x..
        xx    xxx     x.x.   .x.
        xx    xxx     xx.x   ..x
    """
    ancestors = masks.ancestor_matrix((-1, 0, 0, 1))
    assert masks.verify_mask(ancestors, (0, 2, 3), prefix=3, soft=2).tolist() == drawn(picture)


def test_without_contemplate_tokens_the_soft_prompts_are_out_of_view():
    picture = """
        xx  x..
        xx  xx.
        xx  x.x
    """
    ancestors = masks.ancestor_matrix((-1, 0, 0))
    assert masks.verify_mask(ancestors, (), prefix=2, soft=4).tolist() == drawn(picture)


def test_contemplate_token_behind_the_prefix_as_drawn():
    none = torch.zeros(0, 0, dtype=torch.bool)
    assert masks.verify_mask(none, (-1,), prefix=3, soft=2).tolist() == drawn("xx xxx x")


def test_anchor_mask_as_drawn():
    """Two sequences of five positions, anchors at 0, 3 and at 4, 4; one soft prompt."""
    first = """
        x  x....  x.
        x  xxxx.  .x
    """
    second = """
        x  xxxxx  x.
        x  xxxxx  .x
    """
    found = masks.anchor_mask(torch.tensor([[0, 3], [4, 4]]), text=5, soft=1)
    assert found.tolist() == [drawn(first), drawn(second)]


def test_verify_mask_equals_the_rules_on_random_trees():
    dice = random.Random(4)
    for _ in range(60):
        count = dice.randint(1, 9)
        parents = [-1, *(dice.randrange(n) for n in range(1, count))]
        nodes = sorted(dice.sample(range(count), dice.randint(1, count)))
        prefix, soft = dice.randint(0, 4), dice.randint(0, 3)
        found = masks.verify_mask(masks.ancestor_matrix(parents), nodes, prefix, soft)
        assert found.tolist() == reference.verify_mask(parents, nodes, prefix, soft)


def test_additive_mask():
    found = masks.additive(torch.tensor([[True, False]]), torch.float32)
    assert found.tolist() == [[0.0, float("-inf")]]


# The pass ----------------------------------------------------------------------------------------


def prefilled(target, part, ids, room=40):
    """A cache that has read `ids`, with the part's soft prompts in place."""
    cache = target.new_cache(len(ids) + room, fixed=part.shape.soft_prompts)
    cache.set_fixed(part.soft_keys, part.soft_values)
    rows = target.prefill(cache, ids)
    return cache, rows


@pytest.mark.parametrize("scale", [0.5, 1000.0])
@pytest.mark.parametrize("nodes", [(0, 1, 2, 3, 4), (2,), (1, 4)])
def test_nodes_do_not_feel_contemplate_tokens(llama, prompt, head, scale, nodes):
    """Logits, taps, keys and values of every node, with and without, even with absurd weights."""
    part = fakes.tiny_contemplation(llama, head, scale=scale)
    bare = llama.new_cache(len(prompt) + 40)
    llama.prefill(bare, prompt)
    alone = llama.verify(bare, TREE)
    cache, rows = prefilled(llama, part, prompt)
    embedding, _ = part.contemplate(rows.taps[0, -1])
    beside = llama.verify(cache, TREE, nodes, embedding)
    torch.testing.assert_close(beside.logits, alone.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(beside.taps, alone.taps, atol=1e-5, rtol=0)
    assert beside.contemplate_taps.shape == (len(nodes), 3 * llama.hidden)
    for one in (bare, cache):
        one.commit([0, 1, 3, 4])
    for kept, wanted in zip(cache.committed(), bare.committed(), strict=True):
        torch.testing.assert_close(kept, wanted, atol=1e-5, rtol=0)
    # and what follows does not feel them either: their keys are gone
    step = DraftTree.root_only(33)
    torch.testing.assert_close(
        llama.verify(cache, step).logits, llama.verify(bare, step).logits, atol=1e-5, rtol=0
    )


def test_prefill_does_not_feel_contemplation(llama, prompt, head):
    part = fakes.tiny_contemplation(llama, head, scale=1000.0)
    cache, rows = prefilled(llama, part, prompt)
    before = [t.clone() for t in cache.committed()]
    Contemplator(part, head).begin(llama, cache, rows)
    assert (cache.length, cache.pending) == (len(prompt), 0)
    for now, then in zip(cache.committed(), before, strict=True):
        assert torch.equal(now, then)
    bare = llama.new_cache(len(prompt))
    assert torch.equal(llama.prefill(bare, prompt).taps, rows.taps)


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_contemplate_rows_equal_a_row_written_out(kind, rank, prompt):
    """Every contemplate token of a tree against plain attention over its own path."""
    close = 1e-3 if rank else 1e-5  # the reference merges adapters, which rounds elsewhere
    target = fakes.tiny_target(kind, seed=5)
    head = fakes.tiny_head(target)
    part = fakes.tiny_contemplation(target, head, adapter_rank=rank)
    cache, rows = prefilled(target, part, prompt)
    embedding, _ = part.contemplate(rows.taps[0, -1])
    verification = target.verify(cache, TREE, (0, 2, 4), embedding, part.adapters)
    found = verification.contemplate_taps
    for taps, node in zip(found, (0, 2, 4), strict=True):
        path = [TREE.token_ids[n] for n in reference.path_to(list(TREE.parents), node)]
        wanted = reference.contemplate(target, part, embedding, prompt + path)
        torch.testing.assert_close(taps, wanted, atol=close, rtol=close)
    cache.drop_pending()
    behind = target.contemplate(cache, embedding, part.adapters).taps
    wanted = reference.contemplate(target, part, embedding, prompt)
    torch.testing.assert_close(behind, wanted, atol=close, rtol=close)


@pytest.mark.parametrize("node", range(5))
def test_fed_the_true_next_token_it_is_the_target(llama, prompt, head, node):
    """Without soft prompts, a contemplate token that holds the next token's embedding has the
    target's own taps at that place: position, mask and weights are all the normal row's."""
    part = fakes.tiny_contemplation(llama, head, soft_prompts=0)
    cache, _ = prefilled(llama, part, prompt)
    following = 171
    embedding = llama.embed(torch.tensor(following))
    taps = llama.verify(cache, TREE, (node,), embedding).contemplate_taps[0]
    path = [TREE.token_ids[n] for n in reference.path_to(list(TREE.parents), node)]
    wanted = reference.full_taps(llama, [*prompt, *path, following])[-1]
    torch.testing.assert_close(taps, wanted, atol=1e-5, rtol=1e-5)
    cache.drop_pending()
    behind = llama.contemplate(cache, embedding).taps
    wanted = reference.full_taps(llama, [*prompt, following])[-1]
    torch.testing.assert_close(behind, wanted, atol=1e-5, rtol=1e-5)


# The future token --------------------------------------------------------------------------------


class FutureWatcher(Observer):
    """Keeps every round's views."""

    def __init__(self) -> None:
        self.first = None
        self.plans, self.used, self.decided = [], [], []

    def prefilled(self, view) -> None:
        self.first = view

    def verifying(self, view) -> None:
        self.plans.append(view.plan)
        self.used.append(view.future)

    def accepted(self, view) -> None:
        self.decided.append(view)


@pytest.fixture(scope="module")
def watched(llama, prompt, greedy, head, part):
    """A run with short and long accepted paths, watched."""
    watcher = FutureWatcher()
    settings = Settings(max_new_tokens=24, nodes=12, depth=4, top_k=3)
    method = fakes.half_right(greedy, llama.vocab, head=head, part=part)
    rounds = list(decode(llama, method, prompt, settings, watcher))
    assert {len(r.draws) for r in rounds[1:]} >= {1, 5}
    return watcher, rounds


def test_future_token_comes_from_the_last_accepted_node(llama, prompt, greedy, head, part, watched):
    """Recomputed from the text alone: the contemplate row behind the last accepted token, with an
    embedding that was routed by the state accepted one round before."""
    watcher, rounds = watched
    length = len(prompt)
    router_state = reference.full_taps(llama, greedy[:length])[-1]
    futures = [watcher.first.future, *(view.future for view in watcher.decided)]
    checked = 0
    for index, future in enumerate(futures):
        accepted = greedy[:length]  # text up to the last accepted token, which the target has read
        embedding, weights = part.contemplate(router_state)
        taps = reference.contemplate(llama, part, embedding, accepted)
        state = reference.full_taps(llama, accepted)[-1]
        slot, future_weights = part.future(head.fuse(state))
        torch.testing.assert_close(future.feature, head.fuse(taps), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(future.embedding, slot, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(future.contemplate_router, weights, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(future.future_router, future_weights, atol=1e-5, rtol=1e-4)
        assert future.born_round == index
        if index > 0:
            assert future.born_node == rounds[index].acceptance.last_node
        checked += future.born_node > 0
        router_state = state
        if index + 1 < len(rounds):
            length += len(rounds[index + 1].draws)
    assert checked >= 3, "want futures from nodes other than the root"


def test_a_round_is_steered_by_the_future_of_the_round_before(watched):
    watcher, rounds = watched
    assert watcher.used[0] is watcher.first.future
    for index in range(1, len(watcher.used)):
        assert watcher.used[index] is watcher.decided[index - 1].future
        assert rounds[index + 1].future is watcher.used[index]
    assert rounds[0].future is None


def test_every_node_carries_a_contemplate_token_and_all_share_one(watched):
    watcher, rounds = watched
    for plan, round in zip(watcher.plans, rounds[1:], strict=True):
        assert plan.nodes == tuple(range(len(round.draft.tree)))
        assert plan.embedding.dim() == 1
        assert round.target_rows == 2 * len(round.draft.tree)


# Sparse contemplation ----------------------------------------------------------------------------

# Root; children 1 (0.6) and 2 (0.3); 3 (0.5 after 1) and 4 (0.2 after 1); 5 (0.9 after 3).
FORKED = DraftTree(
    (60, 7, 99, 14, 8, 9),
    (-1, 0, 0, 1, 1, 3),
    (0, 1, 1, 2, 2, 3),
    tuple(math.log(reach) for reach in (1.0, 0.6, 0.3, 0.3, 0.12, 0.27)),
)


def test_end_chances_by_hand():
    """Path probability times one minus the children's; over a whole tree they sum to one."""
    wanted = (1 - 0.6 - 0.3, 0.6 * (1 - 0.5 - 0.2), 0.3, 0.3 * (1 - 0.9), 0.12, 0.27)
    assert FORKED.end_chances == pytest.approx(wanted)
    assert sum(FORKED.end_chances) == pytest.approx(1)


def test_children_that_round_above_their_parent_leave_no_negative_chance():
    tree = DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1), (0.0, math.log(0.6), math.log(0.41)))
    assert tree.end_chances[0] == 0


@pytest.mark.parametrize(
    ("share", "nodes"),
    [
        (1.0, (0, 1, 2, 3, 4, 5)),
        (0.99, (0, 1, 2, 4, 5)),  # node 3 is nearly always followed by 5
        (0.5, (0, 2, 5)),  # the root though 1 and 4 are likelier ends
        (0.34, (0, 2)),
        (0.33, (0,)),
        (0.001, (0,)),
    ],
)
def test_the_likeliest_ends_and_the_root_carry_one(share, nodes):
    assert likely_ends(FORKED, share) == nodes


def test_share_is_an_upper_limit_on_every_tree_size():
    for share in (0.1, 0.25, 0.29, 0.3, 0.7):
        for nodes in range(1, 257):
            count = contemplated_count(nodes, share)
            assert count == max(1, int(Fraction(str(share)) * nodes))


def test_share_one_is_dense_exactly(llama, prompt, greedy, head, part, watched):
    """The same rounds and trees as when every node is named outright."""

    class Dense(Contemplator):
        def plan(self, tree, share):
            return self._make_plan(tuple(range(len(tree))))

    def run(method):
        settings = Settings(max_new_tokens=24, nodes=12, depth=4, top_k=3, contemplate=1.0)
        watcher = FutureWatcher()
        return list(decode(llama, method, prompt, settings, watcher)), watcher

    for made in (fakes.half_right(greedy, llama.vocab, head=head, part=part),
                 fakes.method(head, part)):  # fmt: skip
        (found, seen), (wanted, known) = (
            run(made),
            run(replace(made, contemplator=partial(Dense, part, head))),
        )
        assert [r.draft and r.draft.tree for r in found] == [
            r.draft and r.draft.tree for r in wanted
        ]
        assert [r.acceptance for r in found] == [r.acceptance for r in wanted]
        assert [r.plan and r.plan.nodes for r in found] == [r.plan and r.plan.nodes for r in wanted]
        for mine, other in zip(seen.decided, known.decided, strict=True):
            assert torch.equal(mine.future.feature, other.future.feature)


@pytest.mark.parametrize("share", [0.6, 0.25, 0.01])
def test_sparse_future_is_the_nearest_contemplated_ancestors(
    llama, prompt, greedy, head, part, share
):
    """Recomputed from the text alone: the contemplate row behind the accepted path up to the
    source node, routed by the state accepted one round before."""
    watcher = FutureWatcher()
    settings = Settings(max_new_tokens=24, nodes=12, depth=4, top_k=3, contemplate=share)
    method = fakes.half_right(greedy, llama.vocab, head=head, part=part)
    rounds = list(decode(llama, method, prompt, settings, watcher))
    assert [t for r in rounds for t in r.token_ids] == greedy[len(prompt) :][:24]
    length, lags = len(prompt), []
    router_state = reference.full_taps(llama, greedy[:length])[-1]
    for round, plan, view in zip(rounds[1:], watcher.plans, watcher.decided, strict=True):
        tree, future = round.draft.tree, view.future
        assert len(plan.nodes) == max(1, int(share * len(tree)))
        assert round.target_rows == len(tree) + len(plan.nodes)
        path = [0, *round.acceptance.path]
        source = max(step for step, node in enumerate(path) if node in plan.nodes)
        assert (future.born_round, future.born_node) == (round.index, path[source])
        embedding, _ = part.contemplate(router_state)
        taps = reference.contemplate(llama, part, embedding, greedy[: length + source + 1])
        torch.testing.assert_close(future.feature, head.fuse(taps), atol=2e-5, rtol=1e-4)
        length += len(round.draws)
        # the state that routes is the last accepted token's, however old f is
        router_state = reference.full_taps(llama, greedy[:length])[-1]
        lags.append(len(path) - 1 - source)
    assert max(lags) >= 1, "want a stale future"
    assert share > 0.5 or min(lags) == 0


def test_without_contemplation_no_row_is_added(llama, prompt, head):
    watcher = FutureWatcher()
    settings = Settings(max_new_tokens=5, nodes=6, depth=2)
    rounds = list(decode(llama, fakes.method(head), prompt, settings, watcher))
    assert all(r.target_rows == len(r.draft.tree) for r in rounds[1:])
    assert all(plan.nodes == () for plan in watcher.plans)
    assert watcher.first.future is None
    assert all(view.future is None for view in watcher.decided)


def test_future_matters_to_the_draft(llama, prompt, head):
    """Each way of f into the draft changes its scores; with both off the tree is EAGLE-3's."""
    settings = Settings(max_new_tokens=3, nodes=8, depth=2, top_k=4)

    def scores(**switches) -> tuple[float, ...]:
        part = fakes.tiny_contemplation(llama, head, **switches) if switches else None
        rounds = list(decode(llama, fakes.method(head, part), prompt, settings))
        return rounds[1].draft.tree.scores

    off = scores(future_entry=False, future_query=False)
    assert off == pytest.approx(scores(), abs=1e-5)
    only_entry = scores(future_entry=True, future_query=False)
    only_query = scores(future_entry=False, future_query=True)
    both = scores(future_entry=True, future_query=True)
    assert len({tuple(round(s, 4) for s in x) for x in (off, only_entry, only_query, both)}) == 4


# Mixtures ----------------------------------------------------------------------------------------


def test_router_weights():
    """K weights are not zero, they sum to one, and they are the softmax of the best K scores."""
    torch.manual_seed(0)
    mixture = ExpertMixture(inputs=6, outputs=4, experts=8, top_k=3)
    states = torch.randn(50, 6)
    vectors, weights = mixture(states)
    scores = mixture.router(states)
    assert ((weights > 0).sum(-1) == 3).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(50))
    for score, weight, vector in zip(scores, weights, vectors, strict=True):
        best = score.argsort(descending=True)[:3].tolist()
        wanted = torch.zeros(8)
        wanted[best] = score[best].softmax(0)
        torch.testing.assert_close(weight, wanted)
        by_hand = sum(wanted[e] * mixture.experts[e] for e in best)
        torch.testing.assert_close(vector, by_hand)


def test_router_input_is_centred_and_standardised():
    mixture = ExpertMixture(inputs=3, outputs=2, experts=4, top_k=4)
    with torch.no_grad():
        mixture.mean.copy_(torch.tensor([5.0, -2.0, 0.0]))
        mixture.scale.copy_(torch.tensor([2.0, 1.0, 0.5]))
    _, weights = mixture(torch.tensor([6.0, -2.0, 4.0]))
    wanted = mixture.router(torch.tensor([2.0, 0.0, 2.0])).softmax(-1)
    torch.testing.assert_close(weights, wanted)


def test_one_expert_is_a_static_token():
    mixture = ExpertMixture(inputs=6, outputs=4, experts=1, top_k=2)
    assert mixture.router is None
    vectors, weights = mixture(torch.randn(5, 6))
    assert torch.equal(vectors, mixture.experts.expand(5, -1))
    assert torch.equal(weights, torch.ones(5, 1))


def test_top_k_above_the_number_of_experts_takes_all():
    mixture = ExpertMixture(inputs=6, outputs=4, experts=2, top_k=9)
    _, weights = mixture(torch.randn(5, 6))
    assert (weights > 0).all()


def test_steering_by_hand(llama, head, part):
    feature = torch.randn(head.shape.hidden, generator=torch.Generator().manual_seed(3))
    eps = part.shape.rms_eps
    normed = feature / (feature.square().mean() + eps).sqrt() * part.project_norm.weight
    wanted = part.gate * feature + part.project.weight @ normed
    torch.testing.assert_close(part.steer(feature), wanted)
    assert float((part.gate * feature).abs().max()) > 0.1
    assert float((part.project.weight @ normed).abs().max()) > 0.1


def test_soft_prompts_matter_to_contemplate_tokens_only(llama, prompt, head, part):
    cache, rows = prefilled(llama, part, prompt)
    embedding, _ = part.contemplate(rows.taps[0, -1])
    with_prompts = llama.verify(cache, TREE, (0,), embedding)
    cache.drop_pending()
    cache.set_fixed(part.soft_keys + 1.0, part.soft_values + 1.0)
    other = llama.verify(cache, TREE, (0,), embedding)
    assert torch.equal(with_prompts.logits, other.logits)
    assert not torch.allclose(with_prompts.contemplate_taps, other.contemplate_taps, atol=1e-3)


def test_settings_of_a_run_do_not_change_the_first_future(llama, prompt, head, part):
    """The first future token depends on prompt and weights alone."""
    seen = []
    for settings in (
        Settings(max_new_tokens=3, nodes=4),
        replace(Settings(max_new_tokens=9, nodes=30, depth=3), temperature=1.0, seed=4),
    ):
        watcher = FutureWatcher()
        list(decode(llama, fakes.method(head, part), prompt, settings, watcher))
        seen.append(watcher.first.future.feature)
    assert torch.equal(*seen)
