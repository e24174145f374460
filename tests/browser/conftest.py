"""A real page in headless Chromium over the fake engine.

Whatever a test looks at, it fails on a console error or a request that leaves this machine.
"""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "app"))

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


class Site:
    """One running app: its address, its engine and its run desk."""

    def __init__(self, pause: float = 0.02, load_recorded=None, **engine) -> None:
        from fake_engine import FakeEngine

        from app.ui import build_demo, launch_options

        self.engine = FakeEngine(pause=pause, **engine)
        self.demo = build_demo(lambda report: self.engine, load_recorded or (lambda name: None))
        _, self.url, _ = self.demo.launch(
            server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
        )

    def close(self) -> None:
        self.demo.close(verbose=False)


def recorded(name: str):
    """Recorded runs for the tests: all examples but one."""
    from fake_engine import make_trace

    from app.lessons import EXAMPLES

    prompts = {example.name: example.prompt for example in EXAMPLES if example.name != "planets"}
    return make_trace(prompts[name], max_new_tokens=48) if name in prompts else None


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
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
        page.on("console", lambda m: m.type == "error" and faults.append(f"console: {m.text}"))
        page.on(
            "request",
            lambda r: r.url.startswith(LOCAL) or faults.append(f"outside request: {r.url}"),
        )
        page.goto((url or site.url) + query)
        page.wait_for_selector(".cfx")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


def run_prompt(page, prompt: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()


def wait_finished(page) -> None:
    page.wait_for_selector(".cfx-badge-finished")
