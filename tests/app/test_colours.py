"""Colours that mean different things stay apart for every eye, and none of them speaks alone.

Colour vision is simulated with the matrices of Machado, Oliveira and Fernandes (2009), severity 1,
on linear RGB; distances are CIEDE2000, in which about 2 is just noticeable.
"""

import itertools
import math
import re
from pathlib import Path

import pytest

from app import player
from app.views import chart, experts, futures

CSS = (Path(player.__file__).parent / "player.css").read_text(encoding="utf-8")

EYES = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
STATES = ("accepted", "target", "grey", "card")
METHODS = ("m-plain", "m-eagle3", "m-confu", "m-confu-lite", "m-changed")


def variables(theme: str) -> dict[str, str]:
    """The player's colours by name; the dark theme changes some of the light one's."""
    light = re.search(r"^\.cfx \{(.*?)^\}", CSS, re.S | re.M)[1]
    dark = re.search(r"^\.dark \.cfx \{(.*?)^\}", CSS, re.S | re.M)[1]
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    if theme == "dark":
        found |= dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark))
    return found


def linear(colour: str) -> tuple[float, ...]:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)


def seen(colour: str, eye: str) -> tuple[float, ...]:
    """CIELAB of a colour as an eye sees it."""
    rgb = linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True)))) for row in EYES[eye]
    )
    white = (0.95047, 1.0, 1.08883)
    xyz = (
        0.4124564 * red + 0.3575761 * green + 0.1804375 * blue,
        0.2126729 * red + 0.7151522 * green + 0.0721750 * blue,
        0.0193339 * red + 0.1191920 * green + 0.9503041 * blue,
    )
    x, y, z = (
        (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116)
        for t in (v / w for v, w in zip(xyz, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """CIEDE2000 between two CIELAB colours (Sharma, Wu and Dalal 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean**7 / (mean**7 + 25**7)))
    a1, a2 = a1 * (1 + g), a2 * (1 + g)
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    dh = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    turn = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(dh / 2))
    light, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + dh / 2) % 360
    t = (
        1
        - 0.17 * math.cos(math.radians(hue - 30))
        + 0.24 * math.cos(math.radians(2 * hue))
        + 0.32 * math.cos(math.radians(3 * hue + 6))
        - 0.20 * math.cos(math.radians(4 * hue - 63))
    )
    sl = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    bend = 60 * math.exp(-(((hue - 275) / 25) ** 2))
    twist = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(math.radians(bend))
    parts = ((l2 - l1) / sl, (c2 - c1) / sc, turn / sh)
    return math.sqrt(sum(p * p for p in parts) + twist * parts[1] * parts[2])


def test_distance_is_ciede2000():
    # Two pairs of the published test data.
    assert distance((50, 2.6772, -79.7751), (50, 0, -82.7485)) == pytest.approx(2.0425, abs=1e-4)
    assert distance((50, 2.5, 0), (73, 25, -18)) == pytest.approx(27.1492, abs=1e-4)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_meanings_stay_apart(theme, eye):
    colours = variables(theme)
    for names, least in ((STATES, 12), (METHODS, 10)):
        for one, other in itertools.combinations(names, 2):
            apart = distance(seen(colours[one], eye), seen(colours[other], eye))
            assert apart >= least, f"{one} and {other}: {apart:.1f}"
    for name in METHODS:  # the round on show is a bar in the colour of ink
        assert distance(seen(colours[name], eye), seen(colours["ink"], eye)) >= 20, name


@pytest.mark.parametrize("eye", EYES)
def test_phases_of_a_pass_stay_apart(eye):
    from app.views.speed import _PHASE_COLOURS, _PHASE_PATTERNS

    for one, other in itertools.combinations(_PHASE_COLOURS.values(), 2):
        assert distance(seen(one, eye), seen(other, eye)) >= 10
    assert len(set(_PHASE_PATTERNS.values())) == len(_PHASE_COLOURS)


def test_nothing_is_told_by_colour_alone():
    # States: a sign and a stroke each. Methods: a letter and a shape. Charts: symbols and dashes.
    signs = re.search(r"const SIGNS = \{(.*?)\}", player._read("tree.js"))[1]
    assert len(set(re.findall(r': "(.)"', signs))) == 4
    frames = [
        re.search(rf"cfx-is-{state} \.cfx-frame {{[^}}]*stroke-dasharray: ([\d. ]+)", CSS)[1]
        for state in ("rejected", "not-reached", "pending")
    ]
    assert len(set(frames)) == 3
    letters = re.search(r"const letter = \{(.*?)\}", player._read("dom.js"))[1]
    assert len(set(re.findall(r': "(.)"', letters))) == 5
    for cues in (chart.SYMBOLS, chart.DASHES):
        assert len(set(cues.values())) == len(chart.COLOURS)
    symbols = [symbol for turn in futures._SYMBOLS for symbol in turn]
    assert len(set(symbols)) == len(symbols) == 3 * len(futures._COLOURS)


def test_numbers_on_heatmaps_can_be_read():
    def luminance(colour):
        red, green, blue = linear(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    ink = luminance("#111827")
    for _, colour in experts._HEATMAP["colorscale"]:
        assert (luminance(colour) + 0.05) / (ink + 0.05) >= 4.5
