"""Recorded runs: traces of the examples, made by `python -m app.record`, shown without a model."""

from functools import cache
from pathlib import Path

from app.lessons import EXAMPLES
from confu_core.errors import TraceError
from confu_core.trace import Trace

FOLDER = Path(__file__).parent / "examples"


@cache
def load(name: str, folder: Path = FOLDER) -> Trace | None:
    """The recorded run of an example, or None where there is none that this version can read."""
    if name not in {example.name for example in EXAMPLES}:
        return None
    try:
        return Trace.from_json((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, TraceError):
        return None
