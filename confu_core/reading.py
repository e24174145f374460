"""Reading a future token: the tokens that it names itself, its nearest words, and its place on a
fixed map. Plain numbers out.

What it names, ConFu mixes into its draft; nearest words and map are our readings, which no method
uses, and are labelled so wherever they are shown. The map is a PCA basis fitted once on recorded
text and saved with the head (`basis.json`), so its axes and signs never change between runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from confu_core.errors import CheckpointError
from confu_core.heads import Contemplation, DraftHead


def nearest_words(head: DraftHead, feature: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """What the draft's own head makes of a future feature (H,): (token id, probability) pairs,
    likeliest first. Probabilities are within the draft vocabulary."""
    probs = head.logits(feature).float().softmax(-1)
    best, ids = probs.topk(min(count, len(probs)))
    return list(zip(head.target_ids(ids).tolist(), best.tolist(), strict=True))


def named_tokens(
    head: DraftHead, part: Contemplation, read_out: torch.Tensor
) -> list[tuple[int, float]]:
    """What the read-outs of a future token say by themselves: for depth 1, 2, ... of the draft that
    it steers the likeliest token id and its probability within the draft vocabulary.

    read_out: (R, D) logits of the last R read-outs, times their weights, as the draft adds them.
    """
    weight = part.read_out_weight[-len(read_out) :].unsqueeze(-1)
    probs = (read_out / weight.masked_fill(weight == 0, 1)).float().softmax(-1)
    best, ids = probs.max(-1)  # (R,)
    return list(zip(head.target_ids(ids).tolist(), best.tolist(), strict=True))


@dataclass(frozen=True)
class FutureBasis:
    """A fixed map of future features: PCA with two axes, and reference points by task group.

    mean: H numbers; axes: 2 x H; explained: share of variance per axis; points: (group, x, y).
    """

    mean: tuple[float, ...]
    axes: tuple[tuple[float, ...], tuple[float, ...]]
    explained: tuple[float, float]
    points: tuple[tuple[str, float, float], ...]

    @classmethod
    def fit(cls, features: torch.Tensor, groups: list[str], shown: int = 600) -> FutureBasis:
        """Fit on features (n, H) with one group name each; `shown` points are kept for the map."""
        from sklearn.decomposition import PCA

        values = features.float().numpy()
        pca = PCA(n_components=2, svd_solver="full").fit(values)
        places = pca.transform(values)
        step = max(1, len(values) // shown)
        points = [
            (groups[n], round(float(places[n, 0]), 3), round(float(places[n, 1]), 3))
            for n in range(0, len(values), step)
        ]
        axes = pca.components_.round(5).tolist()
        explained = pca.explained_variance_ratio_.round(4).tolist()
        return cls(
            tuple(pca.mean_.round(5).tolist()),
            (tuple(axes[0]), tuple(axes[1])),
            (explained[0], explained[1]),
            tuple(points),
        )

    def place(self, feature: torch.Tensor) -> tuple[float, float]:
        """The point of a future feature (H,)."""
        centred = feature.float().cpu() - torch.tensor(self.mean)
        x, y = (torch.tensor(self.axes) @ centred).tolist()
        return round(x, 3), round(y, 3)

    def save(self, path: Path) -> None:
        """Write as JSON."""
        columns = {
            "mean": self.mean,
            "axes": self.axes,
            "explained": self.explained,
            "points": self.points,
        }
        path.write_text(json.dumps(columns) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> FutureBasis | None:
        """Read a basis; None if the head has none.

        Raises:
            CheckpointError: the file is there but damaged.
        """
        if not path.is_file():
            return None
        try:
            columns = json.loads(path.read_text(encoding="utf-8"))
            first, second = columns["axes"]
            x, y = columns["explained"]
            points = tuple((str(g), float(a), float(b)) for g, a, b in columns["points"])
            basis = cls(tuple(columns["mean"]), (tuple(first), tuple(second)), (x, y), points)
            if not len(basis.mean) == len(first) == len(second):
                raise ValueError("mean and axes differ in length")
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged: {error}. Fetch it again.") from error
        return basis
