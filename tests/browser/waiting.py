"""Assertions that wait for the page.

It paints in the next frame, the server answers in its own time, and a slow machine takes longer: a
count or a text that is read at once tells how fast the machine is. So tests ask of the page's state
with these, which look again until it holds or a minute is over.
"""

import re
import time
from collections.abc import Callable

import pytest

expect = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: browser tests are left out"
).expect
MOST = 60  # seconds
QUIET = 1.2  # seconds: the page asks once a second while its model loads
expect.set_options(timeout=1000 * MOST)


def eventually(look: Callable[[], object], wanted: object) -> None:
    """`look` gives `wanted`, now or later. For what `expect` has no words."""
    deadline = time.monotonic() + MOST
    while (seen := look()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert seen == wanted


def expect_round(page, number: int) -> None:
    """The player shows this round. It paints trees, texts and charts in the same step."""
    expect(page.locator(".cfx-count")).to_have_text(re.compile(f"^Round {number} of"))


def expect_last_round(page) -> None:
    expect(page.locator(".cfx-count")).to_have_text(re.compile(r"^Round (\d+) of \1$"))


def expect_live_rounds(page, least: int = 0) -> None:
    """A run is under way and its ConFu lane has so many rounds: its own, not those of the run that
    was on show before. The page itself looks, at every frame: a short run may be over in a second.
    """
    page.wait_for_function(
        "least => document.querySelector('.cfx-badge-running') &&"
        " document.querySelectorAll('[data-lane=confu] .cfx-bar').length >= least",
        arg=least,
    )


def until_quiet(page) -> None:
    """The model is ready, and the page asks for nothing more."""
    page.locator("#model", has_text="ready").wait_for()
    begin = last = time.monotonic()

    def heard(_) -> None:
        nonlocal last
        last = time.monotonic()

    for event in ("request", "response", "requestfinished"):
        page.on(event, heard)
    while time.monotonic() - last < QUIET:
        assert time.monotonic() - begin < MOST, "the page asks on and on"
        page.wait_for_timeout(100)
    for event in ("request", "response", "requestfinished"):
        page.remove_listener(event, heard)


def requests_of(page) -> list[str]:
    """Whatever the page asks for once it has become quiet."""
    until_quiet(page)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    return seen
