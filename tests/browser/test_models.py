"""Choosing another model on the page, and the count of the prompt's tokens, in a real browser."""

import pytest
from fake_engine import FakeEngine
from fake_site import recorded, run_prompt, wait_finished
from waiting import expect, until_quiet

from app.choices import Choice
from app.ui import build_demo, launch_options


@pytest.fixture(scope="module")
def address():
    """A page with two models; the second has no ConFu head."""
    first, second = FakeEngine(pause=0.005), FakeEngine(pause=0.005, unavailable=("confu",))
    demo = build_demo(
        Choice("one", "Model One", lambda report: first),
        recorded,
        (Choice("two", "Model Two", lambda report: second),),
    )
    _, url, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
    )
    yield url
    demo.close(verbose=False)


def settled(page):
    """The model is ready, and the count of the first screen's prompt stands."""
    page.locator("#count", has_text="of 2048 tokens").wait_for()
    until_quiet(page)
    return page


@pytest.mark.alone
def test_the_count_follows_the_prompt(visit, address):
    page = settled(visit(url=address))
    page.get_by_label("Prompt").fill("Why is it so?")
    count = FakeEngine().count_tokens("Why is it so?")
    page.locator("#count", has_text=f"{count} of 2048 tokens").wait_for()
    requests = []
    page.on("request", lambda r: r.method == "POST" and requests.append(r.url))
    page.get_by_label("Prompt").press_sequentially(" And why not otherwise, I wonder?", delay=15)
    longer = FakeEngine().count_tokens("Why is it so? And why not otherwise, I wonder?")
    page.locator("#count", has_text=f"{longer} of 2048 tokens").wait_for()
    assert 1 <= len(requests) < 12  # 33 keys; one, unless the machine stutters


def test_too_long_a_prompt_is_a_warning(visit, address):
    page = settled(visit("?tokens=256", url=address))
    page.get_by_label("Prompt").fill("a b " * 950)
    page.locator("#count .progress-error", has_text="will be cut short").wait_for()


def test_a_chosen_model_is_loaded_by_a_run_and_lanes_without_a_head_are_left_out(visit, address):
    page = visit("?tokens=12", url=address)
    page.locator("#model", has_text="ready").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.locator("#choice input").click()
    page.get_by_role("option", name="Model Two").click()
    page.locator("#model", has_text="Press Run to load it").wait_for()
    run_prompt(page, "with the other model")
    wait_finished(page)
    expect(page.locator(".cfx-race-row")).to_have_count(2)
    expect(page.locator(".cfx-race-row[data-lane=confu]")).to_have_count(0)
    page.locator("#model", has_text="Model Two is ready").wait_for()
    expect(page.locator("#model")).to_contain_text("left out: ConFu")
