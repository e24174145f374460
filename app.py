"""Start the teaching app: `python app.py`, or the same file as a Hugging Face Space."""

import argparse

from app.runs import EngineSource
from app.ui import build_demo, launch_options


def engine_source(target: str | None, device: str) -> EngineSource:
    """How to load the engine, once somebody needs it."""

    def load(report):
        from confu_core import load_engine  # torch comes with it: not before the page answers

        return load_engine(target, device, report)

    return load


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python app.py",
        description="Plain decoding, EAGLE-3 and ConFu on one prompt, side by side, step by step.",
    )
    parser.add_argument("--host", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, help="port (default: the first free one from 7860)")
    parser.add_argument("--target", help="model id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default)")
    return parser.parse_args(arguments)


options = parse(None if __name__ == "__main__" else [])
demo = build_demo(engine_source(options.target, options.device))

if __name__ == "__main__":
    demo.launch(
        server_name=options.host,
        server_port=options.port,
        prevent_thread_lock=True,
        **launch_options(),
    )
    demo.runs.slot.start()
    demo.block_thread()
