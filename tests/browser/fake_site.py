"""The app over the fake engine, on a free port of this machine."""

from fake_engine import FakeEngine, make_trace

from app.lessons import EXAMPLES
from app.ui import build_demo, launch_options


class Site:
    """One running app: its address, its engine and its run desk. `source` loads another engine, or
    fails to."""

    def __init__(self, pause: float = 0.02, load_recorded=None, source=None, **engine) -> None:
        self.engine = FakeEngine(pause=pause, **engine)
        source = source or (lambda report: self.engine)
        self.demo = build_demo(source, load_recorded or (lambda name: None))
        _, self.url, _ = self.demo.launch(
            server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
        )

    def close(self) -> None:
        self.demo.close(verbose=False)


def recorded(name: str):
    """Recorded runs for the tests: all examples but one."""
    prompts = {example.name: example.prompt for example in EXAMPLES if example.name != "planets"}
    return make_trace(prompts[name], max_new_tokens=48) if name in prompts else None


def run_prompt(page, prompt: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_role("button", name="Run", exact=True).click()


def wait_finished(page) -> None:
    page.wait_for_selector(".cfx-badge-finished")
