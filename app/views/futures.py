"""The run's future tokens as a trail over the head's fixed PCA map, and whose words came true."""

import plotly.graph_objects as go

from app.text import say
from app.views.chart import (
    COLOURS,
    DASHES,
    SYMBOLS,
    Chart,
    figure,
    lane_name,
    link,
    look,
    of_head,
)
from app.views.marks import safe, table, visible
from app.views.reference import Reference
from confu_core.trace import Lane, RoundRecord, Token, Trace

# Six colours and three symbols for each: every group has a pair, and nearly always a symbol, of its
# own.
_COLOURS = ("#56B4E9", "#E69F00", "#CC79A7", "#0072B2", "#D55E00", "#9A8B00")
_SYMBOLS = (
    ("circle", "diamond", "triangle-up", "cross", "x", "star"),
    ("circle-open", "diamond-open", "triangle-down", "cross-open", "x-open", "star-open"),
    ("pentagon", "hourglass", "triangle-left", "bowtie", "hexagram", "star-diamond"),
)

REACH = 8  # tokens within which a reading may come true; the player's too (`future.js`)
MOST_LABELS = 12  # beyond that many points only some are numbered

NOTHING = Reference()


def chart(
    trace: Trace, language: str, reference: Reference = NOTHING, head: str | None = None
) -> Chart:
    """Points in order of the rounds, joined; hover tells what the text did then. Filled points are
    those whose likeliest word came true. `head`: whose map (sha256)."""
    lanes = of_head(trace, head)
    trails = [(name, lane, _placed(lane)) for name, lane in lanes.items() if _placed(lane)]
    if not trails:
        return Chart(None, say(language, "futures.none"))
    # One scale for both axes; what the page is wider than high stays free for the legend.
    drawing = figure(
        600,
        xaxis={"title": {"text": _axis(language, 1, reference)}, "constrain": "domain"},
        yaxis={"title": {"text": _axis(language, 2, reference)}, "scaleanchor": "x"},
    )
    if reference.points:
        _add_reference(drawing, reference)
    for name, lane, rounds in trails:
        main = name == trails[0][0]
        _add_trail(drawing, lane, rounds, language, link(trace, name, _indices(rounds)), main)
    sentence = say(language, "futures.sentence", n=len(trails[0][2]))
    if reference.explained:
        share = f"{sum(reference.explained):.0%}"
        sentence += " " + say(language, "futures.explained", share=share)
    sentence += _truth_sentence(trails[0][1], trails[0][2], language)
    rows = [
        [
            lane_name(lane, language),
            str(record.index),
            *(f"{value:.2f}" for value in record.future.point),
            visible(_text(following(lane, record)), 60),
            visible(_words(lane, record), 100),
        ]
        for _, lane, rounds in trails
        for record in rounds
    ]
    heads = ["chart.method", "chart.round", "futures.first", "futures.second", "futures.followed"]
    heads.append("futures.words")
    return Chart(drawing, sentence, table(language, [say(language, h) for h in heads], rows))


def _placed(lane: Lane) -> list[RoundRecord]:
    return [r for r in lane.rounds if r.future is not None and r.future.point is not None]


def _indices(rounds: list[RoundRecord]) -> list[int | None]:
    return [record.index for record in rounds]


def following(lane: Lane, record: RoundRecord) -> list[Token]:
    """What was written next, from this round on: as far as a reading is given time to come true."""
    later = (token for r in lane.rounds if r.index >= record.index for token in r.tokens)
    return [token for token, _ in zip(later, range(REACH), strict=False)]


def came_true(word: str, tokens: list[Token]) -> int:
    """As the how-manieth token a word came, or 0. Spaces around it and capitals do not count.
    Mirrors `cameTrue` of the player's `layout.js`."""
    wanted = _plain(word)
    texts = [_plain(token.text) for token in tokens]
    return texts.index(wanted) + 1 if wanted and wanted in texts else 0


def _plain(text: str) -> str:
    return text.strip().lower()


def _truth_sentence(lane: Lane, rounds: list[RoundRecord], language: str) -> str:
    """How many of all words came true, and how many would by chance: how often a round's next
    tokens hold the words that were read in the other rounds."""
    nexts = [{_plain(token.text) for token in following(lane, record)} for record in rounds]
    words = [[w for r in record.future.readings if (w := _plain(r.text))] for record in rounds]
    total = sum(map(len, words))
    if not total:
        return ""
    came = sum(w in tokens for read, tokens in zip(words, nexts, strict=True) for w in read)
    sentence = " " + say(
        language, "futures.came", came=came, n=total, reach=REACH, share=f"{came / total:.0%}"
    )
    if len(rounds) > 1:
        anywhere = sum(w in tokens for read in words for w in read for tokens in nexts)
        chance = (anywhere - came) / (total * (len(rounds) - 1))
        sentence += " " + say(language, "futures.chance", chance=f"{chance:.0%}")
    return sentence


def _add_trail(
    drawing: go.Figure,
    lane: Lane,
    rounds: list[RoundRecord],
    language: str,
    meta: dict[str, object],
    main: bool,
) -> None:
    """One lane's points in order of the rounds; the main lane's are coloured by round."""
    shape = SYMBOLS[look(lane)]
    symbols = [shape if _first_came(lane, record) else f"{shape}-open" for record in rounds]
    step = -(-len(rounds) // MOST_LABELS)
    marker = {"size": 11, "symbol": symbols, "line": {"width": 2 if main else 1}}
    if main:
        marker |= {
            "color": list(range(len(rounds))),
            "colorscale": "Cividis",
            "showscale": True,
            "colorbar": {
                "title": {"text": say(language, "chart.round"), "side": "right"},
                "thickness": 12,
                "x": -0.02,
                "xanchor": "right",
                "len": 0.5,
            },
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
        text=[str(r.index) if n % step == 0 else "" for n, r in enumerate(rounds)],
        textposition="top center",
        textfont={"size": 11},
        customdata=[_hover(lane, record) for record in rounds],
        hovertemplate=say(language, "futures.hover") + "<extra></extra>",
        meta={**meta, "trail": True},
    )


def _axis(language: str, number: int, reference: Reference) -> str:
    name = say(language, "futures.axis", n=number)
    return f"{name} ({reference.explained[number - 1]:.0%})" if reference.explained else name


def _add_reference(drawing: go.Figure, reference: Reference) -> None:
    groups = sorted({group for group, _, _ in reference.points})
    for number, group in enumerate(groups):
        column, turn = number % len(_COLOURS), number // len(_COLOURS) % len(_SYMBOLS)
        colour, symbol = _COLOURS[column], _SYMBOLS[turn][column]
        drawing.add_scatter(
            x=[x for name, x, _ in reference.points if name == group],
            y=[y for name, _, y in reference.points if name == group],
            name=safe(group, 24),
            mode="markers",
            marker={"size": 6, "symbol": symbol, "color": colour, "opacity": 0.55},
            hovertemplate=f"{safe(group, 24)}<extra></extra>",
        )


def _hover(lane: Lane, record: RoundRecord) -> list[str]:
    """Round, the text that followed, the nearest words."""
    text = safe(_text(following(lane, record)), 60)
    return [str(record.index), text, safe(_words(lane, record), 100)]


def _text(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def _first_came(lane: Lane, record: RoundRecord) -> bool:
    readings = record.future.readings
    return bool(readings) and came_true(readings[0].text, following(lane, record)) > 0


def _words(lane: Lane, record: RoundRecord) -> str:
    """The nearest words; a tick and a distance stand at those that came true."""
    tokens = following(lane, record)
    words = []
    for reading in record.future.readings:
        when = came_true(reading.text, tokens)
        words.append(f"{reading.text.strip()} ✓+{when}" if when else reading.text.strip())
    return ", ".join(words)
