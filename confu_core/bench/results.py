"""Result files: a summary and its rows as JSON, one row per line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from confu_core.bench.figures import summary
from confu_core.bench.rows import ADVICE, Row, parse, read_row
from confu_core.errors import DataError


def write_result(path: Path, result: dict, rows: Sequence[Row]) -> None:
    """`result` and its rows; a file that is cut is no JSON and is refused."""
    head = json.dumps(result, indent=1, allow_nan=False).removesuffix("\n}")
    lines = ",\n  ".join(json.dumps(dataclasses.asdict(row), allow_nan=False) for row in rows)
    path.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


def read_result(path: Path) -> dict:
    """A result whose figures are made anew from its rows, so that they cannot disagree with them.

    Raises:
        DataError: the file cannot be read, or is damaged (the line or row is named).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The result file {path} cannot be read: {error}.") from error
    value = parse(text, str(path))
    parts = {"settings": dict, "rows": list, "left_out": dict}
    for name, kind in parts.items():
        if not isinstance(value.get(name), kind):
            raise DataError(f"{path} lacks {name!r}. {ADVICE}")
    rows = [read_row(row, f"{path}, row {number}") for number, row in enumerate(value["rows"], 1)]
    if not rows:
        raise DataError(f"{path} holds no rows. {ADVICE}")
    try:
        return summary(value["settings"], rows, value["left_out"])
    except KeyError as error:
        raise DataError(f"{path}: the settings lack {error}. {ADVICE}") from error
