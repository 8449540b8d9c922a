"""What is read of a checkpoint, and refused, before vLLM is imported."""

import json
from pathlib import Path

import pytest

from services.runtime.errors import ModelError
from worker.vllm import loading
from worker.vllm.loading import VllmSettings, weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("no part of the model")
    return tmp_path


def digest_of(folder: Path) -> str:
    weights_digest.cache_clear()
    return weights_digest(folder)


@pytest.mark.parametrize(("name", "is_part"), [("a.safetensors", True), ("config.json", True), ("README.md", False)])
def test_every_byte_of_weights_and_config_is_in_the_digest(folder: Path, name: str, is_part: bool) -> None:
    before = digest_of(folder)
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")
    assert (digest_of(folder) != before) is is_part
    assert len(before) == 32


def test_the_same_bytes_under_other_names_are_other_weights(folder: Path) -> None:
    before = digest_of(folder)
    (folder / "a.safetensors").rename(folder / "b.safetensors")
    assert digest_of(folder) != before


def test_a_folder_without_a_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        digest_of(folder)


@pytest.mark.parametrize(
    ("asked", "config", "dtype"),
    [
        ("auto", {"torch_dtype": "float32"}, "float32"),
        ("auto", {"dtype": "bfloat16"}, "bfloat16"),
        ("auto", {}, "auto"),
        ("float16", {"dtype": "bfloat16"}, "float16"),
    ],
)
def test_auto_is_the_type_of_the_checkpoint(folder: Path, asked: str, config: dict[str, str], dtype: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    assert loading._dtype(VllmSettings(model_dir=folder, dtype=asked)) == dtype
