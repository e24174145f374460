"""Draft heads on disk: strict loading, small shards, no pickle.

A folder holds `config.json` (shapes, target, training facts, the sha256 of every weight file) and
`weights-*.safetensors`. Loading checks everything before a weight is used: a wrong head would
not change the text, only the acceptance, so nothing later would notice.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from confu_core.errors import CheckpointError
from confu_core.heads import Contemplation, ContemplationShape, DraftHead, DraftShape
from confu_core.target import Target

FORMAT = "confu-explorer/1"
SHARD_BYTES = 9_800_000  # a Space's git refuses files of 10 MB


@dataclass(frozen=True)
class Checkpoint:
    """A loaded head. `sha256` covers all weight files; `facts` is the config's training record."""

    name: str
    kind: str
    head: DraftHead
    contemplation: Contemplation | None
    sha256: str
    facts: dict


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
        files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
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
    if str(source).count("/") == 1 and not str(source).startswith(("/", ".")):
        from huggingface_hub import snapshot_download

        try:
            wanted = ["config.json", "basis.json", "*.safetensors"]
            return Path(snapshot_download(str(source), allow_patterns=wanted))
        except Exception as error:  # network, permission, absence: the hub has many kinds
            raise CheckpointError(
                f"The head {str(source)!r} is neither a folder nor a hub repository that can be "
                f"reached ({type(error).__name__}). Check the name and the network."
            ) from error
    raise CheckpointError(
        f"There is no folder {str(source)!r}. Give a checkpoint folder or a hub id (owner/name)."
    )


def load_checkpoint(folder: Path, target: Target, dtype: torch.dtype | None = None) -> Checkpoint:
    """Load a head for this target, on its device and in its precision unless `dtype` says other.

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
        head = DraftHead(DraftShape.from_plain(config["draft"]))
        contemplation = None
        if config["contemplation"] is not None:
            contemplation = Contemplation(ContemplationShape(**config["contemplation"]))
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'} has wrong shape fields: {error}."
        ) from error
    _check_fits(folder, head, contemplation, target)
    modules = parts(head, contemplation)
    expected = modules.state_dict()
    found = _read_tensors(folder, config["files"])
    _compare(folder, expected, found)
    modules.load_state_dict(found)
    _check_map(folder, head)
    modules.to(target.device, dtype or target.dtype)
    modules.eval().requires_grad_(False)
    digest = hashlib.sha256("".join(config["files"].values()).encode()).hexdigest()
    return Checkpoint(
        folder.name, config["kind"], head, contemplation, digest, config.get("training", {})
    )


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
            f"{path} is damaged or not a draft head's config: {error!r}."
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
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise CheckpointError(
                f"{path} is damaged: its sha256 is not the one in config.json. Fetch it again."
            )
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    tensors[key] = file.get_tensor(key)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}.") from error
    return tensors


def _compare(
    folder: Path, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> None:
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} has shape {tuple(found[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if faults:
        shown = "; ".join(faults[:5]) + (f"; and {len(faults) - 5} more" if len(faults) > 5 else "")
        raise CheckpointError(f"The weights in {folder} do not fit its config: {shown}.")


def _check_fits(
    folder: Path, head: DraftHead, contemplation: Contemplation | None, target: Target
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
    }
    checks = [(head.shape, ("hidden", "target_hidden", "vocab", "tap_layers"))]
    if contemplation is not None:
        sizes = ("hidden", "target_hidden", "layers", "kv_heads", "head_dim")
        checks.append((contemplation.shape, sizes))
    for shape, names in checks:
        for name in names:
            if getattr(shape, name) != wanted[name]:
                raise CheckpointError(
                    f"The head in {folder} has {name} {getattr(shape, name)}, but the target needs "
                    f"{wanted[name]}. Choose a head for this target."
                )


def _check_map(folder: Path, head: DraftHead) -> None:
    ids = head.target_ids(torch.arange(head.shape.draft_vocab))
    rising = bool((ids[1:] > ids[:-1]).all())
    if not rising or int(ids[0]) < 0 or int(ids[-1]) >= head.shape.vocab:
        raise CheckpointError(
            f"The draft vocabulary map d2t in {folder} is damaged: target ids must rise and stay "
            f"below {head.shape.vocab}."
        )
