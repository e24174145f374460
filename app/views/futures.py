"""The run's future tokens as a trail over the head's fixed PCA map."""

import plotly.graph_objects as go

from app.text import say
from app.views.chart import COLOURS, DASHES, SYMBOLS, Chart, figure, lane_name, look
from app.views.marks import safe, table, visible
from app.views.reference import Reference
from confu_core.trace import Lane, RoundRecord, Trace

# Okabe-Ito without the colours that mean something else here; each group has its own symbol too.
_GROUPS = (
    ("#56B4E9", "circle"),
    ("#E69F00", "diamond"),
    ("#CC79A7", "triangle-up"),
    ("#0072B2", "cross"),
    ("#D55E00", "x"),
    ("#F0E442", "star"),
)


NOTHING = Reference()


def chart(trace: Trace, language: str, reference: Reference = NOTHING) -> Chart:
    """Points in order of the rounds, joined; hover tells what the text did then."""
    trails = [(lane, _placed(lane)) for lane in trace.lanes.values() if _placed(lane)]
    if not trails:
        return Chart(None, say(language, "futures.none"))
    drawing = figure(
        480,
        xaxis={"title": {"text": _axis(language, 1, reference)}},
        yaxis={"title": {"text": _axis(language, 2, reference)}, "scaleanchor": "x"},
        legend={"orientation": "h", "y": 1.1},
    )
    if reference.points:
        _add_reference(drawing, reference)
    for lane, rounds in trails:
        _add_trail(drawing, lane, rounds, language, main=lane is trails[0][0])
    sentence = say(language, "futures.sentence", n=len(trails[0][1]))
    if reference.explained:
        share = f"{sum(reference.explained):.0%}"
        sentence += " " + say(language, "futures.explained", share=share)
    rows = [
        [
            lane_name(lane, language),
            str(record.index),
            *(f"{value:.2f}" for value in record.future.point),
            visible(_gained(record), 60),
            visible(_words(record), 80),
        ]
        for lane, rounds in trails
        for record in rounds
    ]
    heads = ["chart.method", "chart.round", "futures.first", "futures.second", "chart.gained"]
    heads.append("futures.words")
    return Chart(drawing, sentence, table(language, [say(language, h) for h in heads], rows))


def _placed(lane: Lane) -> list[RoundRecord]:
    return [r for r in lane.rounds if r.future is not None and r.future.point is not None]


def _add_trail(
    drawing: go.Figure, lane: Lane, rounds: list[RoundRecord], language: str, main: bool
) -> None:
    """One lane's points in order of the rounds; the main lane's are coloured by round."""
    marker = {"size": 11, "symbol": SYMBOLS[look(lane)], "line": {"width": 1, "color": "#888"}}
    if main:
        marker |= {
            "color": list(range(len(rounds))),
            "colorscale": "Cividis",
            "showscale": True,
            "colorbar": {"title": {"text": say(language, "chart.round")}, "thickness": 12},
        }
    else:
        marker["color"] = COLOURS[look(lane)]
    drawing.add_scatter(
        x=[record.future.point[0] for record in rounds],
        y=[record.future.point[1] for record in rounds],
        name=say(language, "futures.run", method=lane_name(lane, language)),
        mode="lines+markers+text",
        line={"color": COLOURS[look(lane)], "width": 1.5, "dash": DASHES[look(lane)]},
        marker=marker,
        text=[str(record.index) for record in rounds],
        textposition="top center",
        textfont={"size": 11},
        customdata=[[safe(_gained(r), 40), safe(_words(r), 60)] for r in rounds],
        hovertemplate=say(language, "futures.hover") + "<extra></extra>",
    )


def _axis(language: str, number: int, reference: Reference) -> str:
    name = say(language, "futures.axis", n=number)
    return f"{name} ({reference.explained[number - 1]:.0%})" if reference.explained else name


def _add_reference(drawing: go.Figure, reference: Reference) -> None:
    groups = sorted({group for group, _, _ in reference.points})
    for number, group in enumerate(groups):
        colour, symbol = _GROUPS[number % len(_GROUPS)]
        drawing.add_scatter(
            x=[x for name, x, _ in reference.points if name == group],
            y=[y for name, _, y in reference.points if name == group],
            name=safe(group, 24),
            mode="markers",
            marker={"size": 5, "symbol": symbol, "color": colour, "opacity": 0.5},
            hovertemplate=f"{safe(group, 24)}<extra></extra>",
        )


def _gained(record: RoundRecord) -> str:
    return "".join(token.text for token in record.tokens)


def _words(record: RoundRecord) -> str:
    return ", ".join(reading.text.strip() for reading in record.future.readings)
