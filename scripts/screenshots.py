"""Take the README's pictures: `python scripts/screenshots.py` writes docs/images/*.png.

They show the recorded runs of `app/examples/` in headless Chromium, so that they need no model and
come out the same each time. Take them again after `python -m app.record`.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
MOST_BYTES = 300_000  # a picture in a README should load at once
WIDE, PHONE = (1280, 900), (390, 844)


@dataclass(frozen=True)
class Shot:
    """One picture: which page it opens, how large its window is, what of it is taken.

    part: a selector of the element to take whole; None takes what the window shows.
    tab: a tab to open first. top: a selector of what to scroll to the window's top.
    """

    name: str
    query: str
    window: tuple[int, int] = WIDE
    part: str | None = None
    tab: str | None = None
    top: str | None = None


SHOTS = (
    Shot("run", "?preset=days", part=".cfx"),
    Shot("dark", "?preset=code&__theme=dark"),
    Shot("phone", "?preset=sky", window=PHONE, top=".cfx-panels"),
    Shot("map", "?preset=planets", part="#charts", tab="Map of future tokens"),
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python scripts/screenshots.py", description="Take the README's pictures."
    )
    names = [shot.name for shot in SHOTS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (all)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown picture: {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        chromium = None
    if chromium is None:
        print("Chromium and playwright are needed: `make setup-dev`, and a package chromium.")
        return 1
    from app.ui import build_demo, launch_options

    never = threading.Event()

    def still_loading(report) -> None:
        """Pictures show what a first visitor sees: recorded runs, while the model loads."""
        report("reading weights", 0.6)
        never.wait()

    demo = build_demo(still_loading)
    _, url, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as run:
        browser = run.chromium.launch(executable_path=chromium, args=list(FLAGS))
        for shot in SHOTS:
            if not options.names or shot.name in options.names:
                path = options.out / f"{shot.name}.png"
                path.write_bytes(small(take(browser, url, shot)))
                print(f"{path}: {path.stat().st_size // 1000} kB")
        browser.close()
    demo.close(verbose=False)
    return 0


def take(browser: Any, url: str, shot: Shot) -> bytes:
    """One picture as PNG."""
    width, height = shot.window
    context = browser.new_context(
        viewport={"width": width, "height": height}, locale="en", reduced_motion="reduce"
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.goto(url + shot.query)
    page.wait_for_selector(".cfx-badge-recorded")
    page.locator(".cfx-tree").first.wait_for()
    page.locator("#model .progress-bar").wait_for()
    if shot.tab:
        page.get_by_role("tab", name=shot.tab).click()
        page.locator(".js-plotly-plot .main-svg:visible").first.wait_for()
    if shot.top:
        page.locator(shot.top).evaluate("part => part.scrollIntoView()")
    page.evaluate("document.fonts.ready")
    page.wait_for_timeout(500)  # pictures of charts settle
    picture = page.locator(shot.part).first.screenshot() if shot.part else page.screenshot()
    context.close()
    return picture


def small(picture: bytes) -> bytes:
    """The same picture in as many colours as it takes to stay below `MOST_BYTES`."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colours in (256, 128, 64, 32):
        out = io.BytesIO()
        few = image.quantize(colours, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
        few.save(out, "PNG", optimize=True)
        if out.tell() < MOST_BYTES:
            break
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
