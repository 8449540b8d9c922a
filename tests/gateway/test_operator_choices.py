"""What settings mean to the gateway's parts, where that is more than a copy."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.operator_choices import health_limits, policies, pools, targets
from services.runtime.errors import ConfigError

CONFIG = GatewayConfig(model=Path("here"))


def test_no_limit_is_none_and_not_nothing() -> None:
    assert (targets(CONFIG).ttft_s, targets(CONFIG).itl_s) == (5.0, None)
    assert targets(replace(CONFIG, ttft_target_s=0.0)).ttft_s is None
    assert policies(replace(CONFIG, itl_target_s=0.2)).room.itl_s == 0.2
    assert policies(CONFIG).room.itl_s is None


def test_the_target_is_the_limit_of_the_slowest_first_tokens_unless_another_is_given() -> None:
    assert health_limits(CONFIG).ttft_p99_s == 5.0
    assert health_limits(replace(CONFIG, ttft_target_s=0.0)).ttft_p99_s is None
    assert health_limits(replace(CONFIG, health_max_ttft_s=1.5)).ttft_p99_s == 1.5
    assert health_limits(replace(CONFIG, health_max_ttft_s=0.0)).ttft_p99_s is None


def test_a_mistake_in_the_pools_file_names_file_and_key(tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    with pytest.raises(ConfigError, match=r"pools\.toml does not exist"):
        pools(replace(CONFIG, pools=file))
    file.write_text('[[pool]]\nname = "slow"\n')
    with pytest.raises(ConfigError, match=r"pools\.toml: pool\[0\]: classes or min_prompt_tokens"):
        pools(replace(CONFIG, pools=file))
    assert not pools(CONFIG)
