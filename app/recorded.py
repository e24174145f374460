"""Recorded runs: traces of the examples, made by `python -m app.record`, shown without a model.

Beside them lies the reference of the future-token map: per head (by its sha256) the share of
variance of both axes, and points (task group, x, y) of recorded text.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from app.lessons import EXAMPLES
from app.views.futures import Reference
from confu_core.errors import TraceError
from confu_core.trace import Trace

FOLDER = Path(__file__).parent / "examples"
MAP = "map.json"


@cache
def load(name: str, folder: Path = FOLDER) -> Trace | None:
    """The recorded run of an example, or None where there is none that this version can read."""
    if name not in {example.name for example in EXAMPLES}:
        return None
    try:
        return Trace.from_json((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, TraceError):
        return None


def plain_map(engine: Any, trace: Trace) -> dict[str, Any]:
    """The map's reference of each head in a trace, by its sha256, as plain data."""
    found = {}
    for name, lane in trace.lanes.items():
        basis = engine.bases.get(name)
        if basis is not None and lane.head is not None:
            points = [[group, x, y] for group, x, y in basis.points]
            found[lane.head.sha256] = {"explained": list(basis.explained), "points": points}
    return found


@cache
def _maps(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / MAP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def reference(trace: Trace, engine: Any = None, folder: Path = FOLDER) -> Reference | None:
    """What the map of a trace is drawn over: the recorded one, or that of the loaded head."""
    known = dict(_maps(folder))
    if engine is not None:
        known |= plain_map(engine, trace)
    for lane in trace.lanes.values():
        entry = known.get(lane.head.sha256) if lane.head else None
        if entry:
            points = tuple((str(g), float(x), float(y)) for g, x, y in entry["points"])
            first, second = entry["explained"]
            return Reference((float(first), float(second)), points)
    return None
