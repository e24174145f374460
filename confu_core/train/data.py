"""Training text: token ids with an answer mask, split by hash, batched by length."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from confu_core.errors import DataError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.train.synth import key, read_lines

MAX_TOKENS = 512


@dataclass(frozen=True)
class Conversation:
    """Token ids of one conversation; from `answer_start` on the target wrote them."""

    ids: tuple[int, ...]
    answer_start: int
    kind: str


@dataclass(frozen=True)
class Batch:
    """Padded conversations (B, T). `answer` marks tokens that the target wrote; masks come from
    lengths, never from the padding id, which is this target's end-of-text id."""

    ids: torch.Tensor
    answer: torch.Tensor
    lengths: torch.Tensor
    numbers: tuple[int, ...]


def load_conversations(
    target: Target, paths: list[Path]
) -> tuple[list[Conversation], list[Conversation]]:
    """Read JSON-lines files (`.gz` is unpacked) and split them.

    1 request in 20 is held out, by its hash.

    Returns:
        (training, held out), each request once.

    Raises:
        DataError: a file that cannot be read, or a line that is not
            `{"user": ..., "assistant": ...}`.
    """
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    seen: set[str] = set()
    closing = _answer_closing(target)
    for path in paths:
        for number, line in enumerate(read_lines(path), 1):
            try:
                row = json.loads(line)
                user, assistant = row["user"], row["assistant"]
                finished = row.get("finished", True)
                if not isinstance(user, str) or not isinstance(assistant, str):
                    raise TypeError("they must be texts")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f"{path}, line {number}: expected a JSON object with 'user' and 'assistant' "
                    f"({error})."
                ) from error
            name = key(user)
            if name in seen:
                continue
            seen.add(name)
            prompt = chat_ids(target, user)
            reply = target.tokenizer.encode(assistant, add_special_tokens=False)
            ids = (prompt + reply + (closing if finished else []))[:MAX_TOKENS]
            if len(ids) > len(prompt) + 2:
                chosen = held_out if int(name, 16) % 20 == 0 else train
                chosen.append(Conversation(tuple(ids), len(prompt), row.get("kind", "")))
    return train, held_out


def _answer_closing(target: Target) -> list[int]:
    """The ids with which the chat template ends an answer, up to the stop id."""
    marker = "\x00"
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": marker}], tokenize=False
    )
    ids = target.tokenizer.encode(text.split(marker)[1], add_special_tokens=False)
    stops = [index for index, value in enumerate(ids) if value in target.stop_ids]
    return ids[: stops[0] + 1] if stops else []


def draft_vocabulary(
    conversations: list[Conversation], size: int, forced: set[int]
) -> torch.Tensor:
    """The `size` most frequent answer tokens, `forced` ones included, as ascending ids (D,).

    Ties go to the smaller id, so the map is the same on every machine; unseen ids fill the rest.
    """
    counts: dict[int, int] = {}
    for conversation in conversations:
        for token in conversation.ids[conversation.answer_start :]:
            counts[token] = counts.get(token, 0) + 1
    ranked = sorted(counts, key=lambda token: (token not in forced, -counts[token], token))
    ranked = [*(t for t in sorted(forced) if t not in counts), *ranked]
    unseen = (token for token in range(10**9) if token not in counts and token not in forced)
    while len(ranked) < size:
        ranked.append(next(unseen))
    return torch.tensor(sorted(ranked[:size]))


def coverage(conversations: list[Conversation], vocabulary: torch.Tensor) -> float:
    """Share of answer tokens that the draft vocabulary can name."""
    known = set(vocabulary.tolist())
    tokens = [t for c in conversations for t in c.ids[c.answer_start :]]
    return sum(token in known for token in tokens) / max(1, len(tokens))


def batches(conversations: list[Conversation], tokens: int, seed: int | None) -> Iterator[Batch]:
    """One epoch of batches of about `tokens` padded tokens, similar lengths together.

    Args:
        seed: shuffles conversations and batches; None keeps the order (for evaluation).
    """
    order = list(range(len(conversations)))
    dice = random.Random(seed)
    if seed is not None:
        dice.shuffle(order)
    # Sorting within chunks keeps padding small and the order random.
    chunk = 256
    groups: list[list[int]] = []
    for start in range(0, len(order), chunk):
        part = sorted(order[start : start + chunk], key=lambda n: len(conversations[n].ids))
        group: list[int] = []
        for number in part:
            if group and len(conversations[number].ids) * (len(group) + 1) > tokens:
                groups.append(group)
                group = []
            group.append(number)
        groups.append(group)
    if seed is not None:
        dice.shuffle(groups)
    for group in groups:
        yield collate(conversations, group)


def collate(conversations: list[Conversation], numbers: list[int]) -> Batch:
    """Pad some conversations to one batch."""
    chosen = [conversations[number] for number in numbers]
    width = max(len(c.ids) for c in chosen)
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    answer = torch.zeros(len(chosen), width, dtype=torch.bool)
    for row, conversation in enumerate(chosen):
        ids[row, : len(conversation.ids)] = torch.tensor(conversation.ids)
        answer[row, conversation.answer_start : len(conversation.ids)] = True
    lengths = torch.tensor([len(c.ids) for c in chosen])
    return Batch(ids, answer, lengths, tuple(numbers))
