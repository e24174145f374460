"""What a race of several methods tells while it runs: plain events, light to import.

The engine yields them, the command line, the page and other programs consume them.
"""

from __future__ import annotations

from dataclasses import dataclass

from confu_core.trace import RoundRecord, Trace


@dataclass(frozen=True)
class Started:
    """The first event: a trace whose lanes are present but empty."""

    trace: Trace


@dataclass(frozen=True)
class Advanced:
    """One lane gained tokens; `text` is its answer so far, never cut inside a character."""

    lane: str
    record: RoundRecord
    text: str


@dataclass(frozen=True)
class Finished:
    """The last event: everything."""

    trace: Trace


Event = Started | Advanced | Finished


@dataclass(frozen=True)
class MethodInfo:
    """What a page needs to know of a method.

    reason: why it is not available, or empty. notes: what was read or assumed about a published
    head; warnings: what looks wrong with it. Sentences for the user.
    """

    label: str
    available: bool
    reason: str
    contemplates: bool
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
