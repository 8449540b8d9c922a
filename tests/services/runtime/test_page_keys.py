import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.page_keys import KEY_BYTES, SALT_BYTES, KeyChain, cache_salt, page_keys, sharers

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)
SALT = cache_salt(model="m", tenant="")


@given(TOKENS, st.integers(1, 17))
def test_a_key_is_the_digest_of_the_key_before_and_the_tokens_of_its_page(token_ids: list[int], page_size: int) -> None:
    expected, parent = [], bytes(16)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        tokens = b"".join(token.to_bytes(4, "little") for token in token_ids[start : start + page_size])
        parent = hashlib.blake2b(parent + tokens, digest_size=KEY_BYTES, key=SALT).digest()
        expected.append(parent)
    assert page_keys(token_ids, salt=SALT, page_size=page_size) == expected


@given(TOKENS, st.lists(st.integers(0, 70), max_size=6), st.integers(1, 17))
def test_a_chain_that_grows_piece_by_piece_is_the_same(token_ids: list[int], ends: list[int], page_size: int) -> None:
    chain = KeyChain(SALT, page_size)
    for end in sorted(min(end, len(token_ids)) for end in ends):
        assert len(chain.extend(token_ids, end)) == end // page_size
    assert chain.extend(token_ids, len(token_ids)) == page_keys(token_ids, salt=SALT, page_size=page_size)


@given(TOKENS.filter(bool), TOKENS.filter(bool))
def test_a_page_has_the_key_of_another_only_behind_the_same_tokens(one: list[int], other: list[int]) -> None:
    one_keys, other_keys = (page_keys(token_ids, salt=SALT, page_size=1) for token_ids in (one, other))
    for end in range(1, min(len(one), len(other)) + 1):
        assert (one_keys[end - 1] == other_keys[end - 1]) == (one[:end] == other[:end])


@pytest.mark.parametrize(("model", "tenant"), [("m2", ""), ("m", "t"), ("", "m"), ("mt", ""), ("m", "\0"), ("m", "é")])
def test_another_model_or_tenant_shares_no_key(model: str, tenant: str) -> None:
    salt = cache_salt(model=model, tenant=tenant)
    assert len(salt) == SALT_BYTES
    assert not set(page_keys([1, 2, 3], salt=salt, page_size=1)) & set(page_keys([1, 2, 3], salt=SALT, page_size=1))


def test_where_one_part_ends_and_the_next_begins_is_part_of_the_salt() -> None:
    assert cache_salt(model="ab", tenant="c") != cache_salt(model="a", tenant="bc")


NAMES = st.text("abgt1:", max_size=4)


@given(NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)
def test_pages_are_shared_by_those_of_one_owner_with_one_salt(
    tenant: str, group: str, salt: str, other_tenant: str, other_group: str, other_salt: str
) -> None:
    is_same_owner = group == other_group and (bool(group) or tenant == other_tenant)
    one = sharers(tenant=tenant, group=group, salt=salt)
    other = sharers(tenant=other_tenant, group=other_group, salt=other_salt)
    assert (one == other) == (is_same_owner and salt == other_salt)


def test_pages_that_are_held_to_regions_are_shared_with_no_request_that_is_not() -> None:
    texts = ("", "r2:eu", "2:eu", "eu", "r2:eur2:us")
    rules = ((), ("eu",), ("eu", "us"), ("us",), ("r2:eu",))
    found = {sharers(tenant=tenant, salt=salt, regions=rule) for tenant in texts for salt in texts for rule in rules}
    assert len(found) == len(texts) ** 2 * len(rules)
    assert sharers(tenant="t", salt="s", regions=()) == sharers(tenant="t", salt="s")


def test_no_salt_and_no_name_reaches_the_pages_of_another_owner() -> None:
    """All ways to cut a text into tenant and salt, or group and salt, also of texts that look like an encoded owner."""
    words = ["ab", "aab", "tab", "gab", "3:tab", "3:tabab", "2:ta", "t", "g"]
    splits = [(word[:end], word[end:]) for word in words for end in range(len(word) + 1)]
    owners = {("tenant", owner, salt): sharers(tenant=owner, salt=salt) for owner, salt in splits}
    owners |= {("group", owner, salt): sharers(tenant="x", group=owner, salt=salt) for owner, salt in splits if owner}
    assert len(set(owners.values())) == len(owners)


@given(NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)
def test_pages_that_an_adapter_has_changed_are_apart(
    tenant: str, salt: str, adapter: str, other_tenant: str, other_salt: str, other_adapter: str
) -> None:
    one = sharers(tenant=tenant, salt=salt, adapter=adapter)
    other = sharers(tenant=other_tenant, salt=other_salt, adapter=other_adapter)
    assert (one == other) == ((tenant, salt, adapter) == (other_tenant, other_salt, other_adapter))
