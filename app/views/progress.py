"""The line under the form: what is going on, in one sentence with a bar."""

import html
from typing import Literal

from app.text import say

# "failed" is the error that the model did not load.
Kind = Literal["busy", "done", "quiet", "error", "failed"]


def line(text: str, kind: Kind = "quiet", fraction: float | None = None) -> str:
    """HTML for one sentence; the bar shows `fraction` of the work."""
    bar = ""
    if fraction is not None:
        share = 100 * min(1.0, max(0.0, fraction))
        bar = f"<span class='progress-bar'><span style='width:{share:.0f}%'></span></span>"
    role = " role='alert'" if kind in ("error", "failed") else ""
    looks = "error progress-failed" if kind == "failed" else kind
    return (
        f"<div class='progress progress-{looks}'{role}>{bar}<span>{html.escape(text)}</span></div>"
    )


def working(language: str, written: int, wanted: int) -> str:
    """A run under way: tokens of the slowest lane so far."""
    text = say(language, "progress.running", n=written, total=wanted)
    return line(text, "busy", written / max(1, wanted))
