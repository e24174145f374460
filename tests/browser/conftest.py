"""A real page in headless Chromium over the fake engine.

Whatever a test looks at, it fails on an error or a warning in the console and on a request that
leaves this machine.
"""

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "app")]

from fake_site import Site, recorded  # noqa: E402 (beside this file)

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LOCAL = ("http://127.0.0.1", "http://localhost", "data:", "blob:", "about:", "file:")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def site():
    site = Site(load_recorded=recorded)
    yield site
    site.close()


@pytest.fixture(scope="session")
def launcher():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: browser tests are left out"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: browser tests are left out")
    with playwright.sync_playwright() as run:
        yield run.chromium


@pytest.fixture(scope="session")
def chromium(launcher):
    """A browser for visitors who must share nothing, or who differ in language, motion, pixels."""
    browser = launcher.launch(executable_path=CHROMIUM, args=list(FLAGS))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def profile(launcher, tmp_path_factory):
    """A browser that keeps Gradio's compiled scripts on disk: a page opens in half the time. Each
    visit is a page of its own, thus a session of its own for the server."""
    context = launcher.launch_persistent_context(
        tmp_path_factory.mktemp("profile"), executable_path=CHROMIUM, args=list(FLAGS)
    )
    yield context
    context.close()


@pytest.fixture
def engine(site, monkeypatch):
    """Changes the engine for one test: `engine(pause=0.3)`. Ask for it before `visit`, so that
    the pages go before the engine is itself again. Quicker than a site of one's own."""

    def change(**attributes) -> None:
        for name, value in attributes.items():
            monkeypatch.setattr(site.engine, name, value)

    return change


@pytest.fixture
def visit(request, site):
    """Open the page as a new visitor. At the end, complain of faults and of outside requests.

    `apart`: in a context of its own, which shares neither cache nor storage with other pages; so is
    whatever further options ask for. `pixels`: of the screen, per CSS pixel and direction.
    """
    opened, faults = [], []

    def complain(message) -> None:
        if message.type in ("error", "warning"):  # Gradio itself gives none of either
            faults.append(f"console {message.type}: {message.text}")

    def open_page(
        query: str = "",
        width: int = 1280,
        height: int = 900,
        url=None,
        apart: bool = False,
        pixels: int = 1,
        still: bool = False,
        **options,
    ):
        size = {"width": width, "height": height}
        if apart or options:
            chromium = request.getfixturevalue("chromium")
            opened.append(chromium.new_context(viewport=size, **options))
            page = opened[-1].new_page()
        else:
            page = request.getfixturevalue("profile").new_page()
            opened.append(page)
            page.set_viewport_size(size)
        if pixels > 1:
            metrics = {**size, "deviceScaleFactor": pixels, "mobile": False}
            session = page.context.new_cdp_session(page)
            session.send("Emulation.setDeviceMetricsOverride", metrics)
        if still:
            page.emulate_media(reduced_motion="reduce")
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
        page.on("console", complain)
        page.on(
            "request",
            lambda r: r.url.startswith(LOCAL) or faults.append(f"outside request: {r.url}"),
        )
        page.goto((url or site.url) + query)
        page.wait_for_selector(".cfx")
        if page.url.startswith("http"):  # until the load event has filled the page
            # Any sign: the browser's `\w` knows no Chinese.
            page.locator("#model .progress", has_text=re.compile(r"\S")).wait_for()
            page.wait_for_function("document.querySelector('#prompt textarea').value")
        return page

    open_page.faults = faults
    yield open_page
    for page_or_context in opened:
        page_or_context.close()
    assert not faults
