"""The committed demo checkpoints: complete, small, safe to load, and with one tokenizer."""

import json
from pathlib import Path

import pytest

from cli.up_settings import DEMO_MODEL
from gateway.models.model_files import read_model_files
from services.engine.weights.config import load_config

DEMO = DEMO_MODEL.parent
MAX_BYTES = 10_000_000


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["model", "draft"])
def test_a_checkpoint_is_complete(name: str) -> None:
    config, files = load_config(DEMO / name), read_model_files(DEMO / name)
    assert config.vocab_size == files.facts.vocab_size == 2048
    assert config.dtype == "bfloat16"
    assert files.chat_template is not None
    assert set(files.facts.eos_token_ids) == set(config.eos_token_ids) != set()
    report = json.loads((DEMO / name / "TRAINING.json").read_text())
    assert report["finished"] is True
    assert 0 < report["held_out_loss"] < 3.5


def test_they_are_small_and_the_draft_is_at_most_a_quarter() -> None:
    assert size_bytes(DEMO / "model") <= MAX_BYTES
    weights = [(DEMO / name / "model.safetensors").stat().st_size for name in ("model", "draft")]
    assert weights[1] * 4 <= weights[0]


def test_they_share_a_tokenizer() -> None:
    first, second = ((DEMO / name / "tokenizer.json").read_bytes() for name in ("model", "draft"))
    assert first == second
