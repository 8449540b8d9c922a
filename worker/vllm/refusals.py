"""The settings and request options that vLLM workers reject, with one-line reasons. Does not depend on vLLM."""

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
"""Settings of either worker that vLLM does not support, and why."""
_NOTHING = (None, 0, 1, "off")
"""Values that leave a setting disabled."""


def refuse_settings(settings: WorkerConfig) -> None:
    """Raises ConfigError for settings that vLLM workers do not support."""
    for name, reason in _SETTINGS.items():
        value = getattr(settings, name, None)
        if value not in _NOTHING:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, which --engine vllm does not have: {reason}")


def refuse_request(sampling: Sampling) -> None:
    """Raises NotOffered for request options that vLLM workers do not support."""
    if sampling.prompt_logprobs is not None:
        raise NotOffered(
            "this model is computed with vLLM, which does not report a prompt's log-probabilities here",
            field="prompt_logprobs",
        )
