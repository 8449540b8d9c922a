import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.model import load_model
from services.engine.weights.checkpoint import INDEX_NAME, Checkpoint
from services.runtime.errors import ModelError


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A copy of a checkpoint that a test may damage."""

    def copy(name: str = "llama-mha", *, sharded: bool = False) -> Path:
        return Path(shutil.copytree(checkpoint(name, sharded=sharded), tmp_path / "model"))

    return copy


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_tensor_is_read_checked_and_converted(checkpoint):
    opened = Checkpoint(checkpoint("llama-mha"))
    stored = load_file(checkpoint("llama-mha") / "model.safetensors")["model.norm.weight"]
    assert torch.equal(opened.tensor("model.norm.weight", [64], dtype=torch.bfloat16), stored.bfloat16())
    with pytest.raises(ModelError, match=r"has the shape \[64\] and config.json means \[65\]"):
        opened.tensor("model.norm.weight", [65], dtype=torch.float32)
    with pytest.raises(ModelError, match=r"has no tensor model\.missing"):
        opened.tensor("model.missing", [1], dtype=torch.float32)


def test_digest_names_the_values_and_not_the_files(checkpoint, copied):
    single, sharded = Checkpoint(checkpoint("llama-mha")), Checkpoint(checkpoint("llama-mha", sharded=True))
    folder = copied()
    change_tensors(folder, lambda tensors: tensors["model.norm.weight"].view(-1)[3:4].add_(1e-3))
    changed = Checkpoint(folder)
    digests = []
    for opened, names in ((single, [0, 1]), (sharded, [1, 0]), (changed, [0, 1])):
        tensors = [("model.norm.weight", [64]), ("model.embed_tokens.weight", [331, 64])]
        for index in names:
            opened.tensor(*tensors[index], dtype=torch.float32)
        digests.append(opened.digest())
    assert digests[0] == digests[1] != digests[2]


def test_how_far_reading_is_is_told_now_and_then(checkpoint, caplog, monkeypatch):
    monkeypatch.setattr("services.engine.weights.checkpoint.TELL_EVERY_S", 0.0)
    folder = checkpoint("llama-mha")
    with caplog.at_level("INFO"):
        load_model(folder)
    told = [(record.read_bytes, record.of_bytes) for record in caplog.records if record.message == "loading weights"]
    assert [read for read, _ in told] == sorted({read for read, _ in told}), "it grows"
    assert {size for _, size in told} == {(folder / "model.safetensors").stat().st_size}
    assert 0.9 * told[-1][1] < told[-1][0] <= told[-1][1]
    monkeypatch.setattr("services.engine.weights.checkpoint.TELL_EVERY_S", 60.0)
    caplog.clear()
    load_model(folder)
    assert not [record for record in caplog.records if record.message == "loading weights"]


def test_missing_shard(copied):
    folder = copied(sharded=True)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"lacks {shard.name}: download the checkpoint again"):
        load_model(folder)


def test_shard_that_lacks_a_tensor_of_the_index(copied):
    folder = copied(sharded=True)
    index = json.loads((folder / INDEX_NAME).read_text())
    file = index["weight_map"]["model.norm.weight"]
    tensors = load_file(folder / file)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / file)
    with pytest.raises(ModelError, match=r"lacks the tensor model\.norm\.weight"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "model.bin", ""])
def test_index_must_not_point_out_of_the_folder(copied, name):
    folder = copied(sharded=True)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="is not a safetensors file of this folder"):
        load_model(folder)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_broken_index(copied, content):
    folder = copied(sharded=True)
    (folder / INDEX_NAME).write_text(content)
    with pytest.raises(ModelError, match="is not a safetensors index"):
        load_model(folder)


def test_several_files_without_an_index(copied):
    folder = copied(sharded=True)
    (folder / INDEX_NAME).unlink()
    with pytest.raises(ModelError, match=f"and no {INDEX_NAME}"):
        load_model(folder)


def test_truncated_file(copied):
    folder = copied()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is not a complete safetensors file"):
        load_model(folder)


def test_empty_file_and_lfs_pointer(copied):
    path = copied() / "model.safetensors"
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="is not a complete safetensors file"):
        load_model(path.parent)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 1\n")
    with pytest.raises(ModelError, match="Git LFS pointer"):
        load_model(path.parent)


def test_missing_tensor(copied):
    folder = copied()
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)


def test_missing_head_of_an_untied_model(copied):
    folder = copied()
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ModelError, match=r"no tensor lm_head\.weight"):
        load_model(folder)


def test_tensor_of_another_shape(copied):
    folder = copied()
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(32, 64)}))
    with pytest.raises(ModelError, match=f"{name} has the shape"):
        load_model(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.3.x"]
)
def test_tensor_that_the_architecture_does_not_have(copied, name):
    folder = copied()
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(16)}))
    with pytest.raises(ModelError, match=f"{name}, which LlamaForCausalLM"):
        load_model(folder)


def test_buffers_of_older_checkpoints_are_ignored(copied):
    folder = copied()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert load_model(folder).config.num_layers == 3


def test_integer_weights_are_refused(copied):
    folder = copied()
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(96, 64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match="holds int8 values"):
        load_model(folder)


def test_weights_outlive_the_files(copied, random_ids, paged_run):
    folder = copied()
    ids = random_ids(20)
    model = load_model(folder)
    before = paged_run(model).step({0: ids})[0]
    shutil.rmtree(folder)
    assert torch.equal(paged_run(model).step({0: ids})[0], before)
