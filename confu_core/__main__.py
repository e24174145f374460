"""Commands: `python -m confu_core COMMAND --help`. Parses and prints; computes nothing itself."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from confu_core.errors import ConFuError, SettingsError
from confu_core.events import Advanced, Finished
from confu_core.trace import LABELS, Settings, Trace


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m confu_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_fetch(commands)
    _add_presets(commands)
    _add_run(commands)
    _add_compare(commands)
    _add_synth(commands)
    _add_train(commands)
    _add_ablate(commands)
    _add_curve(commands)
    _add_card(commands)
    _add_export(commands)
    _add_bench(commands)
    _add_profile(commands)
    _add_limits(commands)
    _add_calibration(commands)
    _add_scaling(commands)
    options = parser.parse_args(arguments)
    try:
        if getattr(options, "recipe", None):
            commands.choices["train"].set_defaults(**_with_recipe(options))
            options = parser.parse_args(arguments)
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
    parser.add_argument(
        "--device",
        default="auto",
        help="auto, cpu, cuda, mps, or spread over all GPUs (default: auto)",
    )
    parser.add_argument(
        "--dtype",
        default=dtype,
        help=f"float32, bfloat16 or float16, of the target (default: {dtype})",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: all)")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    for name in ("eagle3", "confu", "confu-lite"):
        parser.add_argument(
            f"--{name}",
            metavar="PATH_OR_ID",
            help=f"the {LABELS[name]} draft head: folder or hub id (default: the one that ships "
            "for the default target)",
        )
    parser.add_argument(
        "--preset", metavar="NAME", help="a target with its public head: see `presets`"
    )
    _add_taps(parser)
    parser.add_argument(
        "--bits", type=int, help="4 or 8: pack the target's weights (needs bitsandbytes)"
    )
    _add_target(parser, "float32")
    parser.set_defaults(dtype=None)  # a preset has its own


def _add_taps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--taps",
        metavar="HOW[:A,B,C]",
        help="how a published EAGLE-3 head counts the layers that it reads, input or output, "
        "where its config leaves that open; and which they are, where it does not say",
    )


VARIED = ("--temperature", "--seed", "--nodes", "--contemplate")  # those that a grid takes lists of


def _add_settings(parser: argparse.ArgumentParser, grid: bool = False) -> None:
    default = Settings()
    numbers = (
        ("--max-new-tokens", int, "longest answer, in tokens"),
        ("--temperature", float, "0 is greedy; sampling is coupled by the seed"),
        ("--top-p", float, "sample from the smallest set with this probability; 1 is off"),
        ("--seed", int, "same seed, same text, whatever the method"),
        (
            "--nodes",
            _tree_size,
            "tree size, root included: 30 means 29 drafted tokens; auto: "
            "each round takes what pays on this machine",
        ),
        ("--depth", int, "levels of the tree below the root"),
        ("--top-k", int, "guesses per node, and nodes expanded per level"),
        ("--contemplate", float, "share of the nodes that carry a contemplate token"),
    )
    for option, kind, words in numbers:
        value = getattr(default, option[2:].replace("-", "_"))
        words = f"{words} (default: {value})"
        if grid and option in VARIED:
            kind, value, words = _listed(kind), (value,), f"{words}; A,B,... runs each"
        parser.add_argument(option, type=kind, default=value, help=words)


def _settings(options: argparse.Namespace) -> Settings:
    return Settings(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.seed,
        options.nodes,
        options.depth,
        options.top_k,
        options.contemplate,
    )


def _tree_size(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(text)


def _listed(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """An option's values with commas between them."""

    def values(text: str) -> tuple:
        found = tuple(kind(part.strip()) for part in text.split(",") if part.strip())
        if not found:
            raise argparse.ArgumentTypeError("at least one value is needed")
        return found

    return values


def _methods(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _engine(options: argparse.Namespace):
    from confu_core import presets
    from confu_core.compare import load_engine

    if options.preset and options.target:
        raise SettingsError("--preset names a target too: leave --target out, or --preset.")
    _set_threads(options.threads)
    named = {
        "eagle3": options.eagle3,
        "confu": options.confu,
        "confu-lite": options.confu_lite,
    }
    heads = {name: source for name, source in named.items() if source} or None
    if options.preset:
        preset = presets.find(options.preset)
        engine = presets.load(
            preset, options.device, _progress, heads, options.dtype, options.taps, options.bits
        )
    else:
        dtype = options.dtype or "float32"
        engine = load_engine(
            options.target, options.device, _progress, dtype, heads, options.taps, options.bits
        )
    for method in engine.methods.values():
        for note in method.notes:
            print(f"{method.label}: {note}", file=sys.stderr)
        for warning in method.warnings:
            print(f"warning: {method.label}: {warning}", file=sys.stderr)
    return engine


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


def _add_presets(commands) -> None:
    parser = commands.add_parser("presets", help="targets to choose from, and what they take")
    parser.add_argument(
        "--bits", type=int, choices=(4, 8), help="what they take with their weights packed"
    )
    parser.set_defaults(run=_presets)


def _presets(options: argparse.Namespace) -> None:
    from confu_core.presets import PRESETS, gigabytes, refusal, this_machine

    machine = this_machine()
    print("| preset | target | EAGLE-3 head | ConFu | download | memory | precision | here |")
    print("|---|---|---|---|---|---|---|---|")
    for preset in PRESETS.values():
        shipped = preset.heads is None
        head = "ships" if shipped else preset.heads.get("eagle3", "none")
        bits = None if shipped else options.bits
        print(
            f"| {preset.name} | {preset.target or preset.title} | {head} "
            f"| {'ships' if shipped else 'none'} | {gigabytes(preset.download_bytes)} GB "
            f"| {gigabytes(preset.memory_bytes(bits=bits))} GB "
            f"| {preset.dtype}{f', {bits}-bit weights' if bits else ''} "
            f"| {refusal(preset, machine, bits=bits) or 'runs'} |"
        )
    for preset in PRESETS.values():
        if preset.gate:
            print(f"\n{preset.title}: accept the {preset.gate} on its hub page first.")
        if preset.note:
            print(f"\n{preset.title}: {preset.note}")


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
        help="plain, eagle3, confu, confu-lite (default: all that have a head)",
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
    parser.add_argument(
        "--conversations", type=int, default=10**9, help="how many it shall hold (default: no end)"
    )
    parser.add_argument(
        "--prompts", type=Path, help="answer these: JSON lines with 'user', or one request a line"
    )
    parser.add_argument("--batch", type=int, default=512, help="requests that are drawn at once")
    parser.add_argument("--seed", type=int, default=0)
    _add_target(parser, "bfloat16")
    parser.set_defaults(run=_synth)


def _synth(options: argparse.Namespace) -> None:
    from confu_core.compare import load_target
    from confu_core.train.synth import read_prompts, synthesise

    _set_threads(options.threads)
    target = load_target(options.target, options.device, options.dtype, _progress)
    rows = synthesise(
        target,
        options.out,
        conversations=options.conversations,
        batch=options.batch,
        seed=options.seed,
        prompts=read_prompts(options.prompts) if options.prompts else None,
    )
    for row in rows:
        print(json.dumps(row), flush=True)


def _add_train(commands) -> None:
    parser = commands.add_parser("train", help="train a draft head")
    parser.add_argument("method", choices=("eagle3", "confu"))
    parser.add_argument(
        "--recipe",
        metavar="NAME_OR_FILE",
        help="target and options for a large target (docs/large-targets.md); others given here win",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="with --recipe: check shapes, memory, time and the first steps of a stand-in",
    )
    _add_training(parser, required=False)  # a dry run needs none of it
    parser.add_argument("--no-replication", action="store_true")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--experts", type=int, help="1 makes the tokens static (no mixture)")
    parser.add_argument("--soft-prompts", type=int)
    parser.add_argument("--no-future-entry", action="store_true", help="f is not a key/value entry")
    parser.add_argument("--no-future-query", action="store_true", help="f does not steer states")
    parser.add_argument("--adapter-rank", type=int, help="of adapters on contemplate rows")
    parser.add_argument("--read-outs", type=int, help="how many tokens f also names itself")
    parser.add_argument(
        "--renew-routers", action="store_true", help="of a ConFu head that collapsed (--start)"
    )
    parser.add_argument(
        "--profile", type=int, metavar="STEPS", help="time so many steps instead of training"
    )
    parser.set_defaults(run=_train)


def _add_training(parser: argparse.ArgumentParser, required: bool) -> None:
    """What a training run and an ablation share."""
    parser.add_argument("--data", type=Path, nargs="+", required=required, help="JSON lines")
    parser.add_argument("--run-folder", type=Path, required=required, help="state and log; resumes")
    parser.add_argument("--save", type=Path, required=required, help="checkpoint folder to write")
    parser.add_argument("--start", type=Path, help="checkpoint to continue from")
    parser.add_argument("--steps", type=int, required=required)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--unroll", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--contemplate-rate", type=float, default=1e-2)
    parser.add_argument("--adapter-rate", type=float, default=3e-3)
    parser.add_argument("--anchor-every", type=int, default=3)
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "no"))
    parser.add_argument(
        "--features",
        default="memory",
        metavar="WHERE",
        help="where to keep what the target read of the text: memory (default; without keys and "
        "values), recompute, or a folder, which later runs over the same text use too",
    )
    _add_target(parser, "bfloat16")


def _recipe(options: argparse.Namespace, method: str):
    """A `Recipe` from the options of `_add_training`."""
    from confu_core.train.loop import TrainSettings
    from confu_core.train.run import Recipe

    settings = TrainSettings(
        steps=options.steps,
        batch_tokens=options.batch_tokens,
        unroll=options.unroll,
        rate=options.rate,
        contemplate_rate=options.contemplate_rate,
        adapter_rate=options.adapter_rate,
        seed=options.seed,
        anchor_every=options.anchor_every,
        evaluate_every=options.evaluate_every,
    )
    return Recipe(
        method=method,
        data=tuple(options.data),
        settings=settings,
        run=options.run_folder,
        save=options.save,
        start=options.start,
        precision=options.precision,
        features=options.features,
        command="python -m confu_core " + shlex.join(sys.argv[1:]),
    )


def _with_recipe(options: argparse.Namespace) -> dict[str, Any]:
    """The defaults of `train` that its recipe sets."""
    from confu_core.train.plan import load_plan

    plan = load_plan(options.recipe)
    chosen = {"target": plan.target, **plan.options[options.method]}
    unknown = [name for name in chosen if name not in vars(options)]
    if unknown:
        raise SettingsError(
            f"Recipe {plan.name!r} has options that `train` does not know: {', '.join(unknown)}."
        )
    return chosen


def _dry_run(options: argparse.Namespace) -> bool:
    from confu_core.train.dryrun import dry_run
    from confu_core.train.plan import load_plan

    if not options.recipe:
        raise SettingsError("--dry-run checks a recipe: name one with --recipe.")
    plan = load_plan(options.recipe)
    stage = {name: getattr(options, name) for name in plan.options[options.method]}
    plan = dataclasses.replace(plan, options={**plan.options, options.method: stage})
    return dry_run(plan, options.method, lambda line: print(line, flush=True))


def _train(options: argparse.Namespace) -> bool | None:
    if options.dry_run:
        return _dry_run(options)
    wanted = ("data", "run_folder", "save", "steps")
    missing = [f"--{name.replace('_', '-')}" for name in wanted if getattr(options, name) is None]
    if missing:
        raise SettingsError(f"A training run needs {', '.join(missing)}.")
    from confu_core.compare import load_target
    from confu_core.train.run import process_device, profile_run, run

    _on_one_device(options)
    _set_threads(options.threads)
    device = process_device() if options.device == "auto" else options.device
    target = load_target(options.target, device, options.dtype, _progress)
    switches: dict[str, int | bool] = {}
    if options.experts:
        switches |= {"contemplate_experts": options.experts, "future_experts": options.experts}
    if options.soft_prompts is not None:
        switches["soft_prompts"] = options.soft_prompts
    if options.no_future_entry:
        switches["future_entry"] = False
    if options.no_future_query:
        switches["future_query"] = False
    if options.adapter_rank:
        switches["adapter_rank"] = options.adapter_rank
    if options.read_outs:
        switches["read_outs"] = options.read_outs
    recipe = _recipe(options, options.method)
    recipe = dataclasses.replace(
        recipe,
        settings=dataclasses.replace(recipe.settings, replicate=not options.no_replication),
        draft_vocab=options.draft_vocab,
        switches=tuple(switches.items()),
        renew_routers=options.renew_routers,
    )
    if options.profile:
        print(profile_run(target, recipe, options.profile).markdown())
        return
    run(target, recipe, lambda row: print(time.strftime("%H:%M:%S"), json.dumps(row), flush=True))


def _on_one_device(options: argparse.Namespace) -> None:
    if options.device == "spread":
        raise SettingsError("Training needs the target on one device; choose another --device.")


def _add_ablate(commands) -> None:
    parser = commands.add_parser(
        "ablate", help="train every variant of ConFu on the same text, and compare them"
    )
    _add_training(parser, required=True)
    parser.add_argument("--variants", help="comma separated (default: all)")
    parser.add_argument("--table", type=Path, help="write the figures as Markdown")
    parser.set_defaults(run=_ablate)


def _ablate(options: argparse.Namespace) -> None:
    from confu_core.compare import load_target
    from confu_core.train.ablate import VARIANTS, ablate, table

    names = options.variants.split(",") if options.variants else list(VARIANTS)
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise SettingsError(f"No variant {unknown[0]!r}. There are: {', '.join(VARIANTS)}.")
    _on_one_device(options)
    _set_threads(options.threads)
    target = load_target(options.target, options.device, options.dtype, _progress)
    figures = {}

    def report(name: str, row: dict) -> None:
        print(time.strftime("%H:%M:%S"), name, json.dumps(row), flush=True)

    for name, held_out in ablate(target, _recipe(options, "confu"), names, report):
        figures[name] = held_out
        print(table(figures), flush=True)
        if options.table:
            options.table.write_text(table(figures) + "\n", encoding="utf-8")


def _add_curve(commands) -> None:
    parser = commands.add_parser("curve", help="draw held-out acceptance over training")
    parser.add_argument("series", nargs="+", help="NAME=RUN_FOLDER+RUN_FOLDER, one after the other")
    parser.add_argument("--figure", default="tau_top8", choices=("tau_top8", "tau_chain"))
    parser.add_argument("--svg", type=Path, required=True)
    parser.set_defaults(run=_curve)


def _curve(options: argparse.Namespace) -> None:
    from confu_core.charts import line_chart
    from confu_core.train.curve import per_doubling, read_series

    lines = [read_series(text, options.figure) for text in options.series]
    for line in lines:
        for starts, value in line.points:
            print(f"{line.name}: {starts:.3f} M starts, {options.figure} {value:.3f}")
        if len(line.points) > 1:
            gain = per_doubling(line.points)
            print(f"{line.name}: {gain:+.3f} for each doubling of the starts")
    picture = line_chart(
        lines,
        title="Held-out acceptance over training",
        x="starts trained on (millions)",
        y={"tau_top8": "top-8 tau", "tau_chain": "chain tau"}[options.figure],
    )
    options.svg.write_text(picture, encoding="utf-8")


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


def _add_export(commands) -> None:
    parser = commands.add_parser(
        "export", help="write an EAGLE-3 head as vLLM or SGLang read it (docs/serving.md)"
    )
    parser.add_argument("head", metavar="HEAD", help="of ours or published: folder or hub id")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    parser.add_argument(
        "--layout",
        choices=("specforge", "speculators"),
        required=True,
        help="specforge for SGLang, speculators for vLLM",
    )
    parser.add_argument(
        "--target",
        metavar="ID_OR_PATH",
        help="the target that the head belongs to; its weights are not loaded (default: the "
        "default target)",
    )
    _add_taps(parser)
    parser.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> None:
    from confu_core.assets import default_target
    from confu_core.checkpoints import find_checkpoint
    from confu_core.compare import DEFAULT_TARGET
    from confu_core.published import export_head
    from confu_core.taps import TapChoice
    from confu_core.target import Target

    target = Target.outline(options.target or default_target(_progress))
    if options.target is None:
        target.name = DEFAULT_TARGET
    choice = TapChoice.parse(options.taps) if options.taps else None
    export_head(find_checkpoint(options.head), options.out, options.layout, target, choice)
    print(options.out)


def _add_bench(commands) -> None:
    parser = commands.add_parser("bench", help="methods interleaved on a set of questions")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="Spec-Bench's question.jsonl, or a file like it (default: 48 questions of our own)",
    )
    parser.add_argument("--limit", type=int, help="that many questions, spread over the groups")
    parser.add_argument(
        "--methods", type=_methods, metavar="A,B,...", help="default: all that have a head"
    )
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="one more trained head as a method of that name, an ablation for instance",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="with transformers' own generate: greedy and prompt lookup (at temperature 0)",
    )
    parser.add_argument(
        "--assistant",
        metavar="ID_OR_PATH",
        help="a smaller model of the target's vocabulary: adds assisted generation to the peers",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures and rows; grows beside it"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the rows of a run that was stopped"
    )
    parser.add_argument(
        "--report", type=Path, nargs="+", metavar="FILE", help="run nothing; show these results"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="the page that --report makes")
    _add_settings(parser, grid=True)
    _add_engine(parser)
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> bool:
    if options.report:
        return _bench_report(options)
    if options.write:
        raise SettingsError("--write makes a page from finished results: name them with --report.")
    if options.resume and not options.json:
        raise SettingsError("--resume needs --json FILE: the rows of a run lie beside its result.")
    from confu_core.bench import lanes as bench_lanes
    from confu_core.bench.facts import place_of, settings_of
    from confu_core.bench.figures import faults, summary
    from confu_core.bench.journal import Journal, journal_path
    from confu_core.bench.peers import peers
    from confu_core.bench.questions import OWN, load_questions, spread
    from confu_core.bench.report import progress, tables
    from confu_core.bench.results import write_result
    from confu_core.bench.run import run

    source = options.prompts or OWN
    questions = spread(load_questions(source), options.limit)
    grid = _grid(options)
    engine = _engine(options)
    target, shares = engine.target, options.contemplate
    methods = bench_lanes.load_methods(engine, options.methods, options.also)
    lanes = list(bench_lanes.own_lanes(methods, target, shares))
    if options.peers or options.assistant:
        lanes += peers(target, options.assistant)
    lanes = bench_lanes.order_lanes(lanes)
    settings = settings_of(grid, lanes, questions, source, shares, options.assistant)
    settings |= place_of(target, methods, _command())
    path = journal_path(options.json) if options.json else None
    journal = Journal(path, settings, options.resume)
    began = time.perf_counter()

    def report(done, total, question, rows) -> None:
        seconds = time.perf_counter() - began
        print(progress(done, total, seconds, question, rows), file=sys.stderr, flush=True)

    run(target, lanes, questions, grid, journal, report)
    result = summary(journal.settings, journal.rows, journal.left_out)
    if options.json:
        write_result(options.json, result, journal.rows)
    print(tables(result))
    wrong = faults(result)
    for found in wrong:
        print(
            f"error: {found['method']} differs at token {found['token']} of question "
            f"{found['question']}, and this is no near tie: margin {found['margin']}",
            file=sys.stderr,
        )
    return bool(journal.rows) and not wrong


def _grid(options: argparse.Namespace):
    from confu_core.bench.run import Grid

    first = {name[2:]: getattr(options, name[2:])[0] for name in VARIED}
    base = _settings(argparse.Namespace(**(vars(options) | first)))
    return Grid(base, options.temperature, options.nodes, options.seed)


def _bench_report(options: argparse.Namespace) -> bool:
    from confu_core.bench.report import document
    from confu_core.bench.results import read_result

    results = [(path, read_result(path)) for path in options.report]
    files = shlex.join(map(str, options.report))
    written = options.write or Path("docs/benchmarks.md")
    page = document(results, f"python -m confu_core bench --report {files} --write {written}")
    if options.write:
        options.write.write_text(page, encoding="utf-8")
    else:
        print(page, end="")
    return True


def _command() -> str:
    """The command under way, without the folders of its files."""

    def without_folder(word: str) -> str:
        name, separator, value = word.rpartition("=")
        path = Path(value)
        known = path.name and (path.is_absolute() or path.exists())
        return f"{name}{separator}{path.name}" if known else word

    return "python -m confu_core " + shlex.join(map(without_folder, sys.argv[1:]))


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


def _add_limits(commands) -> None:
    parser = commands.add_parser(
        "limits", help="how near a round comes to what this machine allows, phase by phase"
    )
    parser.add_argument("--methods", type=_methods, metavar="A,B,...")
    parser.add_argument("--prompt", default="Explain why the sky is blue in three sentences.")
    parser.add_argument("--repeats", type=int, default=3)
    _add_results(parser)
    _add_settings(parser)
    _add_engine(parser)
    parser.set_defaults(run=_limits)


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page with marks for tables")


def _limits(options: argparse.Namespace) -> None:
    from confu_core.bench import limits
    from confu_core.bench.lanes import load_methods
    from confu_core.prompt import chat_ids

    engine = _engine(options)
    methods = load_methods(engine, options.methods, ())
    ids = chat_ids(engine.target, options.prompt)
    found = limits.measure(engine.target, methods, ids, _settings(options), options.repeats, _say)
    title = f"Floors in {engine.target.precision}"
    _publish(options, engine, methods, found, limits.markdown(found), title)


def _add_calibration(commands) -> None:
    parser = commands.add_parser(
        "calibration", help="how often the draft is right, by the probability that it gives"
    )
    parser.add_argument("--prompts", type=Path, help="a question file (default: our own)")
    parser.add_argument("--limit", type=int, help="that many questions, spread over the groups")
    parser.add_argument("--methods", type=_methods, default=["eagle3", "confu"])
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it")
    _add_results(parser)
    _add_settings(parser, grid=True)
    _add_engine(parser)
    parser.set_defaults(run=_calibration)


def _calibration(options: argparse.Namespace) -> None:
    from confu_core.bench import calibration
    from confu_core.bench.lanes import load_methods
    from confu_core.bench.questions import OWN, load_questions, spread

    questions = spread(load_questions(options.prompts or OWN), options.limit)
    engine = _engine(options)
    methods = load_methods(engine, options.methods, ())
    grid = _grid(options)
    found = calibration.measure(
        engine.target,
        methods,
        questions,
        grid.temperatures,
        grid.base,
        lambda done, total: _say(f"question {done} of {total}"),
    )
    if options.svg:
        options.svg.write_text(calibration.chart(found), encoding="utf-8")
    result = {"calibration": found, "questions": len(questions)}
    text = calibration.markdown(found)
    _publish(options, engine, methods, result, text, "Calibration")


def _publish(options, engine, methods, found: dict, text: str, title: str) -> None:
    """Print a measurement, with where and how it was made, and write it where it was asked for."""
    from confu_core.bench.facts import place_lines, place_of
    from confu_core.bench.scaling import write_section

    place = place_of(engine.target, methods, _command())
    text = "\n".join(place_lines(place)) + "\n\n" + text
    print(text)
    if options.json:
        result = {"settings": place} | found
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write_section(options.write, text, title)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _add_scaling(commands) -> None:
    parser = commands.add_parser(
        "scaling", help="cost of a round by context length and tree size, memory, a long run"
    )
    parser.add_argument("--methods", type=_methods, metavar="A,B,...")
    parser.add_argument(
        "--contexts",
        type=_listed(int),
        default=(128, 512, 2048, 4096, 1_000_000),
        metavar="A,B,...",
        help="prompt lengths; more than the target's context is its end "
        "(default: 128,512,2048,4096 and the end)",
    )
    parser.add_argument(
        "--nodes", type=_listed(_tree_size), default=(1, 8, 30, 60), metavar="A,B,..."
    )
    parser.add_argument("--depth", type=int, default=Settings().depth)
    parser.add_argument("--top-k", type=int, default=Settings().top_k)
    parser.add_argument("--rounds", type=int, default=12, help="timed per point (default: 12)")
    parser.add_argument(
        "--long", type=int, default=2000, help="tokens of the long run; 0 leaves it out"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a page with marks for tables")
    _add_engine(parser)
    parser.set_defaults(run=_scaling)


def _scaling(options: argparse.Namespace) -> None:
    from confu_core.bench import scaling
    from confu_core.bench.facts import place_of
    from confu_core.bench.lanes import load_methods

    engine = _engine(options)
    target = engine.target
    methods = load_methods(engine, options.methods, ())
    settings = Settings(depth=options.depth, top_k=options.top_k)

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = {
        "settings": {"depth": options.depth, "top_k": options.top_k, "rounds": options.rounds}
        | place_of(target, methods, _command()),
        "weight_bytes": scaling.weight_bytes(target),
        "bytes_per_token": scaling.bytes_of(target.new_cache(1)),
        "points": scaling.measure(
            target, methods, options.contexts, options.nodes, options.rounds, settings, report
        ),
        "long_run": scaling.long_run(target, methods, options.long, settings, report),
    }
    text = scaling.markdown(result)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.write:
        scaling.write_section(options.write, text)


if __name__ == "__main__":
    sys.exit(main())
