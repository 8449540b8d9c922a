"""Ids and seeds that are drawn, and those that follow from what a client said."""

import itertools

from gateway.requests.seeds import ID_BYTES, IDS_PER_DRAW, choice_seed, id_source, key_seed, seed_source


def test_the_same_start_gives_the_same_seeds_and_no_start_gives_others() -> None:
    first, again, other = seed_source(7), seed_source(7), seed_source(None)
    seeds = [first() for _ in range(8)]
    assert seeds == [again() for _ in range(8)]
    assert len(set(seeds)) == 8
    assert seeds != [other() for _ in range(8)]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_no_id_comes_twice_also_across_draws() -> None:
    ids = list(itertools.islice(id_source(), 3 * IDS_PER_DRAW))
    assert len(set(ids)) == len(ids)
    assert {len(each) for each in ids} == {2 * ID_BYTES}


def test_a_keys_seed_depends_on_tenant_and_key_and_on_where_one_ends() -> None:
    assert key_seed("acme", "k") == key_seed("acme", "k")
    assert len({key_seed("acme", "k"), key_seed("acmek", ""), key_seed("", "acmek"), key_seed("acm", "ek")}) == 4


def test_the_first_choice_has_the_requests_seed_and_the_others_have_their_own() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        seeds = [choice_seed(seed, choice) for choice in range(128)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 128
        assert all(-(2**63) <= each < 2**63 for each in seeds)
