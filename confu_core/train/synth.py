"""Training text by the target itself: it finishes a request, then answers it.

A draft head learns to predict *this* target, so the text that it learns from should be the
target's own. Conversations are written in batches that advance in step, one JSON line each:
`{kind, user, assistant, temperature, finished, batch}`. Every batch draws from a generator seeded
by (seed, batch), so a run that was stopped continues with the text that it would have written.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from confu_core.errors import DataError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.train.openings import LONG_REQUESTS, OPENINGS

ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # 60 % greedy, 20 % each of the others
REQUEST_TOKENS, LONG_REQUEST_TOKENS, ANSWER_TOKENS = 56, 192, 256


@torch.inference_mode()
def continue_batch(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    max_new_tokens: int,
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue several prompts in step, each at its own temperature, up to its stop token.

    Prompts are padded on the left; a padded slot is never attended to and takes no position.

    Returns:
        The new token ids of each prompt; a stop id, if one was drawn, is the last.
    """
    device, batch = target.device, len(prompts)
    width = max(map(len, prompts))
    pad = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    cache = target.new_cache(width + max_new_tokens, batch=batch)
    slots = torch.arange(width + max_new_tokens, device=device)
    is_text = slots.unsqueeze(0) >= pad.unsqueeze(1)  # (B, slots)

    causal = slots[:width].unsqueeze(0) <= slots[:width].unsqueeze(1)
    # A padded row sees itself alone, so that its softmax is defined.
    own = torch.eye(width, dtype=torch.bool, device=device)
    mask = (causal & is_text[:, None, :width]) | own  # (B, W, W)
    positions = (slots[:width].unsqueeze(0) - pad.unsqueeze(1)).clamp(min=0)
    cache.open(width)
    rows = target.run(target.embed(ids), positions, mask, cache)
    cache.commit(list(range(width)))
    last = rows.last[:, -1]

    heat = torch.tensor(temperatures, device=device)
    sampled = heat > 0
    stops = torch.tensor(sorted(target.stop_ids), device=device)
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(max_new_tokens):
        logits = target.logits(last)  # (B, V)
        token = logits.argmax(-1)
        if sampled.any():
            cumulative = (logits[sampled] / heat[sampled, None]).softmax(-1).cumsum(-1)
            draw = torch.rand(cumulative.shape[0], 1, generator=generator, device=device)
            token[sampled] = torch.searchsorted(cumulative, draw * cumulative[:, -1:]).squeeze(-1)
        for index, value in enumerate(token.tolist()):
            if alive[index]:
                answers[index].append(value)
        alive &= ~torch.isin(token, stops)
        if step + 1 == max_new_tokens or not alive.any():
            break
        cache.open(1)
        view = is_text[:, None, : cache.length + 1]  # (B, 1, S)
        position = (cache.length - pad).unsqueeze(1)
        rows = target.run(target.embed(token).unsqueeze(1), position, view, cache)
        cache.commit([0])
        last = rows.last[:, 0]
    return answers


def _text_and_end(target: Target, ids: list[int]) -> tuple[str, bool]:
    finished = bool(ids) and ids[-1] in target.stop_ids
    return target.tokenizer.decode(ids[:-1] if finished else ids).strip(), finished


def write_requests(
    target: Target, kind: str, count: int, dice: random.Random, generator: torch.Generator
) -> list[str]:
    """Let the target finish `count` openings of one task group."""
    marker = "\x00"  # where the opening ends: everything behind it is the template's closing
    template = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False
    ).split(marker)[0]
    openings = [dice.choice(OPENINGS[kind]) for _ in range(count)]
    prompts = [
        target.tokenizer.encode(template + opening, add_special_tokens=False)
        for opening in openings
    ]
    limit = LONG_REQUEST_TOKENS if kind in LONG_REQUESTS else REQUEST_TOKENS
    endings = continue_batch(target, prompts, [1.0] * count, limit, generator)
    texts = []
    for opening, ids in zip(openings, endings, strict=True):
        ending = ids[:-1] if ids and ids[-1] in target.stop_ids else ids
        texts.append((opening + target.tokenizer.decode(ending)).strip())
    return texts


def synthesise(
    target: Target,
    out: Path,
    *,
    conversations: int,
    batch: int,
    seed: int,
    prompts: Iterable[tuple[str, str]] | None = None,
) -> Iterator[dict]:
    """Append conversations to `out` until it holds `conversations` (or `prompts` are answered).

    Args:
        out: a JSON-lines file; an existing one is continued.
        batch: how many conversations are written in step.
        prompts: (kind, user text) pairs to answer instead of requests by the target.

    Yields:
        After each batch `{conversations, answer_tokens, tokens_per_second}`.
    """
    seen, done, next_batch = _resume(out)
    given = [pair for pair in prompts if key(pair[1]) not in seen] if prompts is not None else None
    kinds = sorted(OPENINGS)
    while done < conversations and (given is None or given):
        start = time.perf_counter()
        dice = random.Random(f"{seed}/{next_batch}")
        generator = torch.Generator(target.device).manual_seed(dice.getrandbits(48))
        if given is None:
            kind = kinds[next_batch % len(kinds)]
            texts = write_requests(target, kind, batch, dice, generator)
            requests = [(kind, text) for text in texts]
        else:
            requests, given = given[:batch], given[batch:]
        fresh = []
        for kind, text in requests:
            if key(text) not in seen:
                seen.add(key(text))
                fresh.append((kind, text))
        ids = [chat_ids(target, text) for _, text in fresh]
        temperatures = [dice.choice(ANSWER_TEMPERATURES) for _ in fresh]
        answers = continue_batch(target, ids, temperatures, ANSWER_TOKENS, generator)
        lines = []
        for (kind, text), heat, answer in zip(fresh, temperatures, answers, strict=True):
            reply, finished = _text_and_end(target, answer)
            if reply:
                lines.append(
                    {
                        "kind": kind,
                        "user": text,
                        "assistant": reply,
                        "temperature": heat,
                        "finished": finished,
                        "batch": next_batch,
                    }
                )
        with out.open("a", encoding="utf-8") as file:  # one write, so a batch is whole or absent
            file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        done += len(lines)
        next_batch += 1
        tokens = sum(map(len, answers))
        yield {
            "conversations": done,
            "answer_tokens": tokens,
            "tokens_per_second": tokens / (time.perf_counter() - start),
        }


def key(user: str) -> str:
    """What makes two requests the same one: their text, white space folded, case ignored."""
    return hashlib.sha256(" ".join(user.lower().split()).encode()).hexdigest()[:16]


def _resume(out: Path) -> tuple[set[str], int, int]:
    """Keys seen, conversations written, and the next batch of an existing file."""
    seen: set[str] = set()
    done, next_batch = 0, 0
    if out.exists():
        for number, line in enumerate(out.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                seen.add(key(row["user"]))
                next_batch = max(next_batch, row.get("batch", -1) + 1)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{out}, line {number} is not a conversation: {error}") from error
            done += 1
    return seen, done, next_batch
