"""Files in TOML: what a struct is made of, and what is said of a mistake."""

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from services.runtime.errors import ConfigError
from services.runtime.toml_file import convert, parse, read_text


class Part(Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1)]
    colour: str = "red"


class Whole(Struct, forbid_unknown_fields=True):
    part: list[Part] = []
    other: dict[str, Part] | None = None


def test_a_document_becomes_a_struct() -> None:
    assert parse("[[part]]\nsize = 2\n[other.x]\nsize = 3\n", Whole) == Whole([Part(2)], {"x": Part(3)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[part]]\nsize = 0\n", "part[0].size: Expected `int` >= 1"),
        ("[[part]]\nsize = 1\ncolor = 'x'\n", "part[0]: Object contains unknown field `color`; did you mean colour?"),
        ("parts = 1\n", "Object contains unknown field `parts`; did you mean part?"),
        ("[[part]]\nsize = 1\nzebra = 'x'\n", "part[0]: Object contains unknown field `zebra`"),
        ("a = \n", "not valid TOML: Invalid value (at line 1, column 5)"),
    ],
)
def test_a_mistake_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, Whole)
    assert caught.value.message == said


def test_a_part_is_named_by_where_it_stands_and_a_message_is_not_endless() -> None:
    with pytest.raises(ConfigError, match=r"^other\.x\.size: Expected"):
        convert({"size": 0}, Part, where="other.x")
    with pytest.raises(ConfigError) as caught:
        convert({"size": 1, "z" * 5000: 1}, Part)
    assert len(caught.value.message) < 400


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "some.toml"
    with pytest.raises(ConfigError, match=r"^the file of parts \S+some\.toml does not exist$"):
        read_text(file, "the file of parts", max_bytes=10)
    file.write_text("a = 1\nb = 2\n")
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        read_text(file, "the file of parts", max_bytes=10)
    assert read_text(file, "the file of parts", max_bytes=12) == file.read_text()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        read_text(file, "the file of parts", max_bytes=10)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_text(tmp_path, "the file of parts", max_bytes=10)
