"""The catalog: names, what is known of a model's folder, and how a name travels in a header."""

import pytest

from gateway.models.catalog import ModelCatalog, header_value, load_catalog
from gateway.models.catalog_file import ModelEntry
from services.runtime.errors import InvalidRequest, ModelError, NotFound


@pytest.fixture(scope="module")
def catalog(model_folder):
    return load_catalog([ModelEntry("a", model_folder, aliases=("x", "y")), ModelEntry("b", model_folder)])


def test_every_name_leads_to_its_model(catalog):
    assert [model.name for model in catalog] == ["a", "b"]
    assert [(name, model.name) for name, model in catalog.names()] == [("a", "a"), ("x", "a"), ("y", "a"), ("b", "b")]
    assert [catalog.resolve(name).name for name in ("a", "x", "y", "b")] == ["a", "a", "a", "b"]
    assert catalog["a"] is catalog.resolve("x")
    with pytest.raises(KeyError):
        catalog["x"]
    with pytest.raises(NotFound):
        catalog.resolve("A")


def test_the_own_name_of_what_is_asked_for(catalog):
    assert [catalog.name_of(name) for name in ("a", "y", "b", "none")] == ["a", "a", "b", "none"]
    with pytest.raises(InvalidRequest):
        catalog.name_of("")
    assert ModelCatalog([catalog["b"]]).name_of(None) == "b"


@pytest.mark.parametrize("name", [None, ""])
def test_no_name_means_the_only_model(catalog, name):
    with pytest.raises(InvalidRequest) as refused:
        catalog.resolve(name)
    assert refused.value.field == "model"
    assert ModelCatalog([catalog["b"]]).resolve(name) is catalog["b"]


def test_a_folder_that_cannot_be_used_is_named(tmp_path, model_folder):
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_catalog([ModelEntry("a", model_folder), ModelEntry("b", tmp_path)])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("large -> small; reason=overloaded", "large -> small; reason=overloaded"),
        ("meta/Llama-3.2:1B@v1+x", "meta/Llama-3.2:1B@v1+x"),
        ("größe", "gr%C3%B6%C3%9Fe"),
        ("a\r\nset-cookie: b", "a%0D%0Aset-cookie: b"),
        ("100%", "100%25"),
    ],
)
def test_a_header_holds_any_name_and_nothing_else(text, value):
    assert header_value(text) == value
    assert value.isascii()
    assert value.isprintable()


def test_an_adapters_name_leads_to_its_model_and_tells_the_adapter(model_folder):
    entry = ModelEntry("a", model_folder, aliases=("x",), lora={"sql": model_folder, "law": model_folder})
    catalog = load_catalog([entry])
    assert [name for name, _ in catalog.names()] == ["a", "x", "law", "sql"]
    assert catalog.resolve("sql") is catalog["a"]
    assert [catalog.adapter_of(name) for name in ("a", "x", "sql", "law", "none", "", None)] == [
        "", "", "sql", "law", "", "", "",
    ]  # fmt: skip
