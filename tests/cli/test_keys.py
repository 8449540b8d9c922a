"""`tandem keys`: a key is shown once, its entry is good, and a file is checked."""

import re

import pytest

from cli import main
from cli.commands import run_command
from gateway.access.keys import parse_keys
from services.runtime.errors import ConfigError


@pytest.fixture
def new(capsys):
    """Makes a key with flags; returns it and its entry."""

    def make(*flags):
        capsys.readouterr()
        assert run_command(["keys", "new", *flags]) == 0
        written = capsys.readouterr()
        shown = re.fullmatch(r"the key, shown only now: (tandem-[A-Za-z0-9_-]{43})\n", written.err)
        assert shown
        assert shown[1] not in written.out
        return shown[1], written.out

    return make


def test_a_new_key_is_good_with_its_entry(new):
    key, entry = new("--tenant", "acme", "--models", "a,b", "--admin", "--service-class", "critical", "--priority", "9")
    found = parse_keys(entry).find(key)
    assert (found.tenant, found.models, found.is_admin) == ("acme", frozenset({"a", "b"}), True)
    assert (found.service_class, found.priority, found.expires_s) == ("critical", 9, None)
    assert not found.allow_fallback
    assert key != new("--tenant", "acme")[0]
    key, entry = new("--tenant", "acme", "--allow-fallback")
    assert parse_keys(entry).find(key).allow_fallback


def test_entries_can_be_collected_and_checked(tmp_path, capsys, new):
    file = tmp_path / "keys.toml"
    file.write_text("".join(new("--tenant", tenant, "--days", "1")[1] for tenant in ("a", "a", "b")))
    assert main.main(["keys", "check", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "3 keys of 2 tenants, 0 with limits of their own\n"
    file.write_text("nonsense\n")
    assert main.main(["keys", "check", "--file", str(file)]) == 2
    assert "line 1" in capsys.readouterr().err


def test_a_tenant_is_set_and_shown(tmp_path, capsys):
    file = tmp_path / "keys.toml"
    tables = ""
    for flags in (
        ["--tenant", "acme:eu", "--weight", "3", "--share-cache", "team", "--tokens-per-minute", "500"],
        ["--tenant", "b", "--weight", "0.5", "--residency", "us", "--residency", "eu"],
        ["--tenant", "c", "--concurrency", "0", "--requests-per-minute", "7"],
    ):
        assert main.main(["keys", "tenant", *flags]) == 0
        tables += capsys.readouterr().out
    file.write_text(tables)
    assert main.main(["keys", "check", "--file", str(file)]) == 0
    assert capsys.readouterr().out == (
        "0 keys of 0 tenants, 2 with limits of their own\n"
        "acme:eu: weight 3, tokens_per_minute 500, shares its cache as team\n"
        "b: weight 0.5, default limits, held to the regions eu and us\n"
        "c: weight 1, requests_per_minute 7, concurrency 0\n"
    )


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["old"],
        ["new"],
        ["new", "--tenant", "a b"],
        ["new", "--tenant", "a", "--name", 'a"b'],
        ["new", "--tenant", "a", "--models", "a b"],
        ["new", "--tenant", "a", "--days", "0"],
        ["tenant"],
        ["tenant", "--tenant", "a"],
        ["tenant", "--tenant", "a", "--weight", "1"],
        ["tenant", "--tenant", "a", "--weight", "0"],
        ["tenant", "--tenant", "a", "--weight", "nan"],
        ["tenant", "--tenant", "a", "--share-cache", "a b"],
        ["tenant", "--tenant", "a", "--residency", "e u"],
        ["tenant", "--tenant", "a", "--concurrency", "-1"],
    ],
)
def test_bad_flags(flags):
    with pytest.raises(ConfigError):
        run_command(["keys", *flags])
