"""A loaded model's weights, laid out for passes over a few rows: the same numbers, less work.

A pass over one row, or over the nodes of a draft tree, spends its time on reading weights and on
starting kernels. So

* linear layers that read the same rows (queries, keys and values; gate and up) are one product;
* in float32 on a CPU, weights are stored input by input, which its matrix product reads faster
  (docs/performance.md);
* on a CPU, a small model's weights are read from a second copy in oneDNN's own order, as torch's
  compiler does for frozen models: without it every product orders them anew (bfloat16) or takes
  up to 1.7 times as long at a few rows (float32);
* what is plain is called without the ways of a module, norms as torch's one kernel.

The model's own modules become views of what is stored here: nothing else is kept twice, their
names and shapes stay, the model's own forward still works, and `save_pretrained` writes it as
before (by way of `state_dict`, which copies what is stored in another order). It can no longer be
moved to another device or precision: load it there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

Compute = Callable[[torch.Tensor], torch.Tensor]

MOST_REORDERED = 1 << 30  # bytes of a model's weights that may be kept a second time
REORDERED_FOR = 16  # rows of a pass; oneDNN's order hardly depends on it
FEW_ROWS = range(4, 33)  # where oneDNN is the faster in float32; in bfloat16 it always is


@dataclass(frozen=True)
class Block:
    """One transformer block as functions of rows (..., inputs) -> (..., outputs).

    qkv and gate_up give the outputs of their layers side by side. q_norm and k_norm are None but
    for Qwen-3.
    """

    norm_in: Compute
    qkv: Compute
    q_norm: Compute | None
    k_norm: Compute | None
    out: Compute
    norm_mid: Compute
    gate_up: Compute
    activate: Compute
    down: Compute


@dataclass(frozen=True)
class Fused:
    """A whole model as functions of rows: its blocks, its last norm, its output layer."""

    blocks: tuple[Block, ...]
    norm: Compute
    output: Compute


class Reordered:
    """`F.linear` over a copy of the weight in oneDNN's order, made at the first pass.

    Only under `torch.inference_mode`: elsewhere gradients may be wanted, or weights may change.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._copy: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., inputs) -> (..., outputs)."""
        if not torch.is_inference_mode_enabled() or x.dtype != self._weight.dtype:
            return F.linear(x, self._weight, self._bias)
        if x.dtype == torch.float32 and x.shape[:-1].numel() not in FEW_ROWS:
            return F.linear(x, self._weight, self._bias)
        ops = torch.ops.mkldnn
        if self._copy is None:
            self._copy = ops._reorder_linear_weight(self._weight.detach(), REORDERED_FOR)
        return ops._linear_pointwise(x, self._copy, self._bias, "none", [], "")


def fuse(model: nn.Module) -> Fused:
    """Lay out a causal language model of the Llama or Qwen kind.

    What is packed (quantised), has hooks (spread over devices) or no weights yet is called as the
    module that it is.
    """
    copied = reorders(model)
    blocks = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = hasattr(attention, "q_norm")
        blocks.append(
            Block(
                norm_in=_norm(layer.input_layernorm),
                qkv=_joined(copied, attention.q_proj, attention.k_proj, attention.v_proj),
                q_norm=_norm(attention.q_norm) if normed else None,
                k_norm=_norm(attention.k_norm) if normed else None,
                out=_joined(copied, attention.o_proj),
                norm_mid=_norm(layer.post_attention_layernorm),
                gate_up=_joined(copied, mlp.gate_proj, mlp.up_proj),
                activate=mlp.act_fn,
                down=_joined(copied, mlp.down_proj),
            )
        )
    _store_by_input(model)  # the output layer too, if it is not the embedding
    model.register_state_dict_post_hook(_in_usual_order)
    output = model.get_output_embeddings()
    if copied and _is_plain(output):
        output = Reordered(output.weight, output.bias)
    return Fused(tuple(blocks), _norm(model.model.norm), output)


def lay_out(module: nn.Module) -> None:
    """Lay out all plain linear layers of a module for small passes; they are called as before."""
    _store_by_input(module)
    if reorders(module):
        for part in filter(_is_plain, module.modules()):
            part.forward = Reordered(part.weight, part.bias)


@torch.no_grad()
def _store_by_input(module: nn.Module) -> None:
    """A weight that is also an embedding stays: looking up a token would then read far apart."""
    looked_up = {
        part.weight.data_ptr() for part in module.modules() if isinstance(part, nn.Embedding)
    }
    for part in module.modules():
        if _is_plain(part) and part.weight.data_ptr() not in looked_up:
            part.weight.data = _by_input(part.weight.data)


def _in_usual_order(
    module: nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: dict
) -> None:
    """A hook of `state_dict`: writers of files want weights output by output."""
    for name, tensor in state.items():
        state[name] = tensor.contiguous()


def reorders(module: nn.Module) -> bool:
    """Whether oneDNN's order pays and the second copy is small.

    In float32 it was measured on x86 alone, so other processors keep to the usual product.
    """
    weights = list(module.parameters())
    kinds = {(w.device.type, w.dtype) for w in weights}
    if not torch.backends.mkldnn.is_available() or sum(w.nbytes for w in weights) > MOST_REORDERED:
        return False
    if kinds == {("cpu", torch.bfloat16)}:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    on_x86 = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return kinds == {("cpu", torch.float32)} and on_x86


def _by_input(weight: torch.Tensor) -> torch.Tensor:
    """The same weight (out, in), stored input by input where that pays."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or weight.stride(0) == 1:
        return weight
    return weight.t().contiguous().t()


def _is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer and nothing more: not packed, not an outline, without hooks."""
    return type(module) is nn.Linear and _is_bare(module)


def _is_bare(module: nn.Module) -> bool:
    hooked = module._forward_hooks or module._forward_pre_hooks
    return not hooked and module.weight.device.type != "meta"


@torch.no_grad()
def _joined(copied: bool, *modules: nn.Module) -> Compute:
    """What these layers make of the same rows, side by side; by one product where they are plain
    and alike, and then they become views of its weight."""
    if not all(map(_is_plain, modules)) or not _alike(modules):
        if len(modules) == 1:
            return modules[0]
        return lambda x: torch.cat([module(x) for module in modules], dim=-1)
    weight = _by_input(torch.cat([module.weight for module in modules]))
    bias = None
    if modules[0].bias is not None:
        bias = torch.cat([module.bias for module in modules])
    start = 0
    for module in modules:
        end = start + module.out_features
        module.weight.data = weight[start:end]
        if bias is not None:
            module.bias.data = bias[start:end]
        start = end
    return Reordered(weight, bias) if copied else partial(F.linear, weight=weight, bias=bias)


def _alike(modules: Sequence[nn.Linear]) -> bool:
    """Whether one product can stand for them all."""
    return len({(m.weight.device, m.weight.dtype, m.bias is None) for m in modules}) == 1


def _norm(module: nn.Module) -> Compute:
    """A root-mean-square norm as one kernel: the library's own takes six."""
    if not type(module).__name__.endswith("RMSNorm") or not _is_bare(module):
        return module
    shape, weight, eps = module.weight.shape, module.weight.detach(), module.variance_epsilon
    return lambda x: torch.rms_norm(x, shape, weight.to(x.dtype), eps)
