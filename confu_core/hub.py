"""Files of a Hugging Face hub repository, fetched before they are needed, so that one can watch.

Whoever loads them afterwards finds them in the hub's cache. Nothing depends on this room: what goes
wrong here (no network, no permission, another version of the hub's library) goes wrong again there,
and is told there.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

TARGET_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
HEAD_FILES = ("config.json", "basis.json", "*.safetensors")


def is_hub_id(source: str | Path) -> bool:
    """Whether it can be a repository's name, `owner/name`, and is no folder."""
    name = str(source)
    return not Path(name).is_dir() and name.count("/") == 1 and not name.startswith(("/", ".", "~"))


def fetch(source: str | Path, files: Sequence[str], progress: Callable[[str, float], None]) -> None:
    """Fetch a repository's top-level files into the hub's cache, as far as they are not there.

    Args:
        source: a hub id; anything else is left alone.
        files: patterns of the names that are wanted.
        progress: called with a message and the fraction of the bytes that are here.
    """
    if not is_hub_id(source):
        return
    from huggingface_hub import snapshot_download

    wanted = {"allow_patterns": list(files), "ignore_patterns": ["*/*"]}
    with suppress(Exception):
        found = snapshot_download(str(source), dry_run=True, tqdm_class=_Silent, **wanted)
        total = sum(file.file_size for file in found if file.will_download)
        if total:
            bar = _watching(lambda done: progress(_message(source, done, total), done / total))
            snapshot_download(str(source), tqdm_class=bar, **wanted)


def _message(source: str | Path, done: int, total: int) -> str:
    return f"fetching {source}, {done / 1e9:.1f} of {total / 1e9:.1f} GB"


class _Nowhere(io.TextIOBase):
    def write(self, text: str) -> int:
        return len(text)


class _Silent(tqdm):
    """A progress bar that shows nothing."""

    def __init__(self, *arguments, **options) -> None:
        options.pop("name", None)  # the hub's own addition
        super().__init__(*arguments, **{**options, "file": _Nowhere(), "disable": False})


def _watching(report: Callable[[int], None]) -> type[tqdm]:
    """A kind of bar that tells how many bytes it counts. The library makes several bars for the
    same bytes (received, written); the furthest one is told."""
    furthest = 0

    class Watching(_Silent):
        def update(self, n: float | None = 1) -> bool | None:
            nonlocal furthest
            shown = super().update(n)
            if self.unit == "B" and self.n > furthest:
                furthest = int(self.n)
                report(furthest)
            return shown

    return Watching
