"""How near a round comes to what the machine allows: bytes and operations counted, the machine
measured, floor against time per phase.

The floor of a pass is the larger of two times: reading every weight and cached key and value that
it needs once, at the speed of a copy in memory, and its multiplications at the speed of a large
matrix product. No pass can beat it; norms, softmax and starting kernels are not in it.

Letters: R rows of a pass, N nodes, P tokens of text, L layers, H width, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from confu_core.bench.lanes import OwnLane
from confu_core.bench.peers import Peer
from confu_core.bench.recorder import recorder_shares
from confu_core.bench.report import table
from confu_core.costs import ROWS, measured
from confu_core.decoding import Round, decode
from confu_core.fused import Compute, Reordered, reorders
from confu_core.heads import DraftHead
from confu_core.methods import PLAIN, Method
from confu_core.sizes import TargetShape
from confu_core.target import Target
from confu_core.trace import Settings

COPY_BYTES, LAYOUT_BYTES = 1 << 28, 1 << 26  # beyond a core's caches
PRODUCT_SIZES = (1024, 2048)  # rows and columns of the timed matrices
LAYOUT_ROWS = (1, 4, 8, 16, 30, 60)
TRIES = 5


@dataclass(frozen=True)
class Machine:
    """What the device gives, measured: bytes moved per second by a copy (read and written), and
    operations per second (a multiplication and an addition are two) of a large matrix product."""

    bytes_per_second: float
    operations_per_second: float

    def floor(self, work: Work) -> float:
        """Seconds that this work takes at least."""
        return max(work.bytes / self.bytes_per_second, work.operations / self.operations_per_second)


@dataclass(frozen=True)
class Work:
    """What a pass needs: bytes to read, operations to do."""

    bytes: int
    operations: int

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def times(self, count: int) -> Work:
        return Work(count * self.bytes, count * self.operations)


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of a few tries at both."""
    source = torch.zeros(COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
    place = torch.empty_like(source)
    copy = _best(lambda: place.copy_(source), device)
    rates = []
    for size in PRODUCT_SIZES:
        left = torch.randn(size, size, device=device).to(dtype)
        rates.append(2 * size**3 / _best(lambda left=left: left @ left, device))
    return Machine(2 * source.nbytes / copy, max(rates))


def _best(run: Callable[[], object], device: torch.device) -> float:
    run()
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


@torch.inference_mode()
def measure_layouts(target: Target) -> list[dict]:
    """Milliseconds of products with matrices of the MLP's size, in the ways in which their weights
    can be stored, alternating; the best of a few tries each.

    output: output by output, as checkpoints have them. input: input by input. onednn: a second copy
    in oneDNN's order, only where the target's weights have one (`fused.py`).
    """
    size = (target.intermediate, target.hidden)
    count = max(1, LAYOUT_BYTES // (size[0] * size[1] * target.dtype.itemsize))
    by_output = [torch.randn(size, device=target.device).to(target.dtype) for _ in range(count)]
    ways: dict[str, list[Compute]] = {
        "output": [partial(F.linear, weight=weight) for weight in by_output],
        "input": [partial(F.linear, weight=w.t().contiguous().t()) for w in by_output],
    }
    if reorders(target.model):
        ways["onednn"] = [Reordered(weight, None) for weight in by_output]
    found = []
    for rows in LAYOUT_ROWS:
        x = torch.randn(rows, size[1], device=target.device).to(target.dtype)
        times = {
            way: min(
                _best(lambda products=products, x=x: [run(x) for run in products], target.device)
                for _ in range(2)
            )
            for way, products in ways.items()
        }
        milliseconds = {f"by_{way}_ms": round(1000 * t, 2) for way, t in times.items()}
        found.append({"rows": rows} | milliseconds)
    return found


def measure_passes(target: Target, methods: Sequence[Method]) -> list[dict]:
    """Milliseconds of a target pass over more and more rows, as an automatic budget measures them
    (`costs.py`): what decides how many guesses are worth checking."""
    with_head = [method for method in methods if method.checkpoint is not None]
    if not with_head:
        return []
    seconds = measured(target, with_head[0]).verify
    return [
        {"rows": rows, "ms": round(1000 * seconds[rows - 1], 1)}
        for rows in ROWS
        if rows <= len(seconds)
    ]


# --- counting


def target_work(shape: TargetShape, rows: int, scored: int, text: int, width: int) -> Work:
    """A target pass.

    Args:
        rows: R, contemplate tokens included. scored: rows whose logits are wanted.
        text: P tokens that are in the cache already. width: bytes per number.
    """
    matrices = shape.layers * shape.layer_matrices
    output = shape.vocab * shape.hidden
    cached = 2 * shape.layers * text * shape.kv_width
    attention = 4 * shape.layers * rows * (text + rows) * shape.query_width
    return Work(
        bytes=width * (matrices + output + cached),
        operations=2 * rows * matrices + 2 * scored * output + attention,
    )


def draft_work(head: DraftHead, rows: int, first: bool, text: int, width: int) -> Work:
    """A pass of the draft head.

    Args:
        first: whether it is a round's first, which also fuses the target's features.
    """
    shape = head.shape
    fuse = head.fc.weight.numel()
    layers = [head.q_proj, head.k_proj, head.v_proj, head.o_proj]
    layers += [head.gate_proj, head.up_proj, head.down_proj, head.lm_head]
    matrices = sum(layer.weight.numel() for layer in layers) + (fuse if first else 0)
    cached = 2 * text * shape.kv_heads * shape.head_dim
    attention = 4 * rows * (text + rows) * shape.heads * shape.head_dim
    return Work(width * (matrices + cached), 2 * rows * matrices + attention)


# --- measuring


@torch.inference_mode()
def measure(
    target: Target,
    methods: dict[str, Method],
    prompt_ids: list[int],
    settings: Settings,
    repeats: int,
    report: Callable[[str], None],
) -> dict:
    """Floors and times of every method at this prompt, methods interleaved; plain decoding against
    `transformers`' greedy `generate`, alternating; and what a recorder adds.

    Args:
        repeats: timed runs of each; one more goes before them, untimed.
    """
    report("measuring the machine")
    machines = [measure_machine(target.device, target.dtype)]
    peer, own = Peer("transformers", target), OwnLane("plain", PLAIN, target)
    rounds: dict[str, list[Round]] = {name: [] for name in methods}
    shares: dict[str, list[float]] = {name: [] for name in methods}
    per_token: dict[str, list[float]] = {"plain": [], "transformers": []}
    for repeat in range(repeats + 1):
        report(f"run {repeat} of {repeats}")
        answers = {lane.name: lane.answer(prompt_ids, settings) for lane in (own, peer)}
        for name, method in methods.items():
            alone = list(decode(target, method, prompt_ids, settings))
            watched = recorder_shares(target, method, prompt_ids, settings)
            if repeat:
                rounds[name] += alone
                shares[name] += watched
        for name, answer in answers.items():
            if repeat:
                count = len(answer.token_ids) - answer.first_tokens
                per_token[name].append(1000 * answer.seconds / count)
    machines.append(measure_machine(target.device, target.dtype))
    machine = Machine(  # the better of two moments, so that a busy one lowers no floor
        max(found.bytes_per_second for found in machines),
        max(found.operations_per_second for found in machines),
    )
    return {
        "machine": {
            "copy_gb_per_second": round(machine.bytes_per_second / 1e9, 2),
            "product_gflops": round(machine.operations_per_second / 1e9, 1),
        },
        "layouts": measure_layouts(target),
        "passes": measure_passes(target, list(methods.values())),
        "phases": [
            phase
            for name, method in methods.items()
            for phase in _phases(machine, target, method, name, rounds[name], len(prompt_ids))
        ],
        "loop": [_overhead(name, rounds[name], shares[name]) for name in methods],
        "ms_per_token": {
            name: {"median": round(statistics.median(times), 2), "runs": len(times)}
            for name, times in per_token.items()
        },
        "transformers_over_plain": _ratio(per_token["transformers"], per_token["plain"]),
    }


def _phases(
    machine: Machine, target: Target, method: Method, name: str, rounds: list[Round], prompt: int
) -> list[dict]:
    """Floor, median time and their ratio for each phase of one method."""
    shape = TargetShape.from_config(target.model.config.to_dict())
    width = target.dtype.itemsize
    begins = [round for round in rounds if not round.index]
    later = [round for round in rounds if round.index]
    found = []

    def add(phase: str, works: Sequence[Work], seconds: Sequence[float]) -> None:
        work = works[0] if len(works) == 1 else _mean(works)
        floor = statistics.median(map(machine.floor, works))
        middle = statistics.median(seconds)
        found.append(
            {
                "method": name,
                "phase": phase,
                "n": len(seconds),
                "megabytes": round(work.bytes / 1e6, 1),
                "gigaflop": round(work.operations / 1e9, 3),
                "floor_ms": round(1000 * floor, 2),
                "measured_ms": round(1000 * middle, 2),
                "quartiles_ms": [round(1000 * q, 2) for q in _quartiles(seconds)],
                "ratio": round(middle / floor, 2),
            }
        )

    prefill = target_work(shape, prompt, 1, 0, width)
    contemplates = method.checkpoint is not None and method.checkpoint.contemplation is not None
    if contemplates:  # one row more, in a pass of its own
        prefill += target_work(shape, 1, 0, prompt, width)
    add("prefill", [prefill], [round.seconds.verify for round in begins])
    drafting = [round for round in later if round.draft.passes]
    if drafting:
        head = method.checkpoint.head
        add("draft", [_drafting(head, round) for round in drafting],
            [round.seconds.draft for round in drafting])  # fmt: skip
    add(
        "verify",
        [
            target_work(shape, r.target_rows, len(r.draft.tree), r.position - 1, width)
            for r in later
        ],
        [round.seconds.verify for round in later],
    )
    return found


def _drafting(head: DraftHead, round: Round) -> Work:
    """All draft passes of a round, as if each had one row: what they must read at least."""
    width, text = head.fc.weight.dtype.itemsize, round.position - 1
    work = draft_work(head, 1, True, text, width)
    return work + draft_work(head, 1, False, text, width).times(round.draft.passes - 1)


def _overhead(name: str, rounds: list[Round], shares: list[float]) -> dict:
    """What is not a model's pass (accept, commit, gather and the loop itself), and what a recorder
    adds to a round."""
    rest = [round.seconds.rest for round in rounds if round.index]
    total = [round.seconds.total for round in rounds if round.index]
    return {
        "method": name,
        "n": len(rest),
        "rest_ms": round(1000 * statistics.median(rest), 3),
        "rest_share": round(sum(rest) / sum(total), 4),
        "recorder_share": round(statistics.median(shares), 4),
    }


def _mean(works: Sequence[Work]) -> Work:
    count = len(works)
    return Work(
        round(sum(work.bytes for work in works) / count),
        round(sum(work.operations for work in works) / count),
    )


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    low, _, high = statistics.quantiles(seconds, n=4)
    return low, high


def _ratio(above: Sequence[float], below: Sequence[float]) -> dict:
    """The median of ratios, pair by pair, and the smallest and largest."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
    }


def markdown(result: dict) -> str:
    """The tables."""
    machine, ratio = result["machine"], result["transformers_over_plain"]
    phases = table(
        ("method", "phase", "n", "MB", "GFLOP", "floor ms", "measured ms (quartiles)", "ratio"),
        (
            (
                p["method"],
                p["phase"],
                p["n"],
                p["megabytes"],
                p["gigaflop"],
                p["floor_ms"],
                f"{p['measured_ms']} ({p['quartiles_ms'][0]} to {p['quartiles_ms'][1]})",
                p["ratio"],
            )
            for p in result["phases"]
        ),
    )
    loop = table(
        ("method", "rounds", "rest ms", "share of the round", "a recorder adds"),
        (
            (o["method"], o["n"], o["rest_ms"], f"{100 * o['rest_share']:.1f} %",
             f"{100 * o['recorder_share']:.1f} %")
            for o in result["loop"]
        ),
    )  # fmt: skip
    loop += (
        "\n\nRest is what is no model's pass. A recorder adds: its time over the round's own, the "
        "median over the rounds."
    )
    tokens = result["ms_per_token"]
    peer = (
        f"Plain decoding takes {tokens['plain']['median']} ms per token and greedy `generate` of "
        f"`transformers` {tokens['transformers']['median']} ms, which is {ratio['median']} times "
        f"as long ({ratio['range'][0]} to {ratio['range'][1]}; {tokens['plain']['runs']} runs of "
        "each, alternating)."
    )
    given = (
        f"This machine copies {machine['copy_gb_per_second']} GB/s (read and written) and "
        f"multiplies large matrices at {machine['product_gflops']} GFLOP/s."
    )
    stored = {
        "by_output_ms": "output by output",
        "by_input_ms": "input by input",
        "by_onednn_ms": "in oneDNN's order",
    }
    layouts = table(
        ("ms by rows of a product, weights stored", *(x["rows"] for x in result["layouts"])),
        (
            (name, *(layout[key] for layout in result["layouts"]))
            for key, name in stored.items()
            if key in result["layouts"][0]
        ),
    )
    parts = [given, phases, loop, peer, layouts]
    if result["passes"]:
        parts.append(
            table(
                ("rows of a target pass", *(p["rows"] for p in result["passes"])),
                [("ms", *(p["ms"] for p in result["passes"]))],
            )
        )
    return "\n\n".join(parts)
