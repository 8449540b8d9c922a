"""A model's folder as the gateway reads it."""

import json
import re

import pytest

from gateway.models.model_files import read_model_files
from services.runtime.errors import ModelError


def rewrite(folder, name, change):
    document = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**document, **change}))


def test_model_files(model_folder, tmp_path):
    files = read_model_files(model_folder)
    facts = files.facts
    assert (facts.vocab_size, facts.context_length_tokens, facts.eos_token_ids) == (401, 512, (1,))
    assert files.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|end|>"}


BROKEN = {
    "no-folder": lambda folder: [file.unlink() for file in folder.iterdir()] and folder.rmdir(),
    "no-config": lambda folder: (folder / "config.json").unlink(),
    "no-tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "broken-json": lambda folder: (folder / "config.json").write_text("{"),
    "json-list": lambda folder: (folder / "config.json").write_text("[]"),
    "deep-json": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "binary": lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
    "images": lambda folder: rewrite(folder, "config.json", {"vision_config": {}}),
    "vocab": lambda folder: rewrite(folder, "config.json", {"vocab_size": "many"}),
    "context": lambda folder: rewrite(folder, "config.json", {"max_position_embeddings": 0}),
    "eos": lambda folder: rewrite(folder, "config.json", {"eos_token_id": "x"}),
    "template": lambda folder: rewrite(folder, "tokenizer_config.json", {"chat_template": 5}),
}


@pytest.mark.parametrize("row", BROKEN, ids=BROKEN)
def test_broken_model_folder(model_folder, tmp_path, row):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    BROKEN[row](folder)
    with pytest.raises(ModelError) as refused:
        read_model_files(folder)
    assert re.search(r"; \w+|must be", refused.value.message)


def test_optional_files(model_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    (folder / "chat_template.jinja").write_text("from the file")
    files = read_model_files(folder)
    assert files.facts.eos_token_ids == (1, 4)
    assert files.chat_template == "from the file"
    rewrite(folder, "tokenizer_config.json", {"chat_template": [{"name": "default", "template": "named"}]})
    (folder / "chat_template.jinja").unlink()
    assert read_model_files(folder).chat_template == "named"
    (folder / "tokenizer_config.json").unlink()
    assert read_model_files(folder).chat_template is None
