"""The engine in a program of one's own, without a server: `LLM` and `AsyncLLM`, as vLLM's users know them."""

from tandem.llm import LLM, AsyncLLM
from tandem.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from tandem.params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
