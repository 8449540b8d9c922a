"""Medians and ratios of the servers, and the model files that they are given."""

from pathlib import Path

import pytest

from benchmarks.end_to_end import Round, compare
from benchmarks.load import Timing


def answer(sent_s: float, *times_s: float, failure: str = "") -> Timing:
    return Timing(sent_s, [(time_s, 1) for time_s in times_s], failure)


def test_a_round_counts_whole_answers() -> None:
    answers = [answer(0, 1, 2, 3), answer(1, 3, 5, 7), answer(1, 2, failure="broke off")]
    assert Round.of(answers, 4.0) == Round(0.5, 1, 2, 1, 1)


def test_a_round_of_failures_says_why() -> None:
    with pytest.raises(SystemExit, match="broke off"):
        Round.of([answer(0, 1, failure="broke off")], 1.0)


def test_ratios_are_within_a_round() -> None:
    rounds = {
        "ours": [Round(2.0, 0.4, 0.8, 0.02, 0), Round(4.0, 0.2, 0.4, 0.01, 0), Round(3.0, 0.3, 0.6, 0.01, 0)],
        "llama-server": [Round(1.0, 0.8, 1.6, 0.02, 0), Round(2.0, 0.4, 0.8, 0.01, 0), Round(3.0, 0.3, 0.6, 0.01, 0)],
    }
    ratios = compare(rounds)
    assert (ratios["requests/s over llama-server"].value, ratios["requests/s over llama-server"].aim) == (2.0, 1.45)
    assert ratios["requests/s over llama-server"].is_reached
    assert ratios["ttft_p50 over llama-server"].value == 0.5
    assert ratios["ttft_p50 over llama-server"].lower_is_better


def test_the_model_is_served_and_llama_cpp_gets_its_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from benchmarks.random_model import make_served_model, write_gguf
    from gateway.models.model_files import read_model_files
    from services.engine.weights.config import load_config

    model = make_served_model(tmp_path / "model", "float32")
    assert load_config(model).vocab_size == 8192
    assert read_model_files(model).tokenizer_json
    content = write_gguf(model, tmp_path / "model.gguf").read_bytes()
    assert content[:8] == b"GGUF\x03\0\0\0"
    assert int.from_bytes(content[8:16], "little") == 8 * 9 + 3
    # Aligned tensors fill the file to its end: nothing was left out, nothing is between.
    assert len(content) % 32 == 0
