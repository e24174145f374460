"""From tensors to the trace: the one observer that turns a round into plain numbers.

Everything here happens after a round is decided, outside its measured seconds, so a recorded run
writes the same text and reports the same times as an unrecorded one.
"""

from __future__ import annotations

import torch

from confu_core.decoding import Round
from confu_core.methods import Method
from confu_core.probes import Accepted, Observer
from confu_core.prompt import token_label
from confu_core.ranking import largest
from confu_core.reading import FutureBasis, named_tokens, nearest_words
from confu_core.target import Target
from confu_core.trace import Future, Reading, RoundRecord, Settings, Token, Tree

WORDS = 6  # nearest words kept of a future token


def _short(value: float) -> float:
    """Six significant digits are enough to draw and keep traces small."""
    return float(f"{value:.6g}")


class Recorder(Observer):
    """Keeps what a record needs of the round under way; `record` then makes it plain."""

    def __init__(
        self, target: Target, method: Method, settings: Settings, basis: FutureBasis | None
    ) -> None:
        self._target = target
        self._method = method
        self._settings = settings
        self._basis = basis
        self._labels: dict[int, str] = {}
        self._decided: Accepted | None = None

    def accepted(self, view: Accepted) -> None:
        self._decided = view

    @torch.inference_mode()
    def record(self, round: Round) -> RoundRecord:
        """The plain record of the round that was just yielded."""
        path = round.acceptance.path if round.acceptance else ()
        tokens = tuple(
            Token(
                id=draw.token_id,
                text=self._label(draw.token_id),
                origin="accepted" if index < len(path) else "bonus",
                margin=_short(draw.margin),
            )
            for index, draw in enumerate(round.draws)
        )
        plan, future = round.plan, round.future
        return RoundRecord(
            index=round.index,
            position=round.position,
            tree=self._tree(round) if round.draft else Tree(),
            path=path,
            tokens=tokens,
            contemplated=plan.nodes if plan else (),
            contemplate_router=_weights(plan.router if plan else None),
            future_router=_weights(future.future_router if future else None),
            future=self._future(future),
            target_rows=round.target_rows,
            draft_passes=round.draft.passes if round.draft else 0,
            seconds=round.seconds,
            stop=round.stop,
        )

    def _label(self, token_id: int) -> str:
        if token_id not in self._labels:
            self._labels[token_id] = token_label(self._target, token_id)
        return self._labels[token_id]

    def _tree(self, round: Round) -> Tree:
        tree, acceptance = round.draft.tree, round.acceptance
        # Temperature 0 is shown at 1: a distribution with one certain token explains nothing.
        heat = self._settings.temperature or 1.0
        logits = self._decided.verification.logits  # (N, V)
        probs = (logits if heat == 1 else logits / heat).softmax(-1)
        parents = torch.tensor(tree.parents, device=probs.device).clamp(min=0)
        target_probs = probs[parents, torch.tensor(tree.token_ids, device=probs.device)].tolist()
        target_probs[0] = 1.0  # the root is text already
        best, choices = largest(probs, 1)
        choice_ids, choice_probs = choices[:, 0].tolist(), best[:, 0].tolist()
        # Where the walk came by, the choice is what was drawn there; at a path's last node nothing
        # was, if the run ended with it.
        drawn_at = (0, *acceptance.path)[: len(acceptance.draws)]
        for node, draw in zip(drawn_at, acceptance.draws, strict=True):
            choice_ids[node] = draw.token_id
            choice_probs[node] = float(probs[node, draw.token_id])
        accepted = {0, *acceptance.path}
        states = []
        for node, parent in enumerate(tree.parents):
            if node in accepted:
                states.append("accepted")
            elif parent in drawn_at:
                states.append("rejected")
            else:
                states.append("not reached")
        steps = torch.tensor(tree.scores)
        draft_probs = (steps - steps[parents.cpu()]).exp().tolist()
        return Tree(
            token_ids=tree.token_ids,
            texts=tuple(map(self._label, tree.token_ids)),
            parents=tree.parents,
            depths=tree.depths,
            draft_probs=tuple(map(_short, draft_probs)),
            scores=tuple(map(_short, tree.scores)),
            target_probs=tuple(map(_short, target_probs)),
            states=tuple(states),
            choice_ids=tuple(choice_ids),
            choice_texts=tuple(map(self._label, choice_ids)),
            choice_probs=tuple(map(_short, choice_probs)),
        )

    def _future(self, future) -> Future | None:
        if future is None:
            return None
        head, part = self._method.checkpoint.head, self._method.checkpoint.contemplation
        words = nearest_words(head, future.feature, WORDS)
        named = [] if future.read_out is None else named_tokens(head, part, future.read_out)
        return Future(
            born_round=future.born_round,
            born_node=future.born_node,
            named=tuple(Reading(i, self._label(i), _short(p)) for i, p in named),
            readings=tuple(Reading(i, self._label(i), _short(p)) for i, p in words),
            point=self._basis.place(future.feature) if self._basis else None,
        )


def _weights(router: torch.Tensor | None) -> tuple[float, ...]:
    """Expert weights (E,) as plain numbers; empty without a mixture of at least two experts."""
    if router is None or router.numel() < 2:
        return ()
    return tuple(map(_short, router.flatten().tolist()))
