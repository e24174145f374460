"""The trained modules: EAGLE-3's draft head and ConFu's contemplation. Parameters and forward only.

How they are used is elsewhere: `drafter.py` grows trees with the head, `contemplation.py` makes
and carries future tokens, `train/losses.py` unrolls both for training. All three call the same
methods below, which is what keeps training equal to decoding.

Sizes: H draft width, Ht target width, D draft vocabulary, K key/value heads, G query heads per
key/value head, W head width, E experts, S soft prompts, L target layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from confu_core.target import rotate


@dataclass(frozen=True)
class DraftShape:
    """Everything that changes the draft head's arithmetic; stored in its `config.json`.

    tap_layers: the target's residual stream on *entry* to these layers feeds `fc` (EAGLE's
        convention; SGLang and SpecForge name the layer before by its *output*).
    rope_theta: the draft's own rotary base, never taken from the target at load.
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
    tap_layers: tuple[int, int, int]

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
    `u`; the state handed on is the one before the final norm.
    """

    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, width = shape.hidden, shape.head_dim
        self.fc = nn.Linear(3 * shape.target_hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps=shape.rms_eps)
        self.hidden_norm = RMSNorm(hidden, eps=shape.rms_eps)
        self.q_proj = nn.Linear(2 * hidden, shape.heads * width, bias=False)
        self.k_proj = nn.Linear(2 * hidden, shape.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * hidden, shape.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.heads * width, hidden, bias=False)
        self.post_attention_layernorm = RMSNorm(hidden, eps=shape.rms_eps)
        self.gate_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, hidden, bias=False)
        self.norm = RMSNorm(hidden, eps=shape.rms_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab, bias=False)
        # Offsets: target id = draft id + d2t[draft id].
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft-vocabulary ids to target ids, any shape. The only place where d2t is applied."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """Target features (..., 3 Ht) -> states (..., H)."""
        return self.fc(taps)

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for positions (B, R), each (B, 1, R, W)."""
        # Made anew in float32: a buffer would follow the head into bfloat16, where angles drown.
        steps = torch.arange(0, self.shape.head_dim, 2, device=positions.device).float()
        frequencies = self.shape.rope_theta ** (-steps / self.shape.head_dim)
        angles = positions.unsqueeze(-1).float() * frequencies
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
        keys = self.k_proj(x).view(split).transpose(1, 2)
        return rotate(keys, cos, sin), self.v_proj(x).view(split).transpose(1, 2)

    def queries(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attention inputs (B, R, 2H) -> rotated queries (B, K·G, R, W)."""
        batch, rows, _ = x.shape
        split = (batch, rows, self.shape.heads, self.shape.head_dim)
        return rotate(self.q_proj(x).view(split).transpose(1, 2), cos, sin)

    def finish(self, u: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """Residual u (B, R, H) and attention result (B, K·G, R, W) -> new state g (B, R, H)."""
        batch, rows, _ = u.shape
        a = u + self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        x = self.post_attention_layernorm(a)
        return a + self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """States (..., H) -> draft-vocabulary logits (..., D)."""
        return self.lm_head(self.norm(g))


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

    def steer(self, feature: torch.Tensor) -> torch.Tensor:
        """What f adds to the draft's input state at every step: (..., H) -> (..., H)."""
        return self.gate * feature + self.project(self.project_norm(feature))
