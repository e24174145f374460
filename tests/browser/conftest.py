"""A real page in headless Chromium over the fake engine.

Whatever a test looks at, it fails on a console error or a request that leaves this machine.
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
def chromium():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: browser tests are left out"
    )
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: browser tests are left out")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium, site):
    """Open the page as a new visitor. At the end, complain of errors and outside requests."""
    contexts, faults = [], []

    def open_page(query: str = "", width: int = 1280, height: int = 900, url=None, **options):
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
        page.on("console", lambda m: m.type == "error" and faults.append(f"console: {m.text}"))
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

    yield open_page
    for context in contexts:
        context.close()
    assert not faults
