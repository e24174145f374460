"""Trees: the choice of nodes, their mask, their children, on any scores including ties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from confu_core.decoding import decode
from confu_core.masks import ancestor_matrix
from confu_core.probes import Observer
from confu_core.target import Target
from confu_core.trace import Settings
from confu_core.tree import DraftTree, select
from tests import fakes, reference

COARSE = [0.0, -0.0, -1e-9, -0.5, -1.0, -3.0]  # many ties, and steps of exactly nothing


@st.composite
def candidates(draw) -> tuple[list[int], list[int], list[float]]:
    """Token ids, parents and scores as a draft makes them: parents first, scores never rising."""
    count = draw(st.integers(0, 40))
    parents, scores, tokens = [], [], []
    for index in range(count):
        parent = draw(st.integers(-1, index - 1))
        step = draw(st.sampled_from(COARSE))
        parents.append(parent)
        scores.append(step + (scores[parent] if parent >= 0 else 0.0))
        taken = {tokens[i] for i in range(index) if parents[i] == parent}
        tokens.append(next(t for t in range(100) if t not in taken))
    return tokens, parents, scores


@given(candidates(), st.integers(1, 60))
@settings(max_examples=150, deadline=None)
def test_selected_trees(made, budget):
    tokens, parents, scores = made
    tree = select(777, tokens, parents, scores, budget)
    count = len(tree)
    assert count == min(budget, len(tokens) + 1)
    assert (tree.token_ids[0], tree.parents[0], tree.depths[0], tree.scores[0]) == (777, -1, 0, 0.0)
    for node in range(1, count):
        parent = tree.parents[node]
        assert 0 <= parent < node, "parents stand before their children"
        assert tree.depths[node] == tree.depths[parent] + 1
        assert tree.scores[node] <= tree.scores[parent], "scores never rise along a path"
        assert reference.path_to(list(tree.parents), node)[0] == 0, "every path starts at the root"
        assert tree.child(parent, tree.token_ids[node]) == node
    # the same candidates as the obvious algorithm, in the same order
    kept = reference.select_tree(parents, scores, budget)
    assert list(tree.token_ids[1:]) == [tokens[c] for c in kept]
    assert list(tree.scores[1:]) == [scores[c] for c in kept]
    wanted = [[n in reference.path_to(list(tree.parents), m) for n in range(count)]
              for m in range(count)]  # fmt: skip
    assert tree.ancestors.tolist() == wanted


@pytest.mark.parametrize("score", [0.0, -2.5])
@pytest.mark.parametrize("budget", [1, 2, 7, 13, 14, 99])
def test_all_equal_scores_keep_the_first(score, budget):
    """A chain of 13 with equal scores: the tie bug of the reference would tear it apart."""
    tree = select(5, list(range(13)), list(range(-1, 12)), [score] * 13, budget)
    kept = min(budget - 1, 13)
    assert tree.parents == tuple(range(-1, kept))
    assert tree.token_ids == (5, *range(kept))


def test_a_better_deep_path_beats_a_worse_sibling():
    tree = select(9, [1, 2, 3, 4], [-1, -1, 0, 2], [-1.0, -4.0, -2.0, -3.0], 4)
    assert tree.token_ids == (9, 1, 3, 4)
    assert tree.depths == (0, 1, 2, 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(bad):
    with pytest.raises(ValueError, match="finite"):
        select(0, [1, 2], [-1, -1], [-1.0, bad], 3)


def test_a_kept_node_without_its_parent_is_an_error_not_an_attachment():
    with pytest.raises(ValueError, match="without its parent"):
        select(0, [1, 2], [-1, 0], [-5.0, -1.0], 2)


def test_children_are_told_apart_by_parent():
    tree = DraftTree((8, 4, 5, 4), (-1, 0, 0, 2), (0, 1, 1, 2), (0.0,) * 4)
    assert tree.child(0, 4) == 1
    assert tree.child(2, 4) == 3
    assert tree.child(1, 4) is None
    assert tree.child(0, 8) is None, "the root is nobody's child"


def test_root_only():
    tree = DraftTree.root_only(42)
    assert (len(tree), tree.token_ids, tree.child(0, 42)) == (1, (42,), None)
    assert tree.ancestors.tolist() == [[True]]


@given(st.lists(st.integers(0, 10**6), max_size=30))
@settings(max_examples=100, deadline=None)
def test_mask_is_the_ancestor_set(seeds):
    parents = [-1, *(seed % (index + 1) for index, seed in enumerate(seeds))]
    matrix = ancestor_matrix(parents)
    for node in range(len(parents)):
        found = set(matrix[node].nonzero().flatten().tolist())
        assert found == set(reference.path_to(parents, node))


# Trees as the drafter grows them ------------------------------------------------------------------


class Watcher(Observer):
    """Keeps every tree, and the draft's steps of each."""

    def __init__(self) -> None:
        self.trees: list[DraftTree] = []
        self.steps: list[list] = []
        self._open: list = []

    def drafted(self, step) -> None:
        self._open.append(step)

    def verifying(self, view) -> None:
        self.trees.append(view.draft.tree)
        self.steps.append(self._open)
        self._open = []


def watch(target, method, prompt, **sizes) -> Watcher:
    """Seven rounds, with room enough that no tree is cut by the token limit."""
    watcher = Watcher()
    rounds = decode(target, method, prompt, Settings(max_new_tokens=99, **sizes), watcher)
    for _ in zip(range(8), rounds, strict=False):
        pass
    rounds.close()
    assert len(watcher.trees) >= 7
    return watcher


@pytest.mark.parametrize("peak", [1.0, 8.0, 60.0])
@pytest.mark.parametrize("half", [False, True])
def test_drafted_trees_with_ties(llama, prompt, peak, half):
    """Peaked heads give log-probabilities of exactly 0, bfloat16 heads many equal ones."""
    head = fakes.tiny_head(llama, seed=2, peak=peak)
    target = llama
    if half:
        target = fakes.tiny_target()
        target = Target(target.model.to(torch.bfloat16), target.tokenizer, target.name)
        head = head.to(torch.bfloat16)
    part = fakes.tiny_contemplation(target, head)
    part = part.to(torch.bfloat16) if half else part
    ties = 0
    for method in (fakes.method(head), fakes.method(head, part)):
        for nodes, depth, top_k in ((5, 6, 3), (30, 4, 6), (60, 5, 64)):
            watcher = watch(target, method, prompt, nodes=nodes, depth=depth, top_k=top_k)
            branching = min(top_k, 48)
            for tree in watcher.trees:
                assert len(tree) == min(nodes, 1 + branching + (depth - 1) * branching**2)
                assert max(tree.depths) <= depth
                pairs = list(zip(tree.parents, tree.token_ids, strict=True))
                assert len(set(pairs)) == len(pairs), "siblings are different tokens"
                for node in range(1, len(tree)):
                    assert tree.scores[node] <= tree.scores[tree.parents[node]]
                    ties += tree.scores[node] == tree.scores[tree.parents[node]]
                ids = set((torch.arange(48) + head.d2t).tolist())
                assert set(tree.token_ids[1:]) <= ids, "only what the head can name"
    if peak == 60.0:
        assert ties > 20, "the peaked head must really tie"


def test_draft_steps_are_the_tree(llama, prompt, head):
    """Observers see every candidate of every level; the kept ones are the best of them."""
    watcher = watch(llama, fakes.method(head), prompt, nodes=12, depth=3, top_k=4)
    for tree, steps in zip(watcher.trees, watcher.steps, strict=True):
        assert [step.depth for step in steps] == [1, 2, 3]
        scores = torch.cat([step.scores.flatten() for step in steps]).tolist()
        assert sorted(tree.scores[1:], reverse=True) == sorted(scores, reverse=True)[:11]
        for step in steps:
            assert step.token_ids.shape == step.scores.shape
            assert step.states.shape == (len(step.token_ids), head.shape.hidden)
            assert len(step.token_ids) == (1 if step.depth == 1 else 4)


class ScoreChecker(Observer):
    """Compares each drafted score with the slow head's log-probabilities along the path."""

    def __init__(self, target, head, part, prompt) -> None:
        self.target, self.head, self.part = target, head, part
        self.text = list(prompt)
        self.checked = 0

    def prefilled(self, view) -> None:
        self.text.append(view.first.token_id)

    def verifying(self, view) -> None:
        tree, future, text = view.draft.tree, view.future, self.text
        f = (future.embedding, future.feature) if future else None
        taps = reference.full_taps(self.target, text[:-1])
        embedding = self.target.model.get_input_embeddings().weight
        known = (torch.arange(self.head.shape.draft_vocab) + self.head.d2t).tolist()
        for node in range(1, len(tree)):
            path = reference.path_to(list(tree.parents), node)
            ids = text + [tree.token_ids[n] for n in path[1:]]
            steps = reference.draft_chain(
                self.head, embedding, taps, ids, len(text) - 2, len(path) - 1, self.part, f
            )
            log_probs = [
                float(step[known.index(tree.token_ids[n])])
                for step, n in zip(steps, path[1:], strict=True)
            ]
            assert tree.scores[node] == pytest.approx(sum(log_probs), abs=5e-4)
            self.checked += 1

    def accepted(self, view) -> None:
        self.text.extend(d.token_id for d in view.acceptance.draws)


@pytest.mark.parametrize("switches", [None, {}, {"future_query": False}, {"future_entry": False}])
def test_every_score_equals_an_eager_chain(llama, prompt, switches):
    """EAGLE-3's draft and both ways of f into it, against a head written out in plain vectors."""
    head = fakes.tiny_head(llama, seed=7, peak=5.0)  # peaked, so that eight nodes reach depth 3
    part = None if switches is None else fakes.tiny_contemplation(llama, head, **switches)
    checker = ScoreChecker(llama, head, part, prompt)
    wanted = Settings(max_new_tokens=6, nodes=8, depth=3, top_k=3)
    rounds = list(decode(llama, fakes.method(head, part), prompt, wanted, checker))
    assert checker.text[len(prompt) :] == [t for r in rounds for t in r.token_ids]
    assert checker.checked >= 15
    assert max(depth for r in rounds[1:] for depth in r.draft.tree.depths) == 3
