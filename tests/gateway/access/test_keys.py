"""The file of API keys: what it says, what is wrong with it and where, and following it."""

import asyncio
import hashlib
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.keys import (
    ApiKey,
    KeyFile,
    Tenant,
    digest_of_key,
    new_key,
    parse_keys,
    read_keys,
    toml_entry,
    toml_tenant,
)
from gateway.limits import SERVICE_CLASSES
from services.cluster.tenant_usage import TenantLimits
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S

DIGEST = "a" * 64
FULL = f"""
[default_limits]
requests_per_minute = 60

[[key]]
name = "Alice's laptop"
sha256 = "{DIGEST}"
tenant = "acme"
models = ["one", "two"]
service_class = "interactive"
priority = 5
allow_fallback = true
admin = true
expires = 2027-01-31T00:00:00Z

[[key]]
sha256 = "{"b" * 64}"
tenant = "acme:eu"
models = "all"

[tenant.acme]
requests_per_minute = 600
tokens_per_minute = 0
concurrency = 8

[tenant."acme:eu"]

[tenant.weighty]
weight = 2.5
share_cache = "team"
residency = ["us", "eu", "us"]
"""


def test_all_fields():
    keys = parse_keys(FULL)
    assert keys.keys[DIGEST] == ApiKey(
        sha256=DIGEST,
        tenant="acme",
        name="Alice's laptop",
        models=frozenset({"one", "two"}),
        service_class="interactive",
        priority=5,
        allow_fallback=True,
        is_admin=True,
        expires_s=1801353600.0,
    )
    assert keys.keys["b" * 64] == ApiKey(sha256="b" * 64, tenant="acme:eu")
    assert keys.limits_of("acme") == TenantLimits(600, 0, 8)
    assert keys.limits_of("acme:eu").is_unlimited
    assert keys.limits_of("somebody") == TenantLimits(requests_per_minute=60)
    assert keys.weights == {"acme": 1.0, "acme:eu": 1.0, "weighty": 2.5}
    assert [keys.share_cache_of(tenant) for tenant in ("weighty", "acme", "somebody", "team")] == ["team", "", "", ""]
    assert [keys.residency_of(tenant) for tenant in ("weighty", "acme", "somebody")] == [("eu", "us"), (), ()]
    assert parse_keys("").keys == {}


def test_a_weight_alone_does_not_lift_the_default_limits():
    assert parse_keys(FULL).limits_of("weighty") == TenantLimits(requests_per_minute=60)


def test_a_key_is_found_by_its_digest_alone():
    key = new_key()
    assert len(key) > 40
    assert key != new_key()
    assert digest_of_key(key) == hashlib.sha256(key.encode()).hexdigest()
    keys = parse_keys(toml_entry(ApiKey(digest_of_key(key), "t")))
    assert keys.find(key).tenant == "t"
    assert keys.find(key[:-1]) is None
    assert keys.find(key + "a") is None
    assert keys.find(digest_of_key(key)) is None


HEAD = f'[[key]]\nsha256 = "{DIGEST}"\ntenant = "t"\n'
BROKEN = {
    "no toml": ("[[key]\n", "not valid TOML: Expected ']]' at the end of an array declaration (at line 1, column 6)"),
    "no toml below": (HEAD + "priority = \n", "not valid TOML: Invalid value (at line 4, column 12)"),
    "unknown table": ("[[keys]]\n", "Object contains unknown field `keys`; did you mean key?"),
    "unknown field": (HEAD + "modles = []\n", "key[0]: Object contains unknown field `modles`; did you mean models?"),
    "unknown limit": (HEAD + "[tenant.t]\nrpm = 5\n", "tenant.t: Object contains unknown field `rpm`"),
    "no tenant": (f'[[key]]\nsha256 = "{DIGEST}"\n', "key[0]: Object missing required field `tenant`"),
    "second key": (HEAD + "\n[[key]]\n# a comment\ntenant = 5\n", "key[1].tenant: Expected `str`, got `int`"),
    "upper case": (HEAD.replace("a" * 64, "A" * 64), "key[0].sha256: Expected `str` matching regex '^[0-9a-f]{64}"),
    "line break": (HEAD.replace("a" * 64, "a" * 64 + "\\n"), "key[0].sha256: Expected `str` matching regex"),
    "the key itself": (HEAD.replace("a" * 64, "tandem-secret"), "key[0].sha256: Expected `str` matching regex"),
    "twice": (HEAD + HEAD, "key[1].sha256: an earlier key has it"),
    "tenant": (HEAD.replace('"t"', '"a b"'), "key[0].tenant: Expected `str` matching regex '^[A-Za-z0-9_.:-]{1,64}"),
    "class": (HEAD + 'service_class = "urgent"\n', "key[0].service_class: Expected `str` matching regex '^(critical|"),
    "priority": (HEAD + "priority = 101\n", "key[0].priority: Expected `int` <= 100"),
    "priority below": (HEAD + "priority = -101\n", "key[0].priority: Expected `int` >= -100"),
    "priority bool": (HEAD + "priority = true\n", "key[0].priority: Expected `int`, got `bool`"),
    "admin": (HEAD + 'admin = "yes"\n', "key[0].admin: Expected `bool`, got `str`"),
    "fallback": (HEAD + "allow_fallback = 1\n", "key[0].allow_fallback: Expected `bool`, got `int`"),
    "local time": (HEAD + "expires = 2027-01-31T00:00:00\n", "Expected `datetime` with a timezone component"),
    "a day": (HEAD + "expires = 2027-01-31\n", "key[0].expires: Expected `datetime | null`, got `date`"),
    "no models": (HEAD + "models = []\n", "key[0].models: Expected `array` of length >= 1"),
    "some models": (HEAD + 'models = "some"\n', "key[0].models: Invalid enum value 'some'"),
    "name": (HEAD + "name = 'a\"b'\n", "key[0].name: Expected `str` matching regex"),
    "negative": (HEAD + "\n[tenant.t]\nconcurrency = -1\n", "tenant.t.concurrency: Expected `int` >= 0"),
    "float": ("[default_limits]\ntokens_per_minute = 1.5\n", "default_limits.tokens_per_minute: Expected `int | null`"),
    "key is a table": ('[key]\ntenant = "t"\n', "key: Expected `array`, got `object`"),
    "weight 0": (HEAD + "\n[tenant.t]\nweight = 0\n", "tenant.t.weight: Expected `float` >= 0.001"),
    "weight below 0": ("[tenant.t]\nweight = -1.5\n", "tenant.t.weight: Expected `float` >= 0.001"),
    "weight nan": ("[tenant.t]\nweight = nan\n", "tenant.t.weight: Expected `float` >= 0.001"),
    "weight inf": ("[tenant.t]\nweight = inf\n", "tenant.t.weight: Expected `float` <= 1000.0"),
    "weight text": ('[tenant.t]\nweight = "3"\n', "tenant.t.weight: Expected `float`, got `str`"),
    "weight bool": ("[tenant.t]\nweight = true\n", "tenant.t.weight: Expected `float`, got `bool`"),
    "weight of all": ("[default_limits]\nweight = 2\n", "default_limits: Object contains unknown field `weight`"),
    "no name to share": ('[tenant.t]\nshare_cache = ""\n', "tenant.t.share_cache: Expected `str` matching regex"),
    "share with all": ("[tenant.t]\nshare_cache = true\n", "tenant.t.share_cache: Expected `str`, got `bool`"),
    "no region": ("[tenant.t]\nresidency = []\n", "tenant.t.residency: Expected `array` of length >= 1"),
    "region": ('[tenant.t]\nresidency = ["e u"]\n', "tenant.t.residency[0]: Expected `str` matching regex"),
    "region is a text": ('[tenant.t]\nresidency = "eu"\n', "tenant.t.residency: Expected `array`, got `str`"),
    "tenant is a number": ("tenant = 5\n", "tenant: Expected `object`, got `int`"),
    "name of a tenant": ('[tenant."a b"]\n', "tenant: 'a b' must match"),
    "nested too deep": ("key = " + "[" * 5000 + "]" * 5000, "not valid TOML"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_said_with_file_key_and_rule(case, tmp_path):
    text, words = BROKEN[case]
    file = tmp_path / "keys.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert caught.value.message.startswith(f"{file}: ")
    assert words in caught.value.message
    assert "secret" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_keys(tmp_path / "missing.toml")
    (tmp_path / "latin").write_bytes(b'[[key]]\nname = "\xe4"\n')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_keys(tmp_path / "latin")
    with pytest.raises(ConfigError):
        read_keys(tmp_path)


@given(st.text(max_size=200) | st.lists(st.sampled_from(FULL.splitlines()), max_size=12).map("\n".join))
def test_any_text_is_read_or_refused(text):
    try:
        keys = parse_keys(text)
    except ConfigError:
        return
    assert all(key.sha256 == digest for digest, key in keys.keys.items())


@given(
    key=st.builds(
        ApiKey,
        sha256=st.text("0123456789abcdef", min_size=64, max_size=64),
        tenant=st.text("azAZ09_.:-", min_size=1, max_size=64),
        name=st.text(st.characters(exclude_characters='"\\', exclude_categories=("Cc", "Cs")), max_size=128),
        models=st.none() | st.frozensets(st.text("ab/-.", min_size=1, max_size=9), min_size=1),
        service_class=st.sampled_from(SERVICE_CLASSES),
        priority=st.integers(-100, 100),
        allow_fallback=st.booleans(),
        is_admin=st.booleans(),
        expires_s=st.none() | st.integers(0, 4_000_000_000).map(float),
    )
)
def test_an_entry_is_read_as_it_was_meant(key):
    assert parse_keys(toml_entry(key)).keys == {key.sha256: key}


@given(
    name=st.text("azAZ09_.:-", min_size=1, max_size=64),
    tenant=st.builds(
        Tenant,
        st.none()
        | st.builds(
            TenantLimits, *[st.none() | st.integers(0, 10**9)] * 2, concurrency=st.none() | st.integers(0, 9)
        ).filter(lambda limits: not limits.is_unlimited),
        st.sampled_from([0.001, 0.5, 1.0, 3.0, 1000.0]) | st.floats(0.001, 1000),
        st.just("") | st.text("azAZ09_.:-", min_size=1, max_size=64),
    ).filter(lambda tenant: tenant != Tenant()),
)
def test_a_tenant_is_read_as_it_was_meant(name, tenant):
    assert parse_keys(toml_tenant(name, tenant)).tenants == {name: tenant}


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(HEAD)
    return path


async def test_a_change_is_taken_and_a_broken_one_is_not(key_file, caplog):
    changes = []
    followed = KeyFile(key_file, on_change=lambda: changes.append(1))
    key_file.write_text(HEAD.replace('"t"', '"u"'))
    await followed.check()
    assert followed.keys.keys[DIGEST].tenant == "u"
    key_file.write_text(HEAD + "nonsense = 1\n")
    for _ in range(3):
        await followed.check()
    assert followed.keys.keys[DIGEST].tenant == "u"
    assert "unknown field `nonsense`" in followed.error.message
    records = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(records) == 1
    assert "unknown field `nonsense`" in records[0].error
    key_file.unlink()
    await followed.check()
    assert followed.keys.keys[DIGEST].tenant == "u"
    assert "does not exist" in followed.error.message
    key_file.write_text("")
    await followed.check()
    assert followed.keys.keys == {}
    assert followed.error is None
    assert len(changes) == 2


async def test_a_change_within_one_tick_of_the_clock_is_seen(key_file):
    followed = KeyFile(key_file)
    stat = key_file.stat()
    key_file.write_text(HEAD.replace('"t"', '"u"'))
    os.utime(key_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await followed.check()
    assert followed.keys.keys[DIGEST].tenant == "u"


async def test_a_key_is_taken_out_while_all_of_asyncios_threads_are_busy(key_file):
    followed = KeyFile(key_file)
    followed.start()
    may_end = threading.Event()
    busy = [asyncio.create_task(asyncio.to_thread(may_end.wait, HANG_LIMIT_S)) for _ in range(100)]
    await asyncio.sleep(0)
    key_file.write_text("")
    try:
        async with asyncio.timeout(2.0 + 8.0):  # two seconds, and what a busy machine takes
            while followed.keys.keys:  # noqa: ASYNC110 - the condition is another task's state
                await asyncio.sleep(0.01)
    finally:
        may_end.set()
        await asyncio.gather(*busy)
        await followed.close()


async def test_a_replaced_file_is_seen_within_two_seconds(key_file, tmp_path):
    followed = KeyFile(key_file)
    followed.start()
    other = tmp_path / "new.toml"
    other.write_text(HEAD.replace('"t"', '"u"'))
    other.replace(key_file)
    async with asyncio.timeout(HANG_LIMIT_S):
        while followed.keys.keys[DIGEST].tenant != "u":  # noqa: ASYNC110 - the file is looked at once a second
            await asyncio.sleep(0.02)
    assert followed.num_checks <= 3
    await followed.close()


def is_told_of_no_key(caplog):
    return "every call is refused" in caplog.text


async def test_a_file_without_a_key_is_warned_of_at_the_start_and_when_the_last_one_goes(key_file, caplog):
    followed = KeyFile(key_file)
    assert not is_told_of_no_key(caplog)
    key_file.write_text("")
    await followed.check()
    assert is_told_of_no_key(caplog)
    caplog.clear()
    KeyFile(key_file)
    assert is_told_of_no_key(caplog)


def test_a_broken_file_stops_the_start(key_file):
    key_file.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="unknown field `x`"):
        KeyFile(key_file)
