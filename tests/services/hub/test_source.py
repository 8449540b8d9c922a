from pathlib import Path

import pytest

from services.hub.source import HubModel, S3Model, model_source, served_name, source_of


@pytest.mark.parametrize(
    ("text", "source", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B", "main"), "Qwen/Qwen3-0.6B"),
        ("org/model@v1/x", HubModel("org/model", "v1/x"), "org/model"),
        ("hf://org/model@abc", HubModel("org/model", "abc"), "org/model"),
        ("s3://bucket/a/b/", S3Model("bucket", "a/b"), "b"),
        ("file:///models/a%20b", None, "a-b"),
        ("./org/model", None, "model"),
        ("a/b/c", None, "c"),
        ("model", None, "model"),
        ("/org/model", None, "model"),
    ],
)
def test_a_text_is_a_folder_or_a_name(text: str, source: object, name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = model_source().parse(text)
    assert source_of(path) == source
    assert served_name(path) == name
    assert model_source().parse(str(path)) == path  # as it is passed on to another process


def test_a_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/model").mkdir(parents=True)
    assert source_of(model_source().parse("org/model")) is None
    assert source_of(model_source().parse("hf://org/model")) == HubModel("org/model", "main")


@pytest.mark.parametrize(
    "text", ["", "s3://", "s3://bucket", "s3://bucket/", "hf://model", "hf://a/b/c", "file://host/x", "a\0b"]
)
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - a kind says its rule, not its errors
        model_source().parse(text)
