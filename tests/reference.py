"""Slow and obvious versions of what the core does fast, written from the method, not the code.

Plain loops over Python numbers wherever possible; no cache, no batching, no tree mask.
"""

from __future__ import annotations

import math

import torch

from confu_core.heads import Contemplation, DraftHead
from confu_core.sampling import gumbel_noise
from confu_core.target import Target
from confu_core.trace import Settings

# The tree ----------------------------------------------------------------------------------------


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = []
    while node != -1:
        path.insert(0, node)
        node = parents[node]
    return path


def verify_mask(
    parents: list[int], contemplated: list[int], prefix: int, soft: int
) -> list[list[bool]]:
    """Who may attend to whom, rule by rule. Rows: nodes, contemplate tokens. Columns: soft prompts,
    prefix, nodes, contemplate tokens."""
    columns = [("soft", i) for i in range(soft)] + [("prefix", i) for i in range(prefix)]
    rows = [("node", i) for i in range(len(parents))] + [
        ("contemplate", i) for i in range(len(contemplated))
    ]
    columns += rows

    def allowed(row: tuple[str, int], column: tuple[str, int]) -> bool:
        if column[0] == "soft":  # only contemplate tokens may attend to the soft prompts
            return row[0] == "contemplate"
        if column[0] == "contemplate":  # nobody else ever sees a contemplate token
            return row == column
        if column[0] == "prefix":
            return True
        node = row[1] if row[0] == "node" else contemplated[row[1]]
        return column[1] in path_to(parents, node)

    return [[allowed(row, column) for column in columns] for row in rows]


def select_tree(parents: list[int], scores: list[float], budget: int) -> list[int]:
    """Candidates to keep, ascending: grow the tree by the best candidate that hangs on it."""
    kept: list[int] = []
    while len(kept) < budget - 1:
        hanging = [
            c for c in range(len(scores)) if c not in kept and parents[c] in {-1, *kept}
        ]  # fmt: skip
        if not hanging:
            break
        best = hanging[0]
        for c in hanging:
            if scores[c] > scores[best]:
                best = c
        kept.append(best)
    return sorted(kept)


def walk(token_ids: list[int], parents: list[int], wanted: list[int]) -> tuple[list[int], int]:
    """The accepted path and the bonus token, if the target wants `wanted[n]` after node n."""
    path, node = [], 0
    while True:
        children = [
            c for c in range(1, len(parents))
            if parents[c] == node and token_ids[c] == wanted[node]
        ]  # fmt: skip
        if not children:
            return path, wanted[node]
        node = children[0]
        path.append(node)


# Drawing -----------------------------------------------------------------------------------------


def probabilities(logits: list[float], temperature: float, top_p: float = 1.0) -> list[float]:
    """Softmax at a temperature, cut to the smallest set that reaches top_p, renormalised."""
    peak = max(logits)
    weights = [math.exp((x - peak) / temperature) for x in logits]
    total = math.fsum(weights)
    probs = [w / total for w in weights]
    kept, reached = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda t: (-probs[t], t)):
        if reached >= top_p and kept:
            break
        kept.add(token)
        reached += probs[token]
    total = math.fsum(probs[t] for t in kept)
    return [p / total if t in kept else 0.0 for t, p in enumerate(probs)]


def choose(logits: torch.Tensor, settings: Settings, position: int) -> int:
    """The token at a text position: arg max, or arg max of log-probability plus Gumbel noise."""
    numbers = logits.double().tolist()
    if settings.temperature == 0:
        return max(range(len(numbers)), key=lambda t: (numbers[t], -t))
    probs = probabilities(numbers, settings.temperature, settings.top_p)
    noise = gumbel_noise(settings.seed, position, len(numbers)).tolist()
    scores = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(probs, noise, strict=True)]
    return max(range(len(scores)), key=lambda t: scores[t])


# Models ------------------------------------------------------------------------------------------


@torch.no_grad()
def full_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) of the whole text by the model's own forward, without a cache."""
    output = target.model(torch.tensor([ids], device=target.device), use_cache=False)
    return output.logits[0, :, : len(target.tokenizer)].float()


@torch.no_grad()
def full_taps(target: Target, ids: list[int]) -> torch.Tensor:
    """(T, 3 Ht): the model's own hidden states on entry to layers 2, L // 2 and L - 3."""
    output = target.model(
        torch.tensor([ids], device=target.device), use_cache=False, output_hidden_states=True
    )
    layers = len(output.hidden_states) - 1
    return torch.cat([output.hidden_states[n][0] for n in (2, layers // 2, layers - 3)], dim=-1)


def plain_text(
    target: Target, prompt: list[int], settings: Settings, stops: frozenset[int] | None = None
) -> list[int]:
    """Plain decoding as everybody would write it: one token at a time, everything read anew."""
    stops = target.stop_ids if stops is None else stops
    text = list(prompt)
    while len(text) - len(prompt) < settings.max_new_tokens and len(text) < target.context:
        token = choose(full_logits(target, text)[-1], settings, position=len(text))
        text.append(token)
        if token in stops:
            break
    return text[len(prompt) :]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Rotary embedding of one vector (W,): dimension j is paired with j + W / 2."""
    half = len(x) // 2
    out = x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        a, b = x[j], x[j + half]
        out[j] = a * math.cos(angle) - b * math.sin(angle)
        out[j + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


@torch.no_grad()
def draft_chain(
    head: DraftHead,
    embedding: torch.Tensor,
    taps: torch.Tensor,
    ids: list[int],
    start: int,
    steps: int,
    part: Contemplation | None = None,
    future: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Log-probabilities over the draft vocabulary of a chain that is fed the true tokens.

    Entry i pairs the target's feature of position i with token i + 1. The chain starts at entry
    `start`; step k reads token `start` + 1 + k with its own last state and predicts the next one.

    Args:
        embedding: (V, H) rows of the target's embedding.
        taps: (T, 3 Ht). future: (embedding slot (H,), feature (H,)) of the future token.

    Returns:
        `steps` tensors (D,).
    """
    s = head.shape
    w = {name: tensor.detach() for name, tensor in head.state_dict().items()}

    def attention_input(e: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        e = _norm(e, w["input_layernorm.weight"], s.rms_eps)
        return torch.cat((e, _norm(u, w["hidden_norm.weight"], s.rms_eps)))  # embedding first

    def key_value(x: torch.Tensor, position: int) -> tuple[list, list]:
        keys = (w["k_proj.weight"] @ x).split(s.head_dim)
        values = (w["v_proj.weight"] @ x).split(s.head_dim)
        return [_turn(k, position, s.rope_theta) for k in keys], list(values)

    entries = []  # (keys, values, bias on their scores)
    for i in range(start + 1):
        x = attention_input(embedding[ids[i + 1]], w["fc.weight"] @ taps[i])
        entries.append((*key_value(x, i), 0.0))
    if future is not None and part.shape.future_entry:
        x = attention_input(*future)
        entries.append((*key_value(x, start), float(part.entry_bias)))
    steer = torch.zeros(s.hidden)
    if future is not None and part.shape.future_query:
        f = future[1]
        normed = _norm(f, part.project_norm.weight, part.shape.rms_eps)
        steer = part.gate * f + part.project.weight @ normed

    state = w["fc.weight"] @ taps[start]
    result = []
    for k in range(steps):
        e = embedding[ids[start + 1 + k]]
        if k > 0:  # an entry's key never holds what steers the query
            entries.append((*key_value(attention_input(e, state), start + k), 0.0))
        u = state + steer
        queries = (w["q_proj.weight"] @ attention_input(e, u)).split(s.head_dim)
        mixed = []
        for number, query in enumerate(queries):
            group = number // (s.heads // s.kv_heads)
            query = _turn(query, start + k, s.rope_theta)
            scores = torch.stack(
                [query @ keys[group] / math.sqrt(s.head_dim) + bias for keys, _, bias in entries]
            )
            values = torch.stack([values[group] for _, values, _ in entries])
            mixed.append(scores.softmax(0) @ values)
        a = u + w["o_proj.weight"] @ torch.cat(mixed)
        x = _norm(a, w["post_attention_layernorm.weight"], s.rms_eps)
        gate = w["gate_proj.weight"] @ x
        state = a + w["down_proj.weight"] @ (gate * gate.sigmoid() * (w["up_proj.weight"] @ x))
        logits = w["lm_head.weight"] @ _norm(state, w["norm.weight"], s.rms_eps)
        result.append(logits.log_softmax(0))
    return result


@torch.no_grad()
def contemplate(
    target: Target, part: Contemplation, embedding: torch.Tensor, ids: list[int]
) -> torch.Tensor:
    """Taps (3 Ht,) of a contemplate token behind `ids`, by the model's own layers.

    The text runs through each layer alone, as if nothing followed; the contemplate row then attends
    to the soft prompts, the text and itself. Adapters are merged into the row's own weights.
    """
    model = target.model.model
    text = target.embed(torch.tensor([ids]))[0]
    row = embedding
    length = len(ids)
    positions = torch.arange(length + 1).unsqueeze(0)
    cos, sin = model.rotary_emb(text.unsqueeze(0), positions)
    taps = []

    def by_head(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, target.head_dim))

    for number, layer in enumerate(model.layers):
        if number in (2, target.layers // 2, target.layers - 3):
            taps.append(row)
        attention = layer.self_attn

        def project(name: str, x: torch.Tensor, attention=attention) -> torch.Tensor:
            return by_head(getattr(attention, name)(x))

        def turned(x: torch.Tensor, first: int, norm: str, attention=attention) -> torch.Tensor:
            x = getattr(attention, norm)(x) if hasattr(attention, norm) else x
            half = target.head_dim // 2
            other = torch.cat((-x[..., half:], x[..., :half]), -1)
            c, s = cos[0, first : first + len(x), None], sin[0, first : first + len(x), None]
            return x * c + other * s

        def changed(name: str, x: torch.Tensor, layer=layer, number=number) -> torch.Tensor:
            module = layer.mlp if hasattr(layer.mlp, name) else layer.self_attn
            linear = getattr(module, name)
            weight = linear.weight
            if part.adapters is not None:
                weight = weight + part.adapters.up[name][number] @ part.adapters.down[name][number]
            y = x @ weight.t()
            return y if linear.bias is None else y + linear.bias

        normed_text, normed_row = layer.input_layernorm(text), layer.input_layernorm(row[None])
        text_keys = turned(project("k_proj", normed_text), 0, "k_norm")  # (T, K, W)
        row_key = turned(by_head(changed("k_proj", normed_row)), length, "k_norm")
        keys = torch.cat((part.soft_keys[number].transpose(0, 1), text_keys, row_key))
        values = torch.cat(
            (
                part.soft_values[number].transpose(0, 1),
                project("v_proj", normed_text),
                by_head(changed("v_proj", normed_row)),
            )
        )
        query = turned(by_head(changed("q_proj", normed_row)), length, "q_norm")[0]  # (heads, W)
        mixed = []
        for head in range(target.heads):
            group = head // (target.heads // target.kv_heads)
            scores = keys[:, group] @ query[head] / math.sqrt(target.head_dim)
            mixed.append(scores.softmax(0) @ values[:, group])
        row = row + changed("o_proj", torch.cat(mixed))
        normed = layer.post_attention_layernorm(row)
        inner = layer.mlp.act_fn(changed("gate_proj", normed)) * changed("up_proj", normed)
        row = row + changed("down_proj", inner)
        mask = torch.full((length, length), float("-inf")).triu(1)
        text = layer(
            text.unsqueeze(0),
            attention_mask=mask[None, None],
            position_ids=positions[:, :length],
            position_embeddings=(cos[:, :length], sin[:, :length]),
        )[0]
    return torch.cat(taps)
