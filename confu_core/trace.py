"""The trace: the plain-data record of a run, and the only thing that the app and the core share.

A trace is one prompt decoded by one or more methods ("lanes") with the same settings. It holds
numbers, strings and tuples, never tensors; it is written as versioned JSON and loads back to an
equal object. A file from outside is untrusted: `Trace.from_json` checks every field and names the
place of the first fault. `docs/trace.md` describes the schema for readers of the file.

Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal

from confu_core.errors import TraceError

SCHEMA = 3

# The methods, by the names that lanes and commands use, and how they are written for people. ConFu
# has adapters and read-outs of ours (docs/training.md); ConFu lite is without them.
LABELS = {"plain": "Plain", "eagle3": "EAGLE-3", "confu": "ConFu", "confu-lite": "ConFu lite"}

NodeState = Literal["accepted", "rejected", "not reached"]
Origin = Literal["accepted", "bonus"]
Stop = Literal["eos", "length", "context", "cancelled"]
Change = Literal["remove future", "swap future", "force contemplate expert", "force future expert"]


@dataclass(frozen=True)
class Settings:
    """What a run was asked for. `nodes` counts the root: 30 means 29 drafted tokens; with "auto"
    each round chooses, from what passes cost on the machine and how sure the draft is.

    contemplate: share of the nodes that carry a contemplate token; 1 is all of them (ConFu only).
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    nodes: int | Literal["auto"] = 30
    depth: int = 5
    top_k: int = 8
    contemplate: float = 1.0


@dataclass(frozen=True)
class Tree:
    """The draft tree of one round, one entry per node; node 0 is the root (the newest token).

    parents: -1 for the root; otherwise smaller than the node's own index.
    draft_probs: the draft's probability of the node after its parent, within the draft vocabulary
        (1.0 for the root, which the target itself wrote).
    scores: cumulative natural log-probability along the path from the root.
    target_probs: the target's probability of the node after its parent, at the run's temperature
        (at 1 if that is 0, where one certain token would explain nothing).
    states: the root counts as accepted.
    choice_*: what the target wants after this node: the token drawn where the walk came by,
        elsewhere its most likely token.
    """

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()
    draft_probs: tuple[float, ...] = ()
    scores: tuple[float, ...] = ()
    target_probs: tuple[float, ...] = ()
    states: tuple[NodeState, ...] = ()
    choice_ids: tuple[int, ...] = ()
    choice_texts: tuple[str, ...] = ()
    choice_probs: tuple[float, ...] = ()

    def check(self, place: str) -> None:
        count = len(self.token_ids)
        for column in dataclasses.fields(self):
            length = len(getattr(self, column.name))
            _demand(
                length == count,
                f"{place}.{column.name}",
                f"has {length} entries, token_ids has {count}",
            )
        for node, (parent, depth) in enumerate(zip(self.parents, self.depths, strict=True)):
            here = f"{place}.parents[{node}]"
            if node == 0:
                _demand(parent == -1 and depth == 0, here, "the root has parent -1 and depth 0")
            else:
                _demand(0 <= parent < node, here, "a parent stands before its child")
                _demand(
                    depth == self.depths[parent] + 1,
                    f"{place}.depths[{node}]",
                    "a child is one deeper than its parent",
                )


@dataclass(frozen=True)
class Token:
    """One token of the answer. `margin`: how far (in logits, after temperature and noise) the
    target preferred it to its second choice; near 0 arithmetic alone may decide."""

    id: int
    text: str
    origin: Origin
    margin: float


@dataclass(frozen=True)
class Reading:
    """A token that a future token names or comes close to, and how likely that makes it."""

    id: int
    text: str
    prob: float


@dataclass(frozen=True)
class Future:
    """The future token that steered a round's draft.

    born_round, born_node: the round and tree node whose contemplate token gave it.
    named: what it names itself for depth 1, 2, ... of the draft, which mixes that in; empty in
        ConFu lite.
    readings: its nearest words (our reading of the vector; no method uses it).
    point: coordinates in the head's fixed PCA basis; None if the head has no basis.
    """

    born_round: int
    born_node: int
    named: tuple[Reading, ...]
    readings: tuple[Reading, ...]
    point: tuple[float, float] | None


@dataclass(frozen=True)
class Seconds:
    """Wall time of a round by phase; `rest` is everything that is not a model's forward pass."""

    draft: float
    verify: float
    rest: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.rest


@dataclass(frozen=True)
class RoundRecord:
    """What the trace keeps of one target pass. Round 0 is the prefill: no tree, one token.

    position: how many tokens, prompt included, stood before this round's first gained token.
    path: accepted nodes without the root, in order.
    tokens: what the round gained: the accepted path, then the target's own bonus token (absent
        if the run stopped inside the path).
    contemplated: nodes that carried a contemplate token; they count as rows of the pass.
    contemplate_router, future_router: weight of each expert (0 where not selected); empty without
        a mixture of experts.
    target_rows, draft_passes: rows in the target pass; forward passes of the draft.
    """

    index: int
    position: int
    tree: Tree
    path: tuple[int, ...]
    tokens: tuple[Token, ...]
    contemplated: tuple[int, ...]
    contemplate_router: tuple[float, ...]
    future_router: tuple[float, ...]
    future: Future | None
    target_rows: int
    draft_passes: int
    seconds: Seconds
    stop: Stop | None

    def check(self, place: str) -> None:
        self.tree.check(f"{place}.tree")
        parent = 0
        for step, node in enumerate(self.path):
            here = f"{place}.path[{step}]"
            _demand(0 < node < len(self.tree.token_ids), here, "is not a drafted node of the tree")
            _demand(self.tree.parents[node] == parent, here, "does not continue the path")
            parent = node
        for entry, node in enumerate(self.contemplated):
            _demand(
                0 <= node < len(self.tree.token_ids),
                f"{place}.contemplated[{entry}]",
                "is not a node of the tree",
            )


@dataclass(frozen=True)
class Head:
    """Which draft head a lane used. `sha256` covers all its weight files."""

    name: str
    sha256: str
    trained: bool


@dataclass(frozen=True)
class Intervention:
    """A change to ConFu in one lane, to see what the future token does.

    expert: which expert is forced (from 0). donor: the prompt whose first future token is used in
    every round. Both are None where they mean nothing.
    """

    change: Change
    expert: int | None = None
    donor: str | None = None


@dataclass(frozen=True)
class Lane:
    """One method's run. `error` says why a lane ended early, in words for the reader."""

    method: str
    head: Head | None
    intervention: Intervention | None = None
    rounds: tuple[RoundRecord, ...] = ()
    text: str = ""
    error: str | None = None

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(token for record in self.rounds for token in record.tokens)

    @property
    def stop(self) -> Stop | None:
        return self.rounds[-1].stop if self.rounds else None

    @property
    def target_passes(self) -> int:
        """Verification passes; the prefill is not one."""
        return max(0, len(self.rounds) - 1)

    @property
    def tau(self) -> float:
        """Tokens gained per target pass, bonus token included, prefill left out; 0 if no pass."""
        gained = sum(len(record.tokens) for record in self.rounds[1:])
        return gained / self.target_passes if self.target_passes else 0.0

    @property
    def seconds(self) -> float:
        """Compute time of this lane alone, prefill included."""
        return sum(record.seconds.total for record in self.rounds)


@dataclass(frozen=True)
class TargetInfo:
    """The target of a run and where it ran."""

    name: str
    fingerprint: str
    layers: int
    hidden: int
    vocab: int
    device: str
    dtype: str


@dataclass(frozen=True)
class Difference:
    """The first place where two lanes' answers differ. `margin` is the smaller of both lanes'."""

    lane_a: str
    lane_b: str
    index: int
    text_a: str
    text_b: str
    margin: float


@dataclass(frozen=True)
class Trace:
    """One prompt, decoded by one or more methods. `created` is an ISO 8601 time in UTC."""

    prompt: str
    prompt_tokens: int
    settings: Settings
    target: TargetInfo
    lanes: dict[str, Lane]
    created: str
    schema: int = SCHEMA

    def differences(self) -> tuple[Difference, ...]:
        """Where each later lane first leaves the first lane; empty if all wrote the same text.

        Lanes that were cancelled or failed are compared as far as they came.
        """
        lanes = list(self.lanes.items())
        found = []
        for name, lane in lanes[1:]:
            difference = first_difference(lanes[0][0], lanes[0][1], name, lane)
            if difference:
                found.append(difference)
        return tuple(found)

    def figures(self) -> dict[str, Any]:
        """Texts and figures without the rounds, as `compare --json` writes them."""
        methods = {
            name: {
                "text": lane.text,
                "tokens": len(lane.tokens),
                "tau": lane.tau,
                "target_passes": lane.target_passes,
                "seconds": lane.seconds,
            }
            for name, lane in self.lanes.items()
        }
        return {
            "prompt": self.prompt,
            "settings": to_plain(self.settings),
            "identical": not self.differences(),
            "methods": methods,
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(to_plain(self), ensure_ascii=False, allow_nan=False, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read and check a trace.

        Raises:
            TraceError: not JSON, another schema, or a field that is missing, unknown or wrong.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise TraceError(
                f"This is not a trace file: it is not valid JSON ({error})."
            ) from error
        except RecursionError as error:
            raise TraceError("This is not a trace file: it is nested too deeply.") from error
        version = value.get("schema") if isinstance(value, dict) else None
        # A version is a whole number: True and 1.0 equal 1 in Python, and are none.
        if type(version) is not int or not 1 <= version <= SCHEMA:
            raise TraceError(
                f"This file has trace schema {version!r}; this program reads schemas 1 to "
                f"{SCHEMA}. Record the run again."
            )
        return _read(cls, _upgraded(value), "trace")


def first_difference(name_a: str, a: Lane, name_b: str, b: Lane) -> Difference | None:
    """The first token where two lanes differ, or where one ended (by itself) and one went on."""
    cut_short = any(lane.error or lane.stop in (None, "cancelled") for lane in (a, b))
    for index, (left, right) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if left.id != right.id:
            margin = min(left.margin, right.margin)
            return Difference(name_a, name_b, index, left.text, right.text, margin)
    if len(a.tokens) == len(b.tokens) or cut_short:
        return None
    index = min(len(a.tokens), len(b.tokens))
    longer = max(a.tokens, b.tokens, key=len)[index]
    texts = ("", longer.text) if len(a.tokens) < len(b.tokens) else (longer.text, "")
    return Difference(name_a, name_b, index, *texts, longer.margin)


def to_plain(value: Any) -> Any:
    """Dataclasses and tuples to the dicts and lists that JSON knows."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(entry) for entry in value]
    return value


def _upgraded(value: dict) -> dict:
    """A trace of any schema in the present one (the given one may be changed). In schema 2
    `settings.contemplate` came in, in schema 3 `named` of a future token. What is damaged stays so,
    and is found when it is read."""
    version, value = value["schema"], value | {"schema": SCHEMA}
    if version < 2 and isinstance(value.get("settings"), dict):
        value["settings"] = {"contemplate": 1.0} | value["settings"]
    if version < 3:
        lanes = value.get("lanes")
        for lane in lanes.values() if isinstance(lanes, dict) else ():
            rounds = lane.get("rounds") if isinstance(lane, dict) else None
            for record in rounds if isinstance(rounds, list) else ():
                future = record.get("future") if isinstance(record, dict) else None
                if isinstance(future, dict):
                    future.setdefault("named", [])
    return value


def _demand(holds: bool, place: str, fault: str) -> None:
    if not holds:
        raise TraceError(f"The trace is damaged at {place}: {fault}.")


def _read(kind: Any, value: Any, place: str) -> Any:
    """Build `kind` from JSON data, or say where it does not fit."""
    if dataclasses.is_dataclass(kind):
        _demand(isinstance(value, dict), place, "must be an object")
        hints = typing.get_type_hints(kind)
        names = [f.name for f in dataclasses.fields(kind)]
        for name in value:
            _demand(name in names, f"{place}.{name}", "is not a known field")
        for name in names:
            _demand(name in value, f"{place}.{name}", "is missing")
        built = kind(**{n: _read(hints[n], value[n], f"{place}.{n}") for n in names})
        if hasattr(built, "check"):
            built.check(place)
        return built
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        kinds = [a for a in arguments if a is not type(None)]
        text = isinstance(value, str)
        fitting = [a for a in kinds if (typing.get_origin(a) is Literal) == text]
        return _read((fitting or kinds)[0], value, place)
    if origin is Literal:
        _demand(value in arguments, place, f"must be one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        _demand(isinstance(value, list), place, "must be a list")
        if arguments[-1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        _demand(len(value) == len(arguments), place, f"must have {len(arguments)} entries")
        return tuple(
            _read(a, v, f"{place}[{i}]")
            for i, (a, v) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is dict:
        _demand(isinstance(value, dict), place, "must be an object")
        return {k: _read(arguments[1], v, f"{place}.{k}") for k, v in value.items()}
    if kind is float:
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        # False for NaN and infinity, and for whole numbers that no float can hold
        finite = numeric and abs(value) <= sys.float_info.max
        _demand(finite, place, "must be a finite number")
        return float(value)
    if kind is int:
        _demand(
            isinstance(value, int) and not isinstance(value, bool), place, "must be a whole number"
        )
        return value
    _demand(isinstance(value, kind), place, f"must be of type {kind.__name__}")
    return value
