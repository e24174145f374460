"""Lessons as data: the tour's cards, the glossary's words, the examples of what to try.

The words themselves stand in `app/text`; here are their keys, their order and what they point at.
"""

from dataclasses import dataclass

# A card shows `round` (a number, or "best": the round with the longest accepted path) at `phase`
# (1 draft, 2 check, 3 accept, 4 append) and outlines `target`. `act`: what it asks the learner to
# do (`player/tour.js` can tell when it is done).
TOUR = [
    {"key": "race", "target": ".cfx-race", "round": "best", "phase": 4},
    {"key": "draft", "target": ".cfx-canvas", "round": "best", "phase": 1},
    {"key": "check", "target": ".cfx-phases", "round": "best", "phase": 2},
    {"key": "accept", "target": ".cfx-panels", "round": "best", "phase": 3, "act": "rejected"},
    {"key": "bonus", "target": ".cfx-chips", "round": "best", "phase": 4},
    {"key": "lossless", "target": ".cfx-verdict", "round": "best", "phase": 4},
    {"key": "future", "target": ".cfx-readings", "round": "best", "phase": 4, "act": "moved"},
    {"key": "experts", "target": ".cfx-future", "round": "best", "phase": 4, "act": "predict"},
]

GLOSSARY = [
    "token",
    "target",
    "draft",
    "tree",
    "pass",
    "rows",
    "accept",
    "bonus",
    "tau",
    "lossless",
    "contemplate",
    "future",
    "expert",
    "lite",
    "map",
]

# Formulas of "how it works", by the key of the sentence that explains each (`maths.<key>`).
MATHS = {
    "score": "s(v) = Σ log q(u | parent of u),  u from the root's child to v",
    "draw": "x = arg max over v of [ log p(v) / T + g(seed, position, v) ]",
    "tau": "τ = (tokens gained in rounds 1 … R) / R",
    "speed": "speed-up = τ · t(plain pass) / (t(draft) + t(verify) + t(rest))",
    "expert": "e = Σ wᵢ Eᵢ,  w = the two largest of softmax(W h), scaled to sum 1",
}


@dataclass(frozen=True)
class Example:
    """A prompt of our own with a question to watch it by (`try.<name>` in the string table)."""

    name: str
    prompt: str


EXAMPLES = (
    Example("sky", "Explain why the sky is blue in three sentences."),
    Example("code", "Write a Python function that returns the n-th Fibonacci number."),
    Example("days", "List the seven days of the week, each with one thing to do on it."),
    Example("rhyme", "Write a rhyme of four lines about a cat that learns to count."),
    Example("sum", "A train leaves at 9:40 and arrives at 11:05. How long is the journey?"),
    Example("planets", "Invent five planets and say one strange thing about each of them."),
)
