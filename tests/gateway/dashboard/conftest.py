"""Workers and keys for what the dashboard shows."""

from typing import Any

import pytest

from gateway.access.keys import digest_of_key

ADMIN, PLAIN = "tandem-" + "a" * 43, "tandem-" + "b" * 43


@pytest.fixture
def pair(pair_type: Any, tokenizer: Any) -> Any:
    return pair_type([*tokenizer.encode("hello world, naïve café end", add_special_tokens=False).ids, 1])


@pytest.fixture
def keys(tmp_path: Any) -> Any:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[key]]\nsha256 = "{digest_of_key(ADMIN)}"\ntenant = "ops"\nadmin = true\n'
        f'[[key]]\nsha256 = "{digest_of_key(PLAIN)}"\ntenant = "acme"\n'
    )
    return path
