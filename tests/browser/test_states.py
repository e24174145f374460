"""The states that a page can be in, each as its reader sees it: in line, nothing accepted, another
text, four lanes, a method without a head, a link's wishes. Every read waits for what it reads."""

import re

from fake_site import run_prompt, wait_finished
from waiting import expect


def lane(page, name: str):
    return page.locator(f".cfx-panel[data-lane={name}]")


def test_a_visitor_in_line_sees_the_place_and_can_leave_it(engine, visit):
    engine(pause=0.3)  # slow enough that a slow machine can click meanwhile
    one, two = visit("?tokens=200"), visit("?tokens=16")
    run_prompt(one, "the first in line")
    one.wait_for_selector(".cfx-badge-running")
    run_prompt(two, "the second in line")
    expect(two.locator("#progress")).to_contain_text("runs before yours: 1")
    expect(two.locator("#run")).to_be_disabled()
    two.get_by_role("button", name="Stop", exact=True).click()
    expect(two.locator("#progress")).to_contain_text("Taken out of the line")
    expect(two.locator("#run")).to_be_enabled()
    # What was on show is still what it was.
    expect(two.locator(".cfx-badge")).to_have_text("Recorded run")
    run_prompt(two, "the second again")
    expect(two.locator("#progress")).to_contain_text("runs before yours: 1")
    one.get_by_role("button", name="Stop", exact=True).click()
    wait_finished(two)
    expect(two.locator(".cfx-title")).to_contain_text("the second again")
    for page in (one, two):
        page.close()


def test_a_round_with_nothing_accepted(engine, visit):
    engine(skill={})
    page = visit("?tokens=12")
    run_prompt(page, "guess nothing")
    wait_finished(page)
    page.get_by_label("Decoding round").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".cfx-count")).to_have_text("Round 1 of 11")
    for name in ("eagle3", "confu"):
        expect(lane(page, name).locator(".cfx-story")).to_contain_text("agreed with none of them")
        expect(lane(page, name).locator(".cfx-gain")).to_have_text("+1 token")
        expect(lane(page, name).locator(".cfx-node.cfx-is-accepted")).to_have_count(0)
        expect(lane(page, name).locator(".cfx-node.cfx-is-target")).to_have_count(1)
    # No bonus from a tree that was never right: as many passes as plain decoding.
    expect(page.locator(".cfx-race-row[data-lane=confu] .cfx-tau")).to_have_text("1.00")


def test_another_text_is_named_with_its_margin_and_marked(engine, visit):
    engine(break_at=5)
    page = visit("?tokens=16")
    run_prompt(page, "leave the text")
    wait_finished(page)
    verdict = page.locator(".cfx-verdict")
    expect(verdict).to_contain_text("ConFu differs from Plain decoding at token 6")
    expect(verdict).to_contain_text(re.compile(r"by( only)? \d\.\d{3} logits"))
    expect(page.locator(".cfx-race-row[data-lane=confu] .cfx-bar.cfx-off")).to_have_count(1)
    expect(page.locator(".cfx-race-row[data-lane=eagle3] .cfx-off")).to_have_count(0)


def test_a_method_without_a_head_is_left_out_and_named(engine, visit):
    engine(unavailable=("confu",))
    page = visit("?tokens=12")
    expect(page.locator("#model")).to_contain_text("left out: ConFu")
    run_prompt(page, "one is missing")
    wait_finished(page)
    expect(page.locator(".cfx-race-row")).to_have_count(2)
    expect(lane(page, "eagle3").locator(".cfx-tree")).to_have_count(1)


def test_a_link_restores_prompt_options_methods_and_intervention(visit, site):
    wishes = "tokens=20&nodes=999&seed=7&temperature=0.7&methods=confu,confu-lite&hide=legend,speed"
    page = visit(f"?prompt=Why%3F&{wishes}&change=remove+future&expert=junk")
    expect(page.get_by_label("Prompt")).to_have_value("Why?")
    notice = page.locator("#progress")
    expect(notice).to_contain_text("expert")  # what is junk is named
    run_prompt(page, "Why is it so?")
    wait_finished(page)
    names = page.locator(".cfx-race-row")
    expect(names).to_have_count(3)
    expect(names.nth(1)).to_contain_text("ConFu lite")
    expect(names.nth(2)).to_contain_text("future token withheld")
    expect(page.locator(".cfx-meta")).to_contain_text("temperature 0.7, seed 7 · 120 nodes")
    expect(page.locator(".cfx-verdict")).to_contain_text("depend only on seed 7")
    page.locator(".cfx-phase", has_text="Check").click()
    page.get_by_role("button", name="Copy link").click()
    link = page.get_by_role("textbox", name="Copy this link")
    expect(link).to_have_value(re.compile("methods=confu%2Cconfu-lite&change=remove\\+future"))
    for part in ("phase=check", "a=confu-lite&b=changed", "hide=legend%2Cspeed"):
        expect(link).to_have_value(re.compile(part))
    expect(link).not_to_have_value(re.compile("prompt="))
    page.get_by_label("put my prompt into the link").check()
    expect(link).to_have_value(re.compile(r"prompt=Why\+is\+it\+so"))
    again = visit(url=link.input_value(), query="")
    expect(again.get_by_label("Prompt")).to_have_value("Why is it so?")
    again.get_by_role("button", name="Run", exact=True).click()
    wait_finished(again)
    again.locator("[data-lane=changed] .cfx-phase-2").wait_for()
    expect(again.locator(".cfx-panel:not([hidden])")).to_have_count(2)
    expect(again.locator(".cfx-legend")).to_be_hidden()
    expect(again.locator(".cfx-race-row").nth(2)).to_contain_text("future token withheld")


def test_four_lanes_have_two_trees_on_show_and_each_its_turn(visit, site):
    page = visit("?tokens=24&methods=plain,eagle3,confu,confu-lite")
    run_prompt(page, "four of them")
    wait_finished(page)
    # Each head that contemplates has charts of its own; what is not recorded of it is said.
    page.get_by_role("tab", name="Experts over time").click()
    for method in ("ConFu", "ConFu lite"):
        said = page.locator(".chart-sentence", has_text=f"weights of this {method} head")
        expect(said.first).to_be_visible()
    expect(page.locator(".cfx-race-row")).to_have_count(4)
    expect(page.locator(".cfx-panel:not([hidden])")).to_have_count(2)
    expect(page.locator(".cfx-tab[aria-pressed=true]")).to_have_text(["BConFu", "DConFu lite"])
    page.locator(".cfx-tab", has_text="EAGLE-3").click()
    expect(page.locator(".cfx-tab[aria-pressed=true]")).to_have_count(2)
    expect(lane(page, "eagle3")).to_be_visible()
    # What steers is told of the lane that was asked for last.
    page.locator(".cfx-tab[data-lane=confu]").click()
    expect(page.locator(".cfx-future h2")).to_have_text("What steers the draft of ConFu")
    expect(page.locator(".cfx-named li").first).to_contain_text("depth 1")
    page.locator(".cfx-tab[data-lane=confu-lite]").click()
    expect(page.locator(".cfx-future h2")).to_have_text("What steers the draft of ConFu lite")
    expect(page.locator(".cfx-named")).to_have_count(0)


def test_every_tab_opened_after_a_run_shows_all_of_it(visit, site):
    page = visit("?tokens=24")
    run_prompt(page, "all of it")
    wait_finished(page)
    passes = int(page.locator(".cfx-race-row[data-lane=confu] .cfx-figure").nth(1).inner_text())
    expected = {
        "Experts over time": [passes + 1, passes],  # the prefill makes a contemplate token too
        "Map of future tokens": [passes],
        "Speed": [3, 3],
    }
    for name, counts in expected.items():
        page.get_by_role("tab", name=name).click()
        page.locator(".js-plotly-plot .main-svg:visible").first.wait_for()
        tables = page.locator(".chart-table:visible")
        for number, count in enumerate(counts):
            expect(tables.nth(number).locator("tbody tr")).to_have_count(count)


def test_the_slider_moves_trees_and_explanations_by_the_mouse(visit, site):
    page = visit("?step=3")
    page.wait_for_selector(".cfx-badge-recorded")
    told = [lane(page, name).locator(".cfx-story") for name in ("eagle3", "confu")]
    before = [story.inner_text() for story in told]
    slider = page.get_by_label("Decoding round")
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.7, box["y"] + box["height"] / 2)
    expect(page.locator(".cfx-count")).not_to_have_text(re.compile("^Round 3 of"))
    for story, text in zip(told, before, strict=True):
        expect(story).not_to_have_text(text)


def test_prompts_of_any_script_stand_literally(visit, site):
    prompt = "اشرح السماء\n天空为什么是蓝色？ 👩‍🔬 </script> <b>bold</b> \u202eevil"
    page = visit("?tokens=8")
    run_prompt(page, prompt)
    wait_finished(page)
    title = page.locator(".cfx-title")
    for part in ("اشرح", "↵", "天空", "</script>", "<b>bold</b>", "U+202E"):
        expect(title).to_contain_text(part)
    expect(page.locator(".cfx b", has_text=re.compile("^bold$"))).to_have_count(0)


def test_the_fold_shows_prompt_run_verdict_and_both_trees(visit, site):
    page = visit(width=1280, height=900)
    page.wait_for_selector(".cfx-badge-recorded")
    expect(page.locator(".cfx-tree")).to_have_count(2)
    for selector in ("#prompt", "#run", ".cfx-verdict"):
        expect(page.locator(selector)).to_be_in_viewport(ratio=1)
    for name in ("eagle3", "confu"):
        box = lane(page, name).locator(".cfx-canvas").bounding_box()
        assert box["y"] < 660, name


def test_plain_decoding_alone_has_text_and_no_tree(engine, visit):
    engine(unavailable=("eagle3", "confu"))
    page = visit("?tokens=12")
    run_prompt(page, "no heads at all")
    wait_finished(page)
    expect(page.locator(".cfx-race-row")).to_have_count(1)
    expect(lane(page, "plain").locator(".cfx-chip")).to_have_count(12)
    expect(page.locator(".cfx-future")).to_be_hidden()
