"""The ablation: the same text, steps and seed for every variant of ConFu and for its control.

Each variant is an ordinary training run in a folder of its own, so an ablation that was stopped
goes on where it was, and its figures are those that the run logged.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from confu_core.target import Target
from confu_core.train.run import Recipe, run


@dataclass(frozen=True)
class Variant:
    """One row of the table: how it differs from ConFu lite.

    switches: fields of `ContemplationShape`. settings: fields of `TrainSettings`.
    """

    what: str
    method: str = "confu"
    switches: dict[str, int | bool] = field(default_factory=dict)
    settings: dict[str, bool | float] = field(default_factory=dict)


STATIC = {"contemplate_experts": 1, "future_experts": 1}
VARIANTS: dict[str, Variant] = {
    "control": Variant("EAGLE-3, continued for the same steps", method="eagle3"),
    "bare": Variant("no experts, no replication", switches=STATIC, settings={"replicate": False}),
    "static": Variant("no experts: one static token each", switches=STATIC),
    "no-replication": Variant("f serves its own start only", settings={"replicate": False}),
    "entry-only": Variant(
        "f as a key/value entry only (the paper's data flow)", switches={"future_query": False}
    ),
    "no-soft-prompts": Variant("no soft prompts", switches={"soft_prompts": 0}),
    "no-balance": Variant("routers not kept in balance", settings={"router_balance": 0.0}),
    "lite": Variant("ConFu lite"),
    "read-outs": Variant("ConFu lite, and f names three tokens itself", switches={"read_outs": 3}),
    "adapters": Variant("ConFu lite with adapters of rank 16", switches={"adapter_rank": 16}),
    "full": Variant(
        "ConFu: adapters of rank 16 and read-outs", switches={"read_outs": 3, "adapter_rank": 16}
    ),
}


def ablate(
    target: Target, base: Recipe, names: Sequence[str], report: Callable[[str, dict], None]
) -> Iterator[tuple[str, dict]]:
    """Train the named variants one after the other and yield each one's held-out figures.

    Args:
        base: data, start, settings; its `run` and `save` become folders of folders.
        report: called with (variant, row) for every row that a run logs.
    """
    for name in names:
        variant = VARIANTS[name]
        recipe = replace(
            base,
            method=variant.method,
            switches=tuple(variant.switches.items()),
            settings=replace(base.settings, **variant.settings),
            run=base.run / name,
            save=base.save / name,
        )
        if not (recipe.save / "config.json").exists():
            run(target, recipe, lambda row, name=name: report(name, row))
        config = json.loads((recipe.save / "config.json").read_text(encoding="utf-8"))
        yield name, config["training"]["held_out"]


def table(figures: dict[str, dict]) -> str:
    """Held-out figures as Markdown; differences are against the control if it is there."""
    control = figures.get("control")
    lines = [
        "| variant | chain tau | top-8 tau | depth 1 | depth 2 | depth 3 | n |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, f in figures.items():
        shown = []
        for key in ("tau_chain", "tau_top8"):
            against = ""
            if control is not None and name != "control":
                against = f" ({100 * (f[key] / control[key] - 1):+.1f} %)"
            shown.append(f"{f[key]:.3f}{against}")
        depths = " | ".join(f"{share:.3f}" for share in f["top1"][:3])
        lines.append(f"| {VARIANTS[name].what} | {' | '.join(shown)} | {depths} | {f['n']:,} |")
    return "\n".join(lines)
