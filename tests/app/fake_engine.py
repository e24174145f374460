"""A seeded engine without a model: plausible traces for tests, screenshots and development.

It keeps the promises of the real one: the same events, lanes that take turns by the compute time
they have used, the same text in every lane, a generator that can be closed at any time. The texts
contain what breaks pages: markup, right-to-left marks, half emoji, a token of 200 characters.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from confu_core.errors import PromptError, SettingsError
from confu_core.events import Advanced, Event, Finished, MethodInfo, Started
from confu_core.trace import (
    Future,
    Head,
    Intervention,
    Lane,
    Reading,
    RoundRecord,
    Seconds,
    Settings,
    TargetInfo,
    Token,
    Trace,
    Tree,
)

METHODS = ("plain", "eagle3", "confu")
OFFERED = (*METHODS, "confu-lite")
GROUPS = ("code", "lists", "stories")
SKILL = {"eagle3": 0.62, "confu": 0.72, "confu-lite": 0.68, "changed": 0.5}
EXPERTS = 8
CONTEXT = 2048
HEAD = "0" * 64  # the sha256 of all heads here but ConFu lite's
LITE = "1" * 64

STORY = (
    "Sunlight looks white, but it is a mix of all colours. When it enters the air, it meets "
    "molecules that are much smaller than its wavelength. They scatter blue light far more than "
    "red light, so blue reaches us from every side:\n\n1. the sun sends white light,\n2. the air "
    "scatters the blue part,\n3. our eyes see a blue sky.\n\nAt sunset the light has a longer way "
    "to go, most of the blue is lost, and what remains is orange and red."
)
HOSTILE = (
    "<img", " src=x", " onerror=alert(1)>", "</script>", "\u202eevil\u202c", "\ufffd", "\ufffd",
    "\U0001f469\u200d\U0001f52c", "\t", "\r\n", "\x07", "x" * 200, " مرحبا", " 天空", "${value}",
    "{{this}}", "&lt;b&gt;",
)  # fmt: skip
FILLER = (
    " the", " a", " of", " light", " air", " blue", ",", ".", " and", " to", " is", " in", " that",
    " red", " it", " more", " we", " sky", " far", " every", " sun", " see", "\n", " as", " with",
)  # fmt: skip


@dataclass(frozen=True)
class FakeBasis:
    """Reference points of the map: one ring per task group."""

    explained: tuple[float, float] = (0.21, 0.12)
    points: tuple[tuple[str, float, float], ...] = tuple(
        (group, (2 + ring) * math.cos(n), (1.5 + ring) * math.sin(n))
        for ring, group in enumerate(GROUPS)
        for n in range(40)
    )


@dataclass
class FakeEngine:
    """`pause` is the wall time that one round takes; `break_at` makes a lane write another token
    there; `unavailable` are methods whose heads are "missing"."""

    pause: float = 0.0
    skill: dict[str, float] = field(default_factory=lambda: dict(SKILL))
    break_at: int | None = None
    unavailable: tuple[str, ...] = ()
    rounds_done: int = 0
    open_runs: int = 0
    context: int = CONTEXT
    bases: dict[str, FakeBasis] = field(default_factory=lambda: {"confu": FakeBasis()})

    @property
    def methods(self) -> dict[str, MethodInfo]:
        labels = {
            "plain": "Plain decoding",
            "eagle3": "EAGLE-3",
            "confu": "ConFu",
            "confu-lite": "ConFu lite",
        }
        return {
            name: MethodInfo(
                label=labels[name],
                available=name not in self.unavailable,
                reason="No checkpoint was found." if name in self.unavailable else "",
                contemplates=name.startswith("confu"),
            )
            for name in OFFERED
        }

    def count_tokens(self, prompt: str) -> int:
        return len(pieces(prompt)) + 8

    def method(self, name: str) -> SimpleNamespace:
        """What the page asks of a method's parts: which head it has."""
        return SimpleNamespace(checkpoint=SimpleNamespace(sha256=_sha256(name)))

    def compare(
        self,
        prompt: str,
        settings: Settings,
        methods: Sequence[str] = METHODS,
        should_stop: Callable[[], bool] = lambda: False,
        intervention: Intervention | None = None,
    ) -> Iterator[Event]:
        if not prompt.strip():
            raise PromptError("The prompt is empty. Type a question or choose an example.")
        if self.count_tokens(prompt) > self.context:
            raise PromptError(f"The prompt is longer than the target's {self.context} tokens.")
        if not 1 <= settings.nodes <= 256:
            raise SettingsError(
                f"Tree size is {settings.nodes}, but must be between 1 (root only) and 256."
            )
        return self._counted(prompt, settings, methods, should_stop, intervention)

    def _counted(self, *arguments: Any) -> Iterator[Event]:
        self.open_runs += 1
        try:
            yield from self._events(*arguments)
        finally:
            self.open_runs -= 1

    def _events(
        self,
        prompt: str,
        settings: Settings,
        methods: Sequence[str],
        should_stop: Callable[[], bool],
        intervention: Intervention | None,
    ) -> Iterator[Event]:
        heads = {name: Head(f"{name}-fake", _sha256(name), True) for name in OFFERED[1:]}
        lanes = {name: Lane(name, heads.get(name)) for name in methods}
        if intervention:
            lanes["changed"] = Lane("confu", heads["confu"], intervention)
        header = Trace(
            prompt=prompt,
            prompt_tokens=self.count_tokens(prompt),
            settings=settings,
            target=TargetInfo("fake/tiny", "0" * 64, 7, 32, 256, "cpu", "float32"),
            lanes=lanes,
            created="2026-11-29T12:00:00Z",
        )
        yield Started(header)
        answer = answer_pieces(prompt, settings)
        runners = {
            name: _FakeLane(name, self, settings, answer, header.prompt_tokens) for name in lanes
        }
        while any(not lane.done for lane in runners.values()):
            lane = min((la for la in runners.values() if not la.done), key=lambda la: la.used)
            if self.pause:
                time.sleep(self.pause)
            record = lane.advance(cancelled=should_stop())
            self.rounds_done += 1
            yield Advanced(lane.name, record, lane.text)
        yield Finished(
            replace(
                header,
                lanes={
                    name: replace(header.lanes[name], rounds=tuple(lane.rounds), text=lane.text)
                    for name, lane in runners.items()
                },
            )
        )


def pieces(text: str) -> list[str]:
    """Cut a text into what a tokenizer might make of it."""
    return re.findall(r"\s?\w{1,9}|\n+|\s?[^\w\s]|\s", text)


def answer_pieces(prompt: str, settings: Settings) -> list[str]:
    """The text that every method writes for this prompt and seed."""
    chance = _chance(prompt, settings.seed, settings.temperature > 0)
    story = pieces(STORY)
    if "hostile" in prompt.lower():
        story = list(HOSTILE) + story
    elif chance.random() < 0.3:
        story = pieces("Here is an answer. ") + story
    while len(story) < settings.max_new_tokens:
        story = story + chance.sample(FILLER, 8)
    return story[: settings.max_new_tokens]


class _FakeLane:
    def __init__(
        self, name: str, engine: FakeEngine, settings: Settings, answer: list[str], prompt: int
    ) -> None:
        self.name, self.settings, self.answer, self.prompt = name, settings, list(answer), prompt
        self.skill = engine.skill.get(name, 0.0)
        self.chance = _chance(name, settings.seed, "".join(answer))
        self.rounds: list[RoundRecord] = []
        self.written, self.used, self.done = 0, 0.0, False
        self.born: tuple[int, int] | None = None
        if engine.break_at is not None and name == "confu" and engine.break_at < len(answer):
            self.answer[engine.break_at] = " BUT"

    @property
    def text(self) -> str:
        return "".join(self.answer[: self.written]).rstrip("\ufffd")

    def advance(self, cancelled: bool) -> RoundRecord:
        index = len(self.rounds)
        prefill = index == 0
        speculative = not prefill and self.name != "plain"
        tree, path = self._tree() if speculative else (Tree(), ())
        left = len(self.answer) - self.written
        gained = [(self.answer[self.written + i], "accepted") for i in range(len(path))]
        if len(gained) < left:
            gained.append((self.answer[self.written + len(path)], "bonus"))
        contemplates = self.name in ("confu", "confu-lite", "changed")
        rows = self.prompt if prefill else max(1, len(tree.token_ids))
        record = RoundRecord(
            index=index,
            position=self.prompt + self.written,
            tree=tree,
            path=path,
            tokens=tuple(
                Token(token_id(text), text, origin, self.chance.uniform(0.2, 6))
                for text, origin in gained
            ),
            contemplated=self._contemplated(tree) if contemplates else (),
            contemplate_router=self._router() if contemplates else (),
            future_router=self._router() if contemplates and not prefill else (),
            future=self._future(index) if contemplates and not prefill else None,
            target_rows=rows + (len(self._contemplated(tree)) if contemplates else 0),
            draft_passes=self.settings.depth if speculative else 0,
            seconds=Seconds(
                draft=self.chance.uniform(0.008, 0.014) if speculative else 0.0,
                verify=self.chance.uniform(0.03, 0.04) + 0.0006 * rows,
                rest=self.chance.uniform(0.001, 0.002),
            ),
            stop=None,
        )
        self.written += len(gained)
        if self.written >= len(self.answer):
            record, self.done = replace(record, stop="length"), True
        elif cancelled:
            record, self.done = replace(record, stop="cancelled"), True
        self.used += record.seconds.total
        self.born = (index, self._source(tree, path))
        self.rounds.append(record)
        return record

    def _contemplated(self, tree: Tree) -> tuple[int, ...]:
        """The nodes nearest to the root, the asked share of them."""
        return tuple(range(math.ceil(self.settings.contemplate * len(tree.token_ids))))

    def _source(self, tree: Tree, path: tuple[int, ...]) -> int:
        """The last accepted node, or its nearest ancestor that carries a contemplate token."""
        node = path[-1] if path else 0
        while node > 0 and node not in self._contemplated(tree):
            node = tree.parents[node]
        return node

    def _router(self) -> tuple[float, ...]:
        first, second = self.chance.sample(range(EXPERTS), 2)
        weight = self.chance.uniform(0.5, 0.9)
        weights = [0.0] * EXPERTS
        weights[first], weights[second] = weight, 1 - weight
        return tuple(weights)

    def _future(self, index: int) -> Future:
        coming = self.answer[self.written + 1 : self.written + 4]
        words = [*coming[:2], *self.chance.sample(FILLER, 3)]
        probs = sorted((self.chance.random() for _ in words), reverse=True)
        angle = index / 3 + self.chance.uniform(-0.3, 0.3)
        born_round, born_node = self.born or (0, 0)
        return Future(
            born_round=born_round,
            born_node=born_node,
            named=tuple(
                Reading(token_id(w), w, 0.6 - 0.1 * depth)
                for depth, w in enumerate(coming if self.name == "confu" else ())
            ),
            readings=tuple(
                Reading(token_id(w), w, p / (sum(probs) + 0.5))
                for w, p in zip(words, probs, strict=True)
            ),
            point=(3 * math.cos(angle), 2 * math.sin(angle) + index / 20),
        )

    def _tree(self) -> tuple[Tree, tuple[int, ...]]:
        """Grow a tree around the true continuation, then keep the best-scored nodes."""
        settings, chance = self.settings, self.chance
        left = len(self.answer) - self.written
        root = _Node(self.answer[self.written - 1], None, 0, 1.0, 0.0, true=True)
        nodes, frontier = [root], [root]
        for depth in range(1, settings.depth + 1):
            children: list[_Node] = []
            for parent in frontier:
                truth = self.answer[self.written + depth - 1] if depth <= left else ""
                children += self._children(parent, truth if parent.true else "", depth)
            nodes += children
            frontier = sorted(children, key=lambda n: -n.score)[: settings.top_k]
        kept = sorted(nodes, key=lambda n: (-n.score, n.depth))[: settings.nodes]
        kept.sort(key=lambda n: (n.depth, -n.score))
        number = {id(node): i for i, node in enumerate(kept)}
        parents = tuple(-1 if n.parent is None else number[id(n.parent)] for n in kept)
        path: list[int] = []
        for i, node in enumerate(kept):
            if node.true and node.depth == len(path) + 1 and len(path) < left:
                path.append(i)
        on_path = {0, *path}
        states = tuple(
            "accepted" if i in on_path else "rejected" if parents[i] in on_path else "not reached"
            for i in range(len(kept))
        )
        wanted = [
            self.answer[self.written + n.depth]
            if i in on_path and n.depth < left
            else chance.choice(FILLER)
            for i, n in enumerate(kept)
        ]
        # Greedy: what is accepted is what the target wanted after the parent.
        choice_probs = tuple(chance.uniform(0.3, 0.95) for _ in kept)
        target_probs = tuple(
            choice_probs[parents[i]] if i in on_path and i else chance.uniform(0, 0.28)
            for i in range(len(kept))
        )
        return (
            Tree(
                token_ids=tuple(token_id(n.text) for n in kept),
                texts=tuple(n.text for n in kept),
                parents=parents,
                depths=tuple(n.depth for n in kept),
                draft_probs=tuple(n.prob for n in kept),
                scores=tuple(n.score for n in kept),
                target_probs=target_probs,
                states=states,
                choice_ids=tuple(token_id(w) for w in wanted),
                choice_texts=tuple(wanted),
                choice_probs=choice_probs,
            ),
            tuple(path),
        )

    def _children(self, parent: _Node, truth: str, depth: int) -> list[_Node]:
        chance = self.chance
        count = min(self.settings.top_k, len(FILLER))
        weights = sorted((chance.random() ** 3 for _ in range(count)), reverse=True)
        total = sum(weights) + 0.2
        words = [w for w in chance.sample(FILLER, count) if w != truth]
        if truth and chance.random() < self.skill:
            words.insert(0 if chance.random() < 0.7 else min(2, len(words)), truth)
        return [
            _Node(
                word,
                parent,
                depth,
                weight / total,
                parent.score + math.log(weight / total + 1e-9),
                true=bool(truth) and word == truth,
            )
            for word, weight in zip(words, weights, strict=False)
        ]


@dataclass
class _Node:
    text: str
    parent: _Node | None
    depth: int
    prob: float
    score: float
    true: bool


def _sha256(method: str) -> str:
    return LITE if method == "confu-lite" else HEAD


def token_id(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:2], "big")


def _chance(*parts: object) -> random.Random:
    return random.Random(repr(parts))


def make_trace(prompt: str = "Why is the sky blue?", **settings: object) -> Trace:
    """A finished fake run as a trace."""
    *_, last = FakeEngine().compare(prompt, Settings(**settings))
    return last.trace
