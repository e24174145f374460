"""Heads on disk: what is saved loads to the same outputs, and anything else is refused by name."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from confu_core import checkpoints
from confu_core.checkpoints import load_checkpoint, save_checkpoint
from confu_core.decoding import decode
from confu_core.errors import CheckpointError
from confu_core.heads import DraftHead
from confu_core.methods import with_head
from confu_core.trace import Settings
from tests import fakes

FACTS = {"steps": 3, "data": "none"}


@pytest.fixture
def saved(tmp_path, llama, head, part) -> Path:
    """A ConFu head in full precision."""
    folder = tmp_path / "confu"
    save_checkpoint(folder, head, part, llama, FACTS, dtype=torch.float32)
    return folder


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def rewrite(folder: Path, change) -> None:
    """Change the tensors of the only weight file, and make its checksum right again."""
    (path,) = folder.glob("weights-*.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    config = config_of(folder)
    config["files"] = {path.name: checkpoints.hashlib.sha256(path.read_bytes()).hexdigest()}
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path, target) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, target)
    message = str(caught.value)
    assert "Traceback" not in message
    return message


# Round trip --------------------------------------------------------------------------------------


@pytest.mark.parametrize("contemplates", [False, True])
def test_save_and_load_give_equal_outputs(tmp_path, llama, prompt, head, part, contemplates):
    part = part if contemplates else None
    save_checkpoint(tmp_path / "x", head, part, llama, FACTS, dtype=torch.float32)
    loaded = load_checkpoint(tmp_path / "x", llama)
    assert loaded.kind == ("confu" if contemplates else "eagle3")
    assert (loaded.name, loaded.facts) == ("x", FACTS)
    assert loaded.head.shape == head.shape
    assert (loaded.contemplation and loaded.contemplation.shape) == (part and part.shape)
    made = checkpoints.parts(head, part).state_dict()
    found = checkpoints.parts(loaded.head, loaded.contemplation).state_dict()
    assert made.keys() == found.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, found[name]), name
    settings = Settings(max_new_tokens=6, nodes=9, depth=2, top_k=4)
    ours, theirs = (
        [r.draft and r.draft.tree for r in decode(llama, method, prompt, settings)]
        for method in (fakes.method(head, part), with_head("x", loaded))
    )
    assert ours == theirs
    assert not any(p.requires_grad for p in loaded.head.parameters())
    assert not loaded.head.training


def test_half_precision_on_disk_is_close_and_keeps_the_map(tmp_path, llama, head, part):
    save_checkpoint(tmp_path / "x", head, part, llama, FACTS)
    loaded = load_checkpoint(tmp_path / "x", llama)
    assert torch.equal(loaded.head.d2t, head.d2t)
    torch.testing.assert_close(loaded.head.fc.weight, head.fc.weight, atol=1e-3, rtol=1e-3)
    assert loaded.head.fc.weight.dtype == torch.float32
    stored = load_file(next((tmp_path / "x").glob("*.safetensors")))
    assert stored["draft.fc.weight"].dtype == torch.float16
    assert stored["draft.d2t"].dtype == torch.int64


def test_every_field_that_changes_the_arithmetic_is_in_the_file(saved, head, part):
    """Another rope base, epsilon or switch must come back; none is inherited from the target."""
    config = config_of(saved)
    assert config["draft"] == head.shape.to_plain()
    assert config["draft"]["rope_theta"] == 500.0
    assert config["draft"]["tap_layers"] == [2, 4, 5]
    assert config["contemplation"] == part.shape.to_plain()


def test_precision_may_be_asked_for(saved, llama):
    loaded = load_checkpoint(saved, llama, torch.bfloat16)
    assert loaded.head.fc.weight.dtype == torch.bfloat16


def test_files_stay_below_ten_megabytes(tmp_path, llama, monkeypatch):
    """A head above the limit becomes several files; loading puts them together again."""
    monkeypatch.setattr(checkpoints, "SHARD_BYTES", 25_000)
    head = fakes.tiny_head(llama)
    part = fakes.tiny_contemplation(llama, head)
    save_checkpoint(tmp_path / "x", head, part, llama, FACTS, dtype=torch.float32)
    files = sorted((tmp_path / "x").glob("weights-*"))
    assert len(files) >= 3
    assert all(path.stat().st_size < 29_000 for path in files)
    assert files[0].name == f"weights-01-of-{len(files):02d}.safetensors"
    loaded = load_checkpoint(tmp_path / "x", llama)
    assert torch.equal(loaded.contemplation.project.weight, part.project.weight)
    assert torch.equal(loaded.head.fc.weight, head.fc.weight)
    # saving a smaller head again leaves no old file behind
    monkeypatch.undo()
    save_checkpoint(tmp_path / "x", fakes.tiny_head(llama), None, llama, FACTS)
    assert len(list((tmp_path / "x").glob("weights-*"))) == 1
    load_checkpoint(tmp_path / "x", llama)


def test_the_real_limit_leaves_room_for_the_header():
    assert checkpoints.SHARD_BYTES < 9_900_000


def test_sha256_names_the_weights(tmp_path, llama, head):
    sums = []
    for number, one in enumerate((head, head, fakes.tiny_head(llama, seed=9))):
        save_checkpoint(tmp_path / str(number), one, None, llama, FACTS)
        sums.append(load_checkpoint(tmp_path / str(number), llama).sha256)
    assert sums[0] == sums[1] != sums[2]


# Refused -----------------------------------------------------------------------------------------


def test_a_folder_without_a_head(tmp_path, llama):
    message = refusal(tmp_path / "nothing", llama)
    assert "no config.json" in message
    assert "confu_core train" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "'format'"),
        ('{"format": "x"}', "damaged"),
    ],
)
def test_damaged_config(saved, llama, text, words):
    (saved / "config.json").write_text(text)
    assert words in refusal(saved, llama)


@pytest.mark.parametrize("field", ["target", "draft", "contemplation", "files", "kind"])
def test_config_without_a_field(saved, llama, field):
    config = config_of(saved)
    del config[field]
    (saved / "config.json").write_text(json.dumps(config))
    assert field in refusal(saved, llama)


def test_other_format(saved, llama):
    config = config_of(saved)
    (saved / "config.json").write_text(json.dumps(config | {"format": "confu-explorer/99"}))
    assert "'confu-explorer/99'" in refusal(saved, llama)


@pytest.mark.parametrize("part_name", ["draft", "contemplation"])
@pytest.mark.parametrize("change", ["unknown", "missing", "wrong type"])
def test_wrong_shape_fields(saved, llama, part_name, change):
    config = config_of(saved)
    if change == "unknown":
        config[part_name]["colour"] = 3
    elif change == "missing":
        del config[part_name]["hidden"]
    else:
        config[part_name] = ["no", "dict"]
    (saved / "config.json").write_text(json.dumps(config))
    assert "config.json" in refusal(saved, llama)


def test_missing_extra_and_misshapen_weights_are_all_listed(saved, llama):
    def change(tensors: dict) -> None:
        del tensors["draft.norm.weight"]
        tensors["draft.surprise"] = torch.zeros(2)
        tensors["draft.fc.weight"] = torch.zeros(32, 64)

    rewrite(saved, change)
    message = refusal(saved, llama)
    assert "missing draft.norm.weight" in message
    assert "unexpected draft.surprise" in message
    assert "draft.fc.weight has shape (32, 64), expected (32, 96)" in message


def test_many_faults_are_counted(saved, llama):
    rewrite(saved, lambda tensors: [tensors.pop(name) for name in list(tensors)[:9]])
    message = refusal(saved, llama)
    assert message.count("missing") == 5
    assert "and 4 more" in message


def test_an_eagle3_head_is_not_taken_for_a_confu_head(saved, llama):
    config = config_of(saved)
    (saved / "config.json").write_text(json.dumps(config | {"contemplation": None}))
    assert "unexpected contemplation." in refusal(saved, llama)


@pytest.mark.parametrize("how", ["flipped byte", "truncated", "empty"])
def test_damaged_weights(saved, llama, how):
    (path,) = saved.glob("weights-*")
    data = bytearray(path.read_bytes())
    if how == "flipped byte":
        data[-5] ^= 1
    elif how == "truncated":
        data = data[: len(data) // 2]
    else:
        data = bytearray()
    path.write_bytes(data)
    message = refusal(saved, llama)
    assert path.name in message
    assert "damaged" in message


def test_missing_weight_file(saved, llama):
    (path,) = saved.glob("weights-*")
    path.unlink()
    assert f"{path.name} is missing" in refusal(saved, llama)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize("content", [b"nonsense" * 9, "pickle"])
def test_pickles_are_never_loaded(saved, llama, content):
    """Even with a right checksum: a file that is not safetensors is refused, not executed."""
    data = pickle.dumps(Bomb()) if content == "pickle" else content
    path = saved / "weights-01-of-01.safetensors"
    path.write_bytes(data)
    config = config_of(saved)
    config["files"] = {path.name: checkpoints.hashlib.sha256(data).hexdigest()}
    (saved / "config.json").write_text(json.dumps(config))
    assert "not a readable safetensors file" in refusal(saved, llama)


def test_a_weight_file_outside_the_folder_is_refused(saved, llama, tmp_path):
    """A config from outside must not make the loader read other files."""
    outside = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(1)}, outside)
    digest = checkpoints.hashlib.sha256(outside.read_bytes()).hexdigest()
    for name in ("../other.safetensors", str(outside)):
        config = config_of(saved)
        config["files"] = {name: digest}
        (saved / "config.json").write_text(json.dumps(config))
        assert f"names a file elsewhere: {name!r}" in refusal(saved, llama)


def test_another_target(saved):
    for other in (fakes.tiny_target("qwen3"), fakes.tiny_target(num_hidden_layers=9)):
        message = refusal(saved, other)
        assert "tiny-llama-0" in message, "names what it was trained for"
        assert other.name in message


@pytest.mark.parametrize(
    ("part_name", "field", "value"),
    [
        ("draft", "tap_layers", [2, 4, 6]),
        ("draft", "tap_layers", [1, 3, 4]),
        ("draft", "hidden", 64),
        ("draft", "vocab", 999),
        ("contemplation", "layers", 9),
        ("contemplation", "kv_heads", 4),
        ("contemplation", "hidden", 64),
    ],
)
def test_a_head_that_reads_another_target_is_refused(saved, llama, part_name, field, value):
    """The same fingerprint, but other taps or sizes: it would load and draft nonsense."""
    config = config_of(saved)
    config[part_name][field] = value
    (saved / "config.json").write_text(json.dumps(config))
    message = refusal(saved, llama)
    assert f"{field} {tuple(value) if isinstance(value, list) else value}" in message
    assert "target needs" in message


@pytest.mark.parametrize(
    "broken",
    [
        lambda d2t: d2t.flip(0),  # ids fall
        lambda d2t: torch.zeros_like(d2t) - 1,  # negative id
        lambda d2t: d2t + 290,  # beyond the vocabulary
        lambda d2t: torch.cat((d2t[:1], d2t[:1] - 1, d2t[2:])),  # an id twice
    ],
)
def test_broken_vocabulary_maps(saved, llama, broken):
    rewrite(saved, lambda t: t.update({"draft.d2t": broken(t["draft.d2t"]).contiguous()}))
    assert "d2t" in refusal(saved, llama)


def test_draft_ids_are_mapped_exactly_once(llama):
    head: DraftHead = fakes.tiny_head(llama, vocabulary=[3, 7, 8, 200, 294])
    assert head.target_ids(torch.tensor([0, 1, 2, 3, 4])).tolist() == [3, 7, 8, 200, 294]
    assert head.target_ids(torch.tensor([[4, 0]])).tolist() == [[294, 3]]


def test_angles_do_not_drown_in_half_precision(llama, head):
    """Rotary angles at far positions are made in float32 whatever the head's precision."""
    positions = torch.tensor([[4001, 8000]])
    half = fakes.tiny_head(llama).to(torch.bfloat16)
    full = fakes.tiny_head(llama)
    for ours, wanted in zip(half.rotary(positions), full.rotary(positions), strict=True):
        torch.testing.assert_close(ours, wanted)
