"""Several methods on one prompt: a fair race, told as a stream of plain events.

Lanes take turns by accumulated compute time: whoever has used least goes next, so what is seen is
what each method alone would do. A lane's clock counts only its own work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from confu_core.assets import default_target
from confu_core.checkpoints import find_checkpoint
from confu_core.decoding import Round, check_settings, decode
from confu_core.errors import CheckpointError, SettingsError, TargetError
from confu_core.events import Advanced, Event, Finished, MethodInfo, Started
from confu_core.hub import HEAD_FILES, TARGET_FILES, fetch
from confu_core.interventions import intervene
from confu_core.methods import PLAIN, Method, with_head
from confu_core.prompt import TextStream, chat_ids
from confu_core.published import load_head
from confu_core.reading import FutureBasis
from confu_core.recording import Recorder
from confu_core.taps import TapChoice
from confu_core.target import Target
from confu_core.trace import (
    LABELS,
    Head,
    Intervention,
    Lane,
    RoundRecord,
    Settings,
    TargetInfo,
    Trace,
)

CONTEMPLATING = ("confu", "confu-lite")  # methods whose heads have a contemplating part
CHANGED = "changed"  # the lane that an intervention runs in
DEFAULT_TARGET = "smollm2-135m-instruct"
CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


class Engine:
    """One loaded target with the methods that it can run. Holds nothing of a run, so several
    people can share one."""

    def __init__(
        self, target: Target, methods: dict[str, Method], bases: dict[str, FutureBasis | None]
    ) -> None:
        self.target = target
        self._methods = methods
        self.bases = bases

    @property
    def methods(self) -> dict[str, MethodInfo]:
        """Every method by name; those without a head for this target say why."""
        found = {}
        for name, label in LABELS.items():
            method = self._methods.get(name)
            reason = "" if method else f"there is no {label} head for {self.target.name}"
            head = method.checkpoint if method else None
            found[name] = MethodInfo(
                label,
                method is not None,
                reason,
                name in CONTEMPLATING,
                notes=head.notes if head else (),
                warnings=head.warnings if head else (),
            )
        return found

    @property
    def context(self) -> int:
        return self.target.context

    def method(self, name: str) -> Method:
        """The parts of one method.

        Raises:
            SettingsError: unknown, or without a head for this target.
        """
        if name not in self._methods:
            known = ", ".join(self._methods)
            raise SettingsError(f"Method {name!r} is not available here. Available: {known}.")
        return self._methods[name]

    def count_tokens(self, prompt: str) -> int:
        """Tokens of a prompt with the chat template around it."""
        return len(chat_ids(self.target, prompt))

    def compare(
        self,
        prompt: str,
        settings: Settings,
        methods: Sequence[str] = ("plain", "eagle3", "confu"),
        should_stop: Callable[[], bool] = lambda: False,
        intervention: Intervention | None = None,
    ) -> Iterator[Event]:
        """Run the methods on one prompt, turn by turn.

        With an intervention one more lane, "changed", runs ConFu with it.

        Closing the iterator frees everything. A lane that runs out of memory ends with an error
        message; the others go on.

        Raises:
            SettingsError, PromptError: before the first event.
        """
        check_settings(settings)
        chosen = {name: self.method(name) for name in methods}
        if not chosen:
            raise SettingsError("Choose at least one method.")
        prompt_ids = chat_ids(self.target, prompt)
        if intervention is not None:
            chosen[CHANGED] = intervene(self.target, self.method("confu"), intervention)
        return self._race(prompt, prompt_ids, settings, chosen, should_stop, intervention)

    def _race(
        self,
        prompt: str,
        prompt_ids: list[int],
        settings: Settings,
        methods: dict[str, Method],
        should_stop: Callable[[], bool],
        intervention: Intervention | None,
    ) -> Iterator[Event]:
        trace = Trace(
            prompt=prompt,
            prompt_tokens=len(prompt_ids),
            settings=settings,
            target=describe(self.target),
            lanes={
                name: Lane(
                    method.name,
                    describe_head(method),
                    intervention if name == CHANGED else None,
                )
                for name, method in methods.items()
            },
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        yield Started(trace)
        runners = {
            name: _Runner(
                self.target, method, prompt_ids, settings, self.bases.get(method.name), should_stop
            )
            for name, method in methods.items()
        }
        try:
            running = dict(runners)
            while running:
                name = min(running, key=lambda lane: running[lane].seconds)
                record = runners[name].advance()
                if record is None:
                    del running[name]
                else:
                    yield Advanced(name, record, runners[name].stream.text)
        finally:
            for runner in runners.values():
                runner.close()
        yield Finished(
            dataclasses.replace(
                trace,
                lanes={name: runner.lane(trace.lanes[name]) for name, runner in runners.items()},
            )
        )


class _Runner:
    """One lane under way."""

    def __init__(
        self,
        target: Target,
        method: Method,
        prompt_ids: list[int],
        settings: Settings,
        basis: FutureBasis | None,
        should_stop: Callable[[], bool],
    ) -> None:
        self._recorder = Recorder(target, method, settings, basis)
        self._rounds = decode(target, method, prompt_ids, settings, self._recorder, should_stop)
        self.stream = TextStream(target)
        self.records: list[RoundRecord] = []
        self.seconds = 0.0
        self.error: str | None = None

    def advance(self) -> RoundRecord | None:
        """The next round's record; None when the lane is done."""
        try:
            round: Round | None = next(self._rounds, None)
        except torch.OutOfMemoryError:
            self.error = (
                "The device ran out of memory. Choose fewer new tokens, a smaller tree, or fewer "
                "methods at once."
            )
            round = None
        except TargetError as error:
            self.error = str(error)
            round = None
        if round is None:
            self._end()
            return None
        record = self._recorder.record(round)
        self.records.append(record)
        self.seconds += record.seconds.total
        self.stream.push(round.token_ids)
        if round.stop:
            self.stream.flush()
        return record

    def _end(self) -> None:
        self.stream.flush()
        if self.records and self.records[-1].stop is None:
            self.records[-1] = dataclasses.replace(self.records[-1], stop="cancelled")

    def lane(self, empty: Lane) -> Lane:
        return dataclasses.replace(
            empty, rounds=tuple(self.records), text=self.stream.text, error=self.error
        )

    def close(self) -> None:
        """Free the lane's caches at once."""
        self._rounds.close()


def describe(target: Target) -> TargetInfo:
    """What a trace says of a target."""
    return TargetInfo(
        name=target.name,
        fingerprint=target.fingerprint(),
        layers=target.layers,
        hidden=target.hidden,
        vocab=target.vocab,
        device=target.device.type,
        dtype=target.precision,
    )


def describe_head(method: Method) -> Head | None:
    """What a trace says of a draft head."""
    if method.checkpoint is None:
        return None
    return Head(method.checkpoint.name, method.checkpoint.sha256, bool(method.checkpoint.facts))


def best_device() -> str:
    """CUDA, else Apple's MPS, else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def load_target(
    source: str | None,
    device: str,
    dtype: str,
    progress: Callable[[str, float], None],
    bits: int | None = None,
) -> Target:
    """Load a target by folder or hub id; None is the default, fetched if it is missing.

    Raises:
        TargetError: not found, not supported, or a precision that is not offered.
    """
    kinds = {kind: getattr(torch, kind) for kind in ("float32", "bfloat16", "float16")}
    if dtype not in kinds:
        raise TargetError(f"Precision {dtype!r} is not supported. Choose: {', '.join(kinds)}.")
    folder = default_target(progress) if source is None else source
    fetch(folder, TARGET_FILES, progress)
    progress("loading the target", 0.0)
    place = best_device() if device == "auto" else device
    target = Target.load(folder, place, kinds[dtype], bits)
    if source is None:
        target.name = DEFAULT_TARGET
    return target


def load_engine(
    target: str | None = None,
    device: str = "auto",
    progress: Callable[[str, float], None] | None = None,
    dtype: str = "float32",
    heads: dict[str, str | Path] | None = None,
    taps: str | None = None,
    bits: int | None = None,
) -> Engine:
    """Load a target and its draft heads.

    Args:
        target: a folder or hub id; None for the default, which is fetched if it is missing.
        device: "auto", "cpu", "cuda", "mps", or "spread" over all GPUs.
        progress: called with a message and a fraction from 0 to 1.
        dtype: "float32" (texts are equal token for token), "bfloat16" (faster on a GPU) or
            "float16".
        heads: method name -> checkpoint folder or hub id; None takes those that ship for the
            default target.
        taps: how a published EAGLE-3 head counts the layers that it reads, where its config
            leaves that open (`TapChoice.parse`).
        bits: 4 or 8 packs the target's weights.

    Raises:
        TargetError, CheckpointError, SettingsError: with what to do about it.
    """
    report = progress or (lambda message, fraction: None)
    choice = TapChoice.parse(taps) if taps else None
    loaded = load_target(target, device, dtype, report, bits)
    if heads is None:
        shipped = CHECKPOINTS / DEFAULT_TARGET if target is None else None
        heads = {
            name: shipped / name
            for name in ("eagle3", *CONTEMPLATING)
            if shipped is not None and (shipped / name).is_dir()
        }
    methods: dict[str, Method] = {"plain": PLAIN}
    bases: dict[str, FutureBasis | None] = {}
    for number, (name, source) in enumerate(heads.items(), 1):
        report(f"loading the {LABELS[name]} head", number / (len(heads) + 1))
        fetch(source, HEAD_FILES, report)
        path = find_checkpoint(source)
        checkpoint = load_head(
            path,
            loaded,
            choice if name == "eagle3" else None,
            name=None if Path(source).is_dir() else str(source),
        )
        if (name in CONTEMPLATING) != (checkpoint.contemplation is not None):
            raise CheckpointError(f"{path} is an {checkpoint.kind} head, not one for {name!r}.")
        methods[name] = with_head(name, checkpoint)
        bases[name] = FutureBasis.load(path / "basis.json")
    report("ready", 1.0)
    return Engine(loaded, methods, bases)
