"""What settings mean to the gateway's parts, where that is more than a copy."""

from dataclasses import replace
from pathlib import Path

from gateway.config import GatewayConfig
from gateway.operator_choices import health_limits, policies, targets

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
