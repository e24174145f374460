"""How much to draft and to verify in a round: a fixed number of nodes, or what pays.

A round costs draft passes and one target pass, and gains one token plus, in expectation, the sum
of the path probabilities of the nodes that it verifies: a drafted node is gained if all of its path
is accepted, and the draft's own probabilities tell how often that happens (docs/performance.md
shows how true they are). `AutoBudget` takes the tree with the most expected tokens per second.

Both budgets are asked the same two questions while a tree grows: how many nodes of the newest
level to expand, and how many nodes of all to keep. Neither answer can change the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Costs:
    """Seconds that passes take on one machine.

    verify: a target pass over 1, 2, ... rows. draft_first: taking in new text and drafting the
    root's children. draft_more: a further draft pass over 1, 2, ... rows. adapting: what adapters
    add to a target pass with 1, 2, ... contemplate rows; empty without adapters. No list ever
    falls.
    """

    verify: tuple[float, ...]
    draft_first: float
    draft_more: tuple[float, ...]
    adapting: tuple[float, ...] = ()

    def target_pass(self, rows: int, contemplated: int) -> float:
        """Seconds of a target pass over so many rows, of which so many are contemplate rows."""
        adapted = self.adapting[contemplated - 1] if self.adapting and contemplated else 0.0
        return self.verify[rows - 1] + adapted


def curve(measured: dict[int, float], length: int) -> tuple[float, ...]:
    """Seconds for 1, 2, ... `length` rows from those at some row counts.

    In between a straight line; behind the last one it goes on as steeply as between the last two.
    A pass that measured dearer than a larger one costs as much as that one: some kernels are faster
    on more rows, and then it pays to fill up.

    Args:
        measured: row count -> seconds, at least two of them, the smallest for one row.
    """
    known = sorted(measured)
    least = {count: min(measured[larger] for larger in known if larger >= count) for count in known}
    seconds = []
    for rows in range(1, length + 1):
        end = next((index for index, count in enumerate(known) if count >= rows), len(known) - 1)
        left, right = known[max(0, end - 1)], known[max(1, end)]
        slope = (least[right] - least[left]) / (right - left)
        seconds.append(least[left] + slope * (rows - left))
    return tuple(seconds)


class FixedBudget:
    """Every tree is grown to its full depth and cut to one number of nodes, the root included."""

    def __init__(self, nodes: int) -> None:
        self.most_nodes = nodes

    def start(self) -> FixedBudget:
        """A new tree begins."""
        return self

    def expand(self, scores: Sequence[torch.Tensor], beam: torch.Tensor) -> int:
        """All of the beam."""
        return len(beam)

    def size(self, scores: Sequence[float]) -> int:
        """As many nodes as there may be."""
        return self.most_nodes


class AutoBudget:
    """Every tree is grown and cut for the most expected tokens per second.

    Args:
        rows: nodes of a tree -> rows of the target pass that verifies it, contemplate tokens
            included; never falling, so a larger tree never costs less.
    """

    def __init__(self, costs: Costs, rows: Callable[[int], int]) -> None:
        most = len(costs.verify)
        while rows(most) > len(costs.verify):
            most -= 1
        self.most_nodes = most
        self.costs = costs
        # Seconds of the pass over a tree of 1, 2, ... nodes, root included.
        sizes = [(rows(nodes), rows(nodes) - nodes) for nodes in range(1, most + 1)]
        self._verify = torch.tensor(
            [costs.target_pass(*size) for size in sizes], dtype=torch.float64
        )

    def start(self) -> Growth:
        """A new tree begins."""
        return Growth(self)

    def best(self, reach: torch.Tensor, spent: float) -> tuple[int, float]:
        """The best number of nodes, root included, and its expected tokens per second.

        The best tree of n nodes holds the n - 1 likeliest candidates, since a candidate is never
        likelier than its parent; so the sorted list holds the best tree of every size.

        Args:
            reach: (n,) path probabilities of the candidates below the root, falling, float64.
            spent: seconds of the round that are spent whatever is verified.
        """
        gain = torch.cat((reach.new_ones(1), reach[: self.most_nodes - 1])).cumsum(0)
        rates = gain / (spent + self._verify[: len(gain)])
        best = int(rates.argmax())
        return best + 1, float(rates[best])


class Growth:
    """One tree under way: what its draft passes cost so far, and whether one more would pay."""

    def __init__(self, budget: AutoBudget) -> None:
        self._budget = budget
        self._spent = budget.costs.draft_first
        self._expanded = 1.0  # path probability of the nodes that were expanded last: the root

    def expand(self, scores: Sequence[torch.Tensor], beam: torch.Tensor) -> int:
        """How many of the beam are worth a draft pass; 0 ends the growth.

        A node is not worth expanding if it is not worth verifying, since its children are less
        likely still. Of the others, another level can gain at most their path probability; how
        much of it, the level before tells: its share that was worth verifying. This is set against
        the tokens that the tree as it stands would gain in the time of the pass.

        Args:
            scores: candidates so far, cumulative log-probabilities, level by level.
            beam: (k,) those of the newest level's best nodes, falling.
        """
        reach = torch.cat(list(scores)).cpu().double().exp().sort(descending=True).values
        size, rate = self._budget.best(reach, self._spent)
        if size == 1:
            return 0
        frontier = beam.cpu().double().exp()
        frontier = frontier[frontier >= reach[size - 2]]
        if not len(frontier):
            return 0
        share = min(1.0, float(frontier.sum()) / self._expanded)
        gain = frontier.cumsum(0) * share
        more = torch.tensor(self._budget.costs.draft_more[: len(frontier)], dtype=torch.float64)
        worth = gain - rate * more
        count = int(worth.argmax()) + 1
        if worth[count - 1] <= 0:
            return 0
        self._spent += float(more[count - 1])
        self._expanded = float(frontier[:count].sum())
        return count

    def size(self, scores: Sequence[float]) -> int:
        """How many nodes to keep, root included."""
        reach = torch.tensor(scores, dtype=torch.float64).exp().sort(descending=True).values
        return self._budget.best(reach, self._spent)[0]
