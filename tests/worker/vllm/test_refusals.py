"""What is refused with vLLM, and that nothing else is."""

from typing import Any

import pytest

from decode_worker.config import DecodeWorkerConfig
from prefill_worker.config import PrefillWorkerConfig
from services.engine.steps.sequence import Sampling
from services.runtime import config
from services.runtime.errors import ConfigError, NotOffered
from worker.vllm.refusals import refuse_request, refuse_settings

REQUIRED = ("--id=w", "--model=/models/some", "--engine=vllm")


def settings(role: Any, *flags: str) -> Any:
    return config.load(role, [*REQUIRED, *flags], prog="worker", environ={})


@pytest.mark.parametrize("role", [PrefillWorkerConfig, DecodeWorkerConfig])
@pytest.mark.parametrize("flag", ["--pipeline-parallel=2", "--host-tier-memory=1GiB"])
def test_settings_of_both_workers(role: Any, flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag.partition('=')[0]} is .*, which --engine vllm does not have: \w"):
        refuse_settings(settings(role, flag))


@pytest.mark.parametrize("flag", ["--speculative=ngram", "--draft-model=/d", "--swap-memory=1MiB"])
def test_settings_of_decode_workers(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag.partition('=')[0]} is "):
        refuse_settings(settings(DecodeWorkerConfig, flag))


def test_what_asks_for_nothing_is_taken() -> None:
    for role in (PrefillWorkerConfig, DecodeWorkerConfig):
        refuse_settings(settings(role))
        refuse_settings(settings(role, "--host-tier-memory=0", "--tensor-parallel=2", "--page-size=64"))
    refuse_settings(settings(DecodeWorkerConfig, "--speculative=off", "--swap-memory=0"))


def test_requests() -> None:
    refuse_request(Sampling(max_tokens=3, logprobs=5, presence_penalty=1.0))
    with pytest.raises(NotOffered, match="log-probabilities") as refused:
        refuse_request(Sampling(max_tokens=3, prompt_logprobs=0))
    assert refused.value.field == "prompt_logprobs"
