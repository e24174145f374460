"""Start the teaching app: `python app.py`, or the same file as a Hugging Face Space."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from app import gpu  # brings `spaces`, which must come before torch
from app.choices import Choice, of_preset
from app.ui import build_demo, launch_options
from confu_core import presets
from confu_core.presets import DEFAULT, PRESETS


def own_choice(options: argparse.Namespace) -> Choice:
    """The model that the options name: a target, heads, or both; without a target the preset's."""
    named = {"eagle3": options.eagle3, "confu": options.confu, "confu-lite": options.confu_lite}
    heads = {name: source for name, source in named.items() if source} or None
    preset = PRESETS[options.preset]

    def load(report: Callable[[str, float], None]) -> Any:
        from confu_core import load_engine  # torch comes with it: not before the page answers

        how = {
            "device": options.device,
            "progress": report,
            "heads": heads,
            "taps": options.taps,
            "bits": options.bits,
        }
        if options.target is None:
            return presets.load(preset, dtype=options.dtype, **how)
        presets.free_memory()
        return load_engine(options.target, dtype=options.dtype or "float32", **how)

    return Choice("own", options.target or preset.title, load)


def choices(options: argparse.Namespace) -> list[Choice]:
    """The model to begin with, then the others that visitors may choose.

    A ZeroGPU Space has one alone: its models must lie on the device before the page opens.
    """
    offered = {
        name: of_preset(preset, options.device, options.bits if name != DEFAULT else None)
        for name, preset in PRESETS.items()
    }
    own = ("target", "eagle3", "confu", "confu_lite", "taps", "dtype")
    if any(getattr(options, name) for name in own):
        first = own_choice(options)
    else:
        first = offered.pop(options.preset)
    return [first] if gpu.lends() else [first, *offered.values()]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python app.py",
        description="Plain decoding, EAGLE-3 and ConFu on one prompt, side by side, step by step.",
    )
    parser.add_argument("--host", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    parser.add_argument(
        "--preset",
        help=f"the model to begin with, of {', '.join(PRESETS)} (default: $CONFU_PRESET, else "
        f"{DEFAULT})",
    )
    parser.add_argument("--target", help="a model of your own instead: folder or hub id")
    parser.add_argument("--eagle3", help="the EAGLE-3 head for it: folder or hub id")
    parser.add_argument("--confu", help="the ConFu head for it: folder or hub id")
    parser.add_argument("--confu-lite", help="the ConFu lite head for it: folder or hub id")
    parser.add_argument(
        "--taps", help="how a published EAGLE-3 head counts the layers that it reads, if unclear"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, mps, spread over all GPUs, or auto (default)"
    )
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: the preset's own; float32)"
    )
    parser.add_argument(
        "--bits", type=int, help="4 or 8: pack the weights of large targets (needs bitsandbytes)"
    )
    options = parser.parse_args(arguments)
    if options.preset and options.target:
        parser.error("--preset names a target too: leave --target out, or --preset")
    options.preset = options.preset or os.environ.get("CONFU_PRESET") or DEFAULT
    if options.preset not in PRESETS:
        parser.error(f"there is no preset {options.preset!r}; choose of {', '.join(PRESETS)}")
    return options


options = parse(None if __name__ == "__main__" else [])
first, *others = choices(options)
demo = build_demo(first, others=others)

if __name__ == "__main__":
    if gpu.lends():
        demo.runs.slot.start()
        demo.runs.slot.wait()
    demo.launch(
        server_name=options.host,
        server_port=options.port,
        prevent_thread_lock=True,
        **launch_options(),
    )
    demo.runs.slot.start()
    demo.block_thread()
