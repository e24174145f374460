"""Imports of the app point one way: views see the trace, runs sees no page, nobody sees tensors."""

import ast
from pathlib import Path

import pytest

APP = Path(__file__).resolve().parents[2] / "app"
FILES = [*sorted(APP.rglob("*.py")), APP.parent / "app.py"]
PURE = ("views", "text", "lessons", "links", "form")


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def room(path: Path) -> str:
    return path.stem if path.parent in (APP, APP.parent) else path.parent.name


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(APP.parent)))
def test_imports(path):
    names = imports(path)
    tops = {name.split(".")[0] for name in names}
    assert not tops & {"torch", "numpy", "transformers", "safetensors"}
    # gpu.py knows gradio's error alone, in which the lender of a GPU speaks.
    assert ("gradio" in tops) == (path in (APP / "ui.py", APP / "gpu.py"))
    if room(path) in PURE:
        core = {name for name in names if name.startswith("confu_core")}
        assert core <= {"confu_core.trace"}
        inside = {name.split(".")[1] for name in names if name.startswith("app.")}
        assert inside <= {*PURE}


def test_the_core_knows_no_app():
    for path in (APP.parent / "confu_core").rglob("*.py"):
        assert not {name for name in imports(path) if name.split(".")[0] in ("app", "gradio")}
