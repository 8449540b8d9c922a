"""What an answer is bound to: whole texts are compared, and nothing is equal by omission."""

import dataclasses

import pytest

from services.runtime import identity
from services.runtime.identity import (
    MAX_IDENTITY_CHARS,
    MAX_KEY_CHARS,
    AnswerIdentity,
    has_weights_of,
    identity_fields,
    identity_key,
)

ONE = AnswerIdentity(
    engine="tandem/1",
    weights="w",
    config="c",
    dtype="bfloat16",
    arithmetic="avx2/abc",
    vocabulary="2048/t",
    grammars="g-1",
)
LIFE, OTHER_LIFE = "1" * 32, "2" * 32


def key(text, layout="w", incarnation=LIFE):
    return identity_key(text, layout=layout, incarnation=incarnation)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(AnswerIdentity)])
def test_every_field_makes_another_identity(name):
    other = dataclasses.replace(ONE, **{name: "other"})
    assert key(other.text) != key(ONE.text)
    assert identity_fields(other.text)[name] == "other"


def test_equal_identities_have_equal_keys_in_every_life_of_a_process():
    assert key(ONE.text) == key(dataclasses.replace(ONE).text, incarnation=OTHER_LIFE)


def test_a_field_that_only_another_version_knows_makes_a_difference():
    assert key(f"{ONE.text} quantisation=int8") != key(ONE.text)
    assert key(ONE.text.replace(" dtype=bfloat16", "")) != key(ONE.text)


def test_a_worker_that_says_nothing_is_equal_only_to_itself():
    assert key("") == key("")
    assert key("") != key("", incarnation=OTHER_LIFE)
    assert key("", layout="") == ""
    assert has_weights_of(key(""), key(ONE.text))
    assert not has_weights_of(key(ONE.text), key(ONE.text, layout="other"))


@pytest.mark.parametrize("text", ["", ONE.text])
def test_a_key_has_its_length(text):
    assert len(key(text, layout="f" * 32)) <= MAX_KEY_CHARS


def test_values_keep_to_their_fields_and_the_text_to_its_length():
    spaced = dataclasses.replace(ONE, arithmetic="NVIDIA H100 80GB dtype=float32")
    assert identity_fields(spaced.text)["dtype"] == "bfloat16"
    assert len(dataclasses.replace(ONE, arithmetic="x" * 1000).text) == MAX_IDENTITY_CHARS
    assert identity_fields("") == identity_fields("nothing here") == {}


def test_a_text_is_digested_once_for_any_number_of_workers() -> None:
    identity._digest.cache_clear()
    keys = {identity_key("engine=a", layout="l", incarnation=f"{number:032x}") for number in range(3000)}
    assert len(keys) == 1
    assert identity._digest.cache_info().misses == 1
