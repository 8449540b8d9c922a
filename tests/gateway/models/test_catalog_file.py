"""The models file: what it says, and one row per mistake with the field and the rule that the error names."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.models.catalog_file import ModelEntry, _way, parse_models, read_models_file
from services.runtime.engines import ENGINES
from services.runtime.errors import ConfigError

GOOD = """
[[model]]
name = "large"
path = "models/large"
aliases = ["default", "best/1.0"]
fallback = ["medium", "small"]
fallback_after_s = 2
engine = "vllm"
prefill = 0
decode = 3
lora = {sql = "models/small", law = "/"}

[[model]]
name = "medium"
path = "models/medium"
fallback = ["small"]

[[model]]
name = "small"
path = "models/small"
"""


@pytest.fixture
def file(tmp_path):
    for name in ("large", "medium", "small"):
        (tmp_path / "models" / name).mkdir(parents=True)
    return tmp_path / "models.toml"


def test_all_that_a_file_can_say(file):
    file.write_text(GOOD)
    folder = file.parent / "models"
    large, medium, small = read_models_file(file)
    assert large == ModelEntry(
        "large",
        folder / "large",
        ("default", "best/1.0"),
        ("medium", "small"),
        2.0,
        num_prefill=0,
        num_decode=3,
        engine="vllm",
        lora={"sql": folder / "small", "law": Path("/")},
    )
    assert medium == ModelEntry("medium", folder / "medium", fallbacks=("small",))
    assert small == ModelEntry("small", folder / "small")


def test_every_engine_may_be_named_and_no_other(file):
    for engine in ENGINES:
        (entry,) = parse_models(f'[[model]]\nname = "m"\npath = "models"\nengine = "{engine}"\n', file=file)
        assert entry.engine == engine
    with pytest.raises(ConfigError, match=r"model\[0\]\.engine: Invalid enum value 'sglang'"):
        parse_models('[[model]]\nname = "m"\npath = "models"\nengine = "sglang"\n', file=file)


def test_what_else_stands_in_for_an_answer(file):
    text = f'[[model]]\nname = "m"\npath = "{file.parent}"\n'
    (entry,) = parse_models(text + "fallback_kept = true\nfallback_max_tokens = 64\n", file=file)
    assert (entry.keeps_answers, entry.fallback_max_tokens) == (True, 64)
    (entry,) = parse_models(text, file=file)
    assert (entry.keeps_answers, entry.fallback_max_tokens) == (False, None)
    with pytest.raises(ConfigError, match=r"model\[0\]\.fallback_max_tokens: Expected `int` >= 1"):
        parse_models(text + "fallback_max_tokens = 0", file=file)


def test_a_tier_names_another_model_and_when_it_answers(file):
    text = GOOD.replace('name = "small"', 'name = "small"\ntier = {TIER}')
    good = 'name = "auto", stronger = "large", long_prompt_chars = 9, check = ["json"], pattern = "a+"'
    tier = parse_models(text.replace("TIER", f'{good}, classifier = "json:loads"'), file=file)[2].tier
    assert (tier.name, tier.stronger, tier.long_prompt_chars, tier.checks) == ("auto", "large", 9, ("json",))
    assert (tier.pattern.pattern, tier.classifier) == ("a+", json.loads)
    for bad, words in (
        (
            good.replace('"large"', '"small"'),
            "model[2].tier.stronger is 'small' but must be the name (no alias) of another",
        ),
        (good.replace('"large"', '"default"'), "model[2].tier.stronger is 'default'"),
        (good.replace('"auto"', '"default"'), "model[2].tier.name is 'default' but must be another name"),
        (good.replace("a+", "a("), "pattern: missing ), unterminated subpattern"),
        (good.replace('"json"', '"short"'), "model[2].tier.check[0]"),
        (good + ', classifier = "json"', "model[2].tier.classifier"),
        (good + ', classifier = "json:none"', "'json:none' cannot be imported"),
        ('name = "auto", stronger = "large"', "must say when the stronger one answers"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            parse_models(text.replace("TIER", bad), file=file)


def test_an_absolute_path_stays_as_it_is(file):
    (entry,) = parse_models(f'[[model]]\nname = "m"\npath = "{file.parent}"\n', file=file)
    assert entry.path == file.parent


# (what is replaced in GOOD, by what, words of the error)
BAD = {
    "no-toml": ("[[model]]", "[[model", "not valid TOML"),
    "empty": (GOOD, "", "Object missing required field `model`"),
    "one-table": (GOOD, '[model]\nname = "a"', "model: Expected `array`, got `object`"),
    "other-table": (GOOD, GOOD + "\n[limits]\n", "Object contains unknown field `limits`"),
    "no-table": (GOOD, "model = [1]", "model[0]: Expected `object`, got `int`"),
    "unknown-key": (
        "decode = 3",
        "decodes = 3",
        "model[0]: Object contains unknown field `decodes`; did you mean decode?",
    ),
    "no-name": ('name = "medium"', "", "model[1]: Object missing required field `name`"),
    "empty-name": ('name = "medium"', 'name = ""', "model[1].name: Expected `str` matching regex '^[A-Za-z0-9]"),
    "name-with-space": (
        'name = "medium"',
        'name = "a b"',
        "model[1].name: Expected `str` matching regex '^[A-Za-z0-9]",
    ),
    "name-with-line-break": (
        'name = "medium"',
        'name = "a\\r\\nb"',
        "model[1].name: Expected `str` matching regex '^[A-Za-z0-9]",
    ),
    "name-no-text": ('name = "medium"', "name = 5", "model[1].name: Expected `str`, got `int`"),
    "long-name": (
        'name = "medium"',
        f'name = "{"m" * 257}"',
        "model[1].name: Expected `str` matching regex '^[A-Za-z0-9]",
    ),
    "same-name": ('name = "medium"', 'name = "large"', "model[1].name is 'large' but must be another name"),
    "alias-is-a-name": (
        '"default"',
        '"small"',
        "model[0].aliases[0] is 'small' but must be another name than model[2]",
    ),
    "alias-is-its-own-name": ('"default"', '"large"', "model[0].aliases[0] is 'large'"),
    "alias-twice": ('"default"', '"best/1.0"', "model[0].aliases[1] is 'best/1.0'"),
    "alias-of-another": ('name = "small"', 'name = "small"\naliases = ["default"]', "model[2].aliases[0] is 'default'"),
    "aliases-no-list": (
        'aliases = ["default", "best/1.0"]',
        'aliases = "a"',
        "model[0].aliases: Expected `array`, got `str`",
    ),
    "alias-no-name": ('"default"', '"\u00e9"', "model[0].aliases[0]: Expected `str` matching regex '^[A-Za-z0-9]"),
    "no-path": ('path = "models/small"', "", "model[2]: Object missing required field `path`"),
    "path-no-text": ('path = "models/small"', "path = 1", "model[2].path: Expected `str`, got `int`"),
    "path-nowhere": ("models/small", "models/nowhere", "models/nowhere' but must be a folder that exists"),
    "path-is-a-file": ("models/small", "models.toml", "models.toml' but must be a folder that exists"),
    "unknown-fallback": (
        '"medium", "small"',
        '"tiny"',
        "model[0].fallback[0] is 'tiny' but must be the name (no alias)",
    ),
    "fallback-is-an-alias": ('fallback = ["small"]', 'fallback = ["default"]', "model[1].fallback[0] is 'default'"),
    "fallback-twice": (
        '"medium", "small"',
        '"small", "small"',
        "model[0].fallback[1] is 'small' but must be named only",
    ),
    "falls-back-to-itself": ('"medium", "small"', '"large"', "(large -> large)"),
    "cycle": ('fallback = ["small"]', 'fallback = ["large"]', "(large -> medium -> large)"),
    "long-cycle": (
        'name = "small"',
        'name = "small"\nfallback = ["large"]',
        "must be a model that does not fall back to this one again (large -> medium -> small -> large)",
    ),
    "fallback-no-list": ('fallback = ["small"]', "fallback = 1", "model[1].fallback: Expected `array`, got `int`"),
    "negative-wait": (
        "fallback_after_s = 2",
        "fallback_after_s = -1",
        "model[0].fallback_after_s: Expected `float` >= 0.05",
    ),
    "no-wait": (
        "fallback_after_s = 2",
        "fallback_after_s = 0",
        "model[0].fallback_after_s: Expected `float` >= 0.05",
    ),
    "endless-wait": (
        "fallback_after_s = 2",
        "fallback_after_s = inf",
        "model[0].fallback_after_s: Expected `float` <= 86400",
    ),
    "true-wait": (
        "fallback_after_s = 2",
        "fallback_after_s = true",
        "model[0].fallback_after_s: Expected `float`, got `bool`",
    ),
    "no-decode": ("decode = 3", "decode = 0", "model[0].decode: Expected `int` >= 1"),
    "half-a-prefill": (
        "prefill = 0",
        "prefill = 0.5",
        "model[0].prefill: Expected `int | null`, got `float`",
    ),
    "shared-by-vllm": (
        'name = "small"',
        'name = "small"\nengine = "vllm"\nshare = "all"',
        "model[2].engine is 'vllm' but must be native where models share workers",
    ),
    "number-of-shared-workers-twice": (
        GOOD,
        GOOD.replace('name = "', 'share = "all"\nname = "').replace("vllm", "native") + "decode = 1\n",
        "model[2].decode is '1' but must be left out: large, which shares its workers, says it",
    ),
    "share-of-nothing": ('name = "small"', 'name = "small"\nshare = ""', "model[2].share: Expected `str` matching"),
    "true-prefill": ("prefill = 0", "prefill = true", "model[0].prefill: Expected `int | null`, got `bool`"),
}


@pytest.mark.parametrize("row", BAD, ids=BAD)
def test_a_mistake_is_named_with_its_field_and_rule(file, row):
    wrong, instead, words = BAD[row]
    assert wrong in GOOD
    file.write_text(GOOD.replace(wrong, instead, 1))
    with pytest.raises(ConfigError) as caught:
        read_models_file(file)
    assert str(file) in caught.value.message
    assert words in caught.value.message
    assert len(caught.value.message) < 1000


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_models_file(tmp_path / "models.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_models_file(tmp_path)
    (tmp_path / "m.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not valid UTF-8"):
        read_models_file(tmp_path / "m.toml")


NAMES = "abcdef"


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES), max_size=4), min_size=1))
def test_a_way_is_found_exactly_where_there_is_one(chains):
    for start in NAMES:
        reached = {start}
        while more := {name for each in reached for name in chains.get(each, ())} - reached:
            reached |= more
        for goal in NAMES:
            way = _way(chains, start, goal)
            assert (way is not None) == (goal in reached)
            if way is not None:
                assert (way[0], way[-1]) == (start, goal)
                assert all(after in chains[before] for before, after in itertools.pairwise(way))


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        ('{sql = "none"}', r"model\[0\]\.lora\.sql is .*none' but must be a folder that exists"),
        ('{m = "models"}', r"model\[0\]\.lora\.m is 'm' but must be another name than model\[0\] has already"),
    ],
)
def test_adapters_have_folders_and_names_of_their_own(file, adapters, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_models(f'[[model]]\nname = "m"\npath = "models"\nlora = {adapters}\n', file=file)
