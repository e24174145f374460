"""The learning curve: held-out acceptance over the starts that a chain of runs has trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from confu_core.charts import Series
from confu_core.errors import DataError


def curve(folders: Sequence[Path], figure: str = "tau_top8") -> list[tuple[float, float]]:
    """(millions of starts so far, figure) at every evaluation of runs that continue one another.

    Raises:
        DataError: a folder without a readable log.
    """
    points, starts = [], 0.0
    for folder in folders:
        try:
            lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise DataError(f"{folder} is not the folder of a training run: {error}.") from error
        for row in rows:
            if "held_out" in row:
                points.append((starts / 1e6, row["held_out"][figure]))
            else:
                starts += row["positions_per_second"] * row["seconds"]
    return points


def per_doubling(points: Sequence[tuple[float, float]]) -> float:
    """What a doubling of the starts adds: slope of a least-squares line over log2(starts)."""
    xs, ys = [math.log2(x) for x, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if not spread:
        raise DataError("A slope needs evaluations at two different numbers of starts.")
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def read_series(text: str, figure: str) -> Series:
    """`NAME=FOLDER+FOLDER`: runs that continue one another, as one line.

    Raises:
        DataError: another form, or no evaluation in any of them.
    """
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise DataError(f"{text!r} is not NAME=FOLDER+FOLDER.")
    points = curve([Path(folder) for folder in folders.split("+")], figure)
    if not points:
        raise DataError(f"The runs of {name!r} have not been evaluated yet.")
    return Series(name, points)
