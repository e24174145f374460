"""Commands: `python -m confu_core COMMAND --help`. Parses and prints; computes nothing itself."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from confu_core.errors import ConFuError
from confu_core.events import Advanced, Finished
from confu_core.trace import LABELS, Settings, Trace


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m confu_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_fetch(commands)
    _add_run(commands)
    _add_compare(commands)
    _add_synth(commands)
    _add_train(commands)
    _add_card(commands)
    _add_bench(commands)
    _add_profile(commands)
    options = parser.parse_args(arguments)
    try:
        all_well = options.run(options)
    except ConFuError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0 if all_well is not False else 1


# --- options that several commands share


def _add_target(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument(
        "--target",
        metavar="ID_OR_PATH",
        help="a Hugging Face model of the Llama or Qwen kind: folder or hub id "
        "(default: SmolLM2-135M-Instruct, fetched once)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    parser.add_argument(
        "--dtype", default=dtype, help=f"float32 or bfloat16, of the target (default: {dtype})"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    for name in ("eagle3", "confu"):
        parser.add_argument(
            f"--{name}",
            metavar="PATH_OR_ID",
            help=f"the {LABELS[name]} draft head: folder or hub id (default: the one that ships "
            "for the default target)",
        )
    _add_target(parser, "float32")


def _add_settings(parser: argparse.ArgumentParser) -> None:
    default = Settings()
    numbers = (
        ("--max-new-tokens", int, "longest answer, in tokens"),
        ("--temperature", float, "0 is greedy; sampling is coupled by the seed"),
        ("--top-p", float, "sample from the smallest set with this probability; 1 is off"),
        ("--seed", int, "same seed, same text, whatever the method"),
        ("--nodes", int, "tree size, root included: 30 means 29 drafted tokens"),
        ("--depth", int, "levels of the tree below the root"),
        ("--top-k", int, "guesses per node, and nodes expanded per level"),
    )
    for option, kind, words in numbers:
        value = getattr(default, option[2:].replace("-", "_"))
        parser.add_argument(option, type=kind, default=value, help=f"{words} (default: {value})")


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.seed,
        options.nodes,
        options.depth,
        options.top_k,
    )


def _methods(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _engine(options: argparse.Namespace):
    from confu_core.compare import load_engine

    _set_threads(options.threads)
    named = {"eagle3": options.eagle3, "confu": options.confu}
    heads = {name: source for name, source in named.items() if source}
    return load_engine(options.target, options.device, _progress, options.dtype, heads or None)


def _set_threads(threads: int | None) -> None:
    if threads:
        import torch

        torch.set_num_threads(threads)


def _progress(message: str, fraction: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if fraction >= 1 else ""
        print(f"\r{message}: {100 * fraction:3.0f} %\x1b[K", end=end, file=sys.stderr, flush=True)
    elif fraction in (0, 1):  # a log gets the stages, not every per cent
        print(message, file=sys.stderr, flush=True)


# --- commands


def _add_fetch(commands) -> None:
    parser = commands.add_parser("fetch", help="fetch the default target if it is missing")
    parser.set_defaults(run=_fetch)


def _fetch(options: argparse.Namespace) -> None:
    from confu_core.assets import default_target

    print(default_target(_progress))


def _add_run(commands) -> None:
    parser = commands.add_parser("run", help="answer one prompt by one method, as it is written")
    parser.add_argument("prompt", help="the user's message")
    parser.add_argument(
        "--method", choices=LABELS, default="confu", help="how to decode (default: confu)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the trace of the run")
    _add_settings(parser)
    _add_engine(parser)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> bool:
    engine = _engine(options)
    shown = ""
    for event in engine.compare(options.prompt, _settings(options), [options.method]):
        if isinstance(event, Advanced):
            print(event.text[len(shown) :], end="", flush=True)
            shown = event.text
        elif isinstance(event, Finished):
            trace = event.trace
    lane = trace.lanes[options.method]
    print(lane.text[len(shown) :])
    print(
        f"{len(lane.tokens)} tokens, {lane.target_passes} target passes after the prompt, "
        f"tau {lane.tau:.2f}, {lane.seconds:.2f} s",
        file=sys.stderr,
    )
    _write_trace(options.trace, trace)
    if lane.error:
        print(f"error: {lane.error}", file=sys.stderr)
    return lane.error is None


def _write_trace(path: Path | None, trace: Trace) -> None:
    if path:
        path.write_text(trace.to_json(), encoding="utf-8")


def _add_compare(commands) -> None:
    parser = commands.add_parser("compare", help="one prompt, several methods, side by side")
    parser.add_argument("prompt", help="the user's message")
    parser.add_argument(
        "--methods",
        type=_methods,
        metavar="A,B,...",
        help="plain, eagle3, confu (default: all that have a head)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write texts and figures")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the full trace (docs/trace.md)"
    )
    _add_settings(parser)
    _add_engine(parser)
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> bool:
    engine = _engine(options)
    available = [name for name, info in engine.methods.items() if info.available]
    methods = options.methods or available
    written = dict.fromkeys(methods, 0)
    for event in engine.compare(options.prompt, _settings(options), methods):
        if isinstance(event, Advanced):
            written[event.lane] += len(event.record.tokens)
            _progress("decoding", min(0.99, min(written.values()) / options.max_new_tokens))
        elif isinstance(event, Finished):
            trace = event.trace
    _progress("decoded", 1.0)
    for name, lane in trace.lanes.items():
        print(f"--- {engine.methods[name].label}\n{lane.text}\n")
        if lane.error:
            print(f"error: {lane.error}\n")
    print("| method | tokens | target passes | tau | seconds | draft | verify | rest |")
    print("|---|---|---|---|---|---|---|---|")
    for name, lane in trace.lanes.items():
        draft, verify, rest = (
            sum(getattr(r.seconds, phase) for r in lane.rounds)
            for phase in ("draft", "verify", "rest")
        )
        print(
            f"| {engine.methods[name].label} | {len(lane.tokens)} | {lane.target_passes} "
            f"| {lane.tau:.2f} | {lane.seconds:.2f} | {draft:.2f} | {verify:.2f} | {rest:.2f} |"
        )
    print("\ntau: tokens gained per target pass, bonus token included; the prefill is not counted")
    differences = trace.differences()
    if len(trace.lanes) > 1 and not differences:
        print("same text: yes, token for token")
    for found in differences:
        print(
            f"same text: no. {found.lane_a} and {found.lane_b} first differ at token "
            f"{found.index}: {found.text_a!r} and {found.text_b!r}; "
            f"the target's margin there is {found.margin:.2g}"
        )
    if options.json:
        options.json.write_text(json.dumps(trace.figures(), indent=1) + "\n", encoding="utf-8")
    _write_trace(options.trace, trace)
    # In half precision near ties break either way; in float32 a difference is worth a look.
    same = not differences or trace.target.dtype != "float32"
    return same and not any(lane.error for lane in trace.lanes.values())


def _add_synth(commands) -> None:
    parser = commands.add_parser("synth", help="let the target write training text")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; continued if there")
    parser.add_argument("--conversations", type=int, required=True, help="how many it shall hold")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    _add_target(parser, "bfloat16")
    parser.set_defaults(run=_synth)


def _synth(options: argparse.Namespace) -> None:
    from confu_core.compare import load_target
    from confu_core.train.synth import synthesise

    _set_threads(options.threads)
    target = load_target(options.target, options.device, options.dtype, _progress)
    rows = synthesise(
        target,
        options.out,
        conversations=options.conversations,
        batch=options.batch,
        seed=options.seed,
    )
    for row in rows:
        print(json.dumps(row), flush=True)


def _add_train(commands) -> None:
    parser = commands.add_parser("train", help="train a draft head")
    parser.add_argument("method", choices=("eagle3", "confu"))
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="JSON lines")
    parser.add_argument("--run-folder", type=Path, required=True, help="state and log; resumes")
    parser.add_argument("--save", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--start", type=Path, help="checkpoint to continue from")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--contemplate-rate", type=float, default=1e-2)
    parser.add_argument("--anchor-every", type=int, default=3)
    parser.add_argument("--no-replication", action="store_true")
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--experts", type=int, help="1 makes the tokens static (no mixture)")
    parser.add_argument("--soft-prompts", type=int)
    parser.add_argument("--no-future-entry", action="store_true", help="f is not a key/value entry")
    parser.add_argument("--no-future-query", action="store_true", help="f does not steer states")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "no"))
    _add_target(parser, "bfloat16")
    parser.set_defaults(run=_train)


def _train(options: argparse.Namespace) -> None:
    from confu_core.compare import load_target
    from confu_core.train.loop import TrainSettings
    from confu_core.train.run import Recipe, run

    _set_threads(options.threads)
    target = load_target(options.target, options.device, options.dtype, _progress)
    switches: dict[str, int | bool] = {}
    if options.experts:
        switches |= {"contemplate_experts": options.experts, "future_experts": options.experts}
    if options.soft_prompts is not None:
        switches["soft_prompts"] = options.soft_prompts
    if options.no_future_entry:
        switches["future_entry"] = False
    if options.no_future_query:
        switches["future_query"] = False
    recipe = Recipe(
        method=options.method,
        data=tuple(options.data),
        settings=TrainSettings(
            steps=options.steps,
            batch_tokens=options.batch_tokens,
            unroll=options.unroll,
            rate=options.rate,
            contemplate_rate=options.contemplate_rate,
            seed=options.seed,
            anchor_every=options.anchor_every,
            replicate=not options.no_replication,
            evaluate_every=options.evaluate_every,
        ),
        run=options.run_folder,
        save=options.save,
        start=options.start,
        draft_vocab=options.draft_vocab,
        switches=tuple(switches.items()),
        precision=options.precision,
        command="python -m confu_core " + shlex.join(sys.argv[1:]),
    )
    run(target, recipe, lambda row: print(time.strftime("%H:%M:%S"), json.dumps(row), flush=True))


def _add_card(commands) -> None:
    parser = commands.add_parser(
        "card", help="write a checkpoint's model card anew from its record"
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.set_defaults(run=_card)


def _card(options: argparse.Namespace) -> None:
    from confu_core.train.card import write_card

    for folder in options.folders:
        write_card(folder)


def _add_bench(commands) -> None:
    parser = commands.add_parser("bench", help="methods interleaved on a question file")
    parser.add_argument("--prompts", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--limit", type=int, help="that many questions, spread over the groups")
    parser.add_argument("--methods", type=_methods, default=["plain", "eagle3", "confu"])
    parser.add_argument("--json", type=Path, help="write all figures and rows")
    _add_settings(parser)
    _add_engine(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> bool:
    from confu_core.bench.questions import load_questions, spread
    from confu_core.bench.run import Row, markdown, run, summary

    questions = spread(load_questions(options.prompts), options.limit)
    engine = _engine(options)
    settings = _settings(options)
    began = time.perf_counter()

    def report(done: int, total: int, rows: list[Row]) -> None:
        left = (time.perf_counter() - began) / done * (total - done)
        shown = ", ".join(f"{row.method} {row.tau:.2f}" for row in rows) or "left out"
        print(f"{done}/{total} {shown} ({left / 60:.1f} min left)", file=sys.stderr, flush=True)

    rows, failed = run(engine, questions, options.methods, settings, report)
    result = summary(rows, settings, options.methods) | {"failed": failed}
    print(markdown(result))
    for question, error in failed.items():
        print(f"error: question {question}: {error}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return not failed


def _add_profile(commands) -> None:
    parser = commands.add_parser("profile", help="milliseconds per phase of a round")
    parser.add_argument("--methods", type=_methods, default=["plain", "eagle3", "confu"])
    parser.add_argument("--prompt", default="Explain why the sky is blue in three sentences.")
    parser.add_argument("--repeats", type=int, default=3)
    _add_settings(parser)
    _add_engine(parser)
    parser.set_defaults(run=_profile)


def _profile(options: argparse.Namespace) -> None:
    from confu_core.bench.profile import profile

    engine = _engine(options)
    rows = profile(engine, options.methods, options.prompt, _settings(options), options.repeats)
    columns = list(rows[0])
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[name]) for name in columns) + " |")


if __name__ == "__main__":
    sys.exit(main())
