"""Training text by the target itself: it finishes a request, then answers it.

A draft head learns to predict *this* target, so the text that it learns from should be the
target's own. Conversations are written in batches that advance in step, one JSON line each:
`{kind, user, assistant, temperature, finished, batch}`. Every batch draws from a generator seeded
by (seed, batch), so a run that was stopped continues with the text that it would have written.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from confu_core.errors import DataError
from confu_core.prompt import chat_ids
from confu_core.target import Target
from confu_core.train.openings import FRAMES, LONG_REQUESTS, OPENINGS, PASSAGE_KINDS

ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)  # 60 % greedy, 20 % each of the others
REQUEST_TOKENS, LONG_REQUEST_TOKENS, ANSWER_TOKENS = 56, 192, 256
MIN_PASSAGE = 400  # characters of an earlier answer that is worth a question of its own
ROWS_AT_ONCE = 256  # of one pass: larger was not faster on a CPU
STAY_UNTIL = 0.75  # share of living rows below which a batch is made smaller


@torch.inference_mode()
def continue_batch(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    limits: list[int],
    generator: torch.Generator,
) -> list[list[int]]:
    """Continue several prompts in step, each at its own temperature, up to its stop token.

    Prompts are padded on the left; a padded slot is never attended to and takes no position.
    Rows that have stopped leave the batch once they are a quarter of it.

    Args:
        limits: most new tokens, for each prompt.

    Returns:
        The new token ids of each prompt; a stop id, if one was drawn, is the last.
    """
    device, batch = target.device, len(prompts)
    width, max_new_tokens = max(map(len, prompts)), max(limits)
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
    stops = torch.tensor(sorted(target.stop_ids), device=device)
    owners = list(range(batch))  # which prompt each row of the batch continues
    alive = torch.ones(batch, dtype=torch.bool, device=device)
    answers: list[list[int]] = [[] for _ in prompts]
    for step in range(max_new_tokens):
        logits = target.logits(last)  # (B, V)
        token = logits.argmax(-1)
        sampled = heat > 0
        if sampled.any():
            cumulative = (logits[sampled] / heat[sampled, None]).softmax(-1).cumsum(-1)
            draw = torch.rand(cumulative.shape[0], 1, generator=generator, device=device)
            token[sampled] = torch.searchsorted(cumulative, draw * cumulative[:, -1:]).squeeze(-1)
        for owner, value, goes_on in zip(owners, token.tolist(), alive.tolist(), strict=True):
            if goes_on:
                answers[owner].append(value)
        full = torch.tensor([len(answers[owner]) >= limits[owner] for owner in owners])
        alive &= ~torch.isin(token, stops) & ~full.to(device)
        if step + 1 == max_new_tokens or not alive.any():
            break
        if int(alive.sum()) <= STAY_UNTIL * len(owners):
            stay = alive.nonzero().squeeze(-1)
            cache.select(stay)
            owners = [owners[row] for row in stay.tolist()]
            token, heat, pad, is_text = token[stay], heat[stay], pad[stay], is_text[stay]
            alive = alive[stay]
        cache.open(1)
        view = is_text[:, None, : cache.length + 1]  # (B, 1, S)
        position = (cache.length - pad).unsqueeze(1)
        rows = target.run(target.embed(token).unsqueeze(1), position, view, cache)
        cache.commit([0])
        last = rows.last[:, 0]
    return answers


def continue_all(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    limits: list[int],
    generator: torch.Generator,
) -> list[list[int]]:
    """`continue_batch` over any number of prompts, those of similar length together."""
    order = sorted(range(len(prompts)), key=lambda n: len(prompts[n]))
    answers: list[list[int]] = [[] for _ in prompts]
    for start in range(0, len(order), ROWS_AT_ONCE):
        chosen = order[start : start + ROWS_AT_ONCE]
        columns = ([column[n] for n in chosen] for column in (prompts, temperatures, limits))
        for n, ids in zip(chosen, continue_batch(target, *columns, generator), strict=True):
            answers[n] = ids
    return answers


def _text_and_end(target: Target, ids: list[int]) -> tuple[str, bool]:
    finished = bool(ids) and ids[-1] in target.stop_ids
    return target.tokenizer.decode(ids[:-1] if finished else ids).strip(), finished


def write_requests(
    target: Target, openings: list[tuple[str, str]], generator: torch.Generator
) -> list[str]:
    """Let the target finish openings `(kind, text)` of requests, at temperature 1."""
    marker = "\x00"  # where the opening ends: everything behind it is the template's closing
    template = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False
    ).split(marker)[0]
    prompts = [
        target.tokenizer.encode(template + opening, add_special_tokens=False)
        for _, opening in openings
    ]
    limits = [
        LONG_REQUEST_TOKENS if kind in LONG_REQUESTS else REQUEST_TOKENS for kind, _ in openings
    ]
    texts = []
    endings = continue_all(target, prompts, [1.0] * len(prompts), limits, generator)
    for (_, opening), ids in zip(openings, endings, strict=True):
        ending = ids[:-1] if ids and ids[-1] in target.stop_ids else ids
        texts.append((opening + target.tokenizer.decode(ending)).strip())
    return texts


def draw_requests(
    target: Target, count: int, passages: list[str], dice: random.Random, generator: torch.Generator
) -> list[tuple[str, str]]:
    """`count` requests (kind, text), task groups in equal shares.

    A group with frames puts half of its requests around an earlier answer, so that long prompts
    have well-formed text to copy from; the target finishes the openings of all others.
    """
    kinds = sorted(OPENINGS)
    requests: list[tuple[str, str]] = []
    openings: list[tuple[str, str]] = []
    for _ in range(count):
        kind = dice.choice(kinds)
        if kind in FRAMES and passages and dice.random() < 0.5:
            requests.append((kind, dice.choice(FRAMES[kind]).format(dice.choice(passages))))
        else:
            openings.append((kind, dice.choice(OPENINGS[kind])))
    texts = write_requests(target, openings, generator)
    return requests + [(kind, text) for (kind, _), text in zip(openings, texts, strict=True)]


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
        batch: how many requests are drawn at once.
        prompts: (kind, user text) pairs to answer instead of requests by the target.

    Yields:
        After each batch `{conversations, answer_tokens, tokens_per_second}`.
    """
    seen, passages, done, next_batch = _resume(out)
    given = [pair for pair in prompts if key(pair[1]) not in seen] if prompts is not None else None
    while done < conversations and (given is None or given):
        start = time.perf_counter()
        dice = random.Random(f"{seed}/{next_batch}")
        generator = torch.Generator(target.device).manual_seed(dice.getrandbits(48))
        if given is None:
            requests = draw_requests(target, batch, passages, dice, generator)
        else:
            requests, given = given[:batch], given[batch:]
        fresh = []
        for kind, text in requests:
            if key(text) not in seen:
                seen.add(key(text))
                fresh.append((kind, text))
        ids = [chat_ids(target, text) for _, text in fresh]
        temperatures = [dice.choice(ANSWER_TEMPERATURES) for _ in fresh]
        limits = [ANSWER_TOKENS] * len(ids)
        answers = continue_all(target, ids, temperatures, limits, generator)
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
        passages += [line["assistant"] for line in lines if _is_passage(line)]
        done += len(lines)
        next_batch += 1
        tokens = sum(map(len, answers))
        yield {
            "conversations": done,
            "answer_tokens": tokens,
            "tokens_per_second": tokens / (time.perf_counter() - start),
        }


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """Requests (kind, text) of a file: JSON lines `{"user", "kind"?}`, or plain text, one a line.

    Raises:
        DataError: not readable, a damaged line, or nothing in it.
    """
    prompts = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append(("", line.strip()))
            continue
        try:
            row = json.loads(line)
            user, kind = row["user"], row.get("kind", "")
            if not isinstance(user, str) or not isinstance(kind, str):
                raise TypeError("'user' and 'kind' must be texts")
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}, line {number} is not a request: {error!r}.") from error
        prompts.append((kind, user))
    if not prompts:
        raise DataError(f"{path} holds no requests.")
    return prompts


def read_lines(path: Path) -> list[str]:
    """Lines of a text file, unpacked if its name ends in `.gz`.

    Raises:
        DataError: it cannot be read.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    return text.splitlines()


def key(user: str) -> str:
    """What makes two requests the same one: their text, white space folded, case ignored."""
    return hashlib.sha256(" ".join(user.lower().split()).encode()).hexdigest()[:16]


def _is_passage(row: dict) -> bool:
    return row.get("kind") in PASSAGE_KINDS and len(row["assistant"]) >= MIN_PASSAGE


def _resume(out: Path) -> tuple[set[str], list[str], int, int]:
    """Keys seen, passages to ask about, conversations written, next batch of an existing file."""
    seen: set[str] = set()
    passages: list[str] = []
    done, next_batch = 0, 0
    if out.exists():
        for number, line in enumerate(out.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                seen.add(key(row["user"]))
                next_batch = max(next_batch, row.get("batch", -1) + 1)
                if _is_passage(row):
                    passages.append(row["assistant"])
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{out}, line {number} is not a conversation: {error}") from error
            done += 1
    return seen, passages, done, next_batch
