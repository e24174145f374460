"""The trained modules: EAGLE-3's draft head and ConFu's contemplation. Parameters and forward only.

How they are used is elsewhere: `drafter.py` grows trees with the head, `contemplation.py` makes
and carries future tokens, `train/losses.py` unrolls both for training. All three call the same
methods below, which is what keeps training equal to decoding.

Sizes: H draft width, Ht target width, D draft vocabulary, K key/value heads, G query heads per
key/value head, W head width, E experts, S soft prompts, L target layers, r adapter rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from confu_core.rotary import frequencies
from confu_core.target import Target, rotate


@dataclass(frozen=True)
class DraftShape:
    """Everything that changes the draft head's arithmetic; stored in its `config.json`.

    tap_layers: the target's residual stream on *entry* to these layers feeds `fc` (EAGLE's
        convention; SGLang and SpecForge name the layer before by its *output*).
    rope_theta, rope_scaling: the draft's own rotary base and scaling (`rotary.py`), never taken
        from the target at load.

    The rest are variants of published heads, all off in our own (pitfalls 1.2):

    qk_norm: queries and keys are normed per head, as in Qwen-3.
    attention_bias, fc_bias: biases of q, k, v and o, and of `fc`.
    fc_norm: each tapped state is normed before `fc`; norm_before_fc: their concatenation is.
    norm_before_residual: the residual is the normed `u` instead of `u`.
    recycle_normed: the state handed on is the one after the final norm.
    own_embedding: the head brings token embeddings of its own, (V, H).
    """

    hidden: int
    target_hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    rms_eps: float
    rope_theta: float
    tap_layers: tuple[int, ...]
    rope_scaling: dict | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    recycle_normed: bool = False
    own_embedding: bool = False

    def to_plain(self) -> dict:
        return asdict(self) | {"tap_layers": list(self.tap_layers)}

    @classmethod
    def from_plain(cls, values: dict) -> DraftShape:
        return cls(**values | {"tap_layers": tuple(values["tap_layers"])})


class RMSNorm(nn.RMSNorm):
    """RMSNorm in its input's precision, so that mixed-precision training takes the fused kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftHead(nn.Module):
    """EAGLE-3's one-layer draft model (pitfalls 1.2).

    An entry pairs a token's embedding `e` (the target's own, frozen) with a state `u`: the fused
    target features of the token before, or, further down a drafted path, the head's own last
    state. Attention reads concat(norm(e), norm(u)), embedding first; the residual is the un-normed
    `u`; the state handed on is the one before the final norm. Published heads differ from this
    where `DraftShape` says so.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden, shape.head_dim
        taps, bias = len(shape.tap_layers), shape.attention_bias
        self.fc = nn.Linear(taps * shape.target_hidden, hidden, bias=shape.fc_bias)
        self.input_layernorm = RMSNorm(hidden, eps=shape.rms_eps)
        self.hidden_norm = RMSNorm(hidden, eps=shape.rms_eps)
        self.q_proj = nn.Linear(2 * hidden, shape.heads * width, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, shape.kv_heads * width, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, shape.kv_heads * width, bias=bias)
        self.o_proj = nn.Linear(shape.heads * width, hidden, bias=bias)
        self.post_attention_layernorm = RMSNorm(hidden, eps=shape.rms_eps)
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps=shape.rms_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab, bias=False)
        if shape.qk_norm:
            self.q_norm = RMSNorm(width, eps=shape.rms_eps)
            self.k_norm = RMSNorm(width, eps=shape.rms_eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(shape.target_hidden, eps=shape.rms_eps) for _ in range(taps)
            )
        if shape.norm_before_fc:
            self.input_norm = RMSNorm(taps * shape.target_hidden, eps=shape.rms_eps)
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.vocab, hidden)
        # Offsets: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids to target ids, any shape. The only place where d2t is applied."""
        return draft_ids + self.d2t[draft_ids]

    def embed(self, target: Target, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids (...) -> embeddings (..., H): the target's, or the head's own."""
        return self.embed_tokens(token_ids) if self.shape.own_embedding else target.embed(token_ids)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Target features (..., 3 Ht) -> states (..., H). 3 stands for the number of taps."""
        if self.shape.fc_norm:
            states = taps.split(self.shape.target_hidden, dim=-1)
            normed = [norm(state) for norm, state in zip(self.fc_norm, states, strict=True)]
            taps = torch.cat(normed, dim=-1)
        if self.shape.norm_before_fc:
            taps = self.input_norm(taps)
        return self.fc(taps)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions (B, R), each (B, 1, R, W)."""
        shape = self.shape
        steps = frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling, positions.device)
        angles = positions.unsqueeze(-1).float() * steps
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos(), angles.sin()

    def attention_input(self, e: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """(..., H), (..., H) -> (..., 2H)."""
        return torch.cat((self.input_layernorm(e), self.hidden_norm(u)), dim=-1)

    def keys_values(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention inputs (B, R, 2H) -> rotated keys and values, both (B, K, R, W)."""
        batch, rows, _ = x.shape
        split = (batch, rows, self.shape.kv_heads, self.shape.head_dim)
        keys = self.k_proj(x).view(split)
        if self.shape.qk_norm:
            keys = self.k_norm(keys)
        keys = rotate(keys.transpose(1, 2), cos, sin)
        return keys, self.v_proj(x).view(split).transpose(1, 2)

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attention inputs (B, R, 2H) -> rotated queries (B, K·G, R, W)."""
        batch, rows, _ = x.shape
        split = (batch, rows, self.shape.heads, self.shape.head_dim)
        queries = self.q_proj(x).view(split)
        if self.shape.qk_norm:
            queries = self.q_norm(queries)
        return rotate(queries.transpose(1, 2), cos, sin)

    def finish(self, u: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Residual u (B, R, H) and attention result (B, K·G, R, W) -> new state g (B, R, H)."""
        batch, rows, _ = u.shape
        if self.shape.norm_before_residual:
            u = self.hidden_norm(u)
        a = u + self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        x = self.post_attention_layernorm(a)
        g = a + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.norm(g) if self.shape.recycle_normed else g

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """States (..., H) -> draft-vocabulary logits (..., D)."""
        return self.lm_head(g if self.shape.recycle_normed else self.norm(g))


@dataclass(frozen=True)
class ContemplationShape:
    """Sizes and switches of ConFu's part; every ablation is a value here, not another class.

    contemplate_experts, future_experts, top_k: the two mixtures (paper; sizes are ours). One
        expert is a static token without a router.
    soft_prompts: S; 0 for none.
    future_entry: f is an extra key/value entry of the draft (the paper's data flow).
    future_query: f is also added to the draft's input state at every drafting step (ours: as a
        mere entry it was ignored, see docs/training.md).
    With both switches off the future token is computed but reaches nothing.
    adapter_rank: r of low-rank changes to the target's linear layers for contemplate rows alone;
        0 for none. read_outs: R, how many tokens behind the bonus token the contemplate row names
        itself, to be mixed into the draft's own guesses. read_out_temperature: what such mixed
        logits are divided by, since two opinions that lean on the same evidence are too sure
        together. None of these is the paper's; a head without them is ConFu lite.
    target_heads, target_intermediate: sizes that only the adapters need.
    """

    layers: int
    kv_heads: int
    head_dim: int
    target_hidden: int
    hidden: int
    rms_eps: float
    contemplate_experts: int = 8
    future_experts: int = 8
    top_k: int = 2
    soft_prompts: int = 16
    future_entry: bool = True
    future_query: bool = True
    adapter_rank: int = 0
    read_outs: int = 0
    read_out_temperature: float = 1.0
    target_heads: int = 0
    target_intermediate: int = 0

    def to_plain(self) -> dict:
        return asdict(self)


class ExpertMixture(nn.Module):
    """A mixture of experts whose experts are vectors (paper): router -> softmax -> top-K -> sum.

    The router's input is centred and standardised with constants measured on training text (ours):
    raw hidden states share one large constant direction, and a router on them collapses.
    """

    def __init__(self, inputs: int, outputs: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = min(top_k, experts)
        self.register_buffer("mean", torch.zeros(inputs))
        self.register_buffer("scale", torch.ones(inputs))
        self.router = nn.Linear(inputs, experts) if experts > 1 else None
        self.experts = nn.Parameter(torch.randn(experts, outputs) * 0.02)

    def forward(
        self, state: torch.Tensor, forced: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """State (..., inputs) -> the mixed vector (..., outputs), the weights (..., E).

        Weights are zero where not selected and sum to one over the selected ones (ours).
        `forced`: this expert alone, whatever the router says (an intervention).
        """
        if forced is not None:
            weights = self.experts.new_zeros(*state.shape[:-1], len(self.experts))
            weights[..., forced] = 1.0
            return weights @ self.experts, weights
        if self.router is None:
            lead = state.shape[:-1]
            return self.experts[0].expand(*lead, -1), self.experts.new_ones(*lead, 1)
        scores = self.router((state - self.mean) * self.scale).float().softmax(-1)
        best, index = scores.topk(self.top_k, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, index, best / best.sum(-1, keepdim=True))
        return weights.to(self.experts.dtype) @ self.experts, weights


# The target's linear layers by the rows that they read (`fused.Block` computes each group at once).
ADAPTED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class Adapters(nn.Module):
    """Low-rank changes to the frozen target's linear layers, for contemplate rows alone.

    Not in the paper; work on multi-token prediction does it for its mask tokens (arXiv 2507.11851).
    Text rows never pass through them, so the target's text stays what it is. All changes are zero
    at first.
    """

    def __init__(self, shape: ContemplationShape) -> None:
        super().__init__()
        wide, narrow = shape.target_heads * shape.head_dim, shape.kv_heads * shape.head_dim
        hidden, inner, rank = shape.target_hidden, shape.target_intermediate, shape.adapter_rank
        sizes = {
            "q_proj": (hidden, wide),
            "k_proj": (hidden, narrow),
            "v_proj": (hidden, narrow),
            "o_proj": (wide, hidden),
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        for name, (inputs, outputs) in sizes.items():
            self.down[name] = nn.Parameter(torch.randn(shape.layers, rank, inputs) * inputs**-0.5)
            self.up[name] = nn.Parameter(torch.zeros(shape.layers, outputs, rank))

        # Per group and layer: down (in, n·r), up (n·r, out), made when inference first asks.
        self._joined: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def forward(self, layer: int, group: str, x: torch.Tensor) -> torch.Tensor:
        """What is added to the linear layers of a group of `ADAPTED`, side by side, for inputs
        (..., in): (..., out), in inference in the precision of the factors."""
        if torch.is_inference_mode_enabled():
            down, up = self._products(group, x)[layer]
            rows = x.flatten(0, -2).to(down.dtype)  # (n, in)
            return torch.mm(torch.mm(rows, down), up).unflatten(0, x.shape[:-1])
        parts = []
        for name in ADAPTED[group]:
            down, up = self.down[name][layer].to(x.dtype), self.up[name][layer].to(x.dtype)
            parts.append((x @ down.t()) @ up.t())
        return torch.cat(parts, dim=-1)

    def _products(self, group: str, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One pair of factors per layer for a whole group: two products instead of two per linear
        layer. On a CPU in float32 whatever the rows are: starting such small products is what
        costs, and in bfloat16 that took twice as long (docs/performance.md)."""
        dtype = torch.float32 if x.device.type == "cpu" else x.dtype
        found = self._joined.get(group)
        if found is None or found[0][0].dtype != dtype:
            downs = torch.cat([self.down[name] for name in ADAPTED[group]], dim=1)
            ups = zip(*(self.up[name] for name in ADAPTED[group]), strict=True)
            found = [
                (down.t().to(dtype).contiguous(), torch.block_diag(*up).t().to(dtype).contiguous())
                for down, up in zip(downs, ups, strict=True)
            ]
            self._joined[group] = found
        return found


class Contemplation(nn.Module):
    """ConFu's trained part: soft prompts, both mixtures, and the ways of f into the draft."""

    def __init__(self, shape: ContemplationShape) -> None:
        super().__init__()
        self.shape = shape
        slots = (shape.layers, shape.kv_heads, shape.soft_prompts, shape.head_dim)
        # Constant keys and values per target layer, as they stand in its cache (rotary included).
        self.soft_keys = nn.Parameter(torch.zeros(slots))
        self.soft_values = nn.Parameter(torch.zeros(slots))
        self.contemplate = ExpertMixture(
            3 * shape.target_hidden, shape.target_hidden, shape.contemplate_experts, shape.top_k
        )
        self.future = ExpertMixture(shape.hidden, shape.hidden, shape.future_experts, shape.top_k)
        self.entry_bias = nn.Parameter(torch.tensor(3.0))  # on the attention score of f's entry
        self.gate = nn.Parameter(torch.full((shape.hidden,), 0.1))
        self.project_norm = RMSNorm(shape.hidden, eps=shape.rms_eps)
        self.project = nn.Linear(shape.hidden, shape.hidden, bias=False)
        nn.init.zeros_(self.project.weight)
        self.adapters = Adapters(shape) if shape.adapter_rank else None
        if shape.read_outs:
            # The first read-out is the contemplate row as it is; each further one turns it first.
            turns = torch.eye(shape.target_hidden).repeat(shape.read_outs - 1, 1, 1)
            self.turns = nn.Parameter(turns)
            self.read_out_weight = nn.Parameter(0.1 * 0.5 ** torch.arange(shape.read_outs))

    def steer(self, feature: torch.Tensor) -> torch.Tensor:
        """What f adds to the draft's input state at every step: (..., H) -> (..., H)."""
        return self.gate * feature + self.project(self.project_norm(feature))

    def read_states(self, last: torch.Tensor) -> torch.Tensor:
        """Final states of contemplate rows (..., Ht) -> one state per read-out (..., R, Ht).

        Through the draft's output matrix, state j names the token j + 1 places behind the bonus
        token (`pool` takes it in). Needs a draft as wide as the target.
        """
        # One product for all turns: ((R - 1) Ht, Ht). As an einsum it took five times as long.
        turned = nn.functional.linear(last, self.turns.to(last.dtype).flatten(0, 1))
        turned = turned.unflatten(-1, self.turns.shape[:2])  # (..., R - 1, Ht)
        return torch.cat((last.unsqueeze(-2), turned), dim=-2)

    def pool(self, logits: torch.Tensor, read_out: torch.Tensor) -> torch.Tensor:
        """The draft's own logits (..., D) and read-outs already multiplied by `read_out_weight`
        (..., D) as one guess: a product of two opinions, its weight and temperature fitted."""
        return (logits + read_out) / self.shape.read_out_temperature
