"""The run's future tokens as a trail over the head's fixed PCA map."""

from app.text import say
from app.views.chart import COLOURS, Chart, figure
from app.views.marks import safe, table, visible
from confu_core.trace import RoundRecord, Trace


def chart(trace: Trace, language: str) -> Chart:
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
        460,
        xaxis={"title": {"text": say(language, "futures.axis", n=1)}},
        yaxis={"title": {"text": say(language, "futures.axis", n=2)}, "scaleanchor": "x"},
        showlegend=False,
    )
    drawing.add_scatter(
        x=xs,
        y=ys,
        mode="lines+markers+text",
        line={"color": COLOURS["confu"], "width": 1},
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
    rows = [
        [str(r.index), f"{x:.2f}", f"{y:.2f}", visible(_gained(r), 60), visible(_words(r), 80)]
        for r, x, y in zip(rounds, xs, ys, strict=True)
    ]
    heads = ["chart.round", "futures.first", "futures.second", "chart.gained", "futures.words"]
    return Chart(drawing, sentence, table(language, [say(language, h) for h in heads], rows))


def _gained(record: RoundRecord) -> str:
    return "".join(token.text for token in record.tokens)


def _words(record: RoundRecord) -> str:
    return ", ".join(reading.text.strip() for reading in record.future.readings)
