"""Clients of Tandem's gRPC API: `AsyncClient` for asyncio, `Client` for threads, and the plain data both speak."""

from tandem_client.aio import AsyncAnswerStream, AsyncClient, AsyncStream
from tandem_client.blocking import AnswerStream, Client, Stream
from tandem_client.connections import Tls
from tandem_client.errors import (
    AlreadyExists,
    ClientClosed,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    RateLimited,
    RequestCancelled,
    ServerError,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from tandem_client.retries import RetryPolicy
from tandem_client.values import (
    Answer,
    Delta,
    FinishReason,
    GpuHealth,
    ModelInfo,
    Pages,
    Request,
    TokenLogprobs,
    TopLogprob,
    Topology,
    Usage,
    Worker,
)

__all__ = [
    "AlreadyExists",
    "Answer",
    "AnswerStream",
    "AsyncAnswerStream",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClientClosed",
    "DeadlineExceeded",
    "Delta",
    "FinishReason",
    "GpuHealth",
    "InvalidRequest",
    "ModelInfo",
    "NotFound",
    "Pages",
    "PermissionDenied",
    "RateLimited",
    "Request",
    "RequestCancelled",
    "RetryPolicy",
    "ServerError",
    "Stream",
    "TandemError",
    "Tls",
    "TokenLogprobs",
    "TopLogprob",
    "Topology",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "Worker",
]
