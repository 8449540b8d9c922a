"""Makes of schemathesis' good bodies ones that go together: each member keeps to the document, all of them may not.

Loaded by schemathesis itself, in its own process. What was made to be refused is left alone.
"""

import re
from typing import Any

import schemathesis

MAX_TOKENS = 20
TIMES = ("X-Request-Timeout-Ms", "X-Slo-Ttft-Ms", "X-Slo-Tpot-Ms")
APART = (
    *("best_of", "min_tokens", "model", "response_format", "stop_token_ids", "tool_choice", "tools"),
    *("max_new_tokens", "max_tokens_to_sample", "n_predict", "num_predict", "min_new_tokens", "repeat_penalty"),
    *("stop_sequences", "regex", "ebnf", "grammar", "json_schema", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag", "allowed_token_ids"),
    *("chat_template_kwargs", "enable_thinking", "reasoning_effort", "reasoning", "verbosity"),
)
"""Depend on the model, or on one another in more ways than are worth following here."""


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Changes a case that was made to be accepted."""
    body = case.body
    # A millisecond is allowed, and not enough for any answer.
    for header in TIMES:
        if re.fullmatch(r"[0-9.]+", str(case.headers.get(header, ""))):
            del case.headers[header]
    if isinstance(body, dict) and isinstance(body.get("request_timeout_ms"), int) and body["request_timeout_ms"] > 0:
        del body["request_timeout_ms"]
    if not isinstance(body, dict) or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if not body.keys() & {"prompt", "messages", "tokens"}:
        return
    body = {name: value for name, value in body.items() if name not in APART}
    if "tokens" in body:
        body["tokens"] = [token % 300 for token in body["tokens"]]
    if body.get("prompt") is not None and body.get("messages") is not None:
        del body["messages"]
    # llama.cpp's names of prompt and add_special_tokens, which go with no other of these.
    if body.keys() & {"prompt", "messages", "add_special_tokens"}:
        body.pop("content", None)
    if body.get("content") is None:
        body.pop("add_special", None)
    if isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "hi"}, *body["messages"][1:2]]
        body.pop("add_special_tokens", None)
    if isinstance(body.get("prompt"), list):
        body["prompt"] = "as text"
    if not body.get("stream"):
        body.pop("stream_options", None)
    if body.get("logprobs") is not None:
        body.pop("echo", None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] = MAX_TOKENS
    if body.get("logit_bias"):
        body["logit_bias"] = {"1": 1.0}
    case.body = body
    for header in ("Last-Event-ID", "X-Service-Class"):
        case.headers.pop(header, None)
