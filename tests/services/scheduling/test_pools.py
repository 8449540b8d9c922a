"""Which pool a request belongs to, and which workers it may use."""

import pytest

from services.runtime import toml_file
from services.runtime.errors import ConfigError
from services.scheduling.pools import Pool, Pools, PoolsFile

BATCH = Pool("batch", ("batch", "low"), rule="strict")
LONG = Pool("long", min_prompt_tokens=1000)
BOTH = Pool("both", ("low",), 500)


@pytest.mark.parametrize(
    ("service_class", "num_tokens", "name"),
    [
        ("batch", 5000, "batch"),
        ("low", None, "batch"),
        ("normal", 999, ""),
        ("normal", 1000, "long"),
        ("critical", None, None),
    ],
)
def test_a_request_belongs_to_the_first_pool_whose_conditions_it_meets(service_class, num_tokens, name):
    assert Pools([BATCH, LONG]).of(service_class, num_tokens) == name


def test_all_conditions_of_a_pool_hold_at_once_and_the_list_has_an_order():
    pools = Pools([BOTH, BATCH])
    assert [pools.of("low", num_tokens) for num_tokens in (499, 500)] == ["batch", "both"]
    assert pools.of("batch", None) == "batch"
    assert pools.of("low", None) is None
    assert Pools().of("low", None) == ""
    assert not Pools()


def test_strict_pools_are_apart_and_all_others_help_one_another():
    pools = Pools([BATCH, LONG])
    names = ("", "batch", "long", "unlisted")
    allowed = {(pool, label) for pool in names for label in names if pools.may_use(pool, label)}
    assert allowed == {(a, b) for a in names for b in names if (a == "batch") == (b == "batch")}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "pool"),
        ("pool = []", "pool"),
        ('[[pool]]\nname = "a b"\nclasses = ["low"]', "pool[0].name"),
        ('[[pool]]\nname = "a\\n"\nclasses = ["low"]', "pool[0].name"),
        ('[[pool]]\nname = "a"\nclasses = ["lowest"]', "pool[0].classes[0]"),
        ('[[pool]]\nname = "a"\nmin_prompt_tokens = -1', "pool[0].min_prompt_tokens"),
        ('[[pool]]\nname = "a"\nrule = "soft"\nmin_prompt_tokens = 1', "pool[0].rule"),
        ('[[pool]]\nname = "a"\nmin_prompt_token = 1', "did you mean min_prompt_tokens"),
        ('[[pool]]\nname = "a"', "pool[0]: classes or min_prompt_tokens"),
        ('[[pool]]\nname = "a"\nclasses = ["low"]\n' * 2, "pool[1].name"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_key(text, rule):
    with pytest.raises(ConfigError) as refused:
        Pools(toml_file.parse(text, PoolsFile).pool)
    assert rule in str(refused.value)


def test_the_file_says_what_the_list_is():
    text = '[[pool]]\nname = "batch"\nclasses = ["batch", "low"]\nrule = "strict"\n[[pool]]\nname = "long"\n'
    assert list(Pools(toml_file.parse(text + "min_prompt_tokens = 1000", PoolsFile).pool)) == [BATCH, LONG]
