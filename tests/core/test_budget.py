"""Budgets: the chosen tree is the true optimum, growth stops when it should, costs are measured."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from confu_core import costs as costs_module
from confu_core.budget import AutoBudget, Costs, FixedBudget, curve
from confu_core.contemplation import Contemplator, NoContemplator
from confu_core.costs import TOO_DEAR, budget_for, fastest, measured
from confu_core.decoding import check_settings, decode
from confu_core.errors import SettingsError
from confu_core.methods import PLAIN
from confu_core.trace import Settings
from tests import fakes


def logs(reach: list[float]) -> torch.Tensor:
    return torch.tensor(reach, dtype=torch.float64).log()


# The curve ---------------------------------------------------------------------------------------


def test_curve_goes_through_its_points_and_straight_between():
    found = curve({1: 1.0, 2: 1.5, 4: 4.5}, 6)
    assert found == pytest.approx((1.0, 1.5, 3.0, 4.5, 6.0, 7.5))


def test_a_pass_never_costs_more_than_a_larger_one():
    """Eight rows measured dearer than twelve cost as much as twelve, and so do those between."""
    found = curve({1: 1.0, 4: 4.0, 8: 9.0, 12: 6.0}, 12)
    assert found[0] == 1.0 and found[3] == 4.0
    assert found[7:] == (6.0,) * 5
    assert list(found) == sorted(found)
    assert curve({1: 7.0, 2: 5.0}, 4) == (5.0,) * 4


# The best tree -----------------------------------------------------------------------------------


def random_tree(dice: random.Random, count: int) -> tuple[list[int], list[float]]:
    """Parents (-1 for the root, else a candidate) and path probabilities of `count` candidates."""
    parents, reach = [], []
    for number in range(count):
        parent = dice.randrange(-1, number)
        parents.append(parent)
        reach.append((1.0 if parent < 0 else reach[parent]) * dice.uniform(0.05, 0.95))
    return parents, reach


def best_by_brute_force(parents, reach, seconds, spent) -> float:
    """The highest rate over every set of candidates that holds the parents of its members."""
    found = 0.0
    for keep in itertools.product((False, True), repeat=len(parents)):
        closed = all(
            not kept or parent < 0 or keep[parent]
            for kept, parent in zip(keep, parents, strict=True)
        )
        size = 1 + sum(keep)
        if closed and size <= len(seconds):
            gain = 1 + sum(r for r, kept in zip(reach, keep, strict=True) if kept)
            found = max(found, gain / (spent + seconds[size - 1]))
    return found


def random_seconds(dice: random.Random, count: int) -> tuple[float, ...]:
    """A curve that never falls, with steps and flat stretches."""
    total, seconds = dice.uniform(0.1, 2), []
    for _ in range(count):
        seconds.append(total)
        total += dice.choice((0, 0, 0.01, 0.1, 1)) * dice.random()
    return tuple(seconds)


def test_the_chosen_size_is_the_true_optimum():
    dice = random.Random(1)
    sizes = set()
    for _ in range(150):
        parents, reach = random_tree(dice, dice.randint(1, 9))
        seconds = random_seconds(dice, dice.randint(1, 12))
        spent = dice.choice((0.0, 0.3, 3.0))
        budget = AutoBudget(Costs(seconds, spent, (0.0,)), lambda nodes: nodes)
        order = sorted(reach, reverse=True)
        size, rate = budget.best(torch.tensor(order, dtype=torch.float64), spent)
        assert rate == pytest.approx(best_by_brute_force(parents, reach, seconds, spent))
        assert (1 + sum(order[: size - 1])) / (spent + seconds[size - 1]) == pytest.approx(rate)
        assert budget.start().size([float(x) for x in logs(reach)]) == size
        sizes.add(size)
    assert len(sizes) > 5


def test_rows_of_contemplate_tokens_are_paid_for():
    """Dense contemplation doubles the rows, so fewer nodes pay; a quarter lies in between."""
    seconds = tuple(0.5 + 0.05 * rows for rows in range(1, 65))
    reach = [0.9**n for n in range(1, 40)]
    sizes = []
    for share in (0.01, 0.25, 1.0):
        rows = partial(Contemplator.rows, None, share=share)
        budget = AutoBudget(Costs(seconds, 0.1, (0.0,)), rows)
        assert rows(budget.most_nodes) <= 64 < rows(budget.most_nodes + 1)
        sizes.append(budget.start().size([float(x) for x in logs(reach)]))
    plain = AutoBudget(Costs(seconds, 0.1, (0.0,)), partial(NoContemplator().rows, share=1.0))
    assert plain.most_nodes == 64
    assert plain.start().size([float(x) for x in logs(reach)]) >= sizes[0]
    assert sizes[0] > sizes[1] > sizes[2] > 1


def test_what_adapters_add_is_paid_for():
    """A pass over four nodes and one contemplate row takes the time of five rows and what the
    adapters add for one; so a larger tree pays, since their first row is the dear one."""
    verify = tuple(0.5 + 0.05 * rows for rows in range(1, 65))
    rows = partial(Contemplator.rows, None, share=0.25)
    bare = Costs(verify, 0.1, (0.0,))
    adapted = Costs(verify, 0.1, (0.0,), adapting=tuple(2.0 + 0.001 * n for n in range(1, 65)))
    assert adapted.target_pass(5, 1) == pytest.approx(0.75 + 2.001)
    assert adapted.target_pass(4, 0) == pytest.approx(0.7) == bare.target_pass(4, 0)
    reach = torch.tensor([0.8**n for n in range(1, 40)], dtype=torch.float64)
    size, rate = AutoBudget(adapted, rows).best(reach, 0.1)
    gain = 1 + float(reach[: size - 1].sum())
    seconds = 0.1 + adapted.target_pass(rows(size), rows(size) - size)
    assert rate == pytest.approx(gain / seconds)
    assert size > AutoBudget(bare, rows).best(reach, 0.1)[0]


# Growth ------------------------------------------------------------------------------------------


class Universe:
    """A full tree of known probabilities, level by level, as a drafter would find it."""

    def __init__(self, seed: int, branches: int, depth: int) -> None:
        dice = random.Random(seed)
        self.depth = depth
        self.reach: dict[tuple[int, ...], float] = {(): 1.0}
        for level in range(depth):
            for path in [path for path in self.reach if len(path) == level]:
                cuts = sorted(dice.random() ** 2 for _ in range(branches))
                parts = [b - a for a, b in zip((0, *cuts[:-1]), cuts, strict=True)]
                for child, part in enumerate(parts):
                    self.reach[*path, child] = self.reach[path] * max(part, 1e-6)

    def children(self, paths) -> list[tuple[int, ...]]:
        return [p for p in self.reach if p and p[:-1] in set(paths)]

    def grow(self, budget: AutoBudget, beam: int = 99):
        """The paths that were drafted, how many were expanded per pass, and the budget's size."""
        growth = budget.start()
        level = self.children([()])
        drafted, expanded = list(level), []
        for _ in range(2, self.depth + 1):
            level = sorted(level, key=lambda path: -self.reach[path])[:beam]
            scores = logs([self.reach[path] for path in drafted])
            count = growth.expand([scores], logs([self.reach[path] for path in level]))
            if not count:
                break
            expanded.append(level[:count])
            level = self.children(level[:count])
            drafted += level
        size = growth.size([float(x) for x in logs([self.reach[path] for path in drafted])])
        return drafted, expanded, size


def straight(first: float, slope: float, count: int = 64) -> tuple[float, ...]:
    return tuple(first + slope * rows for rows in range(count))


@pytest.mark.parametrize("seed", range(8))
def test_where_drafting_is_free_the_grown_tree_is_the_best_of_all(seed):
    """On a straight curve a node that is not worth verifying now never will be: nothing that the
    growth leaves out belongs to the best tree of the full universe."""
    universe = Universe(seed, branches=3, depth=4)
    budget = AutoBudget(Costs(straight(1.0, 0.08), 0.2, (0.0,) * 64), lambda nodes: nodes)
    drafted, expanded, size = universe.grow(budget)
    everything = sorted((r for path, r in universe.reach.items() if path), reverse=True)
    best_size, best_rate = budget.best(torch.tensor(everything, dtype=torch.float64), 0.2)
    found = sorted((universe.reach[path] for path in drafted), reverse=True)
    assert size == best_size
    assert budget.best(torch.tensor(found, dtype=torch.float64), 0.2)[1] == pytest.approx(best_rate)
    assert len(drafted) < len(universe.reach) - 1, "want a growth that left something out"
    assert expanded


def test_growth_stops_at_once_where_a_pass_is_dear():
    universe = Universe(1, branches=3, depth=4)
    budget = AutoBudget(Costs(straight(1.0, 0.01), 0.2, (50.0,) * 64), lambda nodes: nodes)
    drafted, expanded, size = universe.grow(budget)
    assert (len(drafted), expanded, size) == (3, [], 4)


def test_no_pass_is_made_that_could_not_pay_even_if_all_of_it_were_accepted():
    """The bound behind the stop: another level gains at most the frontier's path probability."""
    dice = random.Random(5)
    stopped = 0
    for seed in range(40):
        universe = Universe(seed, branches=3, depth=4)
        more = straight(dice.uniform(0.01, 1), dice.uniform(0, 0.1))
        costs = Costs(straight(1.0, dice.uniform(0, 0.2)), 0.2, more)
        budget = AutoBudget(costs, lambda nodes: nodes)
        _, expanded, _ = universe.grow(budget)
        spent = costs.draft_first
        known = universe.children([()])
        for paths in expanded:
            reach = sorted((universe.reach[path] for path in known), reverse=True)
            _, rate = budget.best(torch.tensor(reach, dtype=torch.float64), spent)
            step = more[len(paths) - 1]
            assert sum(universe.reach[path] for path in paths) > rate * step
            spent += step
            known += universe.children(paths)
        stopped += len(expanded) < universe.depth - 1
    assert 5 < stopped < 40


def test_dear_rows_are_left_out_of_a_pass():
    """Where a pass over one row is cheap and over two dear, one node is expanded."""
    scores = logs([0.5, 0.45, 0.02])
    flat = Costs(straight(1.0, 0.0), 0.1, (0.05,) * 64)
    steep = replace(flat, draft_more=(0.05, *[5.0] * 63))
    for costs, wanted in ((flat, 3), (steep, 1)):
        budget = AutoBudget(costs, lambda nodes: nodes)
        assert budget.start().expand([scores], scores) == wanted


def test_a_level_that_lost_most_of_its_mass_foretells_the_next():
    """The same frontier is expanded if the level before kept its mass, and not if it lost it."""
    budget = AutoBudget(Costs(straight(1.0, 0.0), 0.0, (0.15,) * 64), lambda nodes: nodes)
    kept, lost = budget.start(), budget.start()
    assert kept.expand([logs([0.5, 0.1])], logs([0.5, 0.1])) == 2
    assert lost.expand([logs([0.99])], logs([0.99])) == 1
    frontier = logs([0.45])
    assert kept.expand([logs([0.5, 0.1, 0.45])], frontier) == 1
    assert lost.expand([logs([0.5, 0.1, 0.45])], frontier) == 0


def test_a_root_that_is_best_alone_ends_the_growth():
    budget = AutoBudget(Costs((1.0, 9.0), 0.1, (0.0,) * 64), lambda nodes: nodes)
    growth = budget.start()
    assert growth.expand([logs([0.9, 0.05])], logs([0.9, 0.05])) == 0
    assert growth.size([float(x) for x in logs([0.9, 0.05])]) == 1


def test_fixed_budget_takes_what_there_is():
    budget = FixedBudget(30)
    assert budget.start().expand([logs([0.1])], logs([0.1] * 8)) == 8
    assert budget.start().size([0.0] * 300) == budget.most_nodes == 30


# In the loop -------------------------------------------------------------------------------------

AUTO = Settings(max_new_tokens=24, nodes="auto", depth=4, top_k=4)
MACHINES = {
    "verifying is free": Costs(straight(1.0, 0.0), 0.01, (0.001,) * 64),
    "verifying is dear": Costs(straight(1.0, 0.3), 0.01, (0.001,) * 64),
    "speculation never pays": Costs(straight(1.0, 2.0), 0.01, (0.001,) * 64),
    "drafting is dear": Costs(straight(1.0, 0.0), 0.01, (9.0,) * 64),
}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("contemplates", [False, True])
def test_trees_fit_the_machine_and_the_text_stays(
    llama, prompt, greedy, head, part, monkeypatch, machine, contemplates
):
    monkeypatch.setattr(costs_module, "measured", lambda target, method: MACHINES[machine])
    method = fakes.method(head, part if contemplates else None)
    for temperature in (0.0, 1.0):
        settings = replace(AUTO, temperature=temperature, seed=3)
        rounds = list(decode(llama, method, prompt, settings))
        wanted = list(decode(llama, PLAIN, prompt, settings))
        assert [t for r in rounds for t in r.token_ids] == [t for r in wanted for t in r.token_ids]
        trees = [r.draft.tree for r in rounds[1:-5]]  # where the end does not limit the depth
        sizes, depths = {len(tree) for tree in trees}, {max(tree.depths) for tree in trees}
        passes = {r.draft.passes for r in rounds[1:-5]}
        if machine == "verifying is free":
            assert min(sizes) > 10 and max(depths) == 4
        elif machine == "verifying is dear":
            assert (1 if contemplates else 2) <= max(sizes) <= 10
        elif machine == "speculation never pays":
            assert sizes == {1} and passes == {1}
        else:
            assert depths == {1} and passes == {1}


def test_plain_decoding_needs_no_measurement(llama, prompt, greedy, monkeypatch):
    def never(*_):
        raise AssertionError("nothing is drafted, so nothing is chosen")

    monkeypatch.setattr(costs_module, "measured", never)
    rounds = list(decode(llama, PLAIN, prompt, AUTO))
    assert [t for r in rounds for t in r.token_ids] == greedy[len(prompt) :][:24]


def test_words_for_the_tree_size():
    check_settings(Settings(nodes="auto"))
    for wrong in ("many", 0, 257, None):
        with pytest.raises(SettingsError, match=r"Tree size is .* between 1 \(root only\) and 256"):
            check_settings(Settings(nodes=wrong))


# Measuring ---------------------------------------------------------------------------------------


class Clock:
    """Time that passes only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_fastest_of_several_sweeps_and_no_further_than_too_dear(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(costs_module, "time", clock)
    seen = []

    def run(count: int) -> None:
        busy = 0.05 if count == 2 and seen.count(2) == 0 else 0.0  # disturbed once
        clock.now += 0.01 + 0.009 * (count - 1) + busy
        seen.append(count)

    found = fastest(run, (1, 2, 4, 8, 16, 32))
    # more than 7 times the cost of one row is too dear; what is larger is not even tried
    assert 3.7 < TOO_DEAR < 7.3
    assert found == pytest.approx({1: 0.01, 2: 0.019, 4: 0.037, 8: 0.073})
    assert seen[:6] == [1, 1, 2, 1, 2, 4], "a warm-up, a sweep cut short, a second one"


@pytest.mark.parametrize("kind", ["eagle3", "confu", "confu+"])
def test_measured_on_a_tiny_target(llama, head, part, monkeypatch, kind):
    monkeypatch.setattr(costs_module, "SECONDS", 0.05)
    if kind == "confu+":
        part = fakes.tiny_contemplation(llama, head, adapter_rank=2, read_outs=2)
    method = fakes.method(head, part if kind != "eagle3" else None)
    target = fakes.tiny_target(seed=7)
    found = measured(target, method)
    assert 2 <= len(found.verify) <= 128 and len(found.draft_more) == 64
    assert len(found.adapting) == (128 if kind == "confu+" else 0)
    for seconds in (found.verify, found.draft_more, found.adapting or (0.0,)):
        assert list(seconds) == sorted(seconds) and seconds[0] >= 0
    assert found.verify[0] > 0 and found.draft_first > 0


def test_measured_once_per_model(llama, head, monkeypatch):
    monkeypatch.setattr(costs_module, "SECONDS", 0.01)
    calls = []
    original = costs_module.fastest
    monkeypatch.setattr(costs_module, "fastest", lambda *a: calls.append(1) or original(*a))
    one, other = fakes.tiny_target(seed=7), fakes.tiny_target(seed=8)
    own = fakes.tiny_head(llama, seed=9)  # no other test has measured it
    first = measured(one, fakes.method(own))
    assert len(calls) == 3  # verification, first level, several levels
    assert measured(one.with_taps((1, 2, 3)), fakes.method(own)) == first
    assert len(calls) == 3
    measured(other, fakes.method(own))
    assert len(calls) == 4


def test_budget_of_a_run(llama, head, part, monkeypatch):
    monkeypatch.setattr(costs_module, "measured", lambda *_: Costs(straight(1, 0), 0.1, (0.1,)))
    confu = fakes.method(head, part)
    fixed = budget_for(llama, confu, confu.contemplator(), 30, 1.0)
    assert isinstance(fixed, FixedBudget) and fixed.most_nodes == 30
    auto = budget_for(llama, confu, confu.contemplator(), "auto", 1.0)
    assert isinstance(auto, AutoBudget) and auto.most_nodes == 32
    sparse = budget_for(llama, confu, confu.contemplator(), "auto", 0.25)
    assert sparse.most_nodes == 51  # 51 nodes and 12 contemplate tokens
    eagle = fakes.method(head)
    assert budget_for(llama, eagle, eagle.contemplator(), "auto", 1.0).most_nodes == 64
