"""Facts about what ran, where and with what: without them a figure of speed says nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from confu_core.bench.lanes import Lane, OwnLane
from confu_core.bench.questions import Question
from confu_core.bench.run import Grid
from confu_core.methods import Method
from confu_core.target import Target

ROOT = Path(__file__).resolve().parent.parent.parent


def settings_of(
    grid: Grid,
    lanes: Sequence[Lane],
    questions: Sequence[Question],
    source: Path,
    shares: Sequence[float],
    assistant: str | None,
) -> dict:
    """What a benchmark was asked for, as plain data. Single values are the first setting's.

    Args:
        source: the question file; `questions` are those taken from it.
        shares: of nodes with a contemplate token, see `lanes.own_lanes`.
        assistant: the model that `transformers`' assisted generation drafts with.
    """
    asked = [[question.id, question.group, *question.turns] for question in questions]
    own = [lane.name for lane in lanes if isinstance(lane, OwnLane)]
    return dataclasses.asdict(grid.base) | {
        "methods": own,
        "peers": [lane.name for lane in lanes if lane.name not in own],
        "assistant": assistant and Path(assistant).name,
        "temperatures": list(grid.temperatures),
        "node_budgets": list(grid.nodes),
        "seeds": list(grid.seeds),
        "contemplate_shares": list(shares),
        "questions": {
            "file": source.name,
            "count": len(questions),
            "sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest(),
        },
    }


def place_of(target: Target, methods: dict[str, Method], command: str) -> dict:
    """Where and with what a measurement runs, as plain data.

    Args:
        methods: the methods that run, by name; their heads are named with their sha256.
    """
    device = target.device.type
    return {
        "command": command,
        "commit": _commit(),
        "load_at_start": _load(),
        "machine": {
            "cpu": _cpu(),
            "cores": _cores(),
            "threads": torch.get_num_threads(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "target": {
            "name": Path(target.name).name,
            "fingerprint": target.fingerprint(),
            "device": torch.cuda.get_device_name(target.device) if device == "cuda" else device,
            "dtype": target.precision,
        },
        "heads": {
            name: {"name": method.checkpoint.name, "sha256": method.checkpoint.sha256}
            for name, method in methods.items()
            if method.checkpoint is not None
        },
    }


def place_lines(place: dict) -> list[str]:
    """The same as Markdown list items."""
    machine, target, software = place["machine"], place["target"], place["versions"]
    heads = ", ".join(
        f"{method}: {head['name']} (sha256 {head['sha256'][:16]})"
        for method, head in place["heads"].items()
    )
    busy = "unknown" if place["load_at_start"] is None else place["load_at_start"]
    commit = f" at commit {place['commit']}" if place["commit"] else ""
    return [
        f"- Command: `{place['command']}`{commit}",
        f"- Target: {target['name']} (fingerprint {target['fingerprint']}), {target['dtype']}, on "
        f"{target['device']}. Heads: {heads or 'none'}",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, "
        f"{machine['system']}; load when it started: {busy}. Python {software['python']}, torch "
        f"{software['torch']}, transformers {software['transformers']}",
    ]


def _commit() -> str | None:
    """The program's commit, with a plus sign if files were changed since; None outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None


def _load() -> float | None:
    """How many processes wanted a processor in the last minute; None where no system tells."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or "unknown"


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
