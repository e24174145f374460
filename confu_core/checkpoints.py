"""Our own draft heads on disk: strict loading, small shards, no pickle.

A folder holds `config.json` (shapes, target, training facts, the sha256 of every weight file) and
`weights-*.safetensors`. Loading checks everything before a weight is used: a wrong head would
not change the text, only the acceptance, so nothing later would notice. Heads that other projects
publish are read by `published.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from confu_core.errors import CheckpointError
from confu_core.heads import Contemplation, ContemplationShape, DraftHead, DraftShape
from confu_core.hub import HEAD_FILES, is_hub_id
from confu_core.target import Target
from confu_core.weights import compare_weights, read_weights, sha256

FORMAT = "confu-explorer/1"
SHARD_BYTES = 9_800_000  # a Space's git refuses files of 10 MB


@dataclass(frozen=True)
class Checkpoint:
    """A loaded head.

    sha256: covers all weight files. facts: the config's training record. notes: what was read or
    assumed about a published head; warnings: what looks wrong with it. Sentences for the user.
    """

    name: str
    kind: str
    head: DraftHead
    contemplation: Contemplation | None
    sha256: str
    facts: dict
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def parts(head: DraftHead, contemplation: Contemplation | None) -> nn.ModuleDict:
    """Both modules under the names that their tensors have in a file."""
    modules: dict[str, nn.Module] = {"draft": head}
    if contemplation is not None:
        modules["contemplation"] = contemplation
    return nn.ModuleDict(modules)


def save_checkpoint(
    folder: Path,
    head: DraftHead,
    contemplation: Contemplation | None,
    target: Target,
    facts: dict,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a head. Existing weight files of the folder are replaced.

    Args:
        facts: plain data about the training (data, command, steps, figures) for the model card.
        dtype: precision on disk of floating-point tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights-*.safetensors"):
        old.unlink()
    tensors = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None).contiguous()
        for name, tensor in parts(head, contemplation).state_dict().items()
    }
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    files = {}
    for number, shard in enumerate(shards, 1):
        path = folder / f"weights-{number:02d}-of-{len(shards):02d}.safetensors"
        save_file(shard, path)
        files[path.name] = sha256(path)
    config = {
        "format": FORMAT,
        "kind": "confu" if contemplation is not None else "eagle3",
        "target": {"name": target.name, "fingerprint": target.fingerprint()},
        "draft": head.shape.to_plain(),
        "contemplation": contemplation.shape.to_plain() if contemplation is not None else None,
        "files": files,
        "training": facts,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def find_checkpoint(source: str | Path) -> Path:
    """The folder of a head: `source` itself if it is one, else it is fetched as a hub id.

    Raises:
        CheckpointError: neither a folder nor a repository that can be reached.
    """
    if Path(source).is_dir():
        return Path(source)
    if is_hub_id(source):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(source), allow_patterns=list(HEAD_FILES)))
        except Exception as error:  # network, permission, absence: the hub has many kinds
            raise CheckpointError(
                f"The head {str(source)!r} is neither a folder nor a hub repository that can be "
                f"reached ({type(error).__name__}). Check the name and the network."
            ) from error
        if not any(folder.glob("*.safetensors")):
            raise CheckpointError(
                f"The head {str(source)!r} has no .safetensors file; pickle files (.bin) are "
                f"refused. Fetch it into a folder (hf download {source} --local-dir HEAD) and "
                "give that folder: the message then names the command that converts it."
            )
        return folder
    raise CheckpointError(
        f"There is no folder {str(source)!r}. Give a checkpoint folder or a hub id (owner/name)."
    )


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was checked against its target, its weights still as they are on disk."""

    config: dict
    draft: DraftShape
    contemplation: ContemplationShape | None
    tensors: dict[str, torch.Tensor]


def is_ours(folder: Path) -> bool:
    """Whether the folder holds a checkpoint of ours, as its config says."""
    try:
        return "format" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def read_checkpoint(folder: Path, target: Target) -> Stored:
    """Read and check a head for this target.

    Raises:
        CheckpointError: missing, damaged, incomplete, or made for another target; says which.
    """
    config = _read_config(folder)
    made_for = config["target"]
    if made_for["fingerprint"] != target.fingerprint():
        raise CheckpointError(
            f"The head in {folder.name!r} was trained for {made_for['name']!r}, not for "
            f"{target.name!r}: layers, width or vocabulary differ. Choose a head for this target."
        )
    try:
        draft = DraftShape.from_plain(config["draft"])
        contemplation = config["contemplation"] and ContemplationShape(**config["contemplation"])
        with torch.device("meta"):
            expected = _modules(draft, contemplation).state_dict()
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} has wrong shape fields: {error}."
        ) from error
    _check_fits(folder, draft, contemplation, target)
    tensors = _read_tensors(folder, config["files"])
    compare_weights(folder, expected, tensors)
    _check_map(folder, tensors["draft.d2t"], draft.vocab)
    return Stored(config, draft, contemplation, tensors)


def load_checkpoint(folder: Path, target: Target, dtype: torch.dtype | None = None) -> Checkpoint:
    """Load a head for this target, on its device and in its precision unless `dtype` says other.

    Raises:
        CheckpointError: as `read_checkpoint`.
    """
    stored = read_checkpoint(folder, target)
    modules = _modules(stored.draft, stored.contemplation)
    modules.load_state_dict(stored.tensors)
    modules.to(target.device, dtype or target.dtype)
    modules.eval().requires_grad_(False)
    config = stored.config
    return Checkpoint(
        name=folder.name,
        kind=config["kind"],
        head=modules["draft"],
        contemplation=None if stored.contemplation is None else modules["contemplation"],
        sha256=digest_of(config["files"].values()),
        facts=config.get("training", {}),
    )


def digest_of(digests: Iterable[str]) -> str:
    """One sha256 for several files, from theirs."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _modules(draft: DraftShape, contemplation: ContemplationShape | None) -> nn.ModuleDict:
    return parts(DraftHead(draft), contemplation and Contemplation(contemplation))


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no draft head (no config.json). Train one with "
            "`python -m confu_core train`, or give the folder of one."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        known = config["format"]
        config["target"]["fingerprint"], config["target"]["name"]
        config["draft"], config["contemplation"], config["files"], config["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged or not the config of a head of ours: {error!r}."
        ) from error
    if known != FORMAT:
        raise CheckpointError(f"{path} has format {known!r}; this program reads {FORMAT!r}.")
    return config


def _read_tensors(folder: Path, files: dict[str, str]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, digest in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{folder / 'config.json'} names a file elsewhere: {name!r}.")
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing. Fetch the whole checkpoint folder again.")
        if sha256(path) != digest:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is not the one in config.json. Fetch it again."
            )
        tensors |= read_weights(path)
    return tensors


def _check_fits(
    folder: Path, draft: DraftShape, contemplation: ContemplationShape | None, target: Target
) -> None:
    """Sizes and taps that only the target can supply. A head that reads other layers would load
    and draft nonsense."""
    wanted = {
        "hidden": target.hidden,
        "target_hidden": target.hidden,
        "vocab": target.vocab,
        "tap_layers": target.tap_layers,
        "layers": target.layers,
        "kv_heads": target.kv_heads,
        "head_dim": target.head_dim,
        "target_heads": target.heads,
        "target_intermediate": target.intermediate,
    }
    checks = [(draft, ("hidden", "target_hidden", "vocab", "tap_layers"))]
    if contemplation is not None:
        sizes = ("hidden", "target_hidden", "layers", "kv_heads", "head_dim")
        checks.append((contemplation, sizes))
        if contemplation.adapter_rank:
            checks.append((contemplation, ("target_heads", "target_intermediate")))
    for shape, names in checks:
        for name in names:
            if getattr(shape, name) != wanted[name]:
                raise CheckpointError(
                    f"The head in {folder} has {name} {getattr(shape, name)}, but the target needs "
                    f"{wanted[name]}. Choose a head for this target."
                )


def _check_map(folder: Path, d2t: torch.Tensor, vocab: int) -> None:
    ids = torch.arange(len(d2t)) + d2t
    rising = bool((ids[1:] > ids[:-1]).all())
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
        raise CheckpointError(
            f"The draft vocabulary map d2t in {folder} is damaged: target ids must rise and stay "
            f"below {vocab}."
        )
