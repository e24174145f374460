"""The settings that a visitor can change: their ranges in the page, defaults and names.

The ranges are those of the page's sliders and of teacher links; the core has the last word.
"""

from dataclasses import dataclass, fields

from confu_core.trace import Intervention, Settings

METHODS = ("plain", "eagle3", "confu", "confu-lite")
CHOSEN = ("plain", "eagle3", "confu")  # until the visitor says otherwise
MOST_CHARACTERS = 4000
MOST_EXPERTS = 64  # that a form or a link may name; the core knows how many a head has
NO_CHANGE = "none"
CHANGES = (
    "remove future",
    "swap future",
    "force contemplate expert",
    "force future expert",
)


@dataclass(frozen=True)
class Field:
    """One number of `Settings`."""

    name: str
    low: float
    high: float
    step: float

    @property
    def default(self) -> float:
        return next(f.default for f in fields(Settings) if f.name == self.name)

    def clamp(self, value: float) -> float:
        bounded = min(max(value, self.low), self.high)
        return int(bounded) if isinstance(self.default, int) else float(bounded)


FIELDS = (
    Field("max_new_tokens", 1, 256, 1),
    Field("temperature", 0.0, 1.5, 0.1),
    Field("top_p", 0.1, 1.0, 0.05),
    Field("seed", 0, 2**31 - 1, 1),
    Field("nodes", 1, 120, 1),
    Field("depth", 1, 10, 1),
    Field("top_k", 1, 16, 1),
)


def settings_of(values: tuple[float, ...]) -> Settings:
    """`Settings` from the form's numbers, in the order of `FIELDS`."""
    named = zip(FIELDS, values, strict=True)
    return Settings(**{f.name: type(f.default)(value) for f, value in named})


def intervention_of(change: str, expert: float | None, donor: str) -> Intervention | None:
    """What to change about ConFu in a lane of its own. `expert` counts from 1, as the page does."""
    if change not in CHANGES:
        return None
    return Intervention(
        change=change,
        expert=int(expert or 1) - 1 if "expert" in change else None,
        donor=donor if change == "swap future" else None,
    )
