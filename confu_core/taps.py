"""Which layers of the target a published head reads: named, resolved, and checked by its guesses.

The same state is named in two ways (pitfalls 1.1): as the *input* of a layer (EAGLE, vLLM,
speculators) or as the *output* of the layer before (SpecForge, SGLang). Configs hold bare numbers,
and some hold the one kind, some the other. A head that reads the wrong layers loads and runs; only
its acceptance falls. So numbers are taken as one kind where that is certain, asked for where it is
not, and checked on loading either way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from confu_core.errors import CheckpointError, SettingsError
from confu_core.heads import DraftHead
from confu_core.prompt import chat_ids
from confu_core.target import Target, attend

FEWEST = 3  # different layers, as EAGLE-3 is made
SHIFT = {"input": 0, "output": 1}  # from a layer's number to the layer that its state enters
CLEARLY = 3.0  # standard errors of a paired difference
LEAST = 0.02  # of the acceptance: a smaller lead would not matter, however clear
PLACES = 320  # of the fixed answer, where its tokens are that many
QUESTION = "How does a bicycle stay upright?"
ANSWER = (
    "A bicycle stays upright because it is steered under its own weight. When it begins to fall to "
    "one side, the front wheel turns a little to the same side, and the wheels move back under the "
    "centre of mass. The rider does this without thinking, and at a certain speed the bicycle does "
    "it by itself. The reasons are the shape of the fork, the weight in front of the steering "
    "axis, and the spinning of the wheels. At low speed there is not enough time to correct, so "
    "the rider has to turn the handlebars further and move the body to keep balance. "
    "To learn to ride a bicycle, follow these steps: 1. Choose a flat place without cars, such as "
    "an empty car park or a park with wide paths. 2. Lower the seat, so that both feet reach the "
    "ground. 3. Push yourself forward with your feet, and look ahead, not down at the wheel. 4. "
    "When you can roll for a few seconds, put one foot on the pedal and push. 5. Practise to "
    "brake before you go faster. In conclusion, a bicycle is stable because of the way it is "
    "steered, and the best way to learn how to ride it is to practise every day, to be patient, "
    "and to wear a helmet. It is important to remember that everyone falls at first."
)


@dataclass(frozen=True)
class TapChoice:
    """What the user says: how a head counts its layers, and perhaps which they are."""

    convention: str
    layers: tuple[int, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> TapChoice:
        """From `input`, `output`, `input:2,15,27` or `output:1,14,26`.

        Raises:
            SettingsError: written in another way.
        """
        convention, _, numbers = text.partition(":")
        try:
            layers = tuple(int(number) for number in numbers.split(",")) if numbers else None
        except ValueError:
            layers = None
            convention = ""
        if convention not in SHIFT:
            raise SettingsError(
                f"Taps are given as {text!r}. Write input or output, and the layers if the head "
                "does not name them: input:2,15,27."
            )
        return cls(convention, layers)


@dataclass(frozen=True)
class Taps:
    """The states on entry to these layers feed the head; `why` says how that is known."""

    layers: tuple[int, ...]
    why: str


def resolve(
    listed: tuple[int, ...] | None, convention: str | None, depth: int, choice: TapChoice | None
) -> Taps:
    """From a config's numbers to layers.

    Args:
        listed: what the config says, if anything.
        convention: how heads of this layout count, where all do it alike.
        depth: L, the layers of the target.
        choice: what the user says; it overrules the config.

    Raises:
        CheckpointError: both ways of counting are possible, or the layers are not usable.
    """
    usual = (2, depth // 2, depth - 3)
    if choice is not None:
        numbers = choice.layers or listed
        if numbers is None:
            raise CheckpointError(
                "The head's config names no layers to read. Give them too: "
                f"--taps {choice.convention}:A,B,C."
            )
        taps = Taps(_entered(numbers, choice.convention), f"asked for as {choice.convention}s")
    elif listed is None:
        taps = Taps(usual, "the config names none: EAGLE-3's usual ones")
    elif listed == usual:
        taps = Taps(usual, "the config's numbers, as inputs, are EAGLE-3's usual layers")
    elif _entered(listed, "output") == usual:
        taps = Taps(usual, "the config's numbers, as outputs, are EAGLE-3's usual layers")
    elif convention is not None:
        taps = Taps(_entered(listed, convention), f"heads of this layout count {convention}s")
    else:
        shown = ",".join(map(str, listed))
        raise CheckpointError(
            f"The head's config names the layers {shown}, which may be counted as inputs or as "
            f"outputs of layers; heads are published with both. Say which: --taps input, or --taps "
            "output. If acceptance is poor, try the other."
        )
    _check(taps.layers, depth)
    return taps


def _entered(numbers: tuple[int, ...], convention: str) -> tuple[int, ...]:
    return tuple(number + SHIFT[convention] for number in numbers)


def _check(layers: tuple[int, ...], depth: int) -> None:
    shown = ", ".join(map(str, layers))
    if list(layers) != sorted(set(layers)) or len(layers) < FEWEST:
        raise CheckpointError(
            f"A head reads at least {FEWEST} different layers in ascending order, not {shown}."
        )
    if layers[0] < 0 or layers[-1] >= depth:
        raise CheckpointError(
            f"The head reads the states on entry to layers {shown}, but the target's layers are "
            f"0 to {depth - 1}. Choose a head for this target, or correct --taps."
        )


@dataclass(frozen=True)
class TapCheck:
    """What the head's first guesses are worth on a fixed text.

    agreement: share of the `places` where the likeliest one is the target's own choice.
    acceptance: the mean chance that a guess drawn from the head's probabilities q would be kept by
        speculative sampling from the target's p: the sum of min(p, q) over all tokens.
    warning: what looks wrong, in words for the user, or None.
    """

    agreement: float
    acceptance: float
    places: int
    warning: str | None


def check_taps(target: Target, head: DraftHead) -> TapCheck:
    """Read a fixed text once and let the head guess from its own layers and from those beside.

    Verification hides a wrong head from the text, so this is where it shows (pitfalls 2.4). Layers
    are compared by acceptance at the same places, which says more than right and wrong: it sees how
    near a wrong guess was (ours; docs/serving.md has both figures).
    """
    ids = chat_ids(target, QUESTION)
    start = len(ids)
    ids += target.tokenizer.encode(ANSWER, add_special_tokens=False)[:PLACES]
    ids = ids[: target.context]
    own = head.shape.tap_layers
    moves = [m for m in (0, -1, 1) if own[0] + m >= 0 and own[-1] + m < target.layers]
    every = tuple(sorted({layer + move for layer in own for move in moves}))
    with torch.inference_mode():
        rows = target.with_taps(every).prefill(target.new_cache(len(ids)), ids)
        logits = target.logits(rows.last[0, start - 1 : -1])  # (n, V)
        wanted = logits.argmax(-1)  # (n,)
        tokens = head.target_ids(torch.arange(head.shape.draft_vocab, device=logits.device))
        p = logits.softmax(-1)[:, tokens]  # (n, D); a token outside cannot be guessed
        states = dict(zip(every, rows.taps[0].split(target.hidden, dim=-1), strict=True))
        accepted = {}  # (n,) each
        for move in moves:
            taps = torch.cat([states[layer + move] for layer in own], dim=-1)
            guesses = _first_logits(target, head, ids, taps)[start - 2 : -1]  # (n, D)
            accepted[move] = torch.minimum(p, guesses.softmax(-1)).sum(-1)
            if move == 0:
                right = int((tokens[guesses.argmax(-1)] == wanted).sum())
    places = len(wanted)
    acceptance = float(accepted[0].mean())
    warning = None
    best = 0.0
    for move in moves[1:]:
        ahead = accepted[move] - accepted[0]
        lead, error = float(ahead.mean()), float(ahead.std()) / places**0.5
        if error and lead > max(best, CLEARLY * error, LEAST * acceptance):
            best = lead
            better = ",".join(str(layer + move) for layer in own)
            warning = (
                "The layers that this head reads look wrong: the acceptance expected of its first "
                f"guess is {acceptance:.3f} over {places} places, and {acceptance + lead:.3f} with "
                f"the layers beside ({lead / error:.1f} standard errors more). Load it with --taps "
                f"input:{better}."
            )
    commonest = int(wanted.unique(return_counts=True)[1].max())
    if warning is None and right <= commonest:
        warning = (
            f"This head guesses no better than chance: it is right at {right} of {places} places, "
            f"and the target's commonest token alone would be at {commonest}. It may be made for "
            "another target or read other layers (--taps). The text stays right, only not faster."
        )
    return TapCheck(right / places, acceptance, places, warning)


def _first_logits(
    target: Target, head: DraftHead, ids: list[int], taps: torch.Tensor
) -> torch.Tensor:
    """What the head makes of a text, (T - 1, D) in float32: entry i reads state i and token i + 1,
    and guesses token i + 2."""
    u = head.fuse(taps[:-1].to(head.fc.weight.dtype)).unsqueeze(0)  # (1, T - 1, H)
    e = head.embed(target, torch.tensor([ids[1:]], device=u.device)).to(u.dtype)
    positions = torch.arange(u.shape[1], device=u.device).unsqueeze(0)
    cos, sin = (table.to(u.dtype) for table in head.rotary(positions))
    x = head.attention_input(e, u)
    keys, values = head.keys_values(x, cos, sin)
    mixed = attend(head.queries(x, cos, sin), keys, values, None, causal=True)
    return head.logits(head.finish(u, mixed)[0]).float()
