"""Load, decode, observe, draw: ConFu Explorer as a library.

    PYTHONPATH=. python examples/quickstart.py
    PYTHONPATH=. python examples/quickstart.py --target FOLDER --eagle3 FOLDER --confu FOLDER

from the repository's root. Without a target it takes the default one, which is fetched once.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from confu_core import Finished, Observer, Settings, Trace, decode, load_engine
from confu_core.probes import Accepted, Verifying
from confu_core.prompt import TextStream, chat_ids
from confu_core.trace import RoundRecord


class Watcher(Observer):
    """Keeps of every round what it wants; the views hold the loop's own tensors."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gains: list[int] = []

    def verifying(self, view: Verifying) -> None:
        self.sizes.append(len(view.draft.tree) - 1)

    def accepted(self, view: Accepted) -> None:
        self.gains.append(len(view.acceptance.draws))


def draw(record: RoundRecord) -> str:
    """The draft tree of a round as text: indented by depth, with what the target made of it."""
    tree = record.tree
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    marks = {"accepted": "+", "rejected": "-", "not reached": "."}
    lines = []

    def visit(node: int) -> None:
        mark = marks[tree.states[node]]
        chance = "" if node == 0 else f"  {tree.draft_probs[node]:.0%}"
        lines.append(f"{mark} {'  ' * tree.depths[node]}{tree.texts[node]!r}{chance}")
        for child in children.get(node, []):
            visit(child)

    visit(0)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--eagle3", help="EAGLE-3 head: folder or hub id")
    parser.add_argument("--confu", help="ConFu head: folder or hub id")
    parser.add_argument("--prompt", default="Name three rivers.")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--trace", type=Path, help="also write the trace, which the app opens")
    options = parser.parse_args(arguments)
    named = {"eagle3": options.eagle3, "confu": options.confu}
    heads = {name: source for name, source in named.items() if source} or None

    # Load: one target, with every head that there is for it.
    engine = load_engine(options.target, heads=heads)
    available = [name for name, info in engine.methods.items() if info.available]
    method = engine.method(available[-1])
    settings = Settings(max_new_tokens=options.tokens, nodes=20)

    # Decode and observe: the loop itself, a round at a time.
    watcher = Watcher()
    stream = TextStream(engine.target)
    prompt_ids = chat_ids(engine.target, options.prompt)
    for round in decode(engine.target, method, prompt_ids, settings, watcher):
        stream.push(round.token_ids)
    stream.flush()
    print(f"{method.name}: {stream.text!r}")
    print("drafted per round:", watcher.sizes)
    print("gained per round: ", watcher.gains)

    # Compare: all methods on one prompt, as plain events; the last one carries the trace.
    for event in engine.compare(options.prompt, settings, available):
        if isinstance(event, Finished):
            trace: Trace = event.trace
    for name, lane in trace.lanes.items():
        print(f"{name}: tau {lane.tau:.2f} in {lane.target_passes} target passes")
    print("same text:", "no" if trace.differences() else "yes")

    # Draw: the round that gained most, from the trace alone.
    best = max(trace.lanes[method.name].rounds[1:], key=lambda record: len(record.tokens))
    if len(best.tree.token_ids) > 1:
        print(f"round {best.index} of {method.name} (+ accepted, - rejected, . not reached):")
        print(draw(best))
    if options.trace:
        options.trace.write_text(trace.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
