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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from app.choices import Choice, EngineSource
from app.form import CHOSEN, METHODS
from app.gpu import lent
from app.line import Line
from app.text import say
from app.views import progress, wire
from app.views.chart import lane_name
from confu_core.errors import ConFuError, SettingsError
from confu_core.events import Advanced, Event, MethodInfo, Started
from confu_core.trace import Intervention, RoundRecord, Settings, Trace, to_plain

log = logging.getLogger(__name__)

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
    """One engine at a time, loaded in the background on demand. Another choice takes its place
    after it was let go, so that two never share the memory; a failed load may be tried again."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.choices: Mapping[str, Choice] = {choice.name: choice for choice in choices}
        self.name = choices[0].name
        self._lock = threading.Lock()
        self.state = EngineState("idle")
        self.engine: Any = None

    def start(self, name: str | None = None) -> None:
        """Begin to load a choice (none named: the present one), unless it is there already or
        another is being loaded.

        Raises:
            ConFuError: the choice is unknown, or cannot run on this machine; what was loaded stays.
        """
        name = name or self.name
        if name not in self.choices:
            raise SettingsError(f"There is no model {name!r} to choose here.")
        if name != self.name and (reason := self.choices[name].refusal()):
            raise SettingsError(reason)
        with self._lock:
            if self.state.phase == "loading":
                return
            if self.state.phase == "ready" and name == self.name:
                return
            self.name, self.engine = name, None
            self.state = EngineState("loading", "…")
        threading.Thread(target=self._load, name="load-engine", daemon=True).start()

    def wait(self, most: float = API_WAIT_SECONDS) -> None:
        """Until nothing is being loaded, but no longer than `most` seconds."""
        deadline = time.monotonic() + most
        while self.state.phase == "loading" and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _load(self) -> None:
        try:
            self.engine = self.choices[self.name].load(self._report)
        except ConFuError as error:
            self.state = EngineState("failed", str(error))
        except Exception as error:
            log.exception("The engine did not load")
            self.state = EngineState("failed", f"{type(error).__name__}: {error}")
        else:
            self.state = EngineState("ready", fraction=1.0)

    def _report(self, message: str, fraction: float) -> None:
        self.state = EngineState("loading", message, fraction)

    @property
    def methods(self) -> Mapping[str, MethodInfo]:
        """What the loaded engine says of its methods; nothing while there is none."""
        return self.engine.methods if self.engine is not None else {}


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
    """Everything that visitors ask for.

    `source` loads the model of the first visit; `others` are further models to choose from.
    """

    def __init__(self, source: EngineSource | Choice, others: Sequence[Choice] = ()) -> None:
        first = source if isinstance(source, Choice) else Choice("own", "", source)
        self.slot = EngineSlot((first, *others))
        self.store = RunStore()
        self.line = Line()
        self._stops: dict[str, threading.Event] = {}
        self._computing = lent(self._compute)

    # ---- A visitor's live run ----------------------------------------------------------------

    def waiting(self, session: str, language: str) -> str | None:
        """The session's place in the line, as HTML; None if it does not wait."""
        ahead = self.line.ahead(session)
        if ahead is None:
            return None
        key = "progress.waiting" if ahead else "progress.starting"
        return progress.line(say(language, key, n=ahead), "busy")

    def stream(
        self,
        session: str,
        language: str,
        prompt: str,
        methods: Sequence[str],
        settings: Settings,
        intervention: Intervention | None = None,
        choice: str | None = None,
    ) -> Iterator[Frame]:
        """Frames of one run, from waiting for the engine to the finished trace.

        Closing the iterator frees the engine. After `stop` it ends without another frame.

        Args:
            choice: the model to run; None takes the one that is loaded.
        """
        with self.line.at_work(session):
            if not prompt or not prompt.strip():
                text = say(language, "error.empty_prompt")
                yield Frame(progress.line(text, "error"), running=False)
                return
            run = self.store.open(session)
            try:
                yield from self._wait(language, run, choice)
            except ConFuError as error:
                yield Frame(progress.line(str(error), "error"), running=False)
                return
            if run.stop.is_set():
                return
            if self.slot.engine is None:
                yield Frame(self.model_line(language), running=False)
                return
            usable, missing = self._usable(methods)
            if not usable:
                key = "error.no_method" if not methods else "error.unavailable"
                text = say(language, key, reasons=" ".join(missing))
                yield Frame(progress.line(text, "error"), running=False)
                return
            self._stops[run.id] = run.stop
            events = self._computing(run.id, prompt, settings, usable, intervention)
            try:
                yield from self._frames(run, _raised(events), language)
            except ConFuError as error:
                yield Frame(progress.line(str(error), "error"), running=False)
            except Exception:
                log.exception("A run failed")
                text = say(language, "error.unexpected")
                yield Frame(progress.line(text, "error"), running=False)
            finally:
                events.close()
                del self._stops[run.id]

    def _compute(
        self,
        run: str,
        prompt: str,
        settings: Settings,
        methods: tuple[str, ...],
        intervention: Intervention | None = None,
    ) -> Iterator[Event | ConFuError]:
        """The one function that computes. It may run in another process: what goes in and comes
        out is plain, an error is yielded, and a run's stop reaches it there only by closing it."""
        stop = self._stops.get(run)
        try:
            yield from self.slot.engine.compare(
                prompt,
                settings,
                methods,
                stop.is_set if stop else lambda: False,
                intervention=intervention,
            )
        except ConFuError as error:
            yield error

    def _wait(self, language: str, run: Run, choice: str | None) -> Iterator[Frame]:
        """Until the chosen model is loaded or has failed to; behind a load that is under way."""
        wanted = choice or self.slot.name
        self.slot.start(wanted)
        while not run.stop.is_set():
            if self.slot.state.phase != "loading":
                if self.slot.name == wanted:
                    return
                self.slot.start(wanted)
            yield Frame(self.model_line(language))
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
        if self.line.ahead(session) is not None:  # what is on show is an earlier run
            self.line.leave(session)
            return Frame(progress.line(say(language, "progress.left_line"), "done"), running=False)
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

    def stopped_line(self, session: str, language: str) -> str | None:
        """What `stop` said of the run on show, once more; None if that run was not stopped. A frame
        that was under way when Stop was pressed may reach the page after the answer to Stop."""
        run = self.store.get(session)
        if run is None or not run.stop.is_set():
            return None
        return progress.line(say(language, "progress.stopped"), "done")

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

    # ---- The model -----------------------------------------------------------------------------

    def model_line(self, language: str) -> str:
        """Where the model stands, as HTML: loading, ready and what it lacks, or why it failed; and
        what looks wrong with its heads."""
        state = self.slot.state
        kind = {"failed": "failed", "loading": "busy"}.get(state.phase, "quiet")
        fraction = state.fraction if state.phase == "loading" else None
        warnings = [
            say(language, "engine.warning", method=info.label, text=warning)
            for info in self.slot.methods.values()
            for warning in info.warnings
        ]
        lines = [progress.line(self._model_sentence(language), kind, fraction)]
        return "".join([*lines, *(progress.line(text, "error") for text in warnings)])

    def _model_sentence(self, language: str) -> str:
        state = self.slot.state
        if state.phase == "failed":
            return say(language, "engine.failed", reason=state.message)
        title = self.slot.choices[self.slot.name].title
        model = f" {title}" if title else ""
        text = say(language, f"engine.{state.phase}", message=state.message, model=model)
        missing = [info.label for info in self.slot.methods.values() if not info.available]
        if missing:
            text += " " + say(language, "engine.missing", methods=", ".join(missing))
        return text

    def choice_line(self, name: str, language: str) -> str:
        """What choosing a model means, as HTML, before a run loads it."""
        if name == self.slot.name:
            return self.model_line(language)
        choice = self.slot.choices[name]
        reason = choice.refusal()
        return progress.line(reason or choice.about(language), "error" if reason else "quiet")

    def count_line(self, prompt: str, new_tokens: int | None, language: str) -> str:
        """How many tokens a prompt has, as HTML; a warning if they and the answer do not fit.
        Empty without a model or a prompt."""
        engine = self.slot.engine
        if engine is None or not prompt or not prompt.strip():
            return ""
        try:
            count = engine.count_tokens(prompt)
        except ConFuError as error:  # longer than the context
            return progress.line(str(error), "error")
        if count + (new_tokens or 0) > engine.context:
            text = say(
                language, "count.cut", n=count, context=engine.context, room=engine.context - count
            )
            return progress.line(text, "error")
        return progress.line(say(language, "count.tokens", n=count, context=engine.context))

    # ---- The public endpoint -------------------------------------------------------------------

    def compare(
        self,
        prompt: str,
        settings: Settings,
        trace: bool = False,
        methods: Sequence[str] = (),
    ) -> dict[str, Any]:
        """One prompt by the named methods (none named: the usual ones that are available), as plain
        JSON; with the whole trace if asked.

        Raises:
            ConFuError: a prompt, settings or methods that cannot be run, or an engine that did not
                load.
        """
        if unknown := set(methods) - set(METHODS):
            raise SettingsError(
                f"There is no method {', '.join(sorted(unknown))}. Choose of {', '.join(METHODS)}."
            )
        self.slot.start()
        self.slot.wait()
        if self.slot.engine is None:
            raise ConFuError(self._model_sentence("en"))
        usable, missing = self._usable(methods or CHOSEN)
        if methods and missing:
            reasons = " ".join(missing).rstrip(".")
            raise SettingsError(f"A method that was asked for cannot run: {reasons}.")
        *_, last = _raised(self._computing("", prompt, settings, usable, None))
        answer = result_of(last.trace)
        return {**answer, "trace": to_plain(last.trace)} if trace else answer


def _raised(events: Iterator[Event | ConFuError]) -> Iterator[Event]:
    """The events; an error among them is raised."""
    for event in events:
        if isinstance(event, ConFuError):
            raise event
        yield event


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
