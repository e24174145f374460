"""Rows: what the benchmark keeps of every answer. Every figure is made from rows alone."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any

from confu_core.errors import DataError

ADVICE = "The file is damaged; restore it or run the benchmark again."


@dataclass(frozen=True)
class Row:
    """One turn of one question by one lane.

    turn: from 1. nodes: the tree's budget; None for a lane that drafts no tree.
    prompt_tokens: with the chat template and, in a later turn, the turns before.
    first_tokens, first_seconds: what the pass that reads the prompt gained, and the time until its
        first token; tokens, passes, seconds, target_rows: all that came after it.
    draft_seconds, verify_seconds, rest_seconds, target_rows: None if the lane cannot tell.
    offered, accepted: rounds by depth, see `lanes.count_depths`.
    same: whether the tokens equal the reference lane's (None for a run of one lane alone).
    differs_at, margin: the first token that does not, and the target's lead there.
    """

    question: str
    group: str
    turn: int
    method: str
    temperature: float
    seed: int
    nodes: int | str | None
    prompt_tokens: int
    first_tokens: int
    first_seconds: float
    tokens: int
    passes: int
    seconds: float
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    rest_seconds: float | None = None
    target_rows: int | None = None
    offered: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    same: bool | None = None
    differs_at: int | None = None
    margin: float | None = None

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


def read_row(value: Any, place: str) -> Row:
    """A row from JSON data.

    Raises:
        DataError: a field is missing, unknown, or of the wrong type; `place` is named.
    """
    names = {field.name for field in dataclasses.fields(Row)}
    if not isinstance(value, dict) or set(value) != names:
        wrong = sorted(names ^ set(value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(f"{place} is not a row of a result: {wrong}. {ADVICE}")
    hints = typing.get_type_hints(Row)
    for name, entry in value.items():
        if not _fits(entry, hints[name]):
            raise DataError(f"{place}: {name} is {entry!r}. {ADVICE}")
    row = Row(**(value | {name: tuple(value[name]) for name in ("offered", "accepted")}))
    depths = list(zip(row.offered, row.accepted, strict=False))
    fits = len(row.offered) == len(row.accepted) and all(0 <= a <= o >= 1 for o, a in depths)
    if not fits or row.passes < 0 or row.tokens < 0:
        raise DataError(f"{place}: its counts do not fit together. {ADVICE}")
    return row


def _fits(value: Any, kind: Any) -> bool:
    """Whether JSON data is of a field's type. No time, temperature or margin is negative."""
    if isinstance(kind, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list) and all(_fits(entry, int) for entry in value)
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value) and value >= 0
    return isinstance(value, kind)


def parse(text: str, place: str) -> dict:
    """A JSON object.

    Raises:
        DataError: it is none; `place` is named.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DataError(f"{place} cannot be read: {error}. {ADVICE}") from error
    if not isinstance(value, dict):
        raise DataError(f"{place} is not an object. {ADVICE}")
    return value
