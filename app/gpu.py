"""A GPU for the one function that computes, where GPUs are lent: on a Hugging Face ZeroGPU Space.

There a call runs in a forked process, for a time that is promised before it starts. Arguments and
events cross by pickle, so they are plain data; errors lose their words on the way, so the function
yields them. Elsewhere, and without the `spaces` package, nothing changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from confu_core.errors import ConFuError
from confu_core.trace import Settings

try:  # part of every Space; before torch, as the package asks
    import spaces
except ImportError:
    spaces = None

# The promise for a run: what starting takes, then a share per token, at most what any visitor's
# quota allows in one go. A shorter promise waits less.
START_SECONDS = 10.0
TOKEN_SECONDS = 0.4
MOST_SECONDS = 45

Compute = Callable[..., Iterator[Any]]


def lends() -> bool:
    """Whether this process runs on a ZeroGPU Space."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def seconds(run: str, prompt: str, settings: Settings, *others: Any) -> int:
    """How long a run asks the GPU for; takes what the computing function takes."""
    return min(MOST_SECONDS, round(START_SECONDS + TOKEN_SECONDS * settings.max_new_tokens))


def lent(compute: Compute) -> Compute:
    """The generator function `compute`, with a GPU while it runs if this Space lends one."""
    if spaces is None:
        return compute
    with_gpu = spaces.GPU(duration=seconds)(compute)

    def generator(*arguments: Any) -> Iterator[Any]:
        try:
            yield from with_gpu(*arguments)
        except gr.Error as error:  # the lender's words: no quota left, no GPU free
            raise ConFuError(
                f"{error.title}: {error.message} Recorded runs need no GPU."
            ) from error

    return generator
