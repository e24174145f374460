"""A Hugging Face Space: front matter, and the app as it runs there, on ZeroGPU too."""

import importlib.metadata
import importlib.util
import json
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from app import gpu
from app.form import CHOSEN, METHODS
from app.runs import Runs
from confu_core.errors import ConFuError
from confu_core.trace import Settings

ROOT = Path(__file__).resolve().parents[2]
HAVE_SPACES = importlib.util.find_spec("spaces") is not None
needs_spaces = pytest.mark.skipif(
    not HAVE_SPACES, reason="the `spaces` package is not installed (requirements-dev.txt has it)"
)


def front_matter() -> dict[str, str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.startswith("---\n")
    lines = text.split("---\n")[1].splitlines()
    pairs = (line.split(":", 1) for line in lines if re.match(r"\w+:", line))
    return {name: value.strip().strip("\"'") for name, value in pairs}


def test_front_matter_is_complete():
    found = front_matter()
    assert found["sdk"] == "gradio" and found["app_file"] == "app.py"
    assert (ROOT / found["app_file"]).is_file()
    assert {"title", "emoji", "license", "models", "tags", "pinned"} <= set(found)
    colours = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
    assert found["colorFrom"] in colours and found["colorTo"] in colours
    assert 10 < len(found["short_description"]) <= 60
    assert found["python_version"] in ("3.12", "3.12.12")  # what ZeroGPU offers above 3.11


def test_the_spaces_gradio_is_the_one_that_requirements_resolve_to():
    assert front_matter()["sdk_version"] == importlib.metadata.version("gradio")


def test_every_file_is_small_enough_for_a_space():
    listed = subprocess.run(
        ["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout.split("\n")
    files = [ROOT / name for name in listed if name]
    if not files:
        pytest.skip("not a git checkout")
    assert not [str(path) for path in files if path.exists() and path.stat().st_size > 10_000_000]


# ---- What crosses to the process with the GPU ----------------------------------------------------


def test_the_promise_grows_with_the_tokens_and_is_capped():
    short, long = Settings(max_new_tokens=10), Settings(max_new_tokens=256)
    assert gpu.seconds("id", "Why?", short, METHODS, None) == 14
    assert gpu.seconds("id", "Why?", long, METHODS, None) == gpu.MOST_SECONDS


def test_without_a_lender_the_function_is_itself(monkeypatch):
    def compute():
        yield 1

    monkeypatch.setattr(gpu, "spaces", None)
    assert gpu.lent(compute) is compute


class PicklingLender:
    """What the `spaces` package does to a call, in one process: pickle in, pickle out."""

    @staticmethod
    def GPU(duration):
        def decorate(task):
            def call(*arguments):
                assert 10 <= duration(*arguments) <= 45
                for value in task(*pickle.loads(pickle.dumps(arguments))):
                    yield pickle.loads(pickle.dumps(value))

            return call

        return decorate


def test_only_what_pickles_crosses(monkeypatch):
    monkeypatch.setattr(gpu, "spaces", PicklingLender)
    runs = Runs(lambda report: FakeEngine())
    frames = list(runs.stream("me", "en", "Why?", METHODS, Settings(max_new_tokens=12)))
    assert json.loads(frames[-1].player)["kind"] == "full" and not frames[-1].running
    assert runs.compare("Why?", Settings(max_new_tokens=12))["identical"] is True
    with pytest.raises(ConFuError, match="between"):
        runs.compare("Why?", Settings(nodes=0))
    frames = list(runs.stream("me", "en", "Why?", METHODS, Settings(nodes=0)))
    assert "between" in frames[-1].progress


def plain(value) -> bool:
    """Made of dataclasses, tuples, dictionaries and simple values alone."""
    if isinstance(value, dict):
        return all(plain(k) and plain(v) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return all(map(plain, value))
    if hasattr(value, "__dataclass_fields__"):
        return all(plain(getattr(value, name)) for name in value.__dataclass_fields__)
    return value is None or type(value) in (str, int, float, bool)


def test_the_real_engines_events_are_plain(llama):
    from confu_core.compare import Engine
    from confu_core.methods import PLAIN

    runs = Runs(lambda report: Engine(llama, {"plain": PLAIN}, {}))
    runs.slot.start()
    runs.slot.wait()
    arguments = ("", "The hen", Settings(max_new_tokens=4), ("plain",), None)
    events = list(runs._compute(*arguments))
    assert len(events) == 6 and plain(arguments)
    assert all(plain(event) for event in events)
    assert pickle.loads(pickle.dumps(events)) == events


# ---- The real package ----------------------------------------------------------------------------


@needs_spaces
def test_the_app_builds_with_the_package_and_nothing_changes_off_zero_gpu():
    # The file, not the package of the same name beside it.
    code = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('space', 'app.py')\n"
        "space = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(space)\n"
        "print(space.gpu.spaces.__name__, space.gpu.lends(), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["spaces", "False", "False"]


class Zero:
    """The app on an emulated ZeroGPU Space, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        cgroup = folder / "cgroup"
        cgroup.write_text("0::/box\n", encoding="ascii")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("lender.py")), str(cgroup)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,  # the package's forks belong to its group
        )
        self.lines: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        started = self.until("address")
        self.address, self.pid = started["address"], started["pid"]
        self.lender = started["lender"]

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.lines.put(json.loads(line))

    def until(self, name: str, value: object = None) -> dict:
        """The next line that has `name` (and there `value`)."""
        while True:
            line = self.lines.get(timeout=600)
            if name in line and value in (None, line[name]):
                return line

    def tell(self, word: str) -> dict:
        request = urllib.request.Request(f"{self.lender}/tell?{word}", method="POST")
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def zero(tmp_path_factory):
    space = Zero(tmp_path_factory.mktemp("zero"))
    yield space
    space.close()


@pytest.fixture
def client(zero):
    return pytest.importorskip("gradio_client").Client(zero.address, verbose=False)


@needs_spaces
def test_on_zero_gpu_a_run_is_computed_in_a_process_that_was_lent_one(zero, client):
    assert zero.process.poll() is None
    answer = client.predict("Why?", 20, api_name="/compare")
    assert answer["identical"] is True and set(answer["methods"]) == set(CHOSEN)
    asked = zero.until("asked", "/schedule")
    # The package halves the promise for the smaller share of a GPU, or keeps it: never more.
    assert 0 < int(asked["durationSeconds"]) <= 18
    assert zero.until("computed_in")["computed_in"] != zero.pid
    zero.until("asked", "/release")


@needs_spaces
def test_on_zero_gpu_an_error_keeps_its_words(zero, client):
    with pytest.raises(Exception, match="longer than this target reads"):
        client.predict("too long", 20, api_name="/compare")
    # The app goes on, in the same or in a fresh process.
    assert client.predict("Why?", 8, api_name="/compare")["identical"] is True


@needs_spaces
def test_on_zero_gpu_a_crash_shows_no_detail(zero, client):
    with pytest.raises(Exception) as caught:
        client.predict("crash", 20, api_name="/compare")
    assert "secret detail" not in str(caught.value)
    assert client.predict("Why?", 8, api_name="/compare")["identical"] is True


@needs_spaces
def test_on_zero_gpu_a_used_up_quota_is_a_sentence(zero, client):
    zero.tell("refuse")
    try:
        with pytest.raises(Exception, match="Recorded runs need no GPU"):
            client.predict("Why?", 20, api_name="/compare")
    finally:
        zero.tell("lend")
    assert client.predict("Why?", 8, api_name="/compare")["identical"] is True


@needs_spaces
def test_on_zero_gpu_stop_ends_the_computing_process_run(zero):
    told = zero.tell("run-and-stop")
    assert told["frames_after_stop"] == 0 and told["seconds"] < 20
    ended = zero.until("computed_in")
    assert ended["computed_in"] != zero.pid and ended["rounds"] < 150
