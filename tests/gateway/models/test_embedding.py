"""Which models embed texts, and how, by the files beside their weights."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.models.embedding import EmbeddingRule, read_rule
from services.runtime.errors import InvalidRequest, ModelError

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(modules: Any = None, pooling: Any = None, **config: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, **config}))
        if modules is not None:
            (tmp_path / "modules.json").write_text(json.dumps(modules))
        if pooling is not None:
            (tmp_path / "1_Pooling").mkdir()
            (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        return tmp_path

    return write


def pooling(*names: str, width: int = 64) -> dict[str, Any]:
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": width, **{f"pooling_mode_{mode}": mode in names for mode in modes}}


@pytest.mark.parametrize(
    ("modules", "modes", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], pooling("lasttoken"), EmbeddingRule("last", True, 64)),
        ([TRANSFORMER, POOLING], pooling("mean_tokens"), EmbeddingRule("mean", False, 64)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean", "embedding_dimension": 64}, EmbeddingRule("mean", False, 64)),
        ([TRANSFORMER, NORMALIZE], None, EmbeddingRule("last", True, 64)),
    ],
)
def test_modules_say_how(write: Any, modules: Any, modes: Any, expected: EmbeddingRule) -> None:
    assert read_rule(write(modules, modes), "auto") == expected


@pytest.mark.parametrize(
    ("modules", "modes", "reason"),
    [
        ([TRANSFORMER, POOLING], pooling("cls_token"), "pooled by cls_token"),
        ([TRANSFORMER, POOLING], pooling("mean_tokens", "max_tokens"), "pooled by mean_tokens and max_tokens"),
        ([TRANSFORMER, POOLING], pooling(), "pooled by none"),
        ([TRANSFORMER, POOLING], pooling("lasttoken", width=32), "another number of dimensions"),
        ([TRANSFORMER, {**NORMALIZE, "type": "sentence_transformers.models.Dense"}], None, "module Dense"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "on"])
def test_what_would_be_wrong_is_not_computed(write: Any, modules: Any, modes: Any, reason: str, choice: str) -> None:
    rule = read_rule(write(modules, modes), choice)
    assert isinstance(rule, str)
    assert reason in rule


def test_a_generator_embeds_only_where_the_operator_says_so(write: Any) -> None:
    folder = write()
    assert "not trained" in str(read_rule(folder, "auto"))
    assert read_rule(folder, "on") == EmbeddingRule("last", True, 64)
    assert "switched off" in str(read_rule(write([TRANSFORMER]), "off"))


def test_vectors_are_cut_where_the_checkpoint_or_the_operator_allows_it(write: Any) -> None:
    plain = read_rule(write([TRANSFORMER]), "auto")
    named = read_rule(write([TRANSFORMER], matryoshka_dimensions=[8, 16]), "auto")
    free = read_rule(write([TRANSFORMER], is_matryoshka=True), "auto")
    asked = read_rule(write([TRANSFORMER]), "matryoshka")
    sizes = (0, 1, 8, 63, 64, 65)
    allowed = [[size for size in sizes if _allows(rule, size)] for rule in (plain, named, free, asked)]
    assert allowed == [[64], [8, 64], [1, 8, 63, 64], [1, 8, 63, 64]]


def test_a_vector_that_is_cut_is_normalized_again(write: Any) -> None:
    rule = read_rule(write([TRANSFORMER], is_matryoshka=True), "auto")
    assert isinstance(rule, EmbeddingRule)
    assert not rule.is_normalized
    assert rule.cut_to(None) == rule.cut_to(64) == rule
    assert (rule.cut_to(8).num_dimensions, rule.cut_to(8).is_normalized) == (8, True)


def _allows(rule: EmbeddingRule | str, size: int) -> bool:
    assert isinstance(rule, EmbeddingRule)
    try:
        return rule.cut_to(size).num_dimensions == size
    except InvalidRequest:
        return False


@pytest.mark.parametrize("modules", ["no list", [{"path": "x"}], [{**POOLING, "path": "../other"}], {"a": 1}, [1]])
def test_files_that_are_wrong_are_said_to_be(write: Any, modules: Any) -> None:
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_rule(write(modules), "auto")


def test_a_missing_pooling_is_said_to_be(write: Any) -> None:
    with pytest.raises(ModelError, match="1_Pooling"):
        read_rule(write([TRANSFORMER, POOLING]), "auto")
