"""What vLLM's workers refuse at their start and of requests, each in a sentence. Knows nothing of vLLM itself."""

from services.engine.steps.sequence import Sampling
from services.runtime.errors import ConfigError, NotOffered
from worker.config import WorkerConfig

_SETTINGS = {
    "pipeline_parallel": "its pages are of ranks that share every layer",
    "host_tier_memory": "vLLM keeps cached pages in its KV pool alone",
    "swap_memory": "vLLM computes preempted sequences again",
    "speculative": "its answers could not be resumed with the same choices",
    "draft_model": "its answers could not be resumed with the same choices",
}
"""Settings of either worker that vLLM has nothing for, and why."""
_NOTHING = (None, 0, 1, "off")
"""Their values that ask for nothing."""


def refuse_settings(settings: WorkerConfig) -> None:
    """Raises ConfigError for settings that ask for what vLLM's workers do not have."""
    for name, reason in _SETTINGS.items():
        value = getattr(settings, name, None)
        if value not in _NOTHING:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, which --engine vllm does not have: {reason}")


def refuse_request(sampling: Sampling) -> None:
    """Raises NotOffered for what vLLM's workers cannot give."""
    if sampling.prompt_logprobs is not None:
        raise NotOffered(
            "this model is computed with vLLM, which does not report a prompt's log-probabilities here",
            field="prompt_logprobs",
        )
