"""A ZeroGPU Space on one machine: the real `spaces` package, its real fork and pickling, and a
lender of GPUs that is ours. Torch is hidden, since there is no GPU to hand out; the engine is the
fake one.

`python lender.py CGROUP_FILE` prints the addresses of app and lender, then one line per request of
the package to the lender, which also does what a test tells it (`/tell`).
"""

import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path
from urllib.parse import parse_qs, urlparse

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from confu_core.trace import Settings  # noqa: E402 (after the path)


class Lender(http.server.BaseHTTPRequestHandler):
    """The four requests that the package makes of its host, and those of the test."""

    refuse = False
    runs = None

    def do_POST(self) -> None:
        url = urlparse(self.path)
        if url.path == "/tell":
            self.answer(200, Lender.tell(url.query))
            return
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        print(json.dumps({"asked": url.path, **query}), flush=True)
        if url.path == "/schedule" and Lender.refuse:
            self.answer(429, {"left": 5, "wait": 3600}, {"X-Approve-Result": "quota-exceeded"})
        elif url.path == "/schedule":
            grant = {"idle": False, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": "t"}
            self.answer(200, grant)
        else:
            self.answer(200, {})

    @classmethod
    def tell(cls, word: str) -> dict:
        cls.refuse = word == "refuse"
        return run_and_stop(cls.runs) if word == "run-and-stop" else {}

    def answer(self, status: int, value: dict, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments) -> None:
        pass


class NoTorch:
    """Import hook that hides torch."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("hidden")


def end_with_parent() -> None:
    """End this process when the one that started it is gone. A killed test run takes nothing along,
    and the processes that the package forks know only their queues."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def main(cgroup: str) -> None:
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lender)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lender = f"http://127.0.0.1:{server.server_address[1]}"
    os.environ |= {
        "SPACES_ZERO_GPU": "true",
        "SPACES_ZERO_DEVICE_API_URL": lender,
        "ZEROGPU_PROC_SELF_CGROUP_PATH": cgroup,
        "SPACE_ID": "someone/confu-explorer",
    }
    sys.meta_path.insert(0, NoTorch())

    from fake_engine import FakeEngine

    from app import gpu
    from app.ui import build_demo, launch_options
    from confu_core.errors import PromptError

    assert gpu.lends()

    class Watched(FakeEngine):
        """Tells in which process it computes and how it ends."""

        def compare(self, prompt, *arguments, **options):
            if "crash" in prompt:
                raise RuntimeError("secret detail")
            if "too long" in prompt:
                raise PromptError("The prompt is longer than this target reads.")
            events = super().compare(prompt, *arguments, **options)

            def watched():
                try:
                    yield from events
                finally:
                    done = {"computed_in": os.getpid(), "rounds": self.rounds_done}
                    print(json.dumps(done), flush=True)

            return watched()

    demo = build_demo(lambda report: Watched(pause=0.05), lambda name: None)
    demo.runs.slot.start()
    demo.runs.slot.wait()
    _, address, _ = demo.launch(
        server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch_options()
    )
    Lender.runs = demo.runs
    print(json.dumps({"address": address, "lender": lender, "pid": os.getpid()}), flush=True)
    threading.Event().wait()  # not reading the input: a fork would inherit its lock


def run_and_stop(runs) -> dict:
    """A visitor's run of many tokens, stopped after a few rounds."""
    frames = runs.stream("me", "en", "Why?", ("plain",), Settings(max_new_tokens=200))
    for _ in range(6):
        next(frames)
    begin = time.monotonic()
    runs.stop("me", "en")
    after = len(list(frames))
    return {"frames_after_stop": after, "seconds": time.monotonic() - begin}


if __name__ == "__main__":
    main(sys.argv[1])
