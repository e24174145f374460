"""Once with nothing faked: the committed heads on the default target, in a real browser."""

from __future__ import annotations

import time

import pytest
from busy import starvation
from fake_site import run_prompt, wait_finished
from waiting import expect, expect_last_round, expect_live_rounds, expect_round, requests_of

from app.ui import build_demo, launch_options
from confu_core import assets, load_engine
from confu_core.compare import CHECKPOINTS, DEFAULT_TARGET
from confu_core.trace import Trace

pytestmark = [pytest.mark.target, pytest.mark.alone]


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


def open_page(visit, url: str, query: str):
    page = visit(query, url=url, apart=True)
    page.set_default_timeout(120_000)
    return page


def test_a_real_run_streams_three_equal_texts_and_can_be_explored(visit, real_url, tmp_path):
    begin, pace = time.monotonic(), starvation()
    page = open_page(visit, real_url, "?tokens=24")
    # Recorded runs teach before the model is loaded.
    page.wait_for_selector(".cfx-badge-recorded")
    assert time.monotonic() - begin < 10 * pace  # 5 s on a quiet machine is the aim
    page.locator("#model", has_text="ready").wait_for()
    page.evaluate(
        "window.states = new Set();"
        "const bars = () => document.querySelectorAll('[data-lane=confu] .cfx-bar').length;"
        "new MutationObserver(() => window.states.add(bars()))"
        ".observe(document.querySelector('.cfx'), {childList: true, subtree: true})"
    )
    run_prompt(page, "Name the days of the week.")
    wait_finished(page)
    assert page.evaluate("window.states.size") >= 3
    expect(page.locator(".cfx-verdict")).to_contain_text("token for token")
    # Real trees, both routers, words and the trail of the future token.
    expect(page.locator(".cfx-tree")).to_have_count(2)
    expect(page.locator(".cfx-router .cfx-on")).to_have_count(4)  # two experts each
    expect(page.locator(".cfx-readings li")).to_have_count(6)
    # Moving through it asks nobody.
    requests = requests_of(page)
    trail = page.locator(".cfx-map-past, .cfx-map-now")
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("End")
    expect_last_round(page)
    trail.nth(2).wait_for(state="attached")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect_round(page, 1)
    expect(trail).to_have_count(1)
    # A node tells the same figures in the tree and in its details, and why it was not taken.
    node = page.locator("[data-lane=confu] .cfx-node.cfx-is-rejected").first
    node.click()
    page.locator(".cfx-card", has_text="Rejected").wait_for()
    facts = page.locator(".cfx-fact dd").all_inner_texts()
    label = node.get_attribute("aria-label")
    assert f"draft {facts[2]}, target {facts[4]}" in label
    # Every chart is complete and marks the round on show.
    for name, sentence in {
        "Experts over time": "largest weight",
        "Map of future tokens": "nearest words",
        "Speed": "tokens in",
    }.items():
        page.get_by_role("tab", name=name).click()
        page.locator(".js-plotly-plot .main-svg:visible").first.wait_for()
        page.locator(".cfx-over-now:visible").first.wait_for()
        page.locator(".chart-sentence:visible", has_text=sentence).first.wait_for()
    assert not [url for url in requests if "/queue/" in url]
    # What is saved is what is shown.
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Trace (JSON)").click()
    download.value.save_as(tmp_path / "trace.json")
    trace = Trace.from_json((tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert not trace.differences()
    expect(page.locator("[data-lane=confu] .cfx-tau")).to_have_text(
        f"{trace.lanes['confu'].tau:.2f}"
    )


def test_two_visitors_of_the_real_model_and_a_stop(visit, real_url):
    one = open_page(visit, real_url, "?tokens=200")
    two = open_page(visit, real_url, "?tokens=8")
    one.locator("#model", has_text="ready").wait_for()
    run_prompt(one, "Tell the story of the hidden key.")
    expect_live_rounds(one, 3)
    run_prompt(
        two, "Say purple lantern <img src=x onerror=alert(1)> </script> \u202e مرحبا 👩‍🔬 天空."
    )
    # Far from the 200 tokens' end. That Stop acts within a second is timed on the seeded fake run:
    # here the model takes both cores, and the browser waits for its turn to paint and to click.
    one.get_by_role("button", name="Stop", exact=True).dispatch_event("click")
    one.wait_for_selector(".cfx-badge-stopped")
    # The stop set the model free for the other visitor, who sees a literal prompt and nothing else.
    wait_finished(two)
    expect(two.locator(".cfx-title")).to_contain_text("<img")
    assert two.locator(".cfx img").count() == 0
    assert "hidden key" not in two.content() and "purple lantern" not in one.content()
    # What was computed before the stop can be looked through, and a run can follow it.
    one.get_by_role("button", name="First round").click()
    one.get_by_role("button", name="One round forward").click()
    expect_round(one, 1)
    run_prompt(one, "And again.")
    expect_live_rounds(one)
