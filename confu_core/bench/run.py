"""The benchmark's run: every lane on every question, interleaved prompt by prompt, so that a
machine that drifts hits all alike.

A question with two turns is a chat. Its second prompt holds the *reference* lane's first answer
(plain decoding's, if it runs), so all lanes read the same text even where a near tie made them
write different ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from confu_core.bench.journal import Journal
from confu_core.bench.lanes import Answer, Lane, first_difference
from confu_core.bench.questions import Question
from confu_core.bench.rows import Row
from confu_core.decoding import check_settings
from confu_core.errors import PromptError, SettingsError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.trace import Settings

WARM_UP_TOKENS = 8

TreeSize = int | str  # a number of nodes, or the word that Settings accepts instead


@dataclass(frozen=True)
class Grid:
    """What is varied, at least one value of each. All other settings are `base`'s.

    Raises:
        SettingsError: a value is given twice, or one is out of range.
    """

    base: Settings
    temperatures: tuple[float, ...]
    nodes: tuple[TreeSize, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        lists = {"temperature": self.temperatures, "tree size": self.nodes, "seed": self.seeds}
        for name, values in lists.items():
            if len(set(values)) < len(values):
                raise SettingsError(f"A {name} is given twice: {', '.join(map(str, values))}.")
        for temperature, nodes in itertools.product(self.temperatures, self.nodes):
            check_settings(self.settings(temperature, self.seeds[0], nodes))

    def draws(self) -> Iterator[tuple[float, int]]:
        """Temperatures and seeds; the first seed alone at temperature 0, where none matters."""
        for temperature in self.temperatures:
            for seed in self.seeds if temperature > 0 else self.seeds[:1]:
                yield temperature, seed

    def settings(self, temperature: float, seed: int, nodes: TreeSize) -> Settings:
        return replace(self.base, temperature=temperature, seed=seed, nodes=nodes)


def run(
    target: Target,
    lanes: Sequence[Lane],
    questions: Sequence[Question],
    grid: Grid,
    journal: Journal,
    report: Callable[[int, int, Question, Sequence[Row]], None],
) -> None:
    """Run what the journal does not hold yet.

    A question that is too long for the target's context is left out for all lanes, so that no
    figure compares unequal sets.

    Args:
        lanes: the first is the reference.
        report: called after each question with (done, total, question, its rows); `total` counts
            what this call has to do.

    Raises:
        SettingsError: the device is out of memory.
    """
    waiting = [(n, q) for n, q in enumerate(questions) if not journal.done(q.id)]
    if waiting:
        _warm_up(target, lanes, grid)
    for done, (number, question) in enumerate(waiting, 1):
        rows: list[Row] = []
        try:
            rows = ask(target, lanes, question, grid, first=number)
        except PromptError as error:
            journal.leave_out(question.id, str(error))
        except torch.OutOfMemoryError as error:
            raise SettingsError(
                f"The device ran out of memory at question {question.id}. Choose fewer new tokens "
                "or a smaller tree; --resume keeps what is done."
            ) from error
        else:
            journal.add(question.id, rows)
        report(done, len(waiting), question, rows)


def ask(
    target: Target, lanes: Sequence[Lane], question: Question, grid: Grid, first: int = 0
) -> list[Row]:
    """One question by all lanes in all settings.

    Args:
        first: which lane goes first, counted round: it moves from question to question, so that
            none is always the one that runs when the machine has just done something else.

    Raises:
        PromptError: a turn is longer than the context.
    """
    rows: list[Row] = []
    for temperature, seed in grid.draws():
        entries = [
            (lane, nodes)
            for lane in lanes
            if lane.samples or temperature == 0
            for nodes in (grid.nodes if lane.drafts_tree else grid.nodes[:1])
        ]
        turn_order = [entries[(first + n) % len(entries)] for n in range(len(entries))]
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(question.turns, 1):
            messages.append({"role": "user", "content": text})
            ids = chat_ids(target, messages)
            answers = {
                (lane.name, nodes): lane.answer(ids, grid.settings(temperature, seed, nodes))
                for lane, nodes in turn_order
            }
            reference = answers[lanes[0].name, grid.nodes[0]]
            for lane, nodes in entries:
                answer = answers[lane.name, nodes]
                alone = len(entries) == 1
                found = first_difference(reference, answer)
                rows.append(
                    Row(
                        question=question.id,
                        group=question.group,
                        turn=turn,
                        method=lane.name,
                        temperature=temperature,
                        seed=seed,
                        nodes=nodes if lane.drafts_tree else None,
                        prompt_tokens=len(ids),
                        **_counts(answer),
                        same=None if alone else found is None,
                        differs_at=found[0] if found else None,
                        margin=found[1] if found else None,
                    )
                )
            messages.append({"role": "assistant", "content": _text(target, reference)})
    return rows


def _counts(answer: Answer) -> dict:
    draft, verify, rest = answer.phases or (None, None, None)
    return {
        "first_tokens": answer.first_tokens,
        "first_seconds": answer.first_seconds,
        "tokens": len(answer.token_ids) - answer.first_tokens,
        "passes": answer.passes,
        "seconds": answer.seconds,
        "draft_seconds": draft,
        "verify_seconds": verify,
        "rest_seconds": rest,
        "target_rows": answer.target_rows,
        "offered": answer.offered,
        "accepted": answer.accepted,
    }


def _text(target: Target, answer: Answer) -> str:
    return target.tokenizer.decode(
        answer.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _warm_up(target: Target, lanes: Sequence[Lane], grid: Grid) -> None:
    """A few tokens by every lane, not counted: the first call of anything is slow, and an automatic
    budget measures the machine at its first."""
    ids = chat_ids(target, "Name three rivers.")
    few = replace(grid.base, max_new_tokens=WARM_UP_TOKENS, temperature=0.0)
    for lane in lanes:
        for nodes in grid.nodes if lane.drafts_tree else grid.nodes[:1]:
            lane.answer(ids, replace(few, nodes=nodes))
