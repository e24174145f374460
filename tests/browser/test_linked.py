"""One selection for everything: tree, chips, timeline, small map and the page's charts agree, and
nothing of it asks the server."""

import pytest
from waiting import (
    eventually,
    expect,
    expect_last_round,
    expect_round,
    requests_of,
    until_quiet,
)

EXPERTS, MAP = "Experts over time", "Map of future tokens"


STEP = 7  # here ConFu has a path of three, and EAGLE-3 wrote the same place of the text


@pytest.fixture
def page(visit):
    page = visit(f"?step={STEP}")
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator("#model", has_text="ready").wait_for()
    return page


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.locator(".js-plotly-plot .main-svg:visible").first.wait_for()
    page.locator(".cfx-over-now:visible").first.wait_for(state="attached")


def frames(page) -> list[float]:
    """Where the shown round's frames begin in the heatmaps."""
    return page.eval_on_selector_all(
        "rect.cfx-over-now", "all => all.map(r => Math.round(r.getBoundingClientRect().left))"
    )


def test_the_heatmaps_follow_the_player_and_lead_it(page):
    open_tab(page, EXPERTS)
    expect(page.locator("rect.cfx-over-now")).to_have_count(2)
    requests = requests_of(page)
    before = frames(page)
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "left => document.querySelector('rect.cfx-over-now').getBoundingClientRect().left > left",
        arg=before[0] + 1,
    )
    # A click on the third column moves the slider to its round.
    wanted = page.evaluate("document.querySelector('.js-plotly-plot').data[0].meta.rounds[2]")
    width = frames(page)[0] - before[0]
    plot = page.locator(".js-plotly-plot").first.locator(".nsewdrag").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 2.5 * width, box["y"] + 30)
    page.mouse.move(box["x"] + 2.5 * width + 2, box["y"] + 32)
    page.locator("rect.cfx-over-pointed").first.wait_for(state="attached")
    page.locator(".cfx-bar.cfx-pointed").first.wait_for(state="attached")
    page.mouse.click(box["x"] + 2.5 * width + 2, box["y"] + 32)
    expect_round(page, wanted)
    assert not requests


def test_the_big_map_follows_the_player_and_leads_it(page):
    open_tab(page, MAP)
    requests = requests_of(page)

    def trail() -> int:
        points = page.locator(".cfx-over-trail").get_attribute("points")
        return len(points.split())

    eventually(trail, STEP)
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("End")
    expect_last_round(page)
    eventually(trail, page.locator(".cfx-race-row[data-lane=confu] .cfx-bar").count() - 1)
    # The first point of the trail is round 1.
    overlay = page.locator(".cfx-over:has(.cfx-over-trail)")
    overlay.scroll_into_view_if_needed()
    box = overlay.bounding_box()
    x, y = map(float, page.locator(".cfx-over-trail").get_attribute("points").split()[0].split(","))
    page.mouse.move(box["x"] + x - 3, box["y"] + y)
    page.mouse.move(box["x"] + x, box["y"] + y)
    page.locator("circle.cfx-over-pointed").first.wait_for(state="attached")
    page.locator(".hovertext", has_text="then written").first.wait_for()
    expect(page.locator(".hovertext").first).to_contain_text("nearest words")
    page.mouse.click(box["x"] + x, box["y"] + y)
    expect_round(page, 1)
    eventually(trail, 1)
    assert not requests


def test_marks_keep_to_their_points_when_the_chart_is_zoomed(page):
    open_tab(page, MAP)
    ring = page.locator("circle.cfx-over-now")
    before = ring.get_attribute("cx")
    overlay = page.locator(".cfx-over:has(.cfx-over-trail)")
    overlay.scroll_into_view_if_needed()
    box = overlay.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + box["height"] * 0.9, steps=4)
    page.mouse.up()
    page.wait_for_function(
        "cx => document.querySelector('circle.cfx-over-now').getAttribute('cx') != cx", arg=before
    )


def test_another_run_is_not_marked_in_the_charts_of_the_last(page):
    open_tab(page, EXPERTS)
    # Both are drawn, and nothing more comes that would draw them anew.
    expect(page.locator("rect.cfx-over-now:visible")).to_have_count(2)
    until_quiet(page)
    page.evaluate(
        "document.querySelectorAll('.js-plotly-plot').forEach("
        "picture => picture.data.forEach(trace => { trace.meta.run = 'another'; }))"
    )
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("Home")
    expect_round(page, 0)
    # The last marks stay where they were drawn: nothing follows any more.
    left = frames(page)
    page.keyboard.press("ArrowRight")
    expect_round(page, 1)
    assert frames(page) == left


def test_a_token_is_marked_in_both_trees_texts_and_the_timeline(page):
    page.locator("[data-lane=confu] .cfx-node.cfx-is-accepted").first.click()
    confu, eagle3 = (page.locator(f".cfx-panel[data-lane={name}]") for name in ("confu", "eagle3"))
    expect(confu.locator(".cfx-node.cfx-selected")).to_have_count(1)
    expect(confu.locator(".cfx-chip.cfx-selected")).to_have_count(1)
    expect(eagle3.locator(".cfx-node.cfx-twin")).to_have_count(1)
    place, twin = (
        panel.locator(".cfx-chip").evaluate_all(
            f"all => all.findIndex(chip => chip.classList.contains('{look}'))"
        )
        for panel, look in ((confu, "cfx-selected"), (eagle3, "cfx-twin"))
    )
    assert place == twin > 0
    for lane in ("confu", "eagle3"):
        expect(page.locator(f".cfx-race-row[data-lane={lane}] .cfx-pointed")).to_have_count(1)
    expect(page.locator(".cfx-map-canvas .cfx-pointed")).to_have_count(1)
    # A node that never became text has no twin.
    confu.locator(".cfx-node.cfx-is-rejected").first.click()
    page.wait_for_function("!document.querySelector('.cfx-twin')")


def test_pointing_at_a_bar_marks_its_round_everywhere(page):
    bar = page.locator(".cfx-race-row[data-lane=confu] .cfx-bar").nth(2)
    box = bar.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 4)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".cfx-race-row[data-lane=confu] .cfx-pointed").wait_for()
    expect(page.locator(".cfx-map-canvas .cfx-pointed")).to_have_count(1)
    expect(page.locator(".cfx-card-round", has_text="Round 2")).to_have_count(1)
    chips = page.locator(".cfx-panel[data-lane=confu] .cfx-chip.cfx-selected")
    chips.first.wait_for(state="attached")
    page.mouse.move(5, 5)
    page.wait_for_function("!document.querySelector('.cfx-pointed')")


def test_nodes_with_a_contemplate_token_have_a_dot(page):
    confu = page.locator(".cfx-panel[data-lane=confu]")
    nodes = confu.locator(".cfx-node[data-node]:not([data-node=bonus]):not([data-node=fold])")
    expect(confu.locator(".cfx-dot-source")).to_have_count(1)
    expect(confu.locator(".cfx-dot")).to_have_count(nodes.count())
    expect(page.locator(".cfx-panel[data-lane=eagle3] .cfx-dot")).to_have_count(0)
    confu.locator(".cfx-node:has(.cfx-dot-source)").click()
    page.locator(".cfx-card", has_text="became the next future token").wait_for()
    page.locator(".cfx-phase", has_text="Draft").click()
    page.locator(".cfx-phase-1").first.wait_for()
    expect(confu.locator(".cfx-dot")).to_have_count(0)  # it rides in the target's pass
