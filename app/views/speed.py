"""Where the time goes: tokens over compute time, and milliseconds of a pass by phase."""

from statistics import mean, median

from app.text import say
from app.views.chart import COLOURS, DASHES, SYMBOLS, Chart, figure, lane_name, link, look
from app.views.marks import table
from confu_core.trace import Lane, Trace

PHASES = ("draft", "verify", "rest")
_PHASE_COLOURS = {"draft": "#56B4E9", "verify": "#0072B2", "rest": "#9CA3AF"}
_PHASE_PATTERNS = {"draft": "/", "verify": "", "rest": "."}


def race(trace: Trace, language: str) -> Chart:
    """Tokens written over each lane's own compute time: one shared axis, one block per pass."""
    named = {name: lane for name, lane in trace.lanes.items() if lane.rounds}
    lanes = list(named.values())
    if not lanes:
        return Chart(None, say(language, "speed.none"))
    drawing = figure(
        360,
        xaxis={"title": {"text": say(language, "speed.axis_seconds")}, "rangemode": "tozero"},
        yaxis={"title": {"text": say(language, "speed.axis_tokens")}, "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.12},
    )
    for name, lane in named.items():
        seconds, tokens, spent, written = [0.0], [0], 0.0, 0
        for record in lane.rounds:
            spent += record.seconds.total
            written += len(record.tokens)
            seconds.append(spent)
            tokens.append(written)
        drawing.add_scatter(
            x=seconds,
            y=tokens,
            name=lane_name(lane, language),
            mode="lines+markers",
            line={
                "shape": "hv",
                "width": 2,
                "color": COLOURS[look(lane)],
                "dash": DASHES[look(lane)],
            },
            marker={"size": 6, "symbol": SYMBOLS[look(lane)]},
            hovertemplate="%{x:.2f} s, %{y}<extra>%{fullData.name}</extra>",
            meta=link(trace, name, [None, *(record.index for record in lane.rounds)]),
        )
    return Chart(drawing, _race_sentence(trace, lanes, language), _race_table(lanes, language))


def phases(trace: Trace, language: str) -> Chart:
    """Mean milliseconds of a verification round, split by phase."""
    lanes = [lane for lane in trace.lanes.values() if len(lane.rounds) > 1]
    if not lanes:
        return Chart(None, say(language, "speed.none"))
    drawing = figure(
        120 + 46 * len(lanes),
        barmode="stack",
        xaxis={"title": {"text": say(language, "speed.axis_ms")}},
        yaxis={"autorange": "reversed"},
        legend={"orientation": "h", "y": 1.25, "traceorder": "normal"},
    )
    drawing.update_layout(margin={"l": 120})
    for phase in PHASES:
        drawing.add_bar(
            orientation="h",
            name=say(language, f"speed.{phase}"),
            y=[lane_name(lane, language) for lane in lanes],
            x=[_mean_ms(lane, phase) for lane in lanes],
            marker={
                "color": _PHASE_COLOURS[phase],
                "pattern": {"shape": _PHASE_PATTERNS[phase]},
            },
            hovertemplate="%{x:.1f} ms<extra>%{fullData.name}</extra>",
        )
    parts = [
        say(
            language,
            "speed.phase_part",
            method=lane_name(lane, language),
            ms=f"{_median_ms(lane):.0f}",
            n=len(lane.rounds) - 1,
            rows=f"{mean(r.target_rows for r in lane.rounds[1:]):.0f}",
        )
        for lane in lanes
    ]
    sentence = say(language, "speed.phase_sentence", parts="; ".join(parts))
    heads = [say(language, "chart.method")]
    heads += [f"{say(language, f'speed.{phase}')} (ms)" for phase in PHASES]
    heads.append(say(language, "speed.rows"))
    rows = [
        [
            lane_name(lane, language),
            *(f"{_mean_ms(lane, phase):.1f}" for phase in PHASES),
            f"{mean(r.target_rows for r in lane.rounds[1:]):.1f}",
        ]
        for lane in lanes
    ]
    return Chart(drawing, sentence, table(language, heads, rows))


def _mean_ms(lane: Lane, phase: str) -> float:
    return 1000 * mean(getattr(record.seconds, phase) for record in lane.rounds[1:])


def _median_ms(lane: Lane) -> float:
    return 1000 * median(record.seconds.total for record in lane.rounds[1:])


def _race_sentence(trace: Trace, lanes: list[Lane], language: str) -> str:
    parts = [
        say(
            language,
            "speed.race_part",
            method=lane_name(lane, language),
            tokens=len(lane.tokens),
            passes=lane.target_passes,
            tau=f"{lane.tau:.2f}",
            seconds=f"{lane.seconds:.2f}",
        )
        for lane in lanes
    ]
    note = "speed.note_cpu" if trace.target.device.startswith("cpu") else "speed.note_device"
    return " ".join(
        [
            say(language, "speed.race_sentence", parts="; ".join(parts)),
            say(language, note, device=trace.target.device),
        ]
    )


def _race_table(lanes: list[Lane], language: str) -> str:
    heads = ["chart.method", "race.tokens", "race.passes", "race.tau", "race.seconds"]
    rows = [
        [
            lane_name(lane, language),
            str(len(lane.tokens)),
            str(lane.target_passes),
            f"{lane.tau:.2f}",
            f"{lane.seconds:.2f} s",
        ]
        for lane in lanes
    ]
    return table(language, [say(language, head) for head in heads], rows)
