"""Recorded runs: traces of the examples, made by `python -m app.record`, shown without a model.

Beside them lies `reference.json`: per head (by its sha256) the map's axes and points, and the usual
use of the experts by task group.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from app.lessons import EXAMPLES
from app.views.reference import GroupUse, Reference
from confu_core.errors import TraceError
from confu_core.trace import Trace

FOLDER = Path(__file__).parent / "examples"
REFERENCE = "reference.json"


@cache
def load(name: str, folder: Path = FOLDER) -> Trace | None:
    """The recorded run of an example, or None where there is none that this version can read."""
    if name not in {example.name for example in EXAMPLES}:
        return None
    try:
        return Trace.from_json((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, TraceError):
        return None


def maps_of(engine: Any) -> dict[str, dict[str, Any]]:
    """The maps of the heads that an engine has loaded, by the heads' sha256, as plain data."""
    return {
        engine.method(name).checkpoint.sha256: {
            "explained": list(basis.explained),
            "points": [list(point) for point in basis.points],
        }
        for name, basis in engine.bases.items()
        if basis is not None
    }


@cache
def known(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """What was recorded about heads, by sha256."""
    try:
        return json.loads((folder / REFERENCE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def backdrops(folder: Path = FOLDER, most: int = 240) -> dict[str, list[list[float]]]:
    """Per head (by sha256) some points of its map, for the player's small one."""
    found = {}
    for digest, entry in known(folder).items():
        points = entry.get("points", ())
        step = max(1, len(points) // most)
        found[digest] = [[x, y] for _, x, y in points[::step]]
    return found


def reference(
    trace: Trace, engine: Any = None, folder: Path = FOLDER, head: str | None = None
) -> Reference:
    """What a trace is compared with: what was recorded of a head (by sha256; None: the first of
    which anything is known), and that head's map if it is loaded now."""
    loaded = maps_of(engine) if engine is not None else {}
    for lane in trace.lanes.values():
        contemplates = any(r.contemplate_router or r.future for r in lane.rounds)
        if lane.head is None or not contemplates or head not in (None, lane.head.sha256):
            continue
        entry = known(folder).get(lane.head.sha256, {}) | loaded.get(lane.head.sha256, {})
        if entry:
            return _read(entry)
    return Reference()


def _read(entry: dict[str, Any]) -> Reference:
    first, second = entry.get("explained") or (None, None)
    return Reference(
        explained=None if first is None else (first, second),
        points=tuple((group, x, y) for group, x, y in entry.get("points", ())),
        usual=tuple(
            GroupUse(
                group=use["group"],
                rounds=use["rounds"],
                tau=use["tau"],
                contemplate=tuple(use["contemplate"]),
                future=tuple(use["future"]),
            )
            for use in entry.get("usual", ())
        ),
    )
