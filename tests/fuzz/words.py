"""Values, names and paths of which the inputs are made: right ones, nearly right ones and nonsense."""

from __future__ import annotations

from typing import Any

MAX_TOKENS = 3
CONTEXT_TOKENS = 2048

JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 0.0, -0.0,
    0.5, 1.5, -2.5, 1e308, -1e308, 1e-320, 2**31, 2**63, -(2**63) - 1, 10**40,
    "", " ", "a", "\x00", "�", "日本語", "🙂" * 20, "\ud800", "x" * 300, "x" * 70_000, "null", "1", "-1", "NaN",
    [], [[]], [None], [1, "a"], [1.5], [-1], [10**12], ["", ""], ["a"] * 300, [[1, 2], [3]], list(range(100)),
    {}, {"": ""}, {"1": 1}, {"a": {"b": {}}}, {"role": "user"}, {"type": "json_object"}, {"type": "text"},
    [{"role": "user", "content": "a"}], [{"type": "reasoning"}], [{"type": "function_call", "call_id": "1"}],
    [{"type": "function", "name": "f"}], {"format": {"type": "json_object"}}, {"effort": "none"},
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 5, 19, 20, 21, 100, 101, -100, 10**9, 2**31 - 1, 2**32, 0.1, 0.99, 1.01, 2.01, -2.01, 1e-9)
MEMBERS = (
    "model", "max_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "seed", "stop", "stop_token_ids",
    "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "stream", "stream_options",
    "priority", "service_class", "tenant", "return_token_ids",
    "user", "cache_salt", "allow_fallback", "prompt", "logprobs",
    "best_of", "messages", "max_completion_tokens", "top_logprobs", "echo", "suffix", "tools", "tool_choice",
    "response_format", "functions", "metadata", "store", "parallel_tool_calls", "nonsense",
    "input", "instructions", "max_output_tokens", "text", "reasoning", "include", "previous_response_id", "background",
    "conversation", "truncation", "prompt_cache_key", "safety_identifier", "service_tier", "max_tool_calls",
    "system", "stop_sequences", "thinking", "output_config", "output_format", "chat_template_kwargs", "mcp_servers",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "return_token_strs", "tokens", "items",
)  # fmt: skip
HEADERS = (
    "host", "origin", "sec-fetch-site", "access-control-request-method", "trailer", "connection", "upgrade",
    "authorization", "content-type", "accept", "x-request-id", "idempotency-key", "last-event-id", "x-session-id",
    "x-service-class", "x-allow-fallback", "traceparent", "tracestate", "expect", "x-forwarded-for", "cookie", "range",
    "x-request-timeout-ms", "x-slo-ttft-ms", "x-tandem-prefill",
)  # fmt: skip
HEADER_VALUES = (
    "", " ", "x", "x" * 255, "x" * 256,
    "x" * 5000, "Bearer", "Bearer x", "Basic eDp4", "application/json", "text/plain",
    "multipart/form-data; boundary=x", "0", "-1", "99999999999999999999", "00-" + "0" * 32 + "-" + "0" * 16 + "-01",
    "100-continue", "critical", "batch", "true", "maybe", "a\tb", "\xe9\xff", "%00", "../..", "1:2", "bytes=0-1",
)  # fmt: skip
HOSTS = (
    "localhost", "127.0.0.1:8000", "[::1]", "", " ", ":", ":8000", "evil.example", "evil.example:8000", "localhost.",
    "localhost.evil.example", "[evil", "[::1", "]", "a@localhost", "*", "x" * 300, "\xe9", "127.0.0.1.nip.io", "0177.1",
)  # fmt: skip
ORIGINS = (
    "http://localhost", "https://evil.example", "null", "", "://", "http://", "localhost", "http://localhost:99999",
    "file://", "chrome-extension://a", "x" * 3000, "http://localhost, http://localhost", "\xff", "https://[::1]:443",
)  # fmt: skip
SITES = ("cross-site", "same-site", "same-origin", "none", "", "x")
TRAILERS = (
    b"", b"a: b\r\n", b"Authorization: Bearer x\r\n", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n",
    b"X-Request-Id: a b\r\n", b"a: b\r\n" * 90, b"a: b\r\n" * 3000, b"a: " + b"b" * 20_000 + b"\r\n", b"no colon\r\n",
    b" folded\r\n", b"\x00: b\r\n", b"Host: evil.example\r\n" * 2, b"a: b\n", b"\xff: \xff\r\n",
)  # fmt: skip
EXTENSIONS = (
    b"", b";a", b";a=b", b';a="b"', b';a="b', b";" * 50, b";a=" + b"b" * 20_000, b" ", b";\x00", b";a=b;c=d", b";\xff",
)  # fmt: skip
ANSWERING_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Those that answer with tokens."""
ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Those whose errors are Anthropic's."""
API_PATHS = (
    *ANSWERING_PATHS, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions/input_tokens",
    "/v1/batches", "/v1/conversations", "/v1/conversations/x/items", "/v1/chat/completions/x",
    "/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/score", "/rerank",
    "/tokenize", "/detokenize", "/apply-template",
)  # fmt: skip
BLOCKS: tuple[Any, ...] = (
    {"type": "text", "text": "a"}, {"type": "text"}, {"type": "image", "source": {}}, {"type": "thinking"},
    {"type": "tool_use", "id": "1", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "1"}, {}, 1,
    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}, {"type": None},
)  # fmt: skip
"""Blocks of messages, right and wrong ones, as Anthropic's API has them."""
PATHS = (
    "/v1/responses/x", "/v1/responses/x/cancel", "/v1/responses/x/input_items", "/v1/responses/x?stream=true",
    "/v1/conversations/x", "/v1/conversations/x/items", "/v1/conversations/x/items/y", "/v1/conversations",
    "/v1/conversations/x/items?order=x", "/v1/chat/completions/x", "/v1/chat/completions/x/messages",
    "/v1/chat/completions?metadata[a]=b", "/v1/chat/completions?metadata[", "/v1/chat/completions?after=x",
    "/v1/responses/x?starting_after=-1", "/v1/responses/x/input_items?order=x",
    "/v1/files", "/v1/files/x", "/v1/files/x/content", "/v1/files?limit=x", "/v1/batches", "/v1/batches/x",
    "/v1/batches/x/cancel", "/v1/batches?after=x", "/tokenize", "/detokenize", "/openapi.json", "/dashboard",
    "/dashboard/app.js", "/dashboard/data", "/dashboard/events", "/dashboard/requests/1",
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/embeddings",
    "/v1/responses", "/v1/responses/x", "/v1/responses/input_tokens", "/v1/", "/v1", "/", "//",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/messages/x", "/apply-template", "/version", "/tokenizer_info",
    "/tokenizer_info?x", "/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/models",
    "/metrics/targets", "/dashboard/requests",
    "/health", "/health?verbose", "/ready", "/metrics", "/cluster", "/cluster/requests/x", "/docs",
    "/../etc/passwd", "/v1/models/%00", "/v1/models/tandem-demo",
    "/v1/completions/", "/v1/completions?x=" + "y" * 2000, "/" + "a" * 9000, "/%ff%fe", "/v1/chat/completions#x", "*",
)  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "get", "FOO", "POST\t", "")
METHODS_OF_GRPC = (
    "Generate", "Generate", "Generate", "GenerateUnary", "Chat", "Chat", "ChatUnary", "Resume", "Tokenize",
    "Detokenize", "Embed", "ListModels", "Nothing", "Cluster/GetTopology", "Cluster/WatchTopology", "Cluster/Drain",
    "Cluster/Locate", "Cluster/SetPrefill",
)  # fmt: skip
SCHEMAS = (
    '{"type": "object"}', '{"type": "object", "properties": {"a": {"type": "integer"}}}', "{}", "", "null", "1",
    '{"type": 5}', '{"$ref": "#"}', '{"pattern": "("}', "[" * 5000, '"\\ud800"', "{", "true",
)  # fmt: skip
"""Texts that are JSON schemas, nearly, or not at all."""
