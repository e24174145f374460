"""Record the examples' runs with the real engine: `python -m app.record`.

Writes `app/examples/NAME.json`, one trace per example, and `reference.json`: of every head that
contemplates (ConFu, ConFu lite) the future-token map and, with `--questions`, how its experts are
usually used by task group. All of it is shown when there is no model, or before it is loaded.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.form import CHOSEN
from app.lessons import EXAMPLES
from app.recorded import FOLDER, REFERENCE, known, load, maps_of
from app.views.chart import heads
from app.views.reference import GroupUse
from app.views.wire import short_trace
from confu_core.errors import ConFuError
from confu_core.trace import RoundRecord, Settings, Trace


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m app.record", description="Record the examples with the real engine."
    )
    names = [example.name for example in EXAMPLES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (all)")
    parser.add_argument("--target", help="model id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="default 48")
    parser.add_argument("--nodes", type=int, default=30, help="tree size, default 30")
    parser.add_argument(
        "--questions", type=Path, help="question file whose task groups give the usual weights"
    )
    parser.add_argument("--limit", type=int, default=24, help="questions to use, default 24")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"unknown example: {', '.join(sorted(unknown))}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    from confu_core import load_engine

    try:
        engine = load_engine(
            options.target,
            options.device,
            lambda message, fraction: print(f"{message} {fraction:.0%}", file=sys.stderr),
        )
        write(engine, options)
    except ConFuError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def write(engine: Any, options: argparse.Namespace) -> None:
    """Record what the options ask for. What the reference told of a head before stays, as long as
    the engine or a recorded run has that head."""
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(max_new_tokens=options.max_new_tokens, nodes=options.nodes)
    chosen = [e for e in EXAMPLES if not options.names or e.name in options.names]
    for number, example in enumerate(chosen, 1):
        methods = tuple(name for name in CHOSEN if engine.methods[name].available)
        trace = _run(engine, example.prompt, settings, methods)
        path = options.out / f"{example.name}.json"
        path.write_text(short_trace(trace) + "\n", encoding="utf-8")
        taus = ", ".join(f"{name} {lane.tau:.2f}" for name, lane in trace.lanes.items())
        _tell(f"{number}/{len(chosen)} {path.name}: {path.stat().st_size // 1000} KB, tau {taus}")
    maps = maps_of(engine)
    uses = usual(engine, options.questions, options.limit, settings) if options.questions else {}
    used = {*maps, *uses, *_recorded_heads(options.out)}
    entries = {head: entry for head, entry in known(options.out).items() if head in used}
    for head, found in maps.items():
        entries[head] = entries.get(head, {}) | found
    for head, groups in uses.items():
        entries[head] = entries.get(head, {}) | {"usual": [asdict(group) for group in groups]}
    if entries:
        text = json.dumps(entries, separators=(",", ":"))
        (options.out / REFERENCE).write_text(text + "\n", encoding="utf-8")
        known.cache_clear()


def _recorded_heads(folder: Path) -> set[str]:
    """The heads (by sha256) that contemplated in the recorded runs of a folder."""
    load.cache_clear()  # they were written just now
    traces = (load(example.name, folder) for example in EXAMPLES)
    return {head for trace in traces if trace for head in heads(trace)}


def _run(engine: Any, prompt: str, settings: Settings, methods: tuple[str, ...]) -> Trace:
    """One finished run."""
    *_, last = engine.compare(prompt, settings, methods)
    return last.trace


def usual(
    engine: Any, questions: Path, limit: int, settings: Settings
) -> dict[str, list[GroupUse]]:
    """Average expert weights by task group of every head that contemplates, by its sha256."""
    from confu_core.bench.questions import load_questions, spread

    methods = tuple(n for n, info in engine.methods.items() if info.contemplates and info.available)
    if not methods:
        return {}
    rounds: dict[str, dict[str, list[RoundRecord]]] = {}  # head, group
    chosen = spread(load_questions(questions), limit)
    for number, question in enumerate(chosen, 1):
        trace = _run(engine, question.turns[0], settings, methods)
        for lane in trace.lanes.values():
            groups = rounds.setdefault(lane.head.sha256, {})
            groups.setdefault(question.group, []).extend(lane.rounds[1:])
        taus = ", ".join(f"{name} {lane.tau:.2f}" for name, lane in trace.lanes.items())
        _tell(f"{number}/{len(chosen)} {question.group}: tau {taus}")
    return {
        head: [_use(group, records) for group, records in sorted(groups.items())]
        for head, groups in rounds.items()
    }


def _use(group: str, records: list[RoundRecord]) -> GroupUse:
    return GroupUse(
        group=group,
        rounds=len(records),
        tau=round(sum(len(r.tokens) for r in records) / max(1, len(records)), 3),
        contemplate=_mean([r.contemplate_router for r in records if r.contemplate_router]),
        future=_mean([r.future_router for r in records if r.future_router]),
    )


def _mean(rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    return tuple(round(sum(column) / len(rows), 4) for column in zip(*rows, strict=True))


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
