"""Record the examples' runs with the real engine: `python -m app.record`.

Writes `app/examples/NAME.json`, one trace per example, and `map.json`, the reference points of the
future-token map of the heads that were used. Both are shown when there is no model, or before it
is loaded.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from app.lessons import EXAMPLES
from app.recorded import FOLDER, MAP, plain_map
from app.views.wire import short_trace
from confu_core.errors import ConFuError
from confu_core.trace import Settings, Trace


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
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write to")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"unknown example: {', '.join(sorted(unknown))}")
    return options


def record(engine: Any, prompt: str, settings: Settings) -> Trace:
    """One finished run by every available method."""
    methods = [name for name, info in engine.methods.items() if info.available]
    *_, last = engine.compare(prompt, settings, methods)
    return last.trace


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
    options.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(max_new_tokens=options.max_new_tokens, nodes=options.nodes)
    chosen = [e for e in EXAMPLES if not options.names or e.name in options.names]
    maps: dict[str, Any] = {}
    for number, example in enumerate(chosen, 1):
        trace = record(engine, example.prompt, settings)
        path = options.out / f"{example.name}.json"
        path.write_text(short_trace(trace) + "\n", encoding="utf-8")
        maps |= plain_map(engine, trace)
        taus = ", ".join(f"{name} {lane.tau:.2f}" for name, lane in trace.lanes.items())
        size = path.stat().st_size // 1000
        print(f"{number}/{len(chosen)} {path.name}: {size} KB, tau {taus}", file=sys.stderr)
    if maps:
        text = json.dumps(maps, separators=(",", ":"))
        (options.out / MAP).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
