import importlib.util

import pytest

from services.runtime import extras
from services.runtime.errors import ConfigError


def test_what_is_installed_is_enough() -> None:
    extras.check("worker")


@pytest.mark.parametrize(
    ("missing", "words"),
    [({"torch"}, "needs torch, which is not"), ({"numpy", "xxhash"}, "needs numpy, xxhash, which are")],
)
def test_the_error_names_what_is_missing_and_how_to_install_it(monkeypatch, missing, words) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    with pytest.raises(ConfigError, match=words) as caught:
        extras.check("worker")
    assert "pip install 'tandem-serving[worker]'" in caught.value.message
