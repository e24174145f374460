"""Documentation that cannot lie: schema page, error page and map of files are complete."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from confu_core import errors, trace
from confu_core.checkpoints import digest_of

ROOT = Path(__file__).resolve().parent.parent
RECORDS = [
    kind
    for kind in vars(trace).values()
    if dataclasses.is_dataclass(kind) and kind.__name__ != "Difference"
]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_field_of_the_trace_is_documented(kind):
    text = page("trace.md")
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if f"`{field.name}`" not in text
        and not (field.name.startswith("choice_") and "`choice_ids`" in text)
    ]
    assert not missing


def test_the_schema_version_is_the_documented_one():
    assert f"Schema version: {trace.SCHEMA}." in page("trace.md")


def test_every_error_is_documented():
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and name != "ConFuError"
    ]
    assert kinds and all(f"| `{name}` |" in page("errors.md") for name in kinds)


def test_the_licence_that_the_front_matter_names_lies_beside_it():
    front = (ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1]
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "\nlicense: apache-2.0\n" in front
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    cards = list((ROOT / "checkpoints").rglob("README.md"))
    heads = [card for card in cards if (card.parent / "config.json").is_file()]
    assert heads and all("Licence: Apache-2.0" in p.read_text(encoding="utf-8") for p in heads)


def test_the_map_of_confu_core_is_complete():
    rooms = page("architecture.md").split("## Rooms of `confu_core`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+\.py)`", rooms))
    files = {path.name for path in (ROOT / "confu_core").glob("*.py")} - {"__init__.py"}
    assert named == files


RESULTS = ROOT / "docs" / "results"


def test_the_figures_of_the_readme_are_the_benchmarks():
    result = json.loads((RESULTS / "spec-bench-float32.json").read_text(encoding="utf-8"))
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    methods = ("eagle3", "confu-lite", "confu")
    for group, figures in result["groups"].items():
        cells = " | ".join(f"{figures[method]['tau']:.2f}" for method in methods)
        assert f"| {group} | {cells} |" in text
    taus, ratios = [], []
    for method in methods:
        found = result["overall"][method]
        low, high = found["tau_interval"]
        taus.append(f"**{found['tau']:.2f}** ({low:.2f} to {high:.2f})")
        if method != "eagle3":
            found = result["ratios"][f"{method} / eagle3"]
            low, high = found["tau_interval"]
            ratios.append(f"**{found['tau']:.3f}** ({low:.3f} to {high:.3f})")
    assert f"| **all** | {' | '.join(taus)} |" in text
    assert f"| **over EAGLE-3** | | {' | '.join(ratios)} |" in text


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_the_speeds_of_the_pages_are_the_benchmarks(name):
    result = json.loads((RESULTS / "budgets-bfloat16.json").read_text(encoding="utf-8"))
    text = (ROOT / name).read_text(encoding="utf-8")
    by_nodes = {cell["nodes"]: cell["overall"] for cell in result["cells"]}

    def figures(nodes: int | str, lane: str) -> str:
        found = by_nodes[nodes][lane]
        low, high = found["speedup_interval"]
        return f"{found['speedup']:.2f} ({low:.2f} to {high:.2f}), tau {found['tau']:.2f}"

    lanes = {"EAGLE-3": "eagle3", "ConFu lite": "confu-lite-0.25", "ConFu": "confu-0.25"}
    for label, lane in lanes.items():
        cells = " | ".join(figures(nodes, lane) for nodes in (30, 60, "auto"))
        assert f"| {label} | {cells} |" in text
    for label, lane in (("greedy", "transformers"), ("prompt lookup", "transformers-lookup")):
        assert f"| `transformers`, {label} | {figures(30, lane)} |" in text


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_results_are_those_of_the_committed_heads(path):
    heads = json.loads(path.read_text(encoding="utf-8"))["settings"]["heads"]
    if path.stem.startswith("ablation"):  # of heads that were trained for a comparison only
        assert "adapters" in heads
        return
    for method, head in heads.items():
        folder = ROOT / "checkpoints" / "smollm2-135m-instruct" / method
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        wanted = digest_of(config["files"].values())
        assert head["sha256"] == wanted, (
            f"{path.name} is of another {method} head: measure it again"
        )
