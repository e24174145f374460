"""The run's future tokens as a trail over the head's fixed PCA map."""

from dataclasses import dataclass

from app.text import say
from app.views.chart import COLOURS, Chart, figure
from app.views.marks import safe, table, visible
from confu_core.trace import RoundRecord, Trace

# Okabe-Ito without the colours that mean something else here; each group has its own symbol too.
_GROUPS = (
    ("#56B4E9", "circle"),
    ("#E69F00", "diamond"),
    ("#CC79A7", "triangle-up"),
    ("#0072B2", "cross"),
    ("#D55E00", "x"),
    ("#F0E442", "star"),
)


@dataclass(frozen=True)
class Reference:
    """What the map is drawn over: points of recorded text by task group, and how much of the
    variance each axis explains. The axes belong to the head and never change between runs."""

    explained: tuple[float, float]
    points: tuple[tuple[str, float, float], ...]


def chart(trace: Trace, language: str, reference: Reference | None = None) -> Chart:
    """Points in order of the rounds, joined; hover tells what the text did then."""
    rounds = [
        record
        for lane in trace.lanes.values()
        for record in lane.rounds
        if record.future is not None and record.future.point is not None
    ]
    if not rounds:
        return Chart(None, say(language, "futures.none"))
    xs = [record.future.point[0] for record in rounds]
    ys = [record.future.point[1] for record in rounds]
    drawing = figure(
        480,
        xaxis={"title": {"text": _axis(language, 1, reference)}},
        yaxis={"title": {"text": _axis(language, 2, reference)}, "scaleanchor": "x"},
        legend={"orientation": "h", "y": 1.1},
    )
    if reference:
        _add_reference(drawing, reference)
    drawing.add_scatter(
        x=xs,
        y=ys,
        name=say(language, "futures.run"),
        mode="lines+markers+text",
        line={"color": COLOURS["confu"], "width": 1.5},
        marker={
            "size": 11,
            "symbol": "square",
            "color": list(range(len(rounds))),
            "colorscale": "Cividis",
            "showscale": True,
            "colorbar": {"title": {"text": say(language, "chart.round")}, "thickness": 12},
            "line": {"width": 1, "color": "#888"},
        },
        text=[str(record.index) for record in rounds],
        textposition="top center",
        textfont={"size": 11},
        customdata=[[safe(_gained(r), 40), safe(_words(r), 60)] for r in rounds],
        hovertemplate=say(language, "futures.hover") + "<extra></extra>",
    )
    sentence = say(language, "futures.sentence", n=len(rounds))
    if reference:
        share = f"{sum(reference.explained):.0%}"
        sentence += " " + say(language, "futures.explained", share=share)
    rows = [
        [str(r.index), f"{x:.2f}", f"{y:.2f}", visible(_gained(r), 60), visible(_words(r), 80)]
        for r, x, y in zip(rounds, xs, ys, strict=True)
    ]
    heads = ["chart.round", "futures.first", "futures.second", "chart.gained", "futures.words"]
    return Chart(drawing, sentence, table(language, [say(language, h) for h in heads], rows))


def _axis(language: str, number: int, reference: Reference | None) -> str:
    name = say(language, "futures.axis", n=number)
    return f"{name} ({reference.explained[number - 1]:.0%})" if reference else name


def _add_reference(drawing, reference: Reference) -> None:
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
