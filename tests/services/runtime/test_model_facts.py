"""What gateway and workers compare of a model folder."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.runtime.errors import ModelError
from services.runtime.model_facts import read_model_facts, sample_weights

DEMO = Path(__file__).resolve().parents[3] / "demo"


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(DEMO / "draft", tmp_path / "model"))


def test_the_same_files_give_the_same_facts_wherever_they_are(folder):
    assert read_model_facts(folder) == read_model_facts(DEMO / "draft")
    assert read_model_facts(folder) != read_model_facts(DEMO / "model")


def test_the_facts_are_those_of_the_files(folder):
    facts = read_model_facts(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (facts.vocab_size, facts.context_length_tokens) == (config["vocab_size"], config["max_position_embeddings"])
    assert facts.eos_token_ids
    assert facts.vocabulary == f"{facts.vocab_size}/{facts.tokenizer}"


@pytest.mark.parametrize("place", [0, 0.5, -1])
def test_one_number_changed_at_an_end_or_in_the_middle_of_a_tensor_is_seen(folder, place):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    flat = tensors[name].view(-1)
    flat[int(place * flat.numel()) if place != -1 else -1] += 1
    save_file(tensors, path)
    assert sample_weights(folder) != sample_weights(DEMO / "draft")


def test_how_tensors_are_spread_over_files_makes_no_difference(folder):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert sample_weights(folder) == sample_weights(DEMO / "draft")


def test_a_tensor_of_few_bytes_is_sampled_whole(tmp_path):
    digests = set()
    for value in (1.0, 2.0):
        save_file({"w": torch.tensor([value])}, tmp_path / "model.safetensors")
        digests.add(sample_weights(tmp_path))
    assert len(digests) == 2


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]"]
)
def test_weights_that_cannot_be_read_are_no_weights(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    assert read_model_facts(folder).weights == ""


def test_a_folder_without_weights_or_tokenizer_has_none_to_compare(folder):
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    facts = read_model_facts(folder)
    assert (facts.weights, facts.tokenizer) == ("", "")
    assert facts.vocabulary.endswith("/unknown")


def test_an_index_names_no_file_of_another_folder(folder, tmp_path):
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../model.safetensors"}}))
    assert sample_weights(folder) == ""


def test_a_wrong_number_in_the_configuration_is_said(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 0}))
    with pytest.raises(ModelError, match="vocab_size = 0"):
        read_model_facts(folder)
