"""Question sets for the benchmark, by task group, in Spec-Bench's file format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from confu_core.errors import DataError

# 48 questions of our own, eight per group; Spec-Bench's file is not ours to ship.
OWN = Path(__file__).resolve().parent / "prompts.jsonl"

# Spec-Bench reports its eight MT-bench categories as one group.
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)


@dataclass(frozen=True)
class Question:
    """One item: its group, and the user turns of the chat."""

    id: str
    group: str
    turns: tuple[str, ...]


def load_questions(path: Path) -> list[Question]:
    """Read `{"question_id", "category", "turns"}` lines.

    Raises:
        DataError: a line of another form, or an id that stood before; with the line's number.
    """
    questions = []
    known: set[str] = set()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"The question file {path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            category = row["category"]
            group = "mt_bench" if category in MT_BENCH else category
            turns = tuple(row["turns"])
            if not turns or not all(isinstance(turn, str) for turn in turns):
                raise ValueError("'turns' must be a list of strings")
            question = Question(str(row["question_id"]), group, turns)
            if question.id in known:  # rows of a result belong to a question by its id
                raise ValueError(f"question_id {question.id} stands twice")
            known.add(question.id)
            questions.append(question)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number} is not a question: {error!r}.") from error
    if not questions:
        raise DataError(f"{path} holds no questions.")
    return questions


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions, the same number from each group, evenly spaced in each."""
    if limit is None or limit >= len(questions):
        return list(questions)
    groups: dict[str, list[Question]] = {}
    for question in questions:
        groups.setdefault(question.group, []).append(question)
    chosen = []
    for number, members in enumerate(groups.values()):
        share = limit // len(groups) + (number < limit % len(groups))
        share = min(share, len(members))
        chosen += [members[index * len(members) // share] for index in range(share)]
    return chosen
