"""Fixtures that every test may use. Targets, heads and texts are made once and never changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

# Of several test processes side by side each keeps to one core, and so do the programs they start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints" / "smollm2-135m-instruct"


def pytest_collection_modifyitems(items):
    """Tests that want a GPU are skipped without one; the summary counts them with the reason."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device: scripts/gpu_check.sh runs this on one")
        for item in wanting:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_thread(request):
    """Models this small are slower on many threads, and fixed threads round the same way."""
    if any("core" in item.path.parts for item in request.session.items):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama():
    """The tiny random Llama target."""
    from tests.fakes import tiny_target

    return tiny_target()


@pytest.fixture(scope="session")
def prompt(llama):
    """Token ids of a short chat message."""
    from confu_core.prompt import chat_ids

    return chat_ids(llama, "The user and the hen")


@pytest.fixture(scope="session")
def greedy(llama, prompt):
    """Prompt and 48 greedy tokens of the tiny target, by full re-computation, stops ignored."""
    from confu_core.trace import Settings
    from tests.reference import plain_text

    return prompt + plain_text(llama, prompt, Settings(max_new_tokens=48), stops=frozenset())


@pytest.fixture(scope="session")
def head(llama, greedy):
    """A random EAGLE-3 head whose vocabulary holds what the target writes, so that it hits some."""
    from tests.fakes import tiny_head

    return tiny_head(llama, vocabulary={*greedy[-48:], *range(5, 295, 9)})


@pytest.fixture(scope="session")
def part(llama, head):
    """A random ConFu part."""
    from tests.fakes import tiny_contemplation

    return tiny_contemplation(llama, head)


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """A tiny target, an EAGLE-3 and a ConFu head for it, as folders on disk: `target`, `eagle3`,
    `confu`."""
    from tests.fakes import write_models

    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def default_target():
    """The real default target, if it lies on this machine; nothing is downloaded."""
    from confu_core import assets
    from confu_core.target import Target

    folder = assets.home() / assets.TARGET_FOLDER
    if not assets._is_complete(folder):
        pytest.skip(f"the default target is not in {folder}; `make fetch` gets it")
    return Target.load(folder)


@pytest.fixture(scope="session")
def trained(default_target):
    """The committed heads by name, as methods."""
    from confu_core.checkpoints import load_checkpoint
    from confu_core.methods import with_head

    found = {}
    for name in ("eagle3", "confu"):
        if (CHECKPOINTS / name / "config.json").is_file():
            found[name] = with_head(name, load_checkpoint(CHECKPOINTS / name, default_target))
    if not found:
        pytest.skip(f"no trained heads in {CHECKPOINTS.relative_to(CHECKPOINTS.parent.parent)} yet")
    return found


def pytest_make_parametrize_id(config, val, argname):
    """Readable names for settings and other small objects."""
    return json.dumps(val) if isinstance(val, dict) else None
