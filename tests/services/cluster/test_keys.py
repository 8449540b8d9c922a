"""The names of everything in Redis."""

import pytest

from services.cluster.keys import Keys
from services.runtime.errors import ConfigError


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "{a}", "a:b", "ä"])
def test_a_cluster_whose_name_could_end_a_hash_tag_or_be_another_key_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        Keys(name)


def test_all_keys_of_a_cluster_are_in_one_slot() -> None:
    assert Keys("eu-1").worker("decode-0") == "tandem:{eu-1}:worker:decode-0"


def test_no_name_within_a_key_makes_it_another_key() -> None:
    keys = Keys("eu-1")
    assert len({keys.worker("a"), keys.worker("a:b"), keys.worker("b"), Keys("eu-2").worker("a")}) == 4
