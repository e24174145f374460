"""Messages to the step player: one JSON string each, in the trace's own field names.

`run` names one click on Run; `seq` counts its messages, so that two equal ones still differ and a
hole is noticed. Floats are cut to five digits: that halves the size and no picture shows more.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from confu_core.trace import RoundRecord, Trace, to_plain

State = Literal["running", "finished", "stopped"]
Source = Literal["live", "recorded", "file"]

DIGITS = 5


def reset(run: str, trace: Trace) -> str:
    """Start a run: the header, with every lane empty."""
    lanes = {name: replace(lane, rounds=(), text="") for name, lane in trace.lanes.items()}
    header = replace(trace, lanes=lanes)
    return _pack(run=run, seq=0, kind="reset", source={"kind": "live"}, trace=to_plain(header))


def step(run: str, seq: int, lane: str, record: RoundRecord, text: str) -> str:
    """One more round of one lane."""
    return _pack(run=run, seq=seq, kind="step", lane=lane, record=to_plain(record), text=text)


def full(
    run: str,
    seq: int,
    trace: Trace,
    state: State,
    source: Source,
    position: int | None = None,
) -> str:
    """The whole run, whatever came before."""
    return _pack(
        run=run,
        seq=seq,
        kind="full",
        state=state,
        source={"kind": source},
        trace=to_plain(trace),
        **({} if position is None else {"position": position}),
    )


def error(run: str, seq: int, message: str) -> str:
    """A sentence for the reader; what is on show stays."""
    return _pack(run=run, seq=seq, kind="error", message=message)


def speak(
    run: str, language: str, step: int | None = None, hide: Sequence[str] | None = None
) -> str:
    """Change the player's language. `step`: the round at which the next finished run opens. `hide`:
    the parts that are hidden from now on; None leaves them."""
    return _pack(
        run=run,
        seq=0,
        kind="language",
        language=language,
        **({} if step is None else {"step": step}),
        **({} if hide is None else {"hide": list(hide)}),
    )


def dress(
    message: str,
    language: str,
    hide: Sequence[str],
    panels: Sequence[str],
    phase: int | None = None,
) -> str:
    """The same message, which also sets the language, hides parts and chooses the panels. `phase`
    (1 to 4): where the next run opens."""
    extra = {"language": language, "hide": list(hide), "panels": list(panels)}
    extra |= {} if phase is None else {"phase": phase}
    return json.dumps({**json.loads(message), **extra}, separators=(",", ":"))


def short_trace(trace: Trace) -> str:
    """A trace file with floats cut like the player's messages; `Trace.from_json` reads it."""
    return json.dumps(_short(to_plain(trace)), ensure_ascii=False, separators=(",", ":"))


def _pack(**fields: object) -> str:
    # ASCII: a lone surrogate in a token must not break the page's own encoding.
    return json.dumps(_short(fields), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _short(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return value
