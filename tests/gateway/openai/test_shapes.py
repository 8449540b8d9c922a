"""Fields say their meaning, bounds and defaults to the document, and nothing to the parser."""

from typing import Annotated

import msgspec

from gateway.openai.shapes import ABSENT, bounded, flag, list_of, parameter, said, synonym
from services.runtime.sampling import PARAMETERS


class Body(msgspec.Struct):
    """A body."""

    number: Annotated[int | None, bounded("A number.", 1, 5, 2)] = None
    is_set: Annotated[bool | None, flag("A flag.", default=True)] = None
    texts: Annotated[list[str] | None, said("Texts.", **list_of({"type": "string"}, 3))] = None


def test_the_schema_has_what_the_fields_say():
    (_, found) = msgspec.json.schema_components([Body])
    number, is_set, texts = (found["Body"]["properties"][name] for name in ("number", "is_set", "texts"))
    assert (number["description"], number["minimum"], number["maximum"], number[ABSENT]) == ("A number.", 1, 5, 2)
    assert (is_set["description"], is_set[ABSENT]) == ("A flag.", True)
    assert (texts["minItems"], texts["maxItems"], texts["items"]) == (1, 3, {"type": "string"})


def test_the_parser_leaves_bounds_to_the_checks():
    assert msgspec.convert({"number": 9, "texts": []}, Body) == Body(number=9, texts=[])


def test_a_synonym_has_the_bounds_of_its_parameter():
    assert PARAMETERS["max_tokens"].bounds is not None
    schema = PARAMETERS["max_tokens"].bounds.schema
    assert (
        parameter("max_tokens").extra_json_schema == synonym("max_tokens", "Another name.").extra_json_schema == schema
    )
    assert synonym("max_tokens", "From -2.", minimum=-2).extra_json_schema == {**schema, "minimum": -2}
    assert parameter("temperature").extra_json_schema[ABSENT] == 1
    assert parameter("min_tokens", ", and more.").description.endswith("`max_tokens`, and more.")
