"""Keeps requests to few tokens, so that a response that takes long is a hang and not a long response."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.message import DecodeError

from protos import inference_pb2
from tests.fuzz.words import ANSWERING_PATHS, CONTEXT_TOKENS, MAX_TOKENS


def limits_of(path: str) -> tuple[str, ...]:
    """Returns the members of a request to this path that limit its tokens."""
    return ("max_output_tokens",) if path == "/v1/responses" else ("max_tokens", "max_completion_tokens")


def bound_json(path: str, body: dict[str, Any]) -> None:
    """Makes a request that may be valid one for few tokens."""
    if path not in ANSWERING_PATHS:
        return
    limits = limits_of(path)
    for name in limits:
        value = body.get(name, "absent")
        if isinstance(value, int | float) and not isinstance(value, bool) and MAX_TOKENS < value <= CONTEXT_TOKENS:
            body[name] = MAX_TOKENS
    if all(body.get(name) is None for name in limits):
        body[limits[0]] = 1
    if isinstance(body.get("n"), int) and body["n"] > 20:
        body["n"] = 10**6


def is_bounded(path: str, data: bytes) -> bool:
    """Returns whether a body is no valid request for many tokens."""
    if path not in ANSWERING_PATHS:
        return True
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return True
    if not isinstance(body, dict):
        return True
    limit = body.get(limits_of(path)[0])
    return isinstance(limit, int) and limit <= MAX_TOKENS


def bound_message(message: Any) -> None:
    """Makes a gRPC request one for few tokens."""
    if isinstance(message, inference_pb2.GenerateRequest | inference_pb2.ChatRequest):
        sampling = message.sampling
        if not sampling.HasField("max_tokens") or MAX_TOKENS < sampling.max_tokens <= CONTEXT_TOKENS:
            sampling.max_tokens = MAX_TOKENS


_GENERATING = {
    "Generate": inference_pb2.GenerateRequest,
    "GenerateUnary": inference_pb2.GenerateRequest,
    "Chat": inference_pb2.ChatRequest,
    "ChatUnary": inference_pb2.ChatRequest,
}


def bounded_bytes(data: bytes, method: str) -> bytes:
    """Returns the bytes. If they are a request, it is one for few tokens."""
    kind: Any = _GENERATING.get(method)
    if kind is None:
        return data
    try:
        message = kind.FromString(data)
    except DecodeError:
        return data
    bound_message(message)
    return message.SerializeToString()
