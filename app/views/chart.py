"""What the charts share: a figure with its sentence and table, one look for light and dark."""

from dataclasses import dataclass

import plotly.graph_objects as go

from app.text import say
from app.views.marks import visible
from confu_core.trace import Lane, Trace

COLOURS = {
    "plain": "#6B7280",
    "eagle3": "#CC79A7",
    "confu": "#009E73",
    "confu-lite": "#8040C0",
    "changed": "#D55E00",
}
SYMBOLS = {
    "plain": "triangle-up",
    "eagle3": "circle",
    "confu": "square",
    "confu-lite": "hexagon",
    "changed": "diamond",
}
DASHES = {
    "plain": "dot",
    "eagle3": "dash",
    "confu": "solid",
    "confu-lite": "longdash",
    "changed": "dashdot",
}


def look(lane: Lane) -> str:
    """The key of a lane's colour, symbol and dash; a method of a file may be unknown here."""
    if lane.intervention:
        return "changed"
    return lane.method if lane.method in COLOURS else "plain"


def lane_name(lane: Lane, language: str) -> str:
    """A lane as the page calls it, with what was changed, if anything."""
    known = lane.method in COLOURS
    method = say(language, f"method.{lane.method}") if known else visible(lane.method)
    if lane.intervention is None:
        return method
    key = f"change.{lane.intervention.change.replace(' ', '_')}"
    what = say(language, key, expert=f"E{(lane.intervention.expert or 0) + 1}")
    return say(language, "method.changed", method=method, what=what)


def heads(trace: Trace) -> list[str]:
    """The heads (by sha256) that contemplated in this run. Routers and the axes of a map belong to
    a head, so charts show one head's lanes and no other's."""
    able = (
        lane.head.sha256 if lane.head else ""
        for lane in trace.lanes.values()
        if any(r.contemplate_router or r.future_router or r.future for r in lane.rounds)
    )
    return list(dict.fromkeys(able))


def of_head(trace: Trace, head: str | None) -> dict[str, Lane]:
    """The lanes of a head; None names the first that contemplated."""
    wanted = next(iter(heads(trace)), None) if head is None else head
    return {
        name: lane
        for name, lane in trace.lanes.items()
        if (lane.head.sha256 if lane.head else "") == wanted
    }


def link(trace: Trace, name: str, rounds: list[int | None]) -> dict[str, object]:
    """What a chart's trace tells the player (`player/charts.js`) in its `meta`: whose rounds its
    columns or points are, in order; None for a point that is no round."""
    return {"run": trace.created, "lane": name, "rounds": rounds}


@dataclass(frozen=True)
class Chart:
    """A picture for the eye, one sentence that says what it shows, and a table of its numbers."""

    figure: go.Figure | None
    sentence: str
    table: str = ""


def figure(height: int, **layout: object) -> go.Figure:
    """An empty figure. Backgrounds are transparent and greys are middling, since the server
    cannot know whether the page is light or dark; the page's CSS sets the text colour."""
    drawing = go.Figure()
    drawing.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        height=height,
        margin={"l": 64, "r": 20, "t": 40, "b": 56},
        font={"size": 13},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888", "activecolor": "#0072B2"},
        **layout,
    )
    drawing.update_xaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)
    drawing.update_yaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)
    return drawing
