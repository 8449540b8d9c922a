"""Requests that are nearly right, for every public JSON endpoint: parameters, tools, schemas, messages, items, and ids.

They get further than nonsense does: most are accepted, and use what earlier ones have stored.
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from services.runtime.sampling import PARAMETERS
from tests.fuzz.words import JUNK, MAX_TOKENS, NUMBERS

MAX_IDS = 64
"""The most ids of a kind that are remembered."""
_ID = re.compile(rb'"id": ?"((resp|conv|file|batch|chatcmpl|msg|call|fc|rs)[-_][A-Za-z0-9_-]{1,80})"')
TEXTS = (
    "a", "", " ", "Hello, world.", "def add(a, b):\n    return a + b\n", "日本語 🙂", "<|end|>\n<|system|>\nx",
    "<think>a</think>b", "<｜User｜>", '{"a": 1}', "\x00\x1b[31m", "a\r\nb", "word " * 300, "x" * 3000, "<|",
    "\u202e\ufeff\ue000", "null",
)  # fmt: skip
NAMES = ("f", "get_weather", "a.b", "a-b", "x" * 64, "x" * 65, "", "f g", "日")
KEYS = ("a", "b", "city", "", "$ref", "é", "x" * 100)


class Call(NamedTuple):
    """One request with a JSON body, or with none."""

    method: str
    path: str
    body: Any = None


class Plausible:
    """Draws requests. Remembers the ids that `learn` finds in responses, for later requests."""

    def __init__(self, one: random.Random) -> None:
        self._one = one
        self._ids: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MAX_IDS))

    def learn(self, body: bytes) -> None:
        """Remembers the ids in a response."""
        for found in _ID.finditer(body):
            self._ids[found[2].decode()].append(found[1].decode())

    def draw(self) -> Call:
        """Returns the next request; one in five has a member that is nonsense."""
        draws: tuple[Callable[[], Call], ...] = (
            self._completion, self._chat, self._chat, self._response, self._response, self._message, self._conversation,
            self._items, self._vectors, self._tokens, self._batch, self._stored, self._stored, self._stored,
        )  # fmt: skip
        call = self._one.choice(draws)()
        if isinstance(call.body, dict) and call.body and self._one.random() < 0.2:
            self._spoil(call.body)
        return call

    def rows(self) -> str:
        """Returns a file of a batch: requests to the endpoints that batches may have."""
        rows = []
        for number in range(self._one.choice([1, 1, 2, 5])):
            call = self._one.choice([self._completion, self._chat, self._response, self._vectors])()
            call.body.pop("stream", None)
            custom_id = self._one.choice([str(number), "a", "", "x" * 600])
            row = {"custom_id": custom_id, "method": "POST", "url": call.path, "body": call.body}
            rows.append(json.dumps(row) if self._one.random() < 0.9 else self._one.choice(["{", "1", "", "null"]))
        return "\n".join(rows)

    # --- endpoints that generate ---

    def _completion(self) -> Call:
        prompt = self._one.choice([self._text(), [1, 2, 3], [self._text(), self._text()], [[1], [2, 3]]])
        body = {"prompt": prompt, "max_tokens": self._few(), **self._parameters(), **self._stream()}
        self._maybe(body, "echo", lambda: True)
        self._maybe(body, "suffix", self._text)
        self._maybe(body, "logprobs", lambda: self._one.randint(-1, 21))
        return Call("POST", "/v1/completions", body)

    def _chat(self) -> Call:
        body: dict[str, Any] = {"messages": self._messages(), **self._parameters(), **self._stream()}
        body[self._one.choice(["max_tokens", "max_completion_tokens"])] = self._few()
        self._maybe(body, "tools", self._tools)
        self._maybe(body, "tool_choice", self._tool_choice)
        self._maybe(body, "response_format", self._format)
        self._maybe(body, "store", lambda: True)
        self._maybe(body, "metadata", self._metadata)
        self._maybe(body, "logprobs", lambda: True)
        self._maybe(body, "top_logprobs", lambda: self._one.randint(0, 21))
        self._maybe(body, "parallel_tool_calls", lambda: self._one.random() < 0.5)
        self._maybe(
            body, "chat_template_kwargs", lambda: {self._one.choice(KEYS): self._one.choice([True, 1, "a", {}])}
        )
        self._maybe(body, "reasoning_effort", lambda: self._one.choice(["low", "none", "much"]))
        return Call(
            "POST", self._one.choice(["/v1/chat/completions"] * 9 + ["/v1/chat/completions/input_tokens"]), body
        )

    def _response(self) -> Call:
        body: dict[str, Any] = {"input": self._one.choice([self._text, self._input_items])()}
        body |= {"max_output_tokens": self._few(), **self._parameters(), **self._stream()}
        self._maybe(body, "instructions", self._text)
        self._maybe(body, "tools", lambda: [{"type": "function", **tool["function"]} for tool in self._tools()])
        self._maybe(body, "tool_choice", lambda: self._one.choice(["auto", "required", "none", {"type": "function"}]))
        self._maybe(body, "text", lambda: {"format": self._one.choice([{"type": "text"}, self._flat_format()])})
        self._maybe(body, "store", lambda: self._one.random() < 0.5)
        self._maybe(body, "background", lambda: True)
        self._maybe(body, "previous_response_id", lambda: self._id("resp"))
        self._maybe(body, "conversation", lambda: self._one.choice([self._id("conv"), {"id": self._id("conv")}]))
        self._maybe(body, "metadata", self._metadata)
        self._maybe(body, "truncation", lambda: self._one.choice(["auto", "disabled", "x"]))
        self._maybe(body, "include", lambda: self._one.choice([[], ["message.output_text.logprobs"], ["x"]]))
        self._maybe(body, "reasoning", lambda: {"effort": self._one.choice(["low", "none", "x"])})
        return Call("POST", self._one.choice(["/v1/responses"] * 9 + ["/v1/responses/input_tokens"]), body)

    def _message(self) -> Call:
        body: dict[str, Any] = {"messages": [self._anthropic_message() for _ in range(self._one.randint(1, 4))]}
        counts = self._one.random() < 0.2
        body |= {} if counts else {"max_tokens": self._few(), **self._stream()}
        self._maybe(body, "system", lambda: self._one.choice([self._text(), [{"type": "text", "text": self._text()}]]))
        self._maybe(
            body,
            "tools",
            lambda: [{"name": self._one.choice(NAMES), "input_schema": self._schema(3)} for _ in range(2)],
        )
        self._maybe(body, "tool_choice", lambda: {"type": self._one.choice(["auto", "any", "tool", "none", "x"])})
        self._maybe(body, "stop_sequences", lambda: [self._text()])
        self._maybe(
            body, "thinking", lambda: {"type": self._one.choice(["enabled", "disabled"]), "budget_tokens": 1024}
        )
        return Call("POST", "/v1/messages/count_tokens" if counts else "/v1/messages", body)

    # --- endpoints that do not ---

    def _conversation(self) -> Call:
        body: dict[str, Any] = {}
        self._maybe(body, "metadata", self._metadata)
        self._maybe(body, "items", self._input_items)
        path = self._one.choice(["/v1/conversations", f"/v1/conversations/{self._id('conv')}"])
        return Call("POST", path, body)

    def _items(self) -> Call:
        return Call(
            "POST", f"/v1/conversations/{self._id('conv')}/items{self._query()}", {"items": self._input_items()}
        )

    def _vectors(self) -> Call:
        texts = [self._text() for _ in range(self._one.randint(0, 4))]
        kind = self._one.choice(["embeddings", "score", "rerank"])
        if kind == "score":
            return Call("POST", self._one.choice(["/v1/score", "/score"]), {"text_1": self._text(), "text_2": texts})
        if kind == "rerank":
            body = {"query": self._text(), "documents": texts, "top_n": self._number()}
            return Call("POST", self._one.choice(["/v1/rerank", "/v2/rerank", "/rerank"]), body)
        body = {"input": self._one.choice([texts, self._text(), [1, 2], [[1], [2]]])}
        self._maybe(body, "dimensions", self._number)
        self._maybe(body, "encoding_format", lambda: self._one.choice(["float", "base64", "x"]))
        return Call("POST", "/v1/embeddings", body)

    def _tokens(self) -> Call:
        path = self._one.choice(["/tokenize", "/apply-template", "/detokenize"])
        if path == "/detokenize":
            return Call("POST", path, {"tokens": [self._one.choice([0, 1, 5, 300, 1999]) for _ in range(5)]})
        if path == "/tokenize" and self._one.random() < 0.3:
            return Call("POST", path, {"prompt": self._text(), "return_token_strs": True})
        body: dict[str, Any] = {"messages": self._messages()}
        self._maybe(body, "tools", self._tools)
        self._maybe(body, "add_generation_prompt", lambda: False)
        self._maybe(body, "continue_final_message", lambda: True)
        return Call("POST", path, body)

    def _batch(self) -> Call:
        endpoint = self._one.choice(
            ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/x"]
        )
        body = {"input_file_id": self._id("file"), "endpoint": endpoint, "completion_window": "24h"}
        self._maybe(body, "metadata", self._metadata)
        return Call("POST", "/v1/batches", body)

    def _stored(self) -> Call:
        """Reads, changes, or deletes something that may be stored."""
        kinds = (
            ("resp", "/v1/responses/{}", ("GET", "GET", "DELETE")),
            ("resp", "/v1/responses/{}/cancel", ("POST",)),
            ("resp", "/v1/responses/{}/input_items", ("GET",)),
            ("chatcmpl", "/v1/chat/completions/{}", ("GET", "POST", "DELETE")),
            ("chatcmpl", "/v1/chat/completions/{}/messages", ("GET",)),
            ("", "/v1/chat/completions", ("GET",)),
            ("conv", "/v1/conversations/{}", ("GET", "GET", "DELETE")),
            ("conv", "/v1/conversations/{}/items", ("GET",)),
            ("conv", f"/v1/conversations/{{}}/items/{self._id('msg')}", ("GET", "DELETE")),
            ("file", "/v1/files/{}", ("GET", "GET", "DELETE")),
            ("file", "/v1/files/{}/content", ("GET",)),
            ("", "/v1/files", ("GET",)),
            ("batch", "/v1/batches/{}", ("GET",)),
            ("batch", "/v1/batches/{}/cancel", ("POST",)),
            ("", "/v1/batches", ("GET",)),
            ("chatcmpl", "/cluster/requests/{}", ("GET",)),
            ("chatcmpl", "/dashboard/requests/{}", ("GET",)),
            ("", "/v1/models/tandem-demo", ("GET",)),
        )
        kind, path, methods = self._one.choice(kinds)
        method = self._one.choice(methods)
        body = {"metadata": self._metadata()} if (kind, method) == ("chatcmpl", "POST") else None
        return Call(method, path.format(self._id(kind)) + self._query(), body)

    # --- parts ---

    def _maybe(self, body: dict[str, Any], name: str, draw: Callable[[], Any]) -> None:
        if self._one.random() < 0.2:
            body[name] = draw()

    def _spoil(self, body: dict[str, Any]) -> None:
        """Makes nonsense of one value, at any depth."""
        value: Any = body
        while isinstance(value, dict | list) and value:
            key = self._one.choice([*value] if isinstance(value, dict) else [*range(len(value))])
            if key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"):
                return
            if not isinstance(value[key], dict | list) or not value[key] or self._one.random() < 0.4:
                value[key] = self._one.choice(JUNK)
                return
            value = value[key]

    def _few(self) -> int:
        return self._one.randint(1, MAX_TOKENS)

    def _text(self) -> str:
        return self._one.choice(TEXTS)

    def _number(self) -> float:
        return self._one.choice(NUMBERS)

    def _id(self, kind: str) -> str:
        known = self._ids.get(kind)
        return self._one.choice(known) if known and self._one.random() < 0.9 else f"{kind}_x"

    def _query(self) -> str:
        if self._one.random() < 0.6:
            return ""
        one = self._one
        queries = (
            f"limit={one.choice([0, 1, 2, 100, 10**9, 'x'])}", f"after={self._id('msg')}", "purpose=batch",
            f"order={one.choice(['asc', 'x'])}", f"starting_after={one.choice([0, 3, -1])}", "stream=true",
            "include[]=x", "metadata[a]=b",
        )  # fmt: skip
        return "?" + "&".join(one.sample(queries, one.randint(1, 3)))

    def _stream(self) -> dict[str, Any]:
        return {"stream": True} if self._one.random() < 0.3 else {}

    def _parameters(self) -> dict[str, Any]:
        """Returns some of the numbers of sampling, at their bounds, beside them, and within."""
        given: dict[str, Any] = {}
        for name, row in PARAMETERS.items():
            if name == "max_tokens" or self._one.random() > 0.12:
                continue
            if row.bounds is None:
                given[name] = False
                continue
            low, high = row.bounds.minimum, row.bounds.maximum
            within = low + (high - low) * self._one.random()
            tiny = [1e-46, 1e-60, 1e-38, low, high] if row.bounds.kind is float else [low, high]
            given[name] = self._one.choice([within if row.bounds.kind is float else int(within), *tiny, self._number()])
        if self._one.random() < 0.1:
            given["logit_bias"] = {str(self._one.randint(0, 1999)): self._one.choice([1e-60, 100, -100, 0.5, 101])}
        if self._one.random() < 0.1:
            given["n"] = self._one.choice([1, 2, 0])
        self._maybe(given, "stop", lambda: self._one.choice(["a", [" "], [], [self._text()]]))
        self._maybe(given, "user", self._text)
        return given

    def _metadata(self) -> dict[str, Any]:
        return {self._one.choice(KEYS): self._one.choice([self._text(), "b", 1])}

    def _content(self) -> Any:
        return self._one.choice([self._text(), [{"type": "text", "text": self._text()}], None, [], self._text()])

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for _ in range(self._one.choice([1, 1, 2, 4])):
            role = self._one.choice(["system", "developer", "user", "user", "assistant", "tool"])
            message: dict[str, Any] = {"role": role, "content": self._content()}
            if role == "assistant":
                arguments = self._one.choice(['{"a": 1}', "{", "", "[]", "null", '{"a": "<|end|>"}'])
                function = {"name": self._one.choice(NAMES), "arguments": arguments}
                self._maybe(message, "tool_calls", lambda: [{"id": "1", "type": "function", "function": function}])  # noqa: B023 - called at once
                self._maybe(message, "reasoning_content", self._text)
            if role == "tool":
                message["tool_call_id"] = self._one.choice(["1", "2", ""])
            self._maybe(message, "name", lambda: self._one.choice(NAMES))
            messages.append(message)
        return messages

    def _tools(self) -> list[dict[str, Any]]:
        tools = []
        for name in self._one.sample(NAMES[:5] if self._one.random() < 0.8 else NAMES, self._one.randint(1, 3)):
            function: dict[str, Any] = {"name": name, "parameters": self._schema(3)}
            self._maybe(function, "description", self._text)
            self._maybe(function, "strict", lambda: True)
            tools.append({"type": "function", "function": function})
        return tools

    def _tool_choice(self) -> Any:
        named = {"type": "function", "function": {"name": self._one.choice(NAMES)}}
        return self._one.choice(["auto", "none", "required", named])

    def _flat_format(self) -> dict[str, Any]:
        return {"type": "json_schema", "name": "x", "schema": self._schema(4), "strict": self._one.random() < 0.5}

    def _format(self) -> dict[str, Any]:
        schema = {"name": "x", "schema": self._schema(4), "strict": self._one.random() < 0.5}
        return self._one.choice(
            [{"type": "json_schema", "json_schema": schema}, {"type": "json_object"}, {"type": "text"}]
        )

    def _schema(self, depth: int) -> dict[str, Any]:
        """Returns a random JSON schema, which may be one that no value keeps to."""
        one = self._one
        kind = one.choice(["object", "array", "string", "integer", "number", "boolean", "null", "enum", "anyOf", "any"])
        if depth == 0 or kind in ("boolean", "null"):
            return {"type": one.choice(["string", "boolean", "null", "integer"])}
        if kind == "object":
            properties = {key: self._schema(depth - 1) for key in one.sample(KEYS, one.randint(0, 3))}
            schema: dict[str, Any] = {"type": "object", "properties": properties}
            self._maybe(schema, "required", lambda: one.sample(KEYS, 2))
            self._maybe(schema, "additionalProperties", lambda: one.choice([False, True, {"type": "string"}]))
            return schema
        if kind == "array":
            schema = {"type": "array", "items": self._schema(depth - 1)}
            self._maybe(schema, "minItems", lambda: one.choice([0, 1, 3, -1, 10**6]))
            self._maybe(schema, "maxItems", lambda: one.choice([0, 2, 10**6]))
            return schema
        if kind == "string":
            schema = {"type": "string"}
            self._maybe(schema, "pattern", lambda: one.choice(["^a+$", "(", "[a-z]{2,5}", "\\d+", "(a|b)*c"]))
            self._maybe(schema, "format", lambda: one.choice(["date", "email", "uuid", "x"]))
            self._maybe(schema, "maxLength", lambda: one.choice([0, 3, 10**9]))
            return schema
        if kind in ("integer", "number"):
            schema = {"type": kind}
            self._maybe(schema, "minimum", self._number)
            self._maybe(schema, "maximum", self._number)
            self._maybe(schema, "multipleOf", lambda: one.choice([2, 0.5, 0]))
            return schema
        if kind == "enum":
            return {"enum": one.sample(["a", 1, None, True, {"a": 1}, 1.5, "<|end|>"], one.randint(0, 3))}
        if kind == "anyOf":
            return {one.choice(["anyOf", "oneOf", "allOf"]): [self._schema(depth - 1) for _ in range(2)]}
        return one.choice([{}, {"$ref": "#"}, {"const": "a"}, {"type": ["string", "null"]}, {"not": {}}])

    def _input_items(self) -> list[dict[str, Any]]:
        one = self._one
        items: list[dict[str, Any]] = []
        for _ in range(one.choice([1, 1, 2, 4])):
            part = {"type": one.choice(["input_text", "output_text", "text"]), "text": self._text()}
            draws: tuple[dict[str, Any], ...] = (
                {
                    "type": "message",
                    "role": one.choice(["user", "assistant", "system", "developer"]),
                    "content": [part],
                },
                {"role": "user", "content": self._text()},
                {"type": "function_call", "call_id": "1", "name": one.choice(NAMES), "arguments": '{"a": 1}'},
                {"type": "function_call_output", "call_id": one.choice(["1", "2"]), "output": self._text()},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": self._text()}]},
                {"type": "item_reference", "id": self._id("msg")},
            )
            items.append(one.choice(draws))
        return items

    def _anthropic_message(self) -> dict[str, Any]:
        one = self._one
        role = one.choice(["user", "user", "assistant"])
        blocks: tuple[dict[str, Any], ...] = (
            {"type": "text", "text": self._text()},
            {"type": "tool_use", "id": "1", "name": one.choice(NAMES), "input": {"a": self._text()}},
            {"type": "tool_result", "tool_use_id": "1", "content": self._text()},
            {"type": "thinking", "thinking": self._text(), "signature": ""},
            {"type": "document", "source": {"type": "text", "data": self._text()}},
        )
        return {"role": role, "content": one.choice([self._text(), one.sample(blocks, one.randint(1, 2))])}
