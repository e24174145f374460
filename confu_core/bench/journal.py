"""The journal: the file that a run grows by, so that hours of work survive a kill.

Beside a result `NAME.json` stands `NAME.rows.jsonl`: one line of settings, then one line per
question, written when all lanes have done it. A run that was killed goes on behind the last whole
line; what the kill cut short is run again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from confu_core.bench.rows import ADVICE, Row, parse, read_row
from confu_core.errors import DataError

# Facts that may change while a run is interrupted without making its rows unequal.
FREE = frozenset({"command", "commit", "load_at_start"})


def journal_path(result: Path) -> Path:
    """Where the rows of a result lie while it grows."""
    return result.with_suffix(".rows.jsonl")


class Journal:
    """The rows of one run, kept on disk as they are made.

    Args:
        path: the file; None keeps them in memory only.
        settings: what the run was asked for and where it runs: plain data.
        resume: go on with the file if it is there.

    Raises:
        DataError: the file is there and `resume` is not asked for, it is damaged (the line is
            named), or its settings are others.
    """

    def __init__(self, path: Path | None, settings: dict, resume: bool) -> None:
        self._path = path
        self.settings = settings
        self._rows: dict[str, list[Row]] = {}  # by question
        self.left_out: dict[str, str] = {}  # question -> why
        if path is not None and path.exists():
            if not resume:
                raise DataError(
                    f"{path} holds rows of an earlier run. Add --resume to go on with it, or "
                    "remove it, or name another result file."
                )
            self._read(path)
        if path is not None and not path.exists():
            self._write({"settings": settings})

    def done(self, question: str) -> bool:
        return question in self._rows or question in self.left_out

    def add(self, question: str, rows: Sequence[Row]) -> None:
        """Keep the rows of a question that all lanes have done."""
        self._rows[question] = list(rows)
        plain = [dataclasses.asdict(row) for row in rows]
        self._write({"question": question, "rows": plain})

    def leave_out(self, question: str, reason: str) -> None:
        """Remember that a question was left out for all lanes."""
        self.left_out[question] = reason
        self._write({"question": question, "left_out": reason})

    @property
    def rows(self) -> list[Row]:
        """All rows, in the order in which they were made."""
        return [row for rows in self._rows.values() for row in rows]

    def _write(self, value: dict) -> None:
        if self._path is None:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # killed while it wrote
            path.write_bytes(whole)
        if not whole:
            path.unlink()
            return
        lines = whole.decode("utf-8", errors="replace").split("\n")[:-1]
        for number, line in enumerate(lines, 1):
            place = f"{path}, line {number}"
            value = parse(line, place)
            if number == 1:
                self._check_settings(value, place)
            elif isinstance(value.get("rows"), list) and isinstance(value.get("question"), str):
                self._rows[value["question"]] = [read_row(row, place) for row in value["rows"]]
            elif isinstance(value.get("left_out"), str) and isinstance(value.get("question"), str):
                self.left_out[value["question"]] = value["left_out"]
            else:
                raise DataError(f"{place} holds neither rows nor a reason. {ADVICE}")

    def _check_settings(self, value: dict, place: str) -> None:
        kept = value.get("settings")
        if not isinstance(kept, dict):
            raise DataError(f"{place} does not hold the run's settings. {ADVICE}")
        then = dict(_flat(kept))
        now = dict(_flat(json.loads(json.dumps(self.settings))))  # tuples are lists in a file
        differing = sorted(
            name for name in then.keys() | now.keys() if then.get(name) != now.get(name)
        )
        shown = [f"{n} was {then.get(n)!r}, is {now.get(n)!r}" for n in differing if n not in FREE]
        if shown:
            raise DataError(
                f"{place}: this run cannot go on with other settings: {'; '.join(shown)}. Use the "
                "same ones, or name another result file."
            )
        self.settings = kept


def _flat(value: dict, before: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings as `machine.threads` and the like."""
    for name, entry in value.items():
        if isinstance(entry, dict):
            yield from _flat(entry, f"{before}{name}.")
        else:
            yield f"{before}{name}", entry
