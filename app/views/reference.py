"""What a run is compared with: recorded text of known task groups, read by the same head."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupUse:
    """Average expert weights and tokens per pass over the recorded runs of one task group."""

    group: str
    rounds: int
    tau: float
    contemplate: tuple[float, ...]
    future: tuple[float, ...]


@dataclass(frozen=True)
class Reference:
    """The recorded reference of one head.

    explained: share of variance of the map's two axes; None if the head has no map.
    points: (task group, x, y) of recorded future tokens. usual: average use by task group.
    """

    explained: tuple[float, float] | None = None
    points: tuple[tuple[str, float, float], ...] = ()
    usual: tuple[GroupUse, ...] = ()
