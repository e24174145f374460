"""How true a draft's probabilities are: path probability against how often the path is accepted.

The automatic budget takes the path probability of a drafted node for the chance that the node is
accepted. Here drafted nodes are put in bins by it, and each bin tells how many were accepted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from confu_core.bench.questions import Question
from confu_core.bench.report import table
from confu_core.charts import Series, line_chart
from confu_core.decoding import Round, decode
from confu_core.methods import Method
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.trace import Settings

EDGES = (0.0, 1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)


def measure(
    target: Target,
    methods: dict[str, Method],
    questions: Sequence[Question],
    temperatures: Sequence[float],
    settings: Settings,
    report: Callable[[int, int], None],
) -> list[dict]:
    """Every drafted node of every round, in bins of its path probability.

    Args:
        questions: first turns are used.
        report: called with (done, total) after each question.

    Returns:
        One entry per method and temperature: its `bins`, see `bins_of`.
    """
    found: dict[tuple[str, float], list[tuple[float, bool]]] = {}
    for done, question in enumerate(questions, 1):
        ids = chat_ids(target, question.turns[0])
        for temperature in temperatures:
            asked = replace(settings, temperature=temperature)
            for name, method in methods.items():
                nodes = found.setdefault((name, temperature), [])
                for round in decode(target, method, ids, asked):
                    nodes += judged(round)
        report(done, len(questions))
    return [
        {"method": name, "temperature": temperature, "bins": bins_of(nodes)}
        for (name, temperature), nodes in found.items()
    ]


def judged(round: Round) -> list[tuple[float, bool]]:
    """(path probability, accepted) of every drafted node. A round that ended the run says nothing:
    its path may have been cut."""
    if round.draft is None or round.stop is not None:
        return []
    accepted = set(round.acceptance.path)
    scores = round.draft.tree.scores
    return [(math.exp(scores[node]), node in accepted) for node in range(1, len(scores))]


def bins_of(nodes: Sequence[tuple[float, bool]]) -> list[dict]:
    """Nodes by path probability, as (low, high]: how many, their mean path probability, the share
    that was accepted, and its 95 % interval (Wilson's, as if nodes were independent, which those of
    one tree are not quite)."""
    bins = []
    for low, high in itertools.pairwise(EDGES):
        members = [(reach, hit) for reach, hit in nodes if low < reach <= high]
        if members:
            hits = sum(hit for _, hit in members)
            bins.append(
                {
                    "low": low,
                    "high": high,
                    "nodes": len(members),
                    "predicted": round(sum(reach for reach, _ in members) / len(members), 5),
                    "accepted": round(hits / len(members), 5),
                    "interval": [round(edge, 5) for edge in wilson(hits, len(members))],
                }
            )
    return bins


def wilson(hits: int, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.96
    centre = (hits + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(hits * (count - hits) / count + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def markdown(found: Sequence[dict]) -> str:
    """One table per method and temperature."""
    parts = []
    for entry in found:
        head = f"{entry['method']}, temperature {entry['temperature']:g}: path probability"
        parts.append(
            table(
                (head, "nodes", "predicted", "accepted", "95 %"),
                (
                    (
                        f"{b['low']:.3g} to {b['high']:.3g}",
                        b["nodes"],
                        f"{b['predicted']:.4f}",
                        f"{b['accepted']:.4f}",
                        f"{b['interval'][0]:.4f} to {b['interval'][1]:.4f}",
                    )
                    for b in entry["bins"]
                ),
            )
        )
    return "\n\n".join(parts)


def chart(found: Sequence[dict]) -> str:
    """The same as a picture: on the diagonal the draft is right about itself."""
    return line_chart(
        [
            Series(
                f"{entry['method']}, T = {entry['temperature']:g}",
                [(b["predicted"], b["accepted"]) for b in entry["bins"]],
            )
            for entry in found
        ],
        title="Drafted nodes: predicted and realised acceptance",
        x="path probability in the draft, mean of the bin",
        y="share that was accepted",
        diagonal=True,
    )
