from pathlib import Path

import pytest

from services.runtime import config
from services.runtime.errors import ConfigError
from worker.config import WorkerConfig

REQUIRED = ["--id", "prefill-0", "--model", "/models/some"]


def test_settings_have_sane_defaults_and_exclude_each_other() -> None:
    settings = config.load(WorkerConfig, REQUIRED, prog="test", environ={})
    assert (settings.host, settings.port, settings.page_size, settings.chunk_tokens) == ("127.0.0.1", 0, 16, 512)
    assert settings.address(7) == "127.0.0.1:7"
    assert (settings.drain_timeout, settings.step_timeout) == (None, 120.0)
    given = config.load(WorkerConfig, [*REQUIRED, "--drain-timeout=2.5", "--step-timeout=0"], prog="test", environ={})
    assert (given.drain_timeout, given.step_timeout) == (2.5, 0.0)
    with pytest.raises(ConfigError, match="--drain-timeout"):
        config.load(WorkerConfig, [*REQUIRED, "--drain-timeout=-1"], prog="test", environ={})
    assert settings.record_fields(incarnation="a" * 32)["model"] == "some"
    with pytest.raises(ConfigError, match="--kv-memory"):
        config.load(WorkerConfig, [*REQUIRED, "--kv-pages=5", "--kv-memory=1GiB"], prog="test", environ={})
    with pytest.raises(ConfigError, match="--id"):
        config.load(WorkerConfig, ["--id", "Not An Id", "--model", "x"], prog="test", environ={})


def test_adapters_come_in_several_flags_or_one_and_need_vllm() -> None:
    flags = [*REQUIRED, "--engine=vllm", "--lora=sql=a", "--lora", "law=b,team/x=c"]
    lora = config.load(WorkerConfig, flags, prog="test", environ={}).lora
    assert lora == {"sql": Path("a"), "law": Path("b"), "team/x": Path("c")}
    with pytest.raises(ConfigError, match="adapters sql, and its engine is native"):
        config.load(WorkerConfig, [*REQUIRED, "--lora=sql=a"], prog="test", environ={})
    with pytest.raises(ConfigError, match="--lora is 'sql' but must be NAME=DIR"):
        config.load(WorkerConfig, [*REQUIRED, "--engine=vllm", "--lora=sql"], prog="test", environ={})
