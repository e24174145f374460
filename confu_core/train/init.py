"""Where training starts: heads and contemplation initialised from the target, not from noise."""

from __future__ import annotations

import torch

from confu_core.heads import (
    Contemplation,
    ContemplationShape,
    DraftHead,
    DraftShape,
    ExpertMixture,
)
from confu_core.target import Target
from confu_core.train.data import Conversation, batches
from confu_core.train.features import TextMemory, read_text

RENEWED_NOISE = 0.1  # of an expert's size, so that renewed experts differ


def new_head(target: Target, vocabulary: torch.Tensor) -> DraftHead:
    """An EAGLE-3 head that begins as a copy of the target's last layer.

    `fc` passes the high tap through, `lm_head` takes the target's rows of the draft vocabulary;
    the embedding half of the attention input begins small (ours; beats a random start).

    Args:
        vocabulary: (D,) ascending target ids.
    """
    config = target.model.config
    layer = target.model.model.layers[-1]
    hidden = target.hidden
    head = DraftHead(
        DraftShape(
            hidden=hidden,
            target_hidden=hidden,
            heads=target.heads,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            intermediate=config.intermediate_size,
            vocab=target.vocab,
            draft_vocab=len(vocabulary),
            rms_eps=config.rms_norm_eps,
            rope_theta=float(config.rope_parameters["rope_theta"]),
            tap_layers=target.tap_layers,
        )
    )
    attention = layer.self_attn
    with torch.no_grad():
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = getattr(head, name).weight
            weight[:, :hidden].mul_(0.1)
            weight[:, hidden:] = getattr(attention, name).weight.float()
        head.o_proj.weight.copy_(attention.o_proj.weight)
        head.hidden_norm.weight.copy_(layer.input_layernorm.weight)
        head.post_attention_layernorm.weight.copy_(layer.post_attention_layernorm.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(head, name).weight.copy_(getattr(layer.mlp, name).weight)
        head.norm.weight.copy_(target.model.model.norm.weight)
        rows = target.model.get_output_embeddings().weight[vocabulary]
        head.lm_head.weight.copy_(rows)
        # The embedding's scale differs from the hidden states'; its norm brings it to 1.
        head.input_layernorm.weight.fill_(1.0)
    head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
    return head


def renew_routers(part: Contemplation, usage: dict[str, list[float]], seed: int) -> None:
    """Give collapsed mixtures a second chance: every expert becomes the mean of all, weighted by
    their use, with a little noise, and the router begins anew.

    What a mixture gives hardly changes, so what was learnt stays; but all experts can learn again
    (as dense layers are made into experts, arXiv 2212.05055).

    Args:
        usage: `contemplate_experts` and `future_experts`, mean weight of each expert (E,).
    """
    generator = torch.Generator().manual_seed(seed)
    for name in ("contemplate", "future"):
        mixture = getattr(part, name)
        if mixture.router is None:
            continue
        with torch.no_grad():
            shares = torch.tensor(usage[f"{name}_experts"])
            mean = (shares / shares.sum()) @ mixture.experts
            noise = torch.randn(mixture.experts.shape, generator=generator)
            mixture.experts.copy_(mean + RENEWED_NOISE * mean.square().mean().sqrt() * noise)
            _begin_router(mixture, generator)


def _begin_router(mixture: ExpertMixture, generator: torch.Generator) -> None:
    """Inputs are standardised, so first scores spread by about 1."""
    if mixture.router is not None:
        width = mixture.router.in_features
        mixture.router.weight.normal_(0.0, width**-0.5, generator=generator)
        mixture.router.bias.zero_()


def new_contemplation(
    target: Target, head: DraftHead, conversations: list[Conversation], seed: int, **switches
) -> Contemplation:
    """ConFu's part: soft prompts from real tokens' keys and values, experts from real embeddings,
    routers with standardised inputs.

    Args:
        switches: fields of `ContemplationShape` to set (experts, soft prompts, ablations).
    """
    part = Contemplation(
        ContemplationShape(
            layers=target.layers,
            kv_heads=target.kv_heads,
            head_dim=target.head_dim,
            target_hidden=target.hidden,
            hidden=head.shape.hidden,
            rms_eps=head.shape.rms_eps,
            target_heads=target.heads,
            target_intermediate=target.intermediate,
            **switches,
        )
    )
    generator = torch.Generator().manual_seed(seed)
    batch = next(batches(conversations, 4096, seed))
    features = read_text(target, batch, remember=False)
    taps = features.taps[batch.answer].float()
    with torch.no_grad():
        for mixture, states in (
            (part.contemplate, taps),
            (part.future, head.fuse(taps.to(head.fc.weight.dtype)).float()),
        ):
            mixture.mean.copy_(states.mean(0))
            mixture.scale.copy_(1.0 / states.std(0).clamp(min=1e-4))
            picks = torch.randint(0, target.vocab, (len(mixture.experts),), generator=generator)
            mixture.experts.copy_(target.embed(picks).float())
            _begin_router(mixture, generator)
        slots = part.shape.soft_prompts
        if slots:
            words = [t for c in conversations[:8] for t in c.ids[c.answer_start :]][:slots]
            memory = TextMemory(remember=True)
            positions = torch.arange(slots).unsqueeze(0)
            target.run(target.embed(torch.tensor([words])), positions, None, memory)
            for layer in range(target.layers):
                part.soft_keys[layer] = memory.keys[layer][0].float()
                part.soft_values[layer] = memory.values[layer][0].float()
    return part
