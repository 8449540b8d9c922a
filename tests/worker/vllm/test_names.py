"""Blocks have the names that a gateway computes for the tokens in them."""

from services.engine.cache.pages import PageChanges
from services.runtime.page_keys import page_keys
from worker.vllm.names import BlockNames

SIZE = 4
SALT, OTHER = b"s" * 32, b"o" * 32
TOKENS = list(range(100, 116))
KEYS = page_keys(TOKENS, salt=SALT, page_size=SIZE)
HASHES = ["h0", "h1", "h2", "h3"]


def made() -> BlockNames:
    names = BlockNames(SIZE)
    names.stored(HASHES[:2], TOKENS[:8], parent=None, salt=SALT)
    return names


def test_names_follow_from_tokens_and_salt_chunk_by_chunk() -> None:
    names = made()
    assert names.take_changes() == PageChanges(tuple(KEYS[:2]), ())
    names.stored(HASHES[2:], TOKENS[8:], parent="h1", salt=None)
    assert names.take_changes() == PageChanges(tuple(KEYS[2:]), ())
    assert names.take_changes() == PageChanges.none()


def test_tenants_have_names_of_their_own() -> None:
    names = made()
    names.stored(["x0"], TOKENS[:4], parent=None, salt=OTHER)
    assert names.take_changes().added == (*KEYS[:2], *page_keys(TOKENS[:4], salt=OTHER, page_size=SIZE))
    names.stored(["x1"], TOKENS[4:8], parent="x0", salt=None)
    assert names.take_changes().added == (page_keys(TOKENS[:8], salt=OTHER, page_size=SIZE)[1],)


def test_a_name_is_found_until_its_last_block_is_removed() -> None:
    names = made()
    names.stored(HASHES[:1], TOKENS[:4], parent=None, salt=SALT)
    names.take_changes()
    names.removed(["h0"])
    assert names.take_changes() == PageChanges.none()
    names.removed(["h0", "unknown"])
    assert names.take_changes() == PageChanges((), (KEYS[0],))


def test_what_comes_and_goes_between_two_looks_is_no_change() -> None:
    names = made()
    names.removed(["h1"])
    assert names.take_changes() == PageChanges((KEYS[0],), ())
    names.removed(["h0"])
    names.stored(["h0"], TOKENS[:4], parent=None, salt=SALT)
    assert names.take_changes() == PageChanges.none()


def test_blocks_behind_one_that_is_not_known_have_no_names() -> None:
    names = made()
    names.take_changes()
    names.stored(["y"], TOKENS[:4], parent="unknown", salt=None)
    names.stored(["z"], TOKENS[:4], parent=None, salt=None)
    names.removed(["y", "z"])
    assert names.take_changes() == PageChanges.none()
