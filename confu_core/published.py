"""EAGLE-3 heads of other projects, loaded as strictly as ours; and heads written as theirs are.

A wrong head would not change the text, only the acceptance, so everything that can be known is
checked before a weight is used, and the layers that it reads are tried on a fixed text afterwards.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from confu_core.checkpoints import (
    Checkpoint,
    digest_of,
    is_ours,
    load_checkpoint,
    read_checkpoint,
)
from confu_core.errors import CheckpointError
from confu_core.heads import DraftHead, DraftShape
from confu_core.layouts import (
    WRITABLE,
    Config,
    Layout,
    Served,
    config_of,
    detect,
    listed_taps,
    shape_of,
)
from confu_core.taps import TapChoice, check_taps, resolve
from confu_core.target import Target
from confu_core.weights import compare_weights, read_weights, sha256

PICKLES = ("*.bin", "*.pt", "*.pth")
VARIANTS = (
    "qk_norm",
    "attention_bias",
    "fc_bias",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "recycle_normed",
    "own_embedding",
)


@dataclass(frozen=True)
class Published:
    """A published head that fits its target: its weights by our names, and what was found out."""

    layout: Layout
    shape: DraftShape
    tensors: dict[str, torch.Tensor]
    notes: tuple[str, ...]
    sha256: str


def load_head(
    folder: Path, target: Target, choice: TapChoice | None = None, name: str | None = None
) -> Checkpoint:
    """Load a head of ours, or a published EAGLE-3 head, for this target.

    Args:
        choice: how a published head counts its layers, if the user says so.
        name: what to call it; the folder's name if not given.

    Raises:
        CheckpointError: with what is wrong and what was expected.
    """
    name = name or folder.name
    if is_ours(folder):
        if choice is not None:
            raise CheckpointError(
                f"The head in {folder} records which layers it reads. Leave --taps out."
            )
        return replace(load_checkpoint(folder, target), name=name)
    found = read_published(folder, target, choice)
    shape, tensors = _emittable(found.shape, found.tensors, target.vocab)
    notes = list(found.notes)
    if shape.draft_vocab < found.shape.draft_vocab:
        left_out = found.shape.draft_vocab - shape.draft_vocab
        notes.append(f"{left_out} draft tokens left out that the tokenizer does not have")
    with torch.device("meta"):
        head = DraftHead(shape)
    head.load_state_dict(tensors, assign=True)
    head.to(target.device, target.dtype).eval().requires_grad_(False)
    checked = check_taps(target, head)
    notes.append(
        f"first guess right at {checked.agreement:.0%} of {checked.places} places of a fixed text, "
        f"expected acceptance {checked.acceptance:.3f}"
    )
    warnings = (checked.warning,) if checked.warning else ()
    facts = {"published": found.layout.name}
    return Checkpoint(name, "eagle3", head, None, found.sha256, facts, tuple(notes), warnings)


def read_published(folder: Path, target: Target, choice: TapChoice | None = None) -> Published:
    """Read a published head and check all of it.

    Raises:
        CheckpointError: no or an unknown layout, pickle files, missing, unexpected or misshapen
            tensors, a damaged vocabulary map, unclear taps, or another target.
    """
    config = _read_config(folder)
    files = _weight_files(folder)
    found: dict[str, torch.Tensor] = {}
    for path in files:
        tensors = read_weights(path)
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(f"{path} holds {twice[0]}, and so does another file beside it.")
        found |= tensors
    layout = detect(config, found)
    taps = resolve(listed_taps(config), layout.convention, target.layers, choice)
    shape, assumed = shape_of(layout, config, found, taps.layers)
    _check_target(config, shape, target)
    tensors = _ours(folder, layout, config, shape, found)
    shown = ", ".join(map(str, taps.layers))
    scaling = f", {shape.rope_scaling['rope_type']} scaling" if shape.rope_scaling else ""
    variants = [name for name in VARIANTS if getattr(shape, name)]
    notes = [
        f"{layout.name} layout; reads the states on entry to layers {shown} ({taps.why})",
        f"rope base {shape.rope_theta:g}{scaling}; {shape.draft_vocab} of {shape.vocab} tokens",
        *assumed,
    ]
    if variants:
        notes.append(f"variants: {', '.join(variants)}")
    return Published(layout, shape, tensors, tuple(notes), digest_of(map(sha256, files)))


def _read_config(folder: Path) -> Config:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{folder} holds no draft head (no config.json). Train one with "
            "`python -m confu_core train`, or give the folder or hub id of one."
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}. Fetch it again.") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is damaged: it is no JSON object. Fetch it again.")
    return config


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    pickles = sorted(path for pattern in PICKLES for path in folder.glob(pattern))
    if not files and pickles:
        commands = "\n".join(f"  {conversion(path)}" for path in pickles)
        raise CheckpointError(
            f"The weights in {folder} are pickle files, which can run code when they are opened "
            "and are refused. If you trust their source, convert them once; this command reads "
            f"tensors only:\n{commands}"
        )
    if not files:
        raise CheckpointError(f"{folder} holds no weights (no .safetensors file). Fetch it again.")
    return files


def conversion(path: Path) -> str:
    """The command that turns a pickle file of tensors into safetensors, without running code."""
    code = (
        "import torch; from safetensors.torch import save_file; "
        f'tensors = torch.load({json.dumps(str(path))}, map_location="cpu", weights_only=True); '
        "save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, "
        f"{json.dumps(str(path.with_suffix('.safetensors')))})"
    )
    return shlex.join(["python", "-c", code])


def _check_target(config: Config, shape: DraftShape, target: Target) -> None:
    """What a config says of the target it was made for, against the one at hand."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    model, architectures = target.model.config, _architectures(target)
    own = {
        "width": (shape.target_hidden, target.hidden),
        "vocabulary": (shape.vocab, model.vocab_size),
        "kind": (config.get("target_model_type") or model.model_type, model.model_type),
        "architecture": (verifier.get("architectures") or architectures, architectures),
    }
    for what, (wanted, found) in own.items():
        if wanted != found:
            raise CheckpointError(
                f"The head was made for a target of {what} {wanted}, but {target.name!r} has "
                f"{found}. Choose a head for this target."
            )
    if not shape.own_embedding and shape.hidden != shape.target_hidden:
        raise CheckpointError(
            f"The head is {shape.hidden} wide and its target {shape.target_hidden}, so it needs an "
            "embedding of its own (embed_tokens.weight), which is missing."
        )


def _architectures(target: Target) -> list[str]:
    """As a model's config names them."""
    return [type(target.model).__name__]


def _ours(
    folder: Path,
    layout: Layout,
    config: Config,
    shape: DraftShape,
    found: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Every tensor under our names, after strict comparison by theirs."""
    name_of = layout.file_name
    found = dict(found)
    unmapped = shape.draft_vocab == shape.vocab
    if unmapped and "d2t" not in found and "t2d" not in found:
        found["d2t"] = torch.zeros(shape.draft_vocab, dtype=torch.int64)
        found["t2d"] = torch.ones(shape.vocab, dtype=torch.bool)
    tied = config.get("tie_word_embeddings") and unmapped and shape.own_embedding
    if tied and "lm_head.weight" not in found:
        found["lm_head.weight"] = found[name_of("embed_tokens.weight")]
    fc = found.get(name_of("fc.weight"))
    if (
        fc is not None
        and fc.ndim == 2
        and fc.shape[1] != len(shape.tap_layers) * shape.target_hidden
    ):
        raise CheckpointError(
            f"{name_of('fc.weight')} reads {fc.shape[1] / shape.target_hidden:g} states of width "
            f"{shape.target_hidden}, but {len(shape.tap_layers)} layers are named: "
            f"{', '.join(map(str, shape.tap_layers))}. Name them all: --taps input:A,B,C."
        )
    with torch.device("meta"):
        head = DraftHead(shape)
        expected = {name_of(name): tensor for name, tensor in head.state_dict().items()}
        expected["t2d"] = torch.empty(shape.vocab)
    compare_weights(folder, expected, found)
    check_maps(found["d2t"], found["t2d"], shape.vocab)
    tensors = {name: found[name_of(name)] for name in head.state_dict()}
    return tensors | {"d2t": found["d2t"].long()}


def check_maps(d2t: torch.Tensor, t2d: torch.Tensor, vocab: int) -> None:
    """d2t (D,) must hold offsets to the D target ids that t2d (V,) marks, in ascending order.

    Raises:
        CheckpointError
    """
    whole = not (d2t.is_floating_point() or t2d.is_floating_point())
    ids = torch.arange(len(d2t)) + d2t
    known = t2d.nonzero().flatten()
    if not whole or int(d2t.min()) < 0 or len(known) != len(ids) or not torch.equal(ids, known):
        raise CheckpointError(
            "The head's vocabulary maps are damaged: d2t must hold, for each draft token, how far "
            f"its target id lies above it, and t2d must mark just these {len(d2t)} of {vocab} ids."
        )


def _emittable(
    shape: DraftShape, tensors: dict[str, torch.Tensor], vocab: int
) -> tuple[DraftShape, dict[str, torch.Tensor]]:
    """Without the ids that pad the target's matrices beyond its tokenizer: they stand at the end
    of both vocabularies, and the target never writes them."""
    ids = torch.arange(shape.draft_vocab) + tensors["d2t"]
    known = int((ids < vocab).sum())
    cut = {"lm_head.weight": known, "d2t": known, "embed_tokens.weight": vocab}
    tensors = {
        name: tensor[: cut[name]] if name in cut else tensor for name, tensor in tensors.items()
    }
    return replace(shape, vocab=vocab, draft_vocab=known), tensors


def export_head(
    source: Path, folder: Path, layout: str, target: Target, choice: TapChoice | None = None
) -> None:
    """Write an EAGLE-3 head, ours or a published one, in the layout that an engine serves.

    Args:
        layout: "specforge" (SGLang) or "speculators" (vLLM).
        folder: new or empty.
        target: its outline is enough.

    Raises:
        CheckpointError: a ConFu head, a variant that the layout has no field for, a folder in use,
            or as in loading.
    """
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty. Choose a new folder to export to.")
    if is_ours(source):
        stored = read_checkpoint(source, target)
        if stored.contemplation is not None:
            raise CheckpointError(
                f"{source} is a ConFu head, and the engines serve EAGLE-3 heads only. Export an "
                "EAGLE-3 head of the same target."
            )
        shape = stored.draft
        tensors = {name.removeprefix("draft."): t for name, t in stored.tensors.items()}
    else:
        published = read_published(source, target, choice)
        shape, tensors = published.shape, published.tensors
    model = target.model.config
    served = Served(
        name=target.name,
        kind=model.model_type,
        architectures=_architectures(target),
        vocab=model.vocab_size,
        context=target.context,
        bos=target.tokenizer.bos_token_id,
        eos=sorted(target.stop_ids),
    )
    written = WRITABLE[layout]
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    config = config_of(written, shape, served, dtype)
    tensors = _with_maps(shape, tensors, served.vocab)
    folder.mkdir(parents=True, exist_ok=True)
    named = {written.file_name(name): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _with_maps(
    shape: DraftShape, tensors: dict[str, torch.Tensor], vocab: int
) -> dict[str, torch.Tensor]:
    """With t2d, and with the padding of the target's vocabulary that our own heads leave out.
    Where draft and target vocabulary are one, no maps are written."""
    tensors = dict(tensors)
    if shape.own_embedding:
        rows = tensors["embed_tokens.weight"]
        tensors["embed_tokens.weight"] = F.pad(rows, (0, 0, 0, vocab - len(rows)))
    if shape.draft_vocab == vocab:
        del tensors["d2t"]
        return tensors
    known = torch.zeros(vocab, dtype=torch.bool)
    known[torch.arange(shape.draft_vocab) + tensors["d2t"]] = True
    return tensors | {"t2d": known}
