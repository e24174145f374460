"""From a request to a stream of player messages: the engine's slot, the store of runs, errors.

Knows no component of the page. One `Runs` serves all visitors; what belongs to a visitor is kept
under the visitor's session and nowhere else.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.form import METHODS
from app.text import say
from app.views import progress, wire
from app.views.chart import lane_name
from confu_core.errors import ConFuError
from confu_core.events import Advanced, Event, Started
from confu_core.trace import Intervention, RoundRecord, Settings, Trace

log = logging.getLogger(__name__)

# Loads an engine: called once, in a thread, with a function that takes (sentence, fraction).
EngineSource = Callable[[Callable[[str, float], None]], Any]

MOST_RUNS = 64
POLL_SECONDS = 0.2
API_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class EngineState:
    """Where loading stands; `message` is a sentence for the page."""

    phase: Literal["idle", "loading", "ready", "failed"]
    message: str = ""
    fraction: float = 0.0


class EngineSlot:
    """One engine, loaded in the background on first demand; a failed load may be tried again."""

    def __init__(self, source: EngineSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self.state = EngineState("idle")
        self.engine: Any = None

    def start(self) -> None:
        with self._lock:
            if self.state.phase in ("loading", "ready"):
                return
            self.state = EngineState("loading", "…")
        threading.Thread(target=self._load, name="load-engine", daemon=True).start()

    def _load(self) -> None:
        try:
            self.engine = self._source(self._report)
        except ConFuError as error:
            self.state = EngineState("failed", str(error))
        except Exception as error:
            log.exception("The engine did not load")
            self.state = EngineState("failed", f"{type(error).__name__}: {error}")
        else:
            self.state = EngineState("ready", fraction=1.0)

    def _report(self, message: str, fraction: float) -> None:
        self.state = EngineState("loading", message, fraction)


class Run:
    """A run under way or ended: what the visitor has seen of it so far."""

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.seq = 0
        self.trace: Trace | None = None
        self.stop = threading.Event()

    def next(self) -> int:
        self.seq += 1
        return self.seq

    def add(self, name: str, record: RoundRecord, text: str) -> None:
        lane = self.trace.lanes[name]
        longer = replace(lane, rounds=(*lane.rounds, record), text=text)
        self.trace = replace(self.trace, lanes={**self.trace.lanes, name: longer})

    @property
    def written(self) -> int:
        return min(len(lane.tokens) for lane in self.trace.lanes.values())


class RunStore:
    """The newest run of each session. Bounded: the session longest untouched is dropped first."""

    def __init__(self, most: int = MOST_RUNS) -> None:
        self._most = most
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, session: str) -> Run:
        run = Run()
        with self._lock:
            old = self._runs.pop(session, None)
            self._runs[session] = run
            while len(self._runs) > self._most:
                self._runs.popitem(last=False)[1].stop.set()
        if old:
            old.stop.set()
        return run

    def get(self, session: str) -> Run | None:
        with self._lock:
            if session in self._runs:
                self._runs.move_to_end(session)
            return self._runs.get(session)

    def drop(self, session: str) -> None:
        with self._lock:
            run = self._runs.pop(session, None)
        if run:
            run.stop.set()

    def __len__(self) -> int:
        return len(self._runs)


@dataclass(frozen=True)
class Frame:
    """What one moment of a run changes on the page. `player` None: the player keeps what it has."""

    progress: str
    player: str | None = None
    running: bool = True


class Runs:
    """Everything that visitors ask for."""

    def __init__(self, source: EngineSource) -> None:
        self.slot = EngineSlot(source)
        self.store = RunStore()

    # ---- A visitor's live run ----------------------------------------------------------------

    def stream(
        self,
        session: str,
        language: str,
        prompt: str,
        methods: Sequence[str],
        settings: Settings,
        intervention: Intervention | None = None,
    ) -> Iterator[Frame]:
        """Frames of one run, from waiting for the engine to the finished trace.

        Closing the iterator frees the engine. After `stop` it ends without another frame.
        """
        if not prompt or not prompt.strip():
            text = say(language, "error.empty_prompt")
            yield Frame(progress.line(text, "error"), running=False)
            return
        run = self.store.open(session)
        yield from self._wait(language, run)
        if run.stop.is_set():
            return
        if self.slot.engine is None:
            yield Frame(engine_line(self.slot.state, language), running=False)
            return
        usable, missing = self._usable(methods)
        if not usable:
            key = "error.no_method" if not methods else "error.unavailable"
            text = say(language, key, reasons=" ".join(missing))
            yield Frame(progress.line(text, "error"), running=False)
            return
        events: Iterator[Any] | None = None
        try:
            events = self.slot.engine.compare(
                prompt, settings, usable, run.stop.is_set, intervention=intervention
            )
            yield from self._frames(run, events, language)
        except ConFuError as error:
            yield Frame(progress.line(str(error), "error"), running=False)
        except Exception:
            log.exception("A run failed")
            text = say(language, "error.unexpected")
            yield Frame(progress.line(text, "error"), running=False)
        finally:
            if events is not None:
                events.close()

    def _wait(self, language: str, run: Run) -> Iterator[Frame]:
        self.slot.start()
        while self.slot.state.phase == "loading" and not run.stop.is_set():
            yield Frame(engine_line(self.slot.state, language))
            time.sleep(POLL_SECONDS)

    def _usable(self, methods: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
        offered = self.slot.engine.methods
        wanted = [name for name in METHODS if name in methods and name in offered]
        usable = tuple(name for name in wanted if offered[name].available)
        return usable, [offered[name].reason for name in wanted if name not in usable]

    def _frames(self, run: Run, events: Iterator[Event], language: str) -> Iterator[Frame]:
        for event in events:
            if run.stop.is_set():
                return
            if isinstance(event, Advanced):
                run.add(event.lane, event.record, event.text)
                message = wire.step(run.id, run.next(), event.lane, event.record, event.text)
            elif isinstance(event, Started):
                run.trace = event.trace
                message = wire.reset(run.id, event.trace)
            else:
                run.trace = event.trace
                message = wire.full(run.id, run.next(), event.trace, "finished", "live")
                yield Frame(finished_line(event.trace, language), message, running=False)
                return
            wanted = run.trace.settings.max_new_tokens
            yield Frame(progress.working(language, run.written, wanted), message)

    def stop(self, session: str, language: str) -> Frame:
        """Stop the session's run; the rounds so far stay and can be looked through."""
        run = self.store.get(session)
        text = progress.line(say(language, "progress.stopped"), "done")
        if run is None:
            return Frame(text, running=False)
        run.stop.set()
        if run.trace is None:
            return Frame(text, running=False)
        # A little past what is under way, so that a late step cannot follow it.
        message = wire.full(run.id, run.next() + 1, run.trace, "stopped", "live")
        return Frame(text, message, running=False)

    # ---- Runs that are not computed ------------------------------------------------------------

    def show(
        self,
        session: str,
        trace: Trace,
        source: wire.Source,
        position: int | None = None,
    ) -> str:
        """Make a recorded or opened trace the session's run; gives the player's message."""
        run = self.store.open(session)
        run.trace = trace
        return wire.full(run.id, 0, trace, "finished", source, position)

    def trace(self, session: str) -> Trace | None:
        run = self.store.get(session)
        return run.trace if run else None

    # ---- The public endpoint -------------------------------------------------------------------

    def compare(self, prompt: str, settings: Settings) -> dict[str, Any]:
        """All available methods on one prompt, as plain JSON.

        Raises:
            ConFuError: a prompt or settings that cannot be run, or an engine that did not load.
        """
        self.slot.start()
        deadline = time.monotonic() + API_WAIT_SECONDS
        while self.slot.state.phase == "loading" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if self.slot.engine is None:
            raise ConFuError(engine_sentence(self.slot.state, "en"))
        usable, _ = self._usable(METHODS)
        *_, last = self.slot.engine.compare(prompt, settings, usable)
        return result_of(last.trace)


def result_of(trace: Trace) -> dict[str, Any]:
    """The answer of `/compare`: what each method wrote and what it cost."""
    return {
        "prompt": trace.prompt,
        "settings": {name: getattr(trace.settings, name) for name in vars(trace.settings)},
        "target": trace.target.name,
        "identical": not trace.differences(),
        "methods": {
            name: {
                "text": lane.text,
                "tokens": len(lane.tokens),
                "rounds": lane.target_passes,
                "tau": round(lane.tau, 4),
                "seconds": round(lane.seconds, 4),
            }
            for name, lane in trace.lanes.items()
        },
    }


def engine_sentence(state: EngineState, language: str) -> str:
    if state.phase == "failed":
        return say(language, "engine.failed", reason=state.message)
    return say(language, f"engine.{state.phase}", message=state.message)


def engine_line(state: EngineState, language: str) -> str:
    kind = {"failed": "error", "loading": "busy"}.get(state.phase, "quiet")
    fraction = state.fraction if state.phase == "loading" else None
    return progress.line(engine_sentence(state, language), kind, fraction)


def finished_line(trace: Trace, language: str) -> str:
    lanes = [lane for lane in trace.lanes.values() if lane.rounds]
    return progress.line(
        say(
            language,
            "progress.finished",
            taus=", ".join(f"{lane_name(la, language)} {la.tau:.2f}" for la in lanes),
            seconds=f"{sum(lane.seconds for lane in lanes):.1f}",
        ),
        "done",
    )
