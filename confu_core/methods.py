"""The methods: which drafter and which contemplator the one loop runs with.

A method is a `Method`: two factories. To add one, make its drafter (beside `EagleDrafter`) and, if
it wants extra rows in the target pass, its contemplator; the loop and the recorder need no change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from confu_core.checkpoints import Checkpoint
from confu_core.contemplation import Changes, Contemplator, NoContemplator
from confu_core.drafter import EagleDrafter, NoDrafter
from confu_core.fused import lay_out
from confu_core.target import Target


@dataclass(frozen=True)
class Method:
    """One way to decode. Both factories make objects that belong to one run.

    drafter(target, budget=..., top_k=..., capacity=...) and contemplator().
    """

    name: str
    checkpoint: Checkpoint | None
    drafter: Callable[..., NoDrafter | EagleDrafter]
    contemplator: Callable[[], NoContemplator | Contemplator]

    def reading(self, target: Target) -> Target:
        """The target, read at the layers that this method's head was trained on."""
        if self.checkpoint is None:
            return target
        return target.with_taps(self.checkpoint.head.shape.tap_layers)


def _no_drafter(target: Target, **_: object) -> NoDrafter:
    return NoDrafter()


PLAIN = Method("plain", None, _no_drafter, NoContemplator)


def with_head(name: str, checkpoint: Checkpoint) -> Method:
    """The method of a draft head: EAGLE-3, or ConFu if the head contemplates."""
    head, part = checkpoint.head, checkpoint.contemplation
    lay_out(head)

    def drafter(target: Target, **sizes) -> EagleDrafter:
        return EagleDrafter(head, part, target, **sizes)

    contemplator = NoContemplator if part is None else partial(Contemplator, part, head)
    return Method(name, checkpoint, drafter, contemplator)


def with_changes(method: Method, changes: Changes) -> Method:
    """The same method with an intervention on its contemplation (ConFu only)."""
    head, part = method.checkpoint.head, method.checkpoint.contemplation
    return replace(method, contemplator=partial(Contemplator, part, head, changes))
