"""Expert weights of both routers over the rounds."""

import html
from collections import Counter

from app.text import say
from app.views.chart import Chart, figure, lane_name, link, of_head
from app.views.marks import table, visible
from app.views.reference import Reference
from confu_core.trace import Lane, RoundRecord, Trace

ROUTERS = ("contemplate", "future")
ALIKE = 0.02  # weights of task groups that are no further apart tell nothing about a run
LONG = 2  # accepted tokens that make an acceptance "long" in the sentence

# What both heatmaps share: weights from 0 to 1, from white to the palette's light blue, so that the
# dark numbers stay readable in every cell.
_HEATMAP = {
    "textfont": {"size": 10},
    "zmin": 0,
    "zmax": 1,
    "colorscale": [[0.0, "#F4F8FB"], [1.0, "#56B4E9"]],
    "xgap": 1,
    "ygap": 1,
    "hovertemplate": "%{y}, %{x}: %{z:.2f}<extra></extra>",
}


def chart(trace: Trace, router: str, language: str, head: str | None = None) -> Chart:
    """One router's heatmap: experts by rounds, the gained text beneath. `head`: whose (sha256)."""
    lanes = of_head(trace, head)
    name = next((name for name, lane in lanes.items() if _rounds(lane, router)), None)
    if name is None:
        return Chart(None, say(language, f"experts.none_{router}"))
    rounds = _rounds(trace.lanes[name], router)
    count = len(_weights(rounds[0], router))
    columns = [_weights(record, router) for record in rounds]
    labels = [f"{r.index}  {visible(_gained(r), 16)}" for r in rounds]
    below = 24 + 7 * max(map(len, labels))  # pixels that the longest label takes when upright
    drawing = figure(
        60 + 26 * count + below,
        title={"text": _title(trace.lanes[name], router, language), "font": {"size": 14}},
        xaxis={
            "tickmode": "array",
            "tickvals": list(range(len(rounds))),
            "ticktext": [html.escape(label) for label in labels],
            "tickangle": -90,
            "tickfont": {"size": 11},
            "showgrid": False,
        },
        yaxis={"showgrid": False, "autorange": "reversed"},
    )
    drawing.update_layout(margin={"b": below})
    drawing.add_heatmap(
        # Not selected: no colour at all, on a light page as on a dark one.
        z=[[column[expert] or None for column in columns] for expert in range(count)],
        x=list(range(len(rounds))),
        y=[f"E{expert + 1}" for expert in range(count)],
        text=[[_cell(column[expert]) for column in columns] for expert in range(count)],
        texttemplate="%{text}" if len(rounds) <= 32 else None,
        showscale=len(rounds) > 32,
        meta=link(trace, name, [record.index for record in rounds]),
        **_HEATMAP,
    )
    return Chart(
        drawing, _sentence(rounds, router, count, language), _table(rounds, router, language)
    )


def usual_chart(
    trace: Trace, router: str, language: str, reference: Reference, head: str | None = None
) -> Chart:
    """This run's average weights above those of the recorded task groups. `head`: whose."""
    lanes = of_head(trace, head).values()
    lane = next((lane for lane in lanes if _rounds(lane, router)), None)
    uses = [use for use in reference.usual if getattr(use, router)]
    if lane is None:
        return Chart(None, "")
    if not uses:  # said once, not for each router
        first = next(name for name in ROUTERS if _rounds(lane, name))
        said = say(language, "experts.no_usual", method=lane_name(lane, language))
        return Chart(None, said if router == first else "")
    columns = list(
        zip(*(_weights(record, router) for record in _rounds(lane, router)), strict=True)
    )
    own = [sum(column) / len(column) for column in columns]
    rows = [(say(language, "experts.this_run"), lane.tau, own)]
    rows += [(visible(use.group, 24), use.tau, list(getattr(use, router))) for use in uses]
    nearest = min(uses, key=lambda use: _distance(own, getattr(use, router)))
    experts = [f"E{expert + 1}" for expert in range(len(own))]
    drawing = figure(
        110 + 28 * len(rows),
        title={"text": _title(lane, router, language), "font": {"size": 14}},
        xaxis={"showgrid": False, "side": "top"},
        yaxis={"showgrid": False, "autorange": "reversed"},
    )
    drawing.update_layout(margin={"l": 150, "t": 70, "b": 20})
    drawing.add_heatmap(
        z=[weights for _, _, weights in rows],
        x=experts,
        y=[html.escape(name) for name, _, _ in rows],
        text=[[_cell(weight) for weight in weights] for _, _, weights in rows],
        texttemplate="%{text}",
        showscale=False,
        **_HEATMAP,
    )
    spread = max(_distance(list(getattr(use, router)), getattr(nearest, router)) for use in uses)
    alike = spread < ALIKE**2
    key = "experts.alike" if alike else "experts.usual"
    sentence = say(language, key, group=visible(nearest.group, 24))
    heads = [say(language, "experts.group"), say(language, "race.tau"), *experts]
    cells = [
        [name, f"{tau:.2f}", *(f"{weight:.2f}" for weight in weights)]
        for name, tau, weights in rows
    ]
    return Chart(drawing, sentence, table(language, heads, cells))


def _title(lane: Lane, router: str, language: str) -> str:
    return f"{html.escape(lane_name(lane, language))} · {say(language, f'router.{router}')}"


def _distance(one: list[float], other: tuple[float, ...]) -> float:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=False))


def _rounds(lane: Lane, router: str) -> list[RoundRecord]:
    """Rounds with this router's weights, all of one length (a file may hold anything)."""
    rounds = [record for record in lane.rounds if _weights(record, router)]
    count = len(_weights(rounds[0], router)) if rounds else 0
    return [record for record in rounds if len(_weights(record, router)) == count]


def _weights(record: RoundRecord, router: str) -> tuple[float, ...]:
    return record.contemplate_router if router == "contemplate" else record.future_router


def _gained(record: RoundRecord) -> str:
    return "".join(token.text for token in record.tokens)


def _cell(weight: float) -> str:
    if weight <= 0:
        return ""
    # A chosen expert is never shown as nothing.
    return "<.01" if weight < 0.005 else f"{weight:.2f}".lstrip("0")


def _top(weights: tuple[float, ...]) -> int:
    return max(range(len(weights)), key=weights.__getitem__)


def _sentence(rounds: list[RoundRecord], router: str, count: int, language: str) -> str:
    tops = Counter(_top(_weights(record, router)) for record in rounds)
    expert, times = tops.most_common(1)[0]
    used = sum(any(_weights(record, router)[e] > 0 for record in rounds) for e in range(count))
    long = Counter(_top(_weights(record, router)) for record in rounds if len(record.path) >= LONG)
    text = say(
        language,
        "experts.sentence",
        expert=f"E{expert + 1}",
        times=times,
        rounds=len(rounds),
        used=used,
        count=count,
    )
    if not long:
        return text
    expert, times = long.most_common(1)[0]
    return f"{text} " + say(
        language,
        "experts.long",
        expert=f"E{expert + 1}",
        times=times,
        long=sum(long.values()),
        least=LONG,
    )


def _table(rounds: list[RoundRecord], router: str, language: str) -> str:
    count = len(_weights(rounds[0], router))
    heads = [say(language, "chart.round"), say(language, "chart.gained")]
    return table(
        language,
        heads + [f"E{expert + 1}" for expert in range(count)],
        [
            [str(r.index), visible(_gained(r), 60), *(f"{w:.2f}" for w in _weights(r, router))]
            for r in rounds
        ],
    )
