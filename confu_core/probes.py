"""Observers: what a program may watch while a run decodes.

Pass an `Observer` to `decode`; override what you need. The views hold the loop's own tensors: read
them during the call, copy what you keep, change nothing. Without an observer nothing is computed
for one, and time spent in one is not counted in a round's seconds.

Sizes: P prompt tokens, m new entries, N nodes, C contemplate tokens, V vocabulary, Ht target width.
"""

from __future__ import annotations

from dataclasses import dataclass

from confu_core.acceptance import Acceptance
from confu_core.contemplation import ContemplatePlan, FutureToken
from confu_core.drafter import Draft, DraftStep
from confu_core.sampling import Draw
from confu_core.target import Rows, Verification
from confu_core.trace import Seconds


@dataclass(frozen=True)
class Prefilled:
    """After the prompt: `rows` (1, P, ...) of the target, the first drawn token, the first future
    token if the method has one."""

    rows: Rows
    first: Draw
    future: FutureToken | None


@dataclass(frozen=True)
class Verifying:
    """Before the target pass of a round: the drafted tree, the future token that steered it, and
    the contemplate tokens that will ride along."""

    index: int
    draft: Draft
    future: FutureToken | None
    plan: ContemplatePlan


@dataclass(frozen=True)
class Verified:
    """After the target pass: logits (N, V), taps (N, 3 Ht), contemplate taps (C, 3 Ht)."""

    index: int
    draft: Draft
    verification: Verification


@dataclass(frozen=True)
class Accepted:
    """After the walk; `future` is the next round's future token, `seconds` the round's so far."""

    index: int
    draft: Draft
    verification: Verification
    acceptance: Acceptance
    future: FutureToken | None
    seconds: Seconds


class Observer:
    """Does nothing; a base to override."""

    def prefilled(self, view: Prefilled) -> None:
        """The prompt was read and the first token drawn."""

    def drafted(self, step: DraftStep) -> None:
        """One forward pass of the draft added a level of candidates."""

    def verifying(self, view: Verifying) -> None:
        """The tree is complete, the target has not seen it."""

    def verified(self, view: Verified) -> None:
        """The target has scored the tree, nothing is decided."""

    def accepted(self, view: Accepted) -> None:
        """The round is decided."""
