"""The page: components and their wiring. Computes nothing itself."""

from __future__ import annotations

import html
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import gradio as gr

from app import links, player, recorded
from app.choices import Choice, EngineSource
from app.form import (
    CHANGES,
    CHOSEN,
    FIELDS,
    METHODS,
    MOST_CHARACTERS,
    MOST_EXPERTS,
    NO_CHANGE,
    intervention_of,
    settings_of,
)
from app.lessons import EXAMPLES, Example
from app.runs import Frame, Runs
from app.text import DEFAULT, LANGUAGES, choose, say
from app.views import experts, futures, lesson, progress, speed, wire
from app.views.chart import Chart, heads
from confu_core.errors import ConFuError
from confu_core.trace import Settings, Trace

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Noto Sans", "DejaVu Sans", "sans-serif"]
MOST_WAITING = 32
MOST_HEADS = 2  # heads of a run whose experts and maps are drawn: ConFu's and ConFu lite's
MOST_TRACE_BYTES = 8_000_000
COMPUTE = "compute"  # one computation at a time, whoever asks

# Asks for a count when typing pauses. Gradio's own `input` event would ask once per key.
_WATCH_TYPING = """
let pause;
document.addEventListener('input', (event) => {
  if (!event.target.closest('#prompt')) return;
  clearTimeout(pause);
  pause = setTimeout(() => trigger('typed'), 250);
});
"""

# Hands the player what only the page knows: how to watch, where links point, whom to tell.
_MOUNT = """
const host = {
  charts: 'charts',
  source: String(bundle),
  openFile: (text) => trigger('opened', { text }),
  share: (state) => shareLink(state),
};
function shareLink({ header, step, phase, language, panels, hidden, prompt }) {
  const query = new URLSearchParams();
  const preset = Object.entries(PRESETS).find(([, text]) => header && text === header.prompt);
  if (preset) query.set('preset', preset[0]);
  else if (header && prompt) query.set('prompt', header.prompt);
  if (header) {
    for (const [field, name] of Object.entries(FIELDS)) {
      if (field in header.settings) query.set(name, header.settings[field]);
    }
    query.set('step', step);
    if (phase) query.set('phase', PHASES[phase - 1]);
  }
  if (header) {
    const lanes = Object.values(header.lanes);
    const methods = lanes.filter((lane) => !lane.intervention).map((lane) => lane.method);
    if (methods.join() !== CHOSEN.join()) query.set('methods', methods.join());
    const changed = lanes.find((lane) => lane.intervention && !lane.intervention.donor);
    if (changed) query.set('change', changed.intervention.change);
    if (changed && changed.intervention.expert !== null) {
      query.set('expert', changed.intervention.expert + 1);
    }
    // Plain decoding has no tree, and a lane that the link cannot ask for has none either.
    const tree = (name) => header.lanes[name].method !== 'plain';
    panels.filter((name) => tree(name) && (name !== 'changed' || changed))
      .forEach((name, i) => query.set('ab'[i], name));
  }
  query.set('lang', language);
  if (hidden.length) query.set('hide', hidden.join());
  const theme = new URLSearchParams(location.search).get('__theme');
  if (theme) query.set('__theme', theme);
  return `${location.origin}${location.pathname}?${query}`;
}
const mounted = bundle()(element, ASSETS, host);
watch('value', () => mounted.receive(props.value));
if (props.value) mounted.receive(props.value);
"""


def step_player() -> gr.HTML:
    """The always-mounted player; its value is the newest message (see `views/wire.py`).

    Not a subclass of `gr.HTML`: Gradio would write a stub file beside this module for it.
    """
    presets = {example.name: example.prompt for example in EXAMPLES}
    fields = {f.name: links.NAMES.get(f.name, f.name) for f in FIELDS}
    script = [
        player.source(),
        f"const ASSETS = {player.assets()};",
        f"const PRESETS = {player.as_script(presets)};",
        f"const FIELDS = {player.as_script(fields)};",
        f"const CHOSEN = {player.as_script(CHOSEN)};",
        f"const PHASES = {player.as_script(links.PHASES)};",
        _MOUNT,
    ]
    return gr.HTML(
        html_template="<div></div>",
        js_on_load="\n".join(script),
        apply_default_css=False,
        elem_id="player",
    )


def launch_options() -> dict[str, Any]:
    """What `launch` must be told so that the page looks and behaves the same everywhere."""
    return {
        "css": files("app").joinpath("page.css").read_text(encoding="utf-8"),
        "theme": gr.themes.Default(primary_hue="blue", font=FONTS),
        "ssr_mode": False,
        # The public endpoint as a tool, where gradio's extra `mcp` is installed.
        "mcp_server": find_spec("mcp") is not None,
        "footer_links": [],
        "run_history": False,
        "show_error": True,
        "max_file_size": MOST_TRACE_BYTES,
    }


def build_demo(
    source: EngineSource | Choice,
    load_recorded=recorded.load,
    others: Sequence[Choice] = (),
) -> gr.Blocks:
    """The whole page. `source` loads an engine when the first visitor comes; `others` are further
    models that visitors can choose.

    `demo.runs` gives tests and `app.py` the run desk.
    """
    runs = Runs(source, others)
    with gr.Blocks(title="ConFu Explorer", analytics_enabled=False, fill_width=True) as demo:
        page = _Page(runs, load_recorded)
        page.build()
        page.wire(demo)
    demo.queue(max_size=MOST_WAITING)
    demo.runs = runs
    return demo


class _Page:
    """The components by name, and the functions that events call."""

    def __init__(self, runs: Runs, load_recorded) -> None:
        self.runs = runs
        self.load_recorded = load_recorded
        self.texts: list[tuple[Any, dict[str, str]]] = []  # component, {property: string key}

    def words(self, component: Any, **keys: str) -> Any:
        """Remember which strings a component shows, for a change of language."""
        self.texts.append((component, keys))
        return component

    # ---- Components ----------------------------------------------------------------------------

    def build(self) -> None:
        en = partial(say, DEFAULT)
        with gr.Row(equal_height=False, elem_id="head"):
            self.head = gr.HTML(lesson.head(DEFAULT), scale=5)
            self.language = gr.Dropdown(
                [(name, code) for code, name in LANGUAGES.items()],
                value=DEFAULT,
                label=en("form.language"),
                show_label=False,
                container=False,
                elem_id="language",
                scale=1,
                min_width=120,
                visible=len(LANGUAGES) > 1,
            )
        with gr.Row(equal_height=True, elem_id="ask"):
            self.prompt = self.words(
                gr.Textbox(
                    label=en("form.prompt"),
                    placeholder=en("form.placeholder"),
                    lines=1,
                    max_lines=6,
                    max_length=MOST_CHARACTERS,
                    show_label=False,
                    container=False,
                    elem_id="prompt",
                    scale=8,
                ),
                label="form.prompt",
                placeholder="form.placeholder",
            )
            self.run = self.words(
                gr.Button(en("form.run"), variant="primary", elem_id="run", scale=1, min_width=110),
                value="form.run",
            )
            self.stop = self.words(
                gr.Button(
                    en("form.stop"), interactive=False, elem_id="stop", scale=0, min_width=84
                ),
                value="form.stop",
            )
        with gr.Row(elem_id="examples"):
            self.examples = [
                self.words(
                    gr.Button(en(f"example.{example.name}"), size="sm"),
                    value=f"example.{example.name}",
                )
                for example in EXAMPLES
            ]
            self.count = gr.HTML(js_on_load=_WATCH_TYPING, elem_id="count")
            self._settings()
        with gr.Row(elem_id="state"):
            self.progress = gr.HTML(progress.line(""), elem_id="progress", scale=4)
            self.reveal = self.words(
                gr.Button(en("form.reveal"), size="sm", elem_id="reveal", scale=0, visible=False),
                value="form.reveal",
            )
            self.model = gr.HTML(progress.line(""), elem_id="model", scale=2, min_width=240)
        self.player = step_player()
        # Tabs wrap: Gradio's menu for what has no room would show hidden ones, and hide the rest.
        with gr.Tabs(elem_id="charts", overflow_behavior="wrap") as self.tabs:
            with gr.Tab(en("tab.lesson"), id="lesson", elem_id="tab-lesson") as tab:
                self.lesson = gr.HTML(lesson.body(DEFAULT))
            self.words(tab, label="tab.lesson")
            self.charts = [
                *self._tab("experts", 4 * MOST_HEADS),
                *self._tab("futures", MOST_HEADS),
                *self._tab("speed", 2),
            ]
        self.hiding = gr.HTML()  # the style that hides what a link wants hidden of the page
        self.timer = gr.Timer(1.0, active=False)  # the page must know its language first

    def _settings(self) -> None:
        """What a run can be asked for besides its prompt; folded until it is wanted."""
        en = partial(say, DEFAULT)
        with gr.Accordion(en("form.settings"), open=False, elem_id="settings") as self.accordion:
            with gr.Row():
                choices = self.runs.slot.choices
                self.choice = self.words(
                    gr.Dropdown(
                        [(choice.title, name) for name, choice in choices.items()],
                        value=self.runs.slot.name,
                        label=en("form.choice"),
                        info=en("form.choice_info"),
                        elem_id="choice",
                        visible=len(choices) > 1,
                    ),
                    label="form.choice",
                    info="form.choice_info",
                )
                self.methods = self.words(
                    gr.CheckboxGroup(
                        [(en(f"method.{name}"), name) for name in METHODS],
                        value=list(CHOSEN),
                        label=en("form.methods"),
                        info=en("form.methods_info"),
                        scale=2,
                    ),
                    label="form.methods",
                    info="form.methods_info",
                )
            with gr.Row():
                self.numbers = [self._number(field) for field in FIELDS]
            with gr.Row():
                self.change = self.words(
                    gr.Dropdown(
                        self._changes(DEFAULT),
                        value=NO_CHANGE,
                        label=en("form.change"),
                        info=en("form.change_info"),
                        scale=2,
                    ),
                    label="form.change",
                    info="form.change_info",
                )
                self.expert = self.words(
                    gr.Number(
                        1,
                        minimum=1,
                        maximum=MOST_EXPERTS,
                        precision=0,
                        label=en("form.expert"),
                        visible=False,
                    ),
                    label="form.expert",
                )
                self.donor = self.words(
                    gr.Textbox(
                        label=en("form.donor"),
                        max_length=MOST_CHARACTERS,
                        visible=False,
                        scale=2,
                    ),
                    label="form.donor",
                )
        self.words(self.accordion, label="form.settings")

    @staticmethod
    def _changes(language: str) -> list[tuple[str, str]]:
        """The choices of the intervention, as (words, value)."""
        named = [(say(language, f"form.{change.replace(' ', '_')}"), change) for change in CHANGES]
        return [(say(language, "form.no_change"), NO_CHANGE), *named]

    def _number(self, field) -> Any:
        options = {"label": say(DEFAULT, f"field.{field.name}"), "min_width": 220}
        if field.name == "seed":
            component = gr.Number(
                field.default, minimum=field.low, maximum=field.high, precision=0, **options
            )
        else:
            component = gr.Slider(field.low, field.high, field.default, step=field.step, **options)
        return self.words(component, label=f"field.{field.name}")

    def _tab(self, name: str, count: int) -> list[tuple[Any, Any, Any]]:
        """A tab with `count` charts, each a sentence, a plot and a table."""
        with gr.Tab(say(DEFAULT, f"tab.{name}"), id=name, elem_id=f"tab-{name}") as tab:
            charts = []
            for _ in range(count):
                sentence = gr.HTML(elem_classes="chart-sentence")
                plot = gr.Plot(show_label=False, container=False, visible=False)
                charts.append((sentence, plot, gr.HTML()))
        self.words(tab, label=f"tab.{name}")
        return charts

    # ---- Wiring --------------------------------------------------------------------------------

    def wire(self, demo: gr.Blocks) -> None:
        quiet = {"show_progress": "hidden", "api_visibility": "private"}
        frame = [self.player, self.progress, self.run, self.stop]
        charts = [component for chart in self.charts for component in chart]
        form = [self.prompt, self.methods, *self.numbers]
        counting = (
            self.runs.count_line,
            [self.prompt, self.numbers[0], self.language],
            self.count,
        )

        def follow(event: Any) -> None:
            """What must be drawn anew when there is another run, prompt or language."""
            event.then(self.on_draw, self.language, charts, **quiet)
            event.then(*counting, queue=False, **quiet)

        loaded = demo.load(
            self.on_load,
            None,
            [
                *(self.player, self.progress, self.model, self.language, *form),
                *(self.change, self.expert, self.hiding, self.tabs, *self._worded()),
            ],
            **quiet,
        )
        follow(loaded)
        ticking = (self.on_tick, self.language, [self.model, self.timer, self.progress])
        loaded.then(*ticking, queue=False, **quiet)
        asked = gr.on(
            [self.run.click, self.prompt.submit],
            self.on_ask,
            self.language,
            [self.progress, self.run, self.stop, self.timer],
            queue=False,
            **quiet,
        )
        running = asked.then(
            self.on_run,
            [self.language, self.choice, self.change, self.expert, self.donor, *form],
            frame,
            concurrency_id=COMPUTE,
            concurrency_limit=1,
            **quiet,
        )
        stopped = self.stop.click(
            self.on_stop, self.language, frame, cancels=[running], queue=False, **quiet
        )
        stopped.then(self.on_stopped, self.language, self.progress, queue=False, **quiet)
        for event in (running, stopped):
            follow(event)
            event.then(*ticking, **quiet)
        self.choice.input(self.on_choice, [self.choice, self.language], self.model, **quiet)
        self.count.typed(*counting, trigger_mode="always_last", queue=False, **quiet)
        self.numbers[0].change(*counting, trigger_mode="always_last", queue=False, **quiet)
        self.change.input(
            self.on_change, self.change, [self.expert, self.donor], queue=False, **quiet
        )
        for button, example in zip(self.examples, EXAMPLES, strict=True):
            chosen = button.click(
                self.on_example(example),
                self.language,
                [self.prompt, *frame],
                cancels=[running],
                **quiet,
            )
            follow(chosen)
        opened = self.player.opened(
            self.on_opened, self.language, [*frame, self.prompt], cancels=[running], **quiet
        )
        follow(opened)
        spoken = self.language.input(
            self.on_language, self.language, [self.player, self.model, *self._worded()], **quiet
        )
        follow(spoken)
        self.reveal.click(
            self.on_reveal,
            self.language,
            [self.player, self.hiding, self.reveal],
            queue=False,
            **quiet,
        )
        ticked = self.timer.tick(*ticking, queue=False, **quiet)
        ticked.then(*counting, queue=False, **quiet)
        demo.unload(self.on_unload)
        gr.api(
            self.compare,
            api_name="compare",
            concurrency_id=COMPUTE,
            concurrency_limit=1,
        )

    def _worded(self) -> list[Any]:
        return [self.head, self.lesson, *(component for component, _ in self.texts)]

    def _spoken(self, language: str, hide: tuple[str, ...] = ()) -> list[Any]:
        """Every string in a language; if a link hides something, the button that undoes it too."""
        updates: list[Any] = [lesson.head(language), lesson.body(language)]
        for component, keys in self.texts:
            fresh = {name: say(language, key) for name, key in keys.items()}
            if component is self.change:
                fresh["choices"] = self._changes(language)
            if component is self.methods:
                fresh["choices"] = [(say(language, f"method.{name}"), name) for name in METHODS]
            if component is self.reveal and hide:
                fresh["visible"] = True
            updates.append(gr.update(**fresh))
        return updates

    # ---- Events --------------------------------------------------------------------------------

    def on_load(self, request: gr.Request) -> list[Any]:
        """The first screen: the link's wishes, else the first recorded run."""
        self.runs.slot.start()
        presets = tuple(example.name for example in EXAMPLES)
        link = links.parse(dict(request.query_params), presets)
        language = choose(link.language, request.headers.get("accept-language", ""))
        first = link.preset or (None if link.prompt else presets[0])
        trace = self.load_recorded(first) if first else None
        prompt = link.prompt or next((e.prompt for e in EXAMPLES if e.name == first), "")
        session = request.session_hash
        if self.runs.store.get(session):  # a quick visitor has pressed Run already
            return [gr.skip()] * (10 + len(FIELDS) + len(self._worded()))
        if trace:
            link = links.within(link, trace)
            message = self.runs.show(session, trace, "recorded", link.step)
        else:
            message = wire.speak(uuid.uuid4().hex, language, link.step)
        numbers = [gr.update(value=link.numbers.get(f.name, f.default)) for f in FIELDS]
        line = progress.line(lesson.question(language, first) if trace else "")
        tabs = [name for name in links.TABS if name not in link.hide]
        untouched = [gr.skip() for _ in self._worded()]
        notices = [
            say(language, key, names=", ".join(names))
            for names, key in ((link.clamped, "link.clamped"), (link.ignored, "link.ignored"))
            if names
        ]
        if notices:
            line = progress.line(" ".join(notices))
        return [
            wire.dress(message, language, link.hide, link.panels, link.phase),
            line,
            self.runs.model_line(language),
            language,
            prompt,
            list(link.methods) or gr.skip(),
            *numbers,
            gr.update(value=link.change) if link.change else gr.skip(),
            gr.update(value=link.expert or 1, visible="expert" in (link.change or "")),
            lesson.hiding([part for name, part in links.PAGE_PARTS.items() if name in link.hide]),
            gr.update(selected=tabs[0]) if tabs else gr.skip(),
            *(self._spoken(language, link.hide) if language != DEFAULT or link.hide else untouched),
        ]

    def on_reveal(self, language: str) -> list[Any]:
        """Everything that a link has hidden comes back."""
        message = wire.speak(uuid.uuid4().hex, language, hide=())
        return [message, lesson.hiding([]), gr.update(visible=False)]

    def on_tick(self, language: str, request: gr.Request) -> tuple[Any, Any, Any]:
        """Loading progress and the place in the line, until there is nothing more to tell."""
        place = self.runs.waiting(request.session_hash, language)
        busy = self.runs.slot.state.phase in ("idle", "loading") or place is not None
        return self.runs.model_line(language), gr.update(active=busy), place or gr.skip()

    def on_ask(self, language: str, request: gr.Request) -> tuple[Any, Any, Any, Any]:
        """At once, before the queue lets the run begin."""
        self.runs.line.join(request.session_hash)
        place = self.runs.waiting(request.session_hash, language)
        return (
            place,
            gr.update(interactive=False),
            gr.update(interactive=True),
            gr.update(active=True),
        )

    def on_choice(self, name: str, language: str) -> str:
        """What the chosen model takes; a run loads it, not the choice."""
        return self.runs.choice_line(name, language)

    def on_run(
        self,
        request: gr.Request,
        language: str,
        choice: str,
        change: str,
        expert: float | None,
        donor: str,
        prompt: str,
        methods: list[str],
        *numbers: float,
    ) -> Iterator[tuple[Any, ...]]:
        session = request.session_hash
        try:
            settings = settings_of(numbers)
            intervention = intervention_of(change, expert, donor)
        except (TypeError, ValueError):
            line = progress.line(say(language, "error.numbers"), "error")
            yield self._outputs(Frame(line, running=False))
            return
        frames = self.runs.stream(
            session, language, prompt, methods, settings, intervention, choice
        )
        try:
            for count, frame in enumerate(frames):
                yield self._outputs(frame, buttons=count == 0 or not frame.running)
        finally:
            frames.close()

    def _outputs(self, frame: Frame, buttons: bool = True) -> tuple[Any, ...]:
        return (
            gr.skip() if frame.player is None else frame.player,
            frame.progress,
            gr.update(interactive=not frame.running) if buttons else gr.skip(),
            gr.update(interactive=frame.running) if buttons else gr.skip(),
        )

    @staticmethod
    def on_change(change: str) -> tuple[Any, Any]:
        """Ask only for what the chosen intervention needs."""
        return gr.update(visible="expert" in change), gr.update(visible=change == "swap future")

    def on_stop(self, language: str, request: gr.Request) -> tuple[Any, ...]:
        return self._outputs(self.runs.stop(request.session_hash, language))

    def on_stopped(self, language: str, request: gr.Request) -> Any:
        return self.runs.stopped_line(request.session_hash, language) or gr.skip()

    def on_example(self, example: Example) -> Callable[..., tuple[Any, ...]]:
        """An example fills the prompt; its recorded run, if there is one, opens at once."""

        def choose_example(language: str, request: gr.Request) -> tuple[Any, ...]:
            self.runs.line.leave(request.session_hash)
            trace = self.load_recorded(example.name)
            if trace is None:
                line = progress.line(say(language, "example.not_recorded"))
                return (example.prompt, *self._outputs(Frame(line, running=False)))
            message = self.runs.show(request.session_hash, trace, "recorded")
            line = progress.line(lesson.question(language, example.name))
            return (example.prompt, *self._outputs(Frame(line, message, running=False)))

        return choose_example

    def on_opened(self, language: str, event: gr.EventData, request: gr.Request) -> tuple[Any, ...]:
        """A trace file from the visitor: untrusted, so checked field by field."""
        self.runs.line.leave(request.session_hash)
        text = event._data.get("text") if isinstance(event._data, dict) else None
        try:
            if not isinstance(text, str) or len(text) > MOST_TRACE_BYTES:
                raise ConFuError(say(language, "export.too_big"))
            trace = Trace.from_json(text)
        except ConFuError as error:
            line = progress.line(str(error), "error")
            message = wire.error(uuid.uuid4().hex, 0, str(error))
            return (*self._outputs(Frame(line, message, running=False)), gr.skip())
        message = self.runs.show(request.session_hash, trace, "file")
        line = progress.line(say(language, "example.file"))
        return (*self._outputs(Frame(line, message, running=False)), trace.prompt)

    def on_language(self, language: str) -> list[Any]:
        message = wire.speak(uuid.uuid4().hex, language)
        return [message, self.runs.model_line(language), *self._spoken(language)]

    def on_draw(self, language: str, request: gr.Request) -> list[Any]:
        """The charts of the session's run, each as sentence, picture and table."""
        trace = self.runs.trace(request.session_hash)
        if trace is None:
            nothing = html.escape(say(language, "chart.none"))
            return [value for _ in self.charts for value in (nothing, gr.update(visible=False), "")]
        found = heads(trace)[:MOST_HEADS] or [None]
        routers, maps = [], []
        for head in found:
            reference = recorded.reference(trace, self.runs.slot.engine, head=head)
            usual = partial(experts.usual_chart, trace, reference=reference, head=head)
            routers += [experts.chart(trace, name, language, head) for name in experts.ROUTERS]
            routers += [usual(router=name, language=language) for name in experts.ROUTERS]
            maps.append(futures.chart(trace, language, reference, head))
        spare = [Chart(None, "")] * (MOST_HEADS - len(found))
        drawn = [*routers, *4 * spare, *maps, *spare]
        drawn += [speed.race(trace, language), speed.phases(trace, language)]
        values: list[Any] = []
        for chart in drawn:
            plot = gr.update(value=chart.figure, visible=chart.figure is not None)
            sentence = gr.update(value=html.escape(chart.sentence), visible=bool(chart.sentence))
            values += [sentence, plot, gr.update(value=chart.table, visible=bool(chart.table))]
        return values

    def on_unload(self, request: gr.Request) -> None:
        self.runs.line.leave(request.session_hash)
        self.runs.store.drop(request.session_hash)

    def compare(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        nodes: int = 30,
        depth: int = 5,
        top_k: int = 8,
        trace: bool = False,
        methods: str = "",
    ) -> dict:
        """Decode one prompt by several methods and compare what they wrote and what it cost.

        Args:
            prompt: What to answer, as a user would type it.
            max_new_tokens: The most tokens to write.
            temperature: 0 is greedy; above, draws depend only on seed, position and token.
            seed: Seed of the draws.
            nodes: Size of the draft tree, the root included.
            depth: Drafting steps per round.
            top_k: Branches kept per drafting step.
            trace: Whether to add every round's tree, acceptance, experts and future token.
            methods: Which of plain, eagle3, confu, confu-lite, with commas between; empty means
                the first three, as far as they have a head.

        Returns:
            prompt, settings, target, identical (all methods wrote the same tokens), and methods:
            per method text, tokens (how many), rounds (verification passes of the target), tau
            (tokens gained per such pass, bonus token included) and seconds (its own compute time).
            With trace: also trace, as the page saves it.
        """
        settings = Settings(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            nodes=nodes,
            depth=depth,
            top_k=top_k,
        )
        try:
            named = [name.strip() for name in methods.split(",") if name.strip()]
            return self.runs.compare(prompt, settings, trace, named)
        except ConFuError as error:
            raise gr.Error(html.escape(str(error)), print_exception=False) from error
