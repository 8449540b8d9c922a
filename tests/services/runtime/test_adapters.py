"""Adapters as settings name them."""

from pathlib import Path

import pytest

from services.runtime.adapters import MAX_ADAPTERS, check_adapters, folders_by_name, write_folders
from services.runtime.errors import ConfigError


def test_each_name_has_its_folder_and_the_text_is_written_back() -> None:
    text = "sql=/models/sql,team/law@2=law"
    folders = folders_by_name().parse(text)
    assert folders == {"sql": Path("/models/sql"), "team/law@2": Path("law")}
    assert write_folders(folders) == text
    assert write_folders({}) == ""


@pytest.mark.parametrize(
    "text",
    [
        *("", "sql", "=x", "sql=", "two words=x", "a=x,a=y", "a=x,", "a=\0"),
        ",".join(f"a{number}=x" for number in range(MAX_ADAPTERS + 1)),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        folders_by_name().parse(text)


def test_the_engine_that_computes_models_as_they_are_is_named() -> None:
    check_adapters(["sql"], engine="vllm")
    check_adapters([], engine="native")
    with pytest.raises(ConfigError, match="adapters sql, law, and its engine is native"):
        check_adapters(["sql", "law"], engine="native")
