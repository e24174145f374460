"""Once with nothing faked: the committed heads on the default target, in a real browser."""

from __future__ import annotations

import pytest
from fake_site import run_prompt

from app.ui import build_demo, launch_options
from confu_core import assets, load_engine
from confu_core.compare import CHECKPOINTS, DEFAULT_TARGET


@pytest.fixture(scope="module")
def real_url():
    folder = assets.home() / assets.TARGET_FOLDER
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"the default target is not in {folder}; `make fetch` gets it")
    if not (CHECKPOINTS / DEFAULT_TARGET / "confu" / "config.json").is_file():
        pytest.skip("no trained heads in this checkout")
    demo = build_demo(lambda report: load_engine(device="cpu", progress=report))
    _, url, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
    )
    yield url
    demo.close(verbose=False)


@pytest.mark.target
def test_a_real_run_streams_three_equal_texts_and_scrubs(visit, real_url):
    page = visit("?tokens=24", url=real_url)
    page.set_default_timeout(120_000)
    page.locator("#model", has_text="ready").wait_for()
    page.evaluate(
        "window.states = new Set();"
        "const bars = () => document.querySelectorAll('[data-lane=confu] .cfx-bar').length;"
        "new MutationObserver(() => window.states.add(bars()))"
        ".observe(document.querySelector('.cfx'), {childList: true, subtree: true})"
    )
    run_prompt(page, "Name the days of the week.")
    page.wait_for_selector(".cfx-badge-finished")
    assert page.evaluate("window.states.size") >= 3
    assert "token for token" in page.locator(".cfx-verdict").inner_text()
    # Real trees, both routers, words and the trail of the future token.
    assert page.locator(".cfx-tree").count() == 2
    assert page.locator(".cfx-router .cfx-on").count() == 4  # two experts each
    assert page.locator(".cfx-readings li").count() == 6
    trail = page.locator(".cfx-map-past, .cfx-map-now")
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("End")
    at_the_end = trail.count()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    assert at_the_end >= 3 and trail.count() == 1
