"""How much the page's main thread works, measured so that other work on the machine hardly matters.

`PerformanceObserver('longtask')` measures by the clock: on a busy machine a task of 5 ms that waits
for its turn looks long. Chromium's own tracing also tells the processor time of each task.
"""

import json
import time


def main_thread_tasks(page, act) -> list[float]:
    """Milliseconds of processor time of every task on the page's main thread while `act` runs."""
    browser = page.context.browser
    categories = ["toplevel", "blink.user_timing"]
    browser.start_tracing(page=page, categories=categories)
    try:
        page.evaluate("performance.mark('main thread')")
        act()
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    where = next((e["pid"], e["tid"]) for e in events if e["name"] == "main thread")
    return [
        event["tdur"] / 1000
        for event in events
        if event["name"].endswith("RunTask")
        and (event["pid"], event["tid"]) == where
        and "tdur" in event
    ]


# Something to draw, always the same: it needs what the player needs, elements, styles and layout.
_DRAWING = """() => {
  for (let round = 0; round < 12; round++) {
    const box = document.createElement("div");
    box.style.cssText = "position: absolute; left: 0; top: 0; width: 600px; contain: layout paint";
    const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    for (let at = 0; at < 300; at++) {
      const text = document.createElementNS("http://www.w3.org/2000/svg", "text");
      text.setAttribute("x", at);
      text.setAttribute("y", at);
      text.textContent = `token ${at}`;
      picture.append(text);
    }
    box.append(picture);
    document.body.append(box);
    picture.getBBox();
    box.remove();
  }
}"""
_QUIET = 60.0  # its milliseconds on a quiet core of the 2-core machine that the limits were set on


def slowness(page) -> float:
    """How much slower this machine draws just now than a quiet core did: where other work shares
    caches and core halves, processor time itself grows. 1 or more."""
    times = [max(main_thread_tasks(page, lambda: page.evaluate(_DRAWING))) for _ in range(3)]
    return max(1.0, sorted(times)[1] / _QUIET)


def starvation() -> float:
    """By how much this machine's other work slows us down: seconds by the clock for a second of
    work. 1 on a quiet machine."""
    begin, worked = time.perf_counter(), time.process_time()
    while time.process_time() - worked < 0.3:
        pass
    return max(1.0, (time.perf_counter() - begin) / 0.3)


class Memory:
    """The memory that a page and this process keep, after everything that can go has gone."""

    def __init__(self, page) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable")

    def page(self) -> dict[str, float]:
        """Bytes of the JavaScript heap, nodes and listeners of the document."""
        for _ in range(2):  # what a finaliser frees goes with the second
            self._session.send("HeapProfiler.collectGarbage")
        metrics = self._session.send("Performance.getMetrics")["metrics"]
        found = {metric["name"]: metric["value"] for metric in metrics}
        return {name: found[name] for name in ("JSHeapUsedSize", "Nodes", "JSEventListeners")}

    @staticmethod
    def server() -> int | None:
        """Resident bytes of this process, where the system tells them."""
        try:
            with open("/proc/self/status", encoding="ascii") as lines:
                line = next(line for line in lines if line.startswith("VmRSS"))
        except OSError:
            return None
        return 1024 * int(line.split()[1])
