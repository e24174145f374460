"""What only a real browser can show: streaming, scrubbing, stopping, keeping visitors apart."""

import json
import re
import threading
import time
import xml.etree.ElementTree as ElementTree

import pytest
from busy import starvation
from fake_engine import make_trace
from fake_site import Site, recorded, run_prompt, wait_finished
from waiting import (
    eventually,
    expect,
    expect_last_round,
    expect_live_rounds,
    expect_round,
    requests_of,
)

from confu_core.errors import TargetError

TREES = ".cfx-panel:not([hidden]) .cfx-canvas"


def tree_text(page) -> str:
    return "|".join(page.locator(TREES).all_inner_texts())


def test_page_opens_on_a_recorded_run(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    expect(page.locator(".cfx-race-row")).to_have_count(3)
    expect(page.locator(".cfx-tree")).to_have_count(2)
    expect(page.locator(".cfx-verdict")).to_contain_text("token for token")


@pytest.mark.alone
def test_recorded_runs_teach_within_seconds_and_before_the_model(visit):
    gate = threading.Event()

    def slow(report):
        report("reading weights", 0.3)
        gate.wait(60)
        raise TargetError("The target is not here. Run `make fetch`.")

    site = Site(load_recorded=recorded, source=slow)
    try:
        pace = starvation()
        begin = time.monotonic()
        page = visit(url=site.url, apart=True)  # as a first visitor: nothing is kept from before
        page.wait_for_selector(".cfx-badge-recorded")
        page.locator(".cfx-tree").first.wait_for()
        assert time.monotonic() - begin < 5 * pace
        page.locator("#model", has_text="recorded runs work").wait_for()
        page.get_by_role("button", name="Rhyme", exact=True).click()
        page.wait_for_function("document.querySelector('.cfx-title').innerText.includes('cat')")
        # And when the model cannot be loaded, the page says what to do and still teaches.
        gate.set()
        page.locator("#model .progress-error", has_text="make fetch").wait_for()
        page.get_by_role("button", name="Code", exact=True).click()
        page.wait_for_function("document.querySelector('.cfx-title').innerText.includes('Fib')")
        page.get_by_label("Decoding round").focus()
        page.keyboard.press("End")
        expect_last_round(page)
        page.locator(".cfx-node").nth(5).wait_for()
        run_prompt(page, "nobody can answer")
        page.locator("#progress .progress-error", has_text="make fetch").wait_for()
        expect(page.locator(".cfx-badge-recorded")).to_have_count(1)
        page.close()
    finally:
        gate.set()
        site.close()


def test_server_side_rendering_by_environment_changes_nothing(visit, monkeypatch):
    monkeypatch.setenv("GRADIO_SSR_MODE", "True")
    site = Site(load_recorded=recorded)
    try:
        page = visit(url=site.url)
        page.wait_for_selector(".cfx-badge-recorded")
        expect(page.locator(".cfx-tree")).to_have_count(2)
        page.close()
    finally:
        site.close()


def test_a_run_streams_growing_states(visit):
    page = visit("?tokens=32")
    page.evaluate(
        "window.states = new Set();"
        "const bars = () => document.querySelectorAll('[data-lane=confu] .cfx-bar').length;"
        "new MutationObserver(() => window.states.add(bars()))"
        ".observe(document.querySelector('.cfx'), {childList: true, subtree: true})"
    )
    run_prompt(page, "stream this")
    wait_finished(page)
    assert page.evaluate("window.states.size") >= 3
    expect(page.locator("[data-lane=plain] .cfx-bar")).to_have_count(32)
    expect(page.locator(".cfx-verdict")).to_contain_text("same text")


def test_slider_and_keys_move_the_trees_without_the_network(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    requests = requests_of(page)
    slider = page.get_by_label("Decoding round")
    slider.focus()
    page.keyboard.press("Home")
    expect_round(page, 0)
    seen = [tree_text(page)]
    for number in (1, 2, 3, 4):
        page.keyboard.press("ArrowRight")
        expect_round(page, number)
        seen.append(tree_text(page))
    assert len(set(seen)) == 5
    page.keyboard.press("ArrowLeft")
    expect_round(page, 3)
    assert tree_text(page) == seen[3]
    page.locator("[data-lane=confu] .cfx-bar").nth(5).click()
    expect_round(page, 5)
    page.get_by_label("Speed").select_option("4")
    page.get_by_role("button", name="Play").click()
    expect_round(page, 6)
    page.get_by_role("button", name="Pause").click()
    assert not requests


def test_scrubbing_during_a_stream_keeps_its_place_and_live_returns(engine, visit):
    engine(pause=0.3)  # slow enough that a slow machine can click meanwhile
    page = visit("?tokens=200")
    run_prompt(page, "hold my place")
    expect_live_rounds(page, 3)
    page.get_by_role("button", name="First round").click()
    page.get_by_role("button", name="One round forward").click()
    expect_round(page, 1)
    expect_live_rounds(page, page.locator("[data-lane=confu] .cfx-bar").count() + 2)
    assert page.locator(".cfx-count").inner_text().startswith("Round 1 of")
    page.get_by_role("button", name="● Live").click()
    expect(page.locator(".cfx-count")).not_to_have_text(re.compile("^Round 1 of"))


@pytest.mark.alone
def test_stop_is_quick_and_the_rounds_stay(visit):
    site = Site(pause=0.25)
    try:
        page = visit("?tokens=64", url=site.url)
        run_prompt(page, "stop me")
        expect_live_rounds(page, 3)
        begin = time.monotonic()
        page.get_by_role("button", name="Table").click()
        # What a busy machine takes for a click that asks nobody.
        any_click = time.monotonic() - begin
        begin = time.monotonic()
        page.get_by_role("button", name="Stop", exact=True).click()
        page.wait_for_selector(".cfx-badge-stopped")
        page.wait_for_selector("#run:not([disabled])")
        assert time.monotonic() - begin < 1 + 3 * any_click
        deadline = time.monotonic() + 1 + 3 * any_click
        while site.engine.open_runs and time.monotonic() < deadline:
            time.sleep(0.05)
        assert site.engine.open_runs == 0
        expect(page.locator("#progress")).to_contain_text("Stopped")
        done = site.engine.rounds_done
        page.get_by_role("button", name="First round").click()
        page.get_by_role("button", name="One round forward").click()
        expect_round(page, 1)
        page.wait_for_timeout(600)  # two rounds' time
        assert site.engine.rounds_done == done
        run_prompt(page, "and again")
        expect_live_rounds(page)
        page.close()
    finally:
        site.close()


def test_closing_the_tab_frees_the_engine(visit, site):
    page = visit("?tokens=256")
    done = site.engine.rounds_done
    run_prompt(page, "left alone")
    expect_live_rounds(page)
    page.close()
    deadline = time.monotonic() + 60
    while site.engine.open_runs and time.monotonic() < deadline:
        time.sleep(0.1)
    assert site.engine.open_runs == 0
    assert site.engine.rounds_done - done < 256  # plain decoding alone would take so many


def test_two_visitors_do_not_see_each_other(visit):
    one, two = (visit("?tokens=32", apart=True) for _ in range(2))
    run_prompt(one, "the secret of the first")
    run_prompt(two, "the riddle of the second")
    wait_finished(one)
    wait_finished(two)
    expect(one.locator(".cfx-title")).to_contain_text("secret")
    expect(two.locator(".cfx-title")).to_contain_text("riddle")
    assert "riddle" not in one.content() and "secret" not in two.content()


def test_a_repeat_run_redraws(visit):
    page = visit("?tokens=32")
    run_prompt(page, "twice the same")
    wait_finished(page)
    page.get_by_role("button", name="Run", exact=True).click()
    expect_live_rounds(page)
    wait_finished(page)


def test_hostile_tokens_are_literal(visit):
    page = visit("?tokens=32")
    run_prompt(page, "hostile <img src=x onerror=alert(2)> </script> \u202e ${value} {{this}}")
    wait_finished(page)
    page.get_by_role("button", name="First round").click()
    for _ in range(12):
        page.get_by_role("button", name="One round forward").click()
    for part in ("<img", "U+202E", "onerror"):
        expect(page.locator(".cfx-panels")).to_contain_text(part, use_inner_text=True)
    assert page.locator(".cfx img, .cfx script").count() == 0
    expect(page.locator(".cfx-title")).to_contain_text("onerror")
    for name in ("Experts over time", "Map of future tokens", "Speed"):
        page.get_by_role("tab", name=name).click()
        page.locator(".js-plotly-plot .main-svg:visible").first.wait_for()
    assert page.locator(".js-plotly-plot img, .chart-table img").count() == 0


def wait_text(page, selector: str, *words: str) -> None:
    for word in words:
        page.locator(selector, has_text=word).first.wait_for()


def test_node_details_by_mouse_and_by_key(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator("[data-lane=confu] .cfx-node.cfx-is-accepted").first.click()
    wait_text(page, ".cfx-card", "Accepted", "pinned")
    # Without scrolling, wherever the node stands.
    page.evaluate("scrollTo(0, 0)")
    expect(page.locator(".cfx-card")).to_be_in_viewport(ratio=1)
    expect(page.locator("[data-lane=confu] .cfx-chip.cfx-selected")).to_have_count(1)
    page.keyboard.press("Escape")
    page.locator(".cfx-canvas[data-lane=eagle3]").focus()
    wait_text(page, ".cfx-card", "root")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    wait_text(page, ".cfx-card", "pinned", "target wanted here")


def percent(share: float) -> str:
    """As the player writes it."""
    if 99.5 <= share * 100 < 100:
        return ">99%"
    if 0 < share * 100 < 0.5:
        return "<1%"
    return f"{int(share * 100 + 0.5)}%"


def test_details_show_the_figures_of_the_trace(visit):
    page = visit("?step=7")
    page.wait_for_selector(".cfx-badge-recorded")
    record = recorded("sky").lanes["confu"].rounds[7]
    tree = record.tree
    for state in ("accepted", "rejected"):
        shown = page.locator(f"[data-lane=confu] .cfx-node.cfx-is-{state}:not([data-node='0'])")
        node = int(shown.first.get_attribute("data-node"))
        shown.first.click()
        word = {"accepted": "Accepted", "rejected": "Rejected"}[state]
        page.locator(".cfx-card-why", has_text=word).wait_for()
        facts = dict(
            zip(
                page.locator(".cfx-card dt").all_inner_texts(),
                page.locator(".cfx-card dd").all_inner_texts(),
                strict=True,
            )
        )
        assert facts["token id"] == str(tree.token_ids[node])
        assert facts["draft"] == percent(tree.draft_probs[node])
        assert facts["target"] == percent(tree.target_probs[node])
        assert facts["cum. log-prob."] == f"{tree.scores[node]:.2f}"
        wanted = percent(tree.choice_probs[tree.parents[node]])
        assert facts["target wanted here"].endswith(wanted)


def test_trees_of_one_node_and_of_two_hundred(visit, tmp_path):
    page = visit("?step=3")
    page.wait_for_selector(".cfx-badge-recorded")
    for nodes in (1, 200):
        trace = make_trace("size", nodes=nodes, depth=8, top_k=16, max_new_tokens=16)
        size = len(trace.lanes["confu"].rounds[2].tree.token_ids)
        assert size == nodes
        saved = tmp_path / f"{nodes}.json"
        saved.write_text(trace.to_json())
        page.locator(".cfx input[type=file]").set_input_files(saved)
        page.wait_for_function(
            "size => document.querySelector('.cfx-meta').innerText.includes(`${size} nodes`)",
            arg=nodes,
        )
        page.get_by_label("Decoding round").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        expect_round(page, 2)
        confu = page.locator(".cfx-canvas[data-lane=confu]")
        drawn = confu.locator(".cfx-node").evaluate_all(
            "all => all.filter(node => /^[0-9]+$/.test(node.dataset.node)).length"
        )
        folded = confu.locator(".cfx-is-fold text").all_text_contents()
        assert drawn + sum(map(int, folded)) == nodes
        page.wait_for_function("document.documentElement.scrollWidth <= 1280")
    assert sum(map(int, folded)) > 100
    whole = page.locator(".cfx-panel[data-lane=confu]").get_by_role("button", name="Whole tree")
    expect(whole).to_have_text(f"Whole tree (+{sum(map(int, folded))})")
    whole.click()
    page.wait_for_function(
        "document.querySelectorAll('[data-lane=confu] .cfx-node:not(.cfx-is-fold)').length > 199"
    )


def test_words_unfold_and_close(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.get_by_label("? Tau, tokens per pass").click()
    page.get_by_text("Plain decoding has 1.", exact=False).first.wait_for()
    page.keyboard.press("Escape")
    expect(page.locator(".cfx-ask[open]")).to_have_count(0)


def test_table_shows_the_same_nodes(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator(".cfx-canvas").first.focus()
    page.keyboard.press("t")
    rows = page.locator("[data-lane=confu] .cfx-table tbody tr")
    rows.first.wait_for()
    assert rows.count() in (30, 31)


def test_no_sideways_scroll(visit):
    page = visit(width=390)
    page.wait_for_selector(".cfx-badge-recorded")
    for width in (390, 640, 800, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        expect(page.locator(".cfx.cfx-narrow")).to_have_count(1 if width <= 800 else 0)
        page.wait_for_function("width => document.documentElement.scrollWidth <= width", arg=width)


def test_examples_and_links(visit):
    page = visit("?preset=rhyme&step=3&phase=check&hide=plain,junk&nodes=junk&a=plain&b=confu")
    page.wait_for_selector(".cfx-badge-recorded")
    expect_round(page, 3)
    page.locator("[data-lane=confu] .cfx-phase-2").wait_for()
    expect(page.locator(".cfx-plain")).to_be_hidden()
    expect(page.locator("#progress")).to_contain_text("nodes, hide, a.")
    expect(page.locator(".cfx-panel:not([hidden])")).to_have_count(1)
    page.get_by_role("button", name="Code", exact=True).click()
    page.wait_for_function("document.querySelector('.cfx-title').innerText.includes('Fibonacci')")
    page.get_by_role("button", name="Odd planets").click()
    page.locator("#progress", has_text="no recorded").wait_for()


def test_a_lesson_hides_parts_of_the_page_and_its_reader_can_bring_them_back(visit):
    hidden = "head,ask,examples,settings,lesson,speed,legend,actions"
    page = visit(f"?preset=rhyme&step=999&hide={hidden}")
    page.wait_for_selector(".cfx-badge-recorded")
    expect_last_round(page)
    expect(page.locator("#progress")).to_contain_text("brought into it: step.")
    parts = (".page-head", "#ask", "#examples button >> nth=0", "#settings", ".cfx-legend")
    tabs = page.get_by_role("tab")
    for part in parts:
        expect(page.locator(part)).to_be_hidden()
    expect(tabs).to_have_text(["Experts over time", "Map of future tokens"])
    expect(page.locator(".chart-sentence:visible").first).to_contain_text("largest weight")
    page.get_by_role("button", name="Show hidden parts").click()
    for part in parts:
        expect(page.locator(part)).to_be_visible()
    expect(tabs).to_have_count(4)
    expect(page.locator("#reveal")).to_be_hidden()
    expect_last_round(page)


def test_a_step_beyond_the_end_of_a_live_run_is_told(visit):
    page = visit("?prompt=Why%3F&tokens=8&step=99&phase=accept")
    run_prompt(page, "How far?")
    wait_finished(page)
    expect_last_round(page)
    expect(page.locator(".cfx-notice")).to_contain_text("asked for round 99")
    page.locator("[data-lane=confu] .cfx-phase-3").wait_for()


def test_whatever_the_console_says_fails_a_test(visit):
    page = visit()
    page.evaluate("console.warn('a warning of ours'); console.error('an error of ours')")
    wanted = ["console warning: a warning of ours", "console error: an error of ours"]
    eventually(lambda: visit.faults, wanted)
    visit.faults.clear()


def test_empty_prompt_is_refused_and_nothing_lost(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    run_prompt(page, "  ")
    page.get_by_text("The prompt is empty").wait_for()
    expect(page.locator(".cfx-badge-recorded")).to_have_count(1)
    run_prompt(page, "long " * 2500)
    page.wait_for_timeout(200)


def test_saved_trace_opens_again(visit, tmp_path):
    page = visit()
    run_prompt(page, "keep me")
    wait_finished(page)
    page.get_by_text("Save", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Trace (JSON)").click()
    saved = tmp_path / "trace.json"
    download.value.save_as(saved)
    other = visit()
    other.wait_for_selector(".cfx-badge-recorded")
    other.locator(".cfx input[type=file]").set_input_files(saved)
    other.wait_for_selector(".cfx-badge-file")
    expect(other.locator(".cfx-title")).to_contain_text("keep me")
    broken = json.loads(saved.read_text())
    broken["lanes"]["confu"]["rounds"][1]["tree"]["parents"][1] = 99
    saved.write_text(json.dumps(broken))
    other.locator(".cfx input[type=file]").set_input_files(saved)
    expect(other.locator(".cfx-notice:not([hidden])")).to_contain_text("damaged at")


def test_saved_page_and_pictures(visit, tmp_path):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")

    def save(name: str):
        page.get_by_text("Save", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        saved = tmp_path / download.value.suggested_filename
        download.value.save_as(saved)
        return saved

    ElementTree.parse(save("Tree as SVG"))
    assert save("Tree as PNG").read_bytes().startswith(b"\x89PNG")
    alone = visit(url=save("This run as one HTML file").as_uri())
    expect(alone.locator(".cfx-race-row")).to_have_count(3)
    alone.get_by_role("button", name="First round").click()
    expect_round(alone, 0)


def test_predict_then_reveal_keeps_score(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.get_by_role("button", name="Predict first").click()
    page.locator("[data-lane=confu] .cfx-phase-1").wait_for()
    expect(page.locator("[data-lane=confu] .cfx-is-accepted.cfx-node")).to_have_count(0)
    page.locator(".cfx-canvas[data-lane=confu] [data-node='1']").click()
    wait_text(page, ".cfx-hint", "Score")


def test_tour_moves_through_the_player_and_waits_for_the_learner(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.get_by_role("button", name="Tour").click()
    guide = page.locator(".cfx-guide")
    for _ in range(3):
        guide.get_by_role("button", name="Next").click()
        expect(page.locator(".cfx-spot")).to_have_count(1)
    # A card with something to do: until then its button only skips.
    guide.get_by_text("Your turn", exact=False).wait_for()
    guide.get_by_role("button", name="Go on without").wait_for()
    page.locator("[data-lane=confu] .cfx-node.cfx-is-rejected").first.click()
    page.locator(".cfx-guide-done").wait_for()
    for _ in range(3):
        guide.get_by_role("button", name="Next").click()
    guide.get_by_role("button", name="Go on without").click()
    page.locator(".cfx-spot.cfx-future").wait_for()
    guide.get_by_role("button", name="Done").click()
    expect(guide).to_have_count(0)
