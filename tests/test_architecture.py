"""Who may import whom, read from the syntax trees; and what must load without heavy packages."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORE = sorted((ROOT / "confu_core").rglob("*.py"))
APP = sorted([*(ROOT / "app").rglob("*.py"), ROOT / "app.py"])

# Lowest first. A file imports only from floors below its own, or from its own floor.
FLOORS = (
    {"errors", "trace", "events", "assets", "hub", "sizes", "charts", "ranking"},
    {"cache", "masks", "tree", "sampling", "budget", "fused", "rotary", "weights"},
    {"target"},
    {"heads", "acceptance", "prompt"},
    {"checkpoints", "contemplation", "drafter", "layouts", "taps", "published"},
    {"methods", "probes", "reading", "costs"},
    {"decoding", "interventions"},
    {"recording"},
    {"compare"},
    {"presets"},
    {"train", "bench", "__main__"},
)
# Words that name no room.
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc", "manager", "base", "tools"}


def room(path: Path) -> str:
    """`confu_core/train/loop.py` is in `train`, `confu_core/tree.py` in `tree`."""
    inside = path.relative_to(ROOT / "confu_core")
    return inside.parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    """Every module that a file imports anywhere, lazily or not, as dotted names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full"
            module = node.module or ""
            if module == "confu_core":  # from confu_core import masks
                found += [f"confu_core.{name.name}" for name in node.names]
            else:
                found.append(module)
    return found


def floor(name: str) -> int:
    for number, names in enumerate(FLOORS):
        if name in names:
            return number
    raise AssertionError(f"{name} has no floor in tests/test_architecture.py: give it one")


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check():
    assert len(CORE) > 20
    assert any(name.startswith("confu_core.") for path in CORE for name in imports(path))


@pytest.mark.parametrize("path", CORE, ids=label)
def test_the_core_knows_no_page(path):
    for name in imports(path):
        assert name.split(".")[0] not in {"gradio", "plotly", "app", "tests"}, name


@pytest.mark.parametrize("path", CORE, ids=label)
def test_imports_point_down(path):
    if room(path) == "__init__":
        return  # the promised names, loaded when they are first used
    for name in imports(path):
        if name.startswith("confu_core."):
            below = name.split(".")[1]
            assert floor(below) <= floor(room(path)), f"{room(path)} must not import {below}"


@pytest.mark.parametrize("path", CORE, ids=label)
def test_low_rooms_stay_light(path):
    """Errors and trace use the standard library only; trees know no model."""
    light = {"errors", "trace", "assets"}
    tops = {name.split(".")[0] for name in imports(path)} - {"confu_core", "__future__"}
    if room(path) in {"errors", "trace", "events"}:
        assert tops <= sys.stdlib_module_names
    if room(path) in {"cache", "masks", "tree", "sampling", "acceptance", "decoding"}:
        assert "transformers" not in tops
    if room(path) not in light | {"target", "__init__"} and path.parent.name == "confu_core":
        assert "transformers" not in tops, "only target.py knows the models library"


@pytest.mark.parametrize("path", APP, ids=label)
def test_the_app_touches_no_tensors(path):
    for name in imports(path):
        assert name.split(".")[0] not in {"torch", "transformers", "safetensors", "tests"}, name


@pytest.mark.parametrize("path", [p for p in APP if "views" in p.parts], ids=label)
def test_views_see_the_trace_and_nothing_else_of_the_core(path):
    for name in imports(path):
        if name.startswith("confu_core"):
            assert name in {"confu_core.trace", "confu_core.errors"}, name
        assert name.split(".")[0] != "gradio", name


@pytest.mark.parametrize("path", CORE + APP, ids=label)
def test_files_are_named_after_their_room(path):
    for part in path.relative_to(ROOT).parts:
        assert part.removesuffix(".py").lower() not in NAMELESS


@pytest.mark.parametrize("path", CORE + APP, ids=label)
def test_no_global_randomness_and_no_device_by_name(path):
    """The sampler is the only source of chance in decoding; devices are arguments."""
    text = path.read_text(encoding="utf-8")
    assert ".cuda()" not in text
    if "train" not in path.parts and "bench" not in path.parts:
        for call in ("torch.manual_seed(", "torch.multinomial(", "np.random", "random.random("):
            assert call not in text, call


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


BLOCK = """
import sys
class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Wall())
"""


def test_a_trace_is_read_without_torch_or_a_page():
    blocked = {"torch", "gradio", "plotly", "transformers", "numpy", "safetensors", "sklearn"}
    code = BLOCK.format(blocked=blocked) + (
        "import confu_core, confu_core.trace, confu_core.errors\n"
        "from confu_core import Trace, Settings, ConFuError\n"
        "print(Trace.__name__, Settings().nodes, ConFuError.__name__)"
    )
    assert run_python(code) == "Trace 30 ConFuError"


def test_the_core_loads_without_a_page_and_starts_nothing():
    code = BLOCK.format(blocked={"gradio", "plotly", "app"}) + (
        "import threading\n"
        "before = threading.active_count()\n"
        "import confu_core, torch\n"
        "print(all(callable(getattr(confu_core, name)) for name in confu_core.__all__))\n"
        "print(torch.cuda.is_initialized(), threading.active_count() - before)"
    )
    assert run_python(code).split() == ["True", "False", "0"]


def test_promised_names_exist_and_others_do_not():
    import confu_core

    assert confu_core.__all__ == sorted(confu_core.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        confu_core.no_such_name  # noqa: B018
