"""Accessibility: axe finds nothing serious; the page works in the dark, at 390 px, at 200 % zoom,
by the keyboard alone, without motion, and for eyes that see fewer colours."""

import io

import pytest
from PIL import Image
from test_colours import distance, seen
from waiting import eventually, expect

axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright",
    reason="axe-playwright-python is not installed: the accessibility check is left out",
)

RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}


def findings(page, where: str) -> list[str]:
    answer = axe.Axe().run(page, context=where, options=RULES).response
    return [
        f"{found['id']} ({found['impact']}): {node['html'][:160]}"
        for found in answer["violations"]
        if found["impact"] in ("serious", "critical")
        for node in found["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(visit, theme):
    page = visit(f"?__theme={theme}")
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator("[data-lane=confu] .cfx-node.cfx-is-rejected").first.click()
    page.wait_for_selector(".cfx-card.cfx-is-rejected")
    assert findings(page, "body") == []
    if theme == "light":
        page.locator(".cfx-canvas").first.press("t")
        page.wait_for_selector(".cfx-canvas .cfx-table")
        page.get_by_role("button", name="Keys").click()
        page.locator(".cfx-dialog[open]").wait_for()
        assert findings(page, ".cfx") == []


def test_every_node_has_words(visit):
    page = visit()
    page.wait_for_selector(".cfx-tree")
    labels = page.eval_on_selector_all(
        ".cfx-node", "nodes => nodes.map(node => node.getAttribute('aria-label'))"
    )
    assert len(labels) > 20 and all(labels)
    assert any("rejected" in label and "%" in label for label in labels)


def test_narrow_page_without_motion_in_german(visit):
    page = visit("?lang=de", width=390, still=True)
    page.wait_for_selector(".cfx-badge-recorded")
    page.wait_for_selector(".cfx-narrow")
    expect(page.get_by_role("button", name="Start", exact=True)).to_have_count(1)
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    page.locator(".cfx-tab").first.click()
    page.wait_for_selector(".cfx-panel[data-lane=eagle3]:not([hidden])")
    page.get_by_role("button", name="Abspielen").click()
    page.get_by_role("button", name="Pause", exact=True).wait_for()
    assert page.locator(".cfx-playing").count() == 0


def test_language_can_be_chosen(visit):
    page = visit(locale="it-IT")
    page.wait_for_selector(".cfx-badge-recorded")
    expect(page.get_by_role("button", name="Avvia", exact=True)).to_have_count(1)
    page.locator("#language input").click()
    page.get_by_role("option", name="Français").click()
    page.get_by_role("button", name="Lancer", exact=True).wait_for()
    page.locator(".cfx-verdict", has_text="méthodes").wait_for()


# Elements whose text is cut off, or that stand outside the window. What scrolls in a box of its own
# may be wider, and what only a screen reader hears is small on purpose.
CUT = """() => {
  const apart = ".cfx-canvas, .cfx-chips, .cfx-spoken, .cfx-ask p, svg, .tab-wrapper";
  const parts = document.querySelectorAll(".page-head *, #state *, .cfx, .cfx *, .lesson *");
  return [...parts].filter((part) => {
    const box = part.getBoundingClientRect();
    if (!box.width || !box.height || part.closest(apart)) return false;
    const folded = part.closest("details:not([open])");
    if (folded && part !== folded && !part.closest("summary")) return false;
    const hides = getComputedStyle(part).overflowX !== "visible";
    const cut = hides && part.scrollWidth > part.clientWidth + 1;
    return cut || box.right > innerWidth + 1 || box.left < -1;
  }).map((part) => `${part.tagName} ${part.className}: ${part.textContent.slice(0, 40)}`);
}"""


@pytest.mark.parametrize("language", ["en", "de", "fr", "it", "zh"])
def test_at_200_percent_zoom_nothing_is_cut(visit, language):
    # A window of 1280 x 900 at 200 %: half the CSS pixels, each twice as large.
    page = visit(f"?lang={language}&step=7", width=640, height=450, pixels=2)
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator("[data-lane=confu] .cfx-node.cfx-is-accepted").first.click()
    page.wait_for_selector(".cfx-card.cfx-is-accepted")
    page.locator(".cfx-menu summary").click()
    page.locator(".cfx-menu[open]").wait_for()
    page.wait_for_function("document.documentElement.scrollWidth <= 640")
    eventually(lambda: page.evaluate(CUT), [])


FOCUS = """() => {
  const at = document.activeElement;
  const style = getComputedStyle(at);
  const seen = style.outlineStyle !== "none" || style.boxShadow !== "none";
  const names = { prompt: "#prompt", run: "#run", slider: ".cfx-slider", eagle3:
    ".cfx-canvas[data-lane=eagle3]", confu: ".cfx-canvas[data-lane=confu]", tab: "[role=tab]" };
  const name = Object.keys(names).find((key) => at.closest(names[key]));
  return { name, inside: Boolean(at.closest(".cfx-canvas")) && !at.matches(".cfx-canvas"), seen };
}"""


def test_tab_goes_from_prompt_to_charts_with_one_stop_per_tree(visit):
    page = visit()
    page.wait_for_selector(".cfx-badge-recorded")
    page.get_by_label("Prompt").focus()
    stops = [page.evaluate(FOCUS)]
    while stops[-1]["name"] != "tab" and len(stops) < 80:
        page.keyboard.press("Tab")
        stops.append(page.evaluate(FOCUS))
    names = [stop["name"] for stop in stops if stop["name"]]
    assert list(dict.fromkeys(names)) == ["prompt", "run", "slider", "eagle3", "confu", "tab"]
    assert names.count("confu") == names.count("eagle3") == 1
    assert not any(stop["inside"] for stop in stops)
    assert all(stop["seen"] for stop in stops if stop["name"])


def colour_of(page, selector: str) -> str:
    """The colour that fills most of an element's edge region on the screen."""
    shot = page.locator(selector).first.screenshot()
    pixels = Image.open(io.BytesIO(shot)).convert("RGB")
    inner = pixels.crop((6, 6, pixels.width - 6, pixels.height - 6))
    _, rgb = max(inner.getcolors(1 << 20))
    return "#{:02x}{:02x}{:02x}".format(*rgb)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_states_differ_on_the_screen_for_every_eye(visit, theme):
    page = visit(f"?__theme={theme}&step=7")
    page.wait_for_selector(".cfx-badge-recorded")
    session = page.context.new_cdp_session(page)
    for deficiency in ("none", "protanopia", "deuteranopia", "tritanopia"):
        session.send("Emulation.setEmulatedVisionDeficiency", {"type": deficiency})
        colours = [
            colour_of(page, f"[data-lane=confu] .cfx-node.cfx-is-{state} .cfx-frame")
            for state in ("accepted", "target", "rejected")
        ]
        labs = [seen(colour, "usual") for colour in colours]
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert distance(labs[one], labs[other]) > 12, (deficiency, colours)


CONTRAST = """() => {
  const number = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => number(colour).slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  }).reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  let under = document.querySelector(".js-plotly-plot");
  const paper = () => getComputedStyle(under).backgroundColor;
  while (paper() === "rgba(0, 0, 0, 0)") under = under.parentElement;
  const page = light(paper());
  const texts = document.querySelectorAll(".js-plotly-plot :is(.xtick text, .legendtext)");
  return Math.min(...[...texts]
    .map((text) => light(getComputedStyle(text).fill))
    .map((text) => (Math.max(text, page) + 0.05) / (Math.min(text, page) + 0.05)));
}"""


def test_chart_text_can_be_read_in_both_themes_even_when_toggled(visit):
    page = visit("?__theme=dark")
    page.wait_for_selector(".cfx-badge-recorded")
    page.get_by_role("tab", name="Speed").click()
    page.locator(".js-plotly-plot .legendtext").first.wait_for()
    page.wait_for_function(f"({CONTRAST})() >= 4.5")
    page.evaluate("document.body.classList.toggle('dark')")
    page.wait_for_function(f"({CONTRAST})() >= 4.5")
