"""Weights laid out for small passes: the model stays what it was, in numbers, names and memory."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from confu_core import fused
from confu_core.fused import fuse, lay_out
from tests import fakes

IDS = torch.tensor([[1, 40, 77, 123, 9, 200, 31, 5]])
KINDS = {
    "llama": ("llama", {}),
    "llama with tied output": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2 with biases": ("qwen2", {"head_dim": None}),
    "qwen3 with normed queries": ("qwen3", {"head_dim": 12}),
}


def storage(model: torch.nn.Module) -> int:
    """Bytes behind all parameters, each storage once."""
    found = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    return sum(found.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_stays_what_it_was(kind, dtype):
    name, config = KINDS[kind]
    model = fakes.tiny_model(name, seed=3, **config).to(dtype)
    before = copy.deepcopy(model)
    fuse(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in before.named_parameters()]
    for (_, now), (_, then) in zip(
        model.named_parameters(), before.named_parameters(), strict=True
    ):
        assert now.shape == then.shape and torch.equal(now, then)
    with torch.no_grad():
        found, wanted = model(IDS).logits, before(IDS).logits
    close = 1e-5 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    assert storage(model) == storage(before), "nothing is kept twice"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_can_be_saved(tmp_path, kind, dtype):
    """Each weight once and in the usual order, whatever the order in memory."""
    name, config = KINDS[kind]
    model = fakes.tiny_model(name, seed=3, **config).to(dtype)
    model.save_pretrained(tmp_path / "before")
    fuse(model)
    model.save_pretrained(tmp_path / "after")
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and after[n].dtype == dtype for n in before)
    again = type(model).from_pretrained(tmp_path / "after", dtype=dtype)
    for now, then in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(now, then)


def rows(width: int, *lead: int) -> torch.Tensor:
    return torch.randn(*lead, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_compute_what_the_modules_do(kind):
    name, config = KINDS[kind]
    model = fakes.tiny_model(name, seed=3, **config)
    layers = copy.deepcopy(model).model.layers
    whole = fuse(model)
    blocks, last = whole.blocks, whole.norm
    assert len(blocks) == len(layers)
    x, inner = rows(model.config.hidden_size, 1, 5), rows(model.config.intermediate_size, 1, 5)
    for block, layer in zip(blocks, layers, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        mixed = rows(attention.o_proj.in_features, 1, 5)
        with torch.no_grad():
            pairs = [
                (block.norm_in(x), layer.input_layernorm(x)),
                (block.norm_mid(x), layer.post_attention_layernorm(x)),
                (block.qkv(x), [attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)]),
                (block.gate_up(x), [mlp.gate_proj(x), mlp.up_proj(x)]),
                (block.out(mixed), attention.o_proj(mixed)),
                (block.down(inner), mlp.down_proj(inner)),
                (block.activate(inner), mlp.act_fn(inner)),
            ]
            if kind.startswith("qwen3"):
                heads = rows(attention.head_dim, 1, 4, 5)
                pairs.append((block.q_norm(heads), attention.q_norm(heads)))
                pairs.append((block.k_norm(heads), attention.k_norm(heads)))
            else:
                assert block.q_norm is block.k_norm is None
        for found, wanted in pairs:
            wanted = torch.cat(wanted, dim=-1) if isinstance(wanted, list) else wanted
            torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(last(x), model.model.norm(x), atol=1e-6, rtol=1e-6)


def test_weights_are_stored_by_input_but_for_a_tied_output():
    tied, free = (fakes.tiny_model("llama", tie_word_embeddings=tie) for tie in (True, False))
    for model in (tied, free):
        fuse(model)
        assert model.model.layers[0].mlp.down_proj.weight.stride(0) == 1
        assert model.model.layers[0].self_attn.q_proj.weight.stride(0) == 1
        assert model.model.embed_tokens.weight.stride(1) == 1
    assert free.lm_head.weight.stride(0) == 1
    assert tied.lm_head.weight.data_ptr() == tied.model.embed_tokens.weight.data_ptr()


def test_laying_out_twice_moves_nothing():
    model = fakes.tiny_model("llama")
    fuse(model)
    before = [p.data_ptr() for p in model.parameters()]
    lay_out(model)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_half_precision_keeps_its_order():
    """There the matrix product packs weights by itself; storing them otherwise gained nothing."""
    model = fakes.tiny_model("llama").to(torch.bfloat16)
    fuse(model)
    assert model.model.layers[0].mlp.down_proj.weight.stride(1) == 1


PRECISIONS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-2, 2e-2)}  # atol, rtol


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_reordered_weights_compute_the_same(kind, dtype):
    name, config = KINDS[kind]
    model = fakes.tiny_model(name, seed=3, **config).to(dtype)
    whole = fuse(model)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    x = rows(model.config.hidden_size, 1, 5).to(dtype)
    inner = rows(model.config.intermediate_size, 1, 5).to(dtype)
    block = whole.blocks[1]
    atol, rtol = PRECISIONS[dtype]
    with torch.inference_mode():
        qkv = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], -1)
        for found, wanted in (
            (block.qkv(x), qkv),
            (block.gate_up(x), torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], -1)),
            (block.down(inner), mlp.down_proj(inner)),
            (whole.output(x), model.lm_head(x)),
        ):
            torch.testing.assert_close(found, wanted, atol=atol, rtol=rtol)
    if fused.reorders(model):
        assert block.down._copy is not None and whole.output._copy is not None


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_weights_are_reordered_for_inference_alone(dtype):
    layer = torch.nn.Linear(32, 16).to(dtype)
    lay_out(layer_of := torch.nn.Sequential(layer))
    if not fused.reorders(layer_of):
        pytest.skip("on this processor nothing is reordered in this precision")
    x = rows(32, 5).to(dtype).requires_grad_()
    with torch.no_grad():
        layer(x)
    assert layer.forward._copy is None
    layer(x).sum().backward()
    assert layer.forward._copy is None and x.grad is not None
    with torch.inference_mode():
        found = layer(x.detach())
        assert layer.forward._copy is not None
    wide = F.linear(x.detach().float(), layer.weight.float(), layer.bias.float())
    atol, rtol = PRECISIONS[dtype]
    torch.testing.assert_close(found.float(), wide, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "count, reordered", [(1, False), (3, False), (4, True), (32, True), (33, False)]
)
def test_float32_takes_the_reordered_copy_for_a_few_rows_only(count, reordered):
    """For one row and for many the usual product is the faster (docs/performance.md)."""
    layer = torch.nn.Linear(32, 16)
    product = fused.Reordered(layer.weight, layer.bias)
    if not fused.reorders(layer):
        pytest.skip("on this processor nothing is reordered in float32")
    with torch.inference_mode():
        found = product(x := rows(32, 1, count))
        torch.testing.assert_close(found, layer(x), atol=1e-6, rtol=1e-5)
    assert (product._copy is not None) is reordered


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_large_models_are_not_kept_twice(monkeypatch, dtype):
    small = fakes.tiny_model("llama").to(dtype)
    monkeypatch.setattr(fused, "MOST_REORDERED", sum(p.nbytes for p in small.parameters()) - 1)
    assert not fused.reorders(small)
    assert not isinstance(fuse(small).output, fused.Reordered)


def test_float32_keeps_its_products_where_they_were_not_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not fused.reorders(fakes.tiny_model("llama"))


class Packed(torch.nn.Linear):
    """Stands for a quantised layer."""


@pytest.mark.parametrize("how", ["packed", "watched", "other precision"])
def test_layers_that_are_not_plain_are_called_as_they_are(how):
    model = fakes.tiny_model("llama")
    attention = model.model.layers[2].self_attn
    calls = []
    if how == "packed":
        packed = Packed(32, 16, bias=False)
        packed.weight.data = attention.k_proj.weight.data
        attention.k_proj = packed
    elif how == "watched":
        attention.k_proj.register_forward_pre_hook(lambda module, rows: calls.append(1))
    else:
        attention.k_proj.to(torch.float64).register_forward_pre_hook(
            lambda module, rows: (rows[0].double(),)
        )
    blocks = fuse(model).blocks
    x = rows(32, 1, 5)
    with torch.no_grad():
        wanted = [attention.q_proj(x), attention.k_proj(x).float(), attention.v_proj(x)]
        calls.clear()
        found = blocks[2].qkv(x)
    torch.testing.assert_close(found.float(), torch.cat(wanted, -1), atol=1e-6, rtol=1e-6)
    assert len(calls) == (how == "watched")
    shared = attention.q_proj.weight.untyped_storage().data_ptr()
    assert shared != attention.v_proj.weight.untyped_storage().data_ptr()


def test_an_outline_is_left_without_weights():
    with torch.device("meta"):
        model = fakes.tiny_model("llama")
    blocks = fuse(model).blocks
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(blocks) == 8


def test_a_watched_norm_is_called_with_its_hook():
    model = fakes.tiny_model("llama")
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_hook(lambda module, rows, result: result + 100)
    blocks = fuse(model).blocks
    x = rows(32, 1, 5)
    with torch.no_grad():
        assert float(blocks[1].norm_in(x).min()) > 50
        assert float(blocks[2].norm_in(x).min()) < 50
