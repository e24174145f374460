"""Accessibility: axe finds nothing serious; dark, at 390 px, without motion the page works."""

import pytest

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
    page = visit("?lang=de", width=390, reduced_motion="reduce")
    page.wait_for_selector(".cfx-badge-recorded")
    page.wait_for_selector(".cfx-narrow")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.get_by_role("button", name="Start", exact=True).count() == 1
    page.locator(".cfx-tab").first.click()
    page.wait_for_selector(".cfx-panel[data-lane=eagle3]:not([hidden])")
    page.get_by_role("button", name="Abspielen").click()
    assert page.locator(".cfx-playing").count() == 0


def test_language_can_be_chosen(visit):
    page = visit(locale="it-IT")
    page.wait_for_selector(".cfx-badge-recorded")
    assert page.get_by_role("button", name="Avvia", exact=True).count() == 1
    page.locator("#language input").click()
    page.get_by_role("option", name="Français").click()
    page.get_by_role("button", name="Lancer", exact=True).wait_for()
    page.locator(".cfx-verdict", has_text="méthodes").wait_for()
