"""What is sent: requests that are nearly right, and bytes that are nothing. One seed, one sequence of inputs.

No input asks for more than `MAX_TOKENS` tokens, so that an answer that takes long is a hang and not a long answer.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protos import cluster_pb2, inference_pb2
from tests.attack import http2
from tests.fuzz.bounds import bound_json, bound_message, bounded_bytes, is_bounded, limits_of
from tests.fuzz.plausible import Plausible
from tests.fuzz.words import (
    ANSWERING_PATHS,
    ANTHROPIC_PATHS,
    API_PATHS,
    BLOCKS,
    EXTENSIONS,
    HEADER_VALUES,
    HEADERS,
    HOSTS,
    JUNK,
    MAX_TOKENS,
    MEMBERS,
    METHODS,
    METHODS_OF_GRPC,
    NUMBERS,
    ORIGINS,
    PATHS,
    SCHEMAS,
    SITES,
    TRAILERS,
)


@dataclass(frozen=True)
class HttpInput:
    """Bytes for one connection.

    `leaves`: the client goes away after this number of bytes of the answer; None: it stays. `may_be_short`: the server
    may rightly wait for more of the request.
    """

    what: str
    data: bytes
    leaves: int | None = None
    may_be_short: bool = False


@dataclass(frozen=True)
class GrpcInput:
    """One call. `leaves`: the client cancels after the first message. `timeout_s`: the call's deadline.

    `num_messages`: how often the message is sent. `frames`: what is sent instead, on a connection that then ends.
    """

    what: str
    method: str
    message: bytes
    metadata: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 20.0
    leaves: bool = False
    num_messages: int = 1
    frames: bytes = b""


@dataclass
class Inputs:
    """Draws inputs; the same seed draws the same ones."""

    seed: int
    _random: random.Random = field(init=False)
    _plausible: Plausible = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._plausible = Plausible(self._random)

    def learn(self, body: bytes) -> None:
        """Takes ids from a response, for later requests. The order of responses changes the inputs."""
        self._plausible.learn(body)

    # --- HTTP ---

    def http(self) -> HttpInput:
        """The next one."""
        kinds: tuple[Callable[[], HttpInput], ...] = (
            self._wrong_member, self._wrong_member, self._wrong_member, self._wrong_bytes, self._wrong_headers,
            self._wrong_line, self._wrong_framing, self._leaving, self._nested, self._wrong_form, self._wrong_chunks,
            self._unfinished, self._pipelined, self._wrong_site, *[self._nearly_right] * 14, self._rows,
        )  # fmt: skip
        return self._random.choice(kinds)()

    def _nearly_right(self) -> HttpInput:
        call = self._plausible.draw()
        text = "" if call.body is None else json.dumps(call.body)
        leaves = 200 if "stream=true" in call.path else None
        data = self._request(call.method, call.path, text.encode("utf-8", "replace"))
        return HttpInput(f"plausible {call.method} {call.path[:40]}", data, leaves=leaves)

    def _rows(self) -> HttpInput:
        """Uploads a file of requests for a batch."""
        part = '--x\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
        parts = part.format("purpose", "", "batch") + part.format(
            "file", '; filename="r.jsonl"', self._plausible.rows()
        )
        headers = [("content-type", "multipart/form-data; boundary=x")]
        body = f"{parts}--x--\r\n".encode("utf-8", "replace")
        return HttpInput("rows", self._request("POST", "/v1/files", body, headers=headers))

    def _body(self) -> tuple[str, dict[str, Any]]:
        one = self._random
        path = one.choice([*ANSWERING_PATHS, *API_PATHS])
        if path == "/v1/batches":
            return path, {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
        if path == "/tokenize" and one.random() < 0.5:
            return path, {"prompt": self._word()}
        if path == "/detokenize":
            return path, {"tokens": one.choices([0, 1, 77, 2**40], k=one.randint(0, 20))}
        common: dict[str, Any] = {limits_of(path)[0]: one.randint(1, MAX_TOKENS), "temperature": one.choice([0, 1])}
        if one.random() < 0.3:
            common["stream"] = True
        if path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/embeddings"):
            return path, {"input": self._word(), **common}
        if path in ("/v1/score", "/score"):
            return path, {"text_1": self._word(), "text_2": [self._word(), self._word()], **common}
        if path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            return path, {"query": self._word(), "documents": [self._word(), {"text": self._word()}], **common}
        if path == "/v1/completions":
            return path, {"prompt": self._word(), **common}
        if path in ("/v1/messages/count_tokens", "/tokenize", "/apply-template"):
            common = {}  # They answer no tokens.
        content: Any = self._word()
        if path in ANTHROPIC_PATHS and one.random() < 0.3:
            content = one.choices(BLOCKS, k=one.randint(0, 3))
        return path, {"messages": [{"role": "user", "content": content}], **common}

    def _wrong_member(self) -> HttpInput:
        path, body = self._body()
        names = []
        for _ in range(self._random.randint(1, 3)):
            name = self._random.choice(MEMBERS)
            names.append(name)
            body[name] = self._random.choice(NUMBERS) if self._random.random() < 0.4 else self._random.choice(JUNK)
            if self._random.random() < 0.1:
                del body[name]
        bound_json(path, body)
        text = json.dumps(body)
        if self._random.random() < 0.05:
            text = text[:-1] + ', "temperature": 1}'
        return HttpInput(f"member {', '.join(names)}", self._request("POST", path, text.encode("utf-8", "replace")))

    def _wrong_bytes(self) -> HttpInput:
        path, body = self._body()
        data = bytearray(json.dumps(body).encode())
        for _ in range(self._random.randint(1, 4)):
            data[self._random.randrange(len(data))] = self._random.choice([0, 0x22, 0x7B, 0x5D, 0x80, 0xFF, 0x5C, 0x2D])
        if self._random.random() < 0.3:
            del data[self._random.randrange(len(data)) :]
        if not is_bounded(path, bytes(data)):
            del data[-1:]
        return HttpInput("bytes", self._request("POST", path, bytes(data)))

    def _wrong_headers(self) -> HttpInput:
        path, body = self._body()
        some = [
            (self._random.choice(HEADERS), self._random.choice(HEADER_VALUES))
            for _ in range(self._random.choice([1, 2, 3, 120]))
        ]
        return HttpInput("headers", self._request("POST", path, json.dumps(body).encode(), headers=some))

    def _wrong_line(self) -> HttpInput:
        method, path = self._random.choice(METHODS), self._random.choice(PATHS)
        version = self._random.choice(["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""])
        data = self._request(method, path, b"", version=version)
        if self._random.random() < 0.2:
            data = bytes(self._random.randrange(256) for _ in range(self._random.randint(1, 200))) + b"\r\n\r\n"
            return HttpInput("random bytes", data, may_be_short=True)
        leaves = 200 if path == "/dashboard/events" else None  # which has no end
        return HttpInput(f"line {method} {path[:40]}", data, leaves=leaves)

    def _wrong_framing(self) -> HttpInput:
        path, body = self._body()
        text = json.dumps(body).encode()
        framing: list[tuple[str, str]] = self._random.choice(
            [
                [("content-length", str(len(text) - 3))],
                [("content-length", "-1")],
                [("content-length", "abc")],
                [("content-length", str(len(text))), ("content-length", "1")],
                [("content-length", str(10**12))],
                [("transfer-encoding", "chunked")],
                [("transfer-encoding", "gzip, chunked")],
                [("transfer-encoding", "chunked"), ("content-length", "5")],
                [],
            ]
        )
        is_short = False
        if framing and framing[0][0] == "transfer-encoding":
            size = self._random.choice(
                [b"%x" % len(text), b"zz", b"-1", b"%x" % (len(text) + 50), b"FFFFFFFFFFFFFFFFF"]
            )
            is_short = size == b"%x" % (len(text) + 50)
            text = size + b"\r\n" + text + b"\r\n0\r\n\r\n"
        head = "".join(f"{name}: {value}\r\n" for name, value in [("host", "localhost"), *framing])
        data = f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + text
        return HttpInput(f"framing {framing}", data, may_be_short=is_short)

    def _wrong_chunks(self) -> HttpInput:
        """A good body in odd chunks, with odd extensions and trailers."""
        one = self._random
        path, body = self._body()
        text = json.dumps(body).encode()
        size = one.choice([1, 2, 7, 100, len(text)])
        chunks = b"".join(
            b"%x%b\r\n%b\r\n" % (len(part), one.choice(EXTENSIONS) if one.random() < 0.1 else b"", part)
            for part in (text[at : at + size] for at in range(0, len(text), size))
        )
        trailers = one.choice(TRAILERS)
        end = b"0%b\r\n%b\r\n" % (one.choice(EXTENSIONS), trailers)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        data = f"{head}transfer-encoding: chunked\r\n\r\n".encode() + chunks + end
        return HttpInput(f"chunks {size} {trailers[:20]!r}", data, may_be_short=True)

    def _unfinished(self) -> HttpInput:
        """A message of which the end does not come, whose sender leaves."""
        if self._random.random() < 0.5:
            given = self._wrong_chunks()
        else:
            path, body = self._body()
            given = HttpInput("body", self._request("POST", path, json.dumps(body).encode()))
        end = self._random.randrange(1, len(given.data))
        return HttpInput(f"unfinished {given.what}", given.data[:end], leaves=0)

    def _pipelined(self) -> HttpInput:
        """Requests in one write, of which a later one may be wrong; the first answer is looked at."""
        probe = self._request("GET", "/health", b"")
        last = self._random.choice([probe, b"\x16\x03\x01", b"GET / HTTP/1.1\r\nx: " + b"a" * 20_000, probe[:-3]])
        return HttpInput("pipelined", probe * self._random.choice([2, 20, 2000]) + last)

    def _wrong_site(self) -> HttpInput:
        one = self._random
        path, body = self._body()
        some = [("origin", one.choice(ORIGINS))] if one.random() < 0.7 else []
        some += [("sec-fetch-site", one.choice(SITES))] if one.random() < 0.5 else []
        some += [("access-control-request-method", "POST")] if one.random() < 0.3 else []
        method = one.choice(["POST", "POST", "OPTIONS", "GET", "DELETE"])
        host = one.choice(HOSTS)
        data = self._request(method, path, json.dumps(body).encode(), headers=some, host=host)
        return HttpInput(f"site {host[:30]} {some}"[:100], data)

    def _leaving(self) -> HttpInput:
        path, body = self._body()
        data = self._request("POST", path, json.dumps({**body, "stream": True}).encode())
        if self._random.random() < 0.3:
            return HttpInput("cut off", data[: self._random.randrange(len(data))], leaves=0)
        return HttpInput("leaves", data, leaves=self._random.choice([0, 1, 200]))

    def _nested(self) -> HttpInput:
        depth = self._random.choice([10, 500, 5000, 100_000])
        name = self._random.choice(["prompt", "messages", "logit_bias", "stop", "metadata"])
        opening, closing = self._random.choice([("[", "]"), ('{"a":', "}")])
        text = f'{{"max_tokens": 1, "prompt": "a", "{name}": {opening * depth}1{closing * depth}}}'
        return HttpInput(f"nested {name} {depth}", self._request("POST", "/v1/completions", text.encode()))

    def _wrong_form(self) -> HttpInput:
        part = 'content-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
        parts = [("purpose", "", "batch"), ("file", '; filename="rows.jsonl"', "{}\n" * 3)]
        if self._random.random() < 0.3:
            parts.append(
                (self._random.choice(["file", "purpose", "expires_after[seconds]", "", "x"]), "", self._word())
            )
        body = bytearray("".join(f"--x\r\n{part.format(*each)}" for each in parts).encode() + b"--x--\r\n")
        for _ in range(self._random.randint(0, 4)):
            body[self._random.randrange(len(body))] = self._random.choice([0, 0x0A, 0x0D, 0x22, 0x2D, 0x3B, 0x80, 0xFF])
        if self._random.random() < 0.2:
            del body[self._random.randrange(len(body)) :]
        kinds = (
            "; boundary=x",
            "; boundary=",
            "",
            "; boundary*=x; boundary*0=y",
            '; boundary="x',
            "; boundary=" + "x" * 300,
        )
        kind = "multipart/form-data" + self._random.choice((kinds[0], *kinds))
        return HttpInput("form", self._request("POST", "/v1/files", bytes(body), headers=[("content-type", kind)]))

    def _request(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        headers: list[tuple[str, str]] | None = None,
        version: str = "HTTP/1.1",
        host: str = "localhost",
    ) -> bytes:
        all_headers = [("host", host), ("content-length", str(len(body))), *(headers or [])]
        if not any(name == "content-type" for name, _ in all_headers):
            all_headers.append(("content-type", "application/json"))
        head = f"{method} {path} {version}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in all_headers)
        return head.encode("latin-1", "replace") + b"\r\n" + body

    def _word(self) -> str:
        return "".join(self._random.choices(string.printable, k=self._random.randint(1, 30)))

    # --- gRPC ---

    def grpc(self) -> GrpcInput:
        """The next one."""
        method = self._random.choice(METHODS_OF_GRPC)
        what, message = self._message(method)
        metadata = []
        if self._random.random() < 0.2:
            name = self._random.choice(
                ["authorization", "idempotency-key", "x-allow-fallback", "traceparent", "x-request-id"]
            )
            value = self._random.choice(HEADER_VALUES).encode("ascii", "ignore").decode()
            metadata.append((name, "".join(letter for letter in value if letter.isprintable()).strip()))
            what += f" {name}"
        timeout_s = self._random.choice([0.001, 0.01]) if self._random.random() < 0.05 else 20.0
        path = method if "/" in method else f"Inference/{method}"
        if self._random.random() < 0.03:
            return GrpcInput(f"{what} frames", path, message, frames=self._frames(path, message))
        if self._random.random() < 0.03:
            metadata.append(("x-more", "x" * self._random.choice([4000, 20_000, 100_000])))
            what += " much metadata"
        if self._random.random() < 0.03:
            num_messages = self._random.choice([0, 2, 3])
            return GrpcInput(f"{what} {num_messages} times", path, message, tuple(metadata), num_messages=num_messages)
        leaves = self._random.random() < 0.1 or method == "Cluster/WatchTopology"  # which has no end
        return GrpcInput(what, path, message, tuple(metadata), timeout_s, leaves=leaves)

    def _frames(self, path: str, message: bytes) -> bytes:
        """A call that does not end: a part of a message, headers without end, or frames in another order."""
        one, block = self._random, http2.grpc_headers(f"/tandem.v1.{path}")
        begin = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)
        headers = http2.frame(http2.HEADERS, http2.END_HEADERS, 1, block)
        kind = one.choice(["unfinished", "continuation", "spoilt", "preface"])
        if kind == "unfinished":
            size = one.choice([len(message) + 1, 100_000, 2**23, 2**32 - 1])
            data = (http2.message_prefix(size) + message + bytes(20_000))[: one.choice([3, 5, 100, 16_000])]
            return begin + headers + http2.frame(http2.DATA, 0, 1, data)
        if kind == "continuation":
            more = http2.frame(http2.CONTINUATION, 0, 1, http2.literal("x", "y" * one.choice([0, 10, 4000])))
            return begin + http2.frame(http2.HEADERS, 0, 1, block) + more * one.choice([1, 100, 1000])
        if kind == "spoilt":
            data = http2.frame(http2.DATA, one.randrange(256), one.choice([0, 1, 2, 3]), message[:10_000])
            whole = bytearray(headers + data + http2.frame(one.randrange(12), one.randrange(256), 1, one.randbytes(9)))
            for _ in range(one.randint(0, 3)):
                whole[one.randrange(len(whole))] = one.randrange(256)
            return begin + bytes(whole)
        return begin[: one.choice([1, 10, 24, 33])]

    def _message(self, method: str) -> tuple[str, bytes]:
        one = self._random
        if one.random() < 0.1:
            return f"{method} random bytes", bounded_bytes(one.randbytes(one.randint(1, 200)), method)
        if method in ("Generate", "GenerateUnary"):
            message: Any = inference_pb2.GenerateRequest(text=self._word())
            message.sampling.max_tokens = one.randint(1, MAX_TOKENS)
            if one.random() < 0.3:
                message.token_ids.ids.extend(one.choices([0, 1, 5, 1999, 2**31, 2**32 - 1], k=one.randint(1, 50)))
        elif method in ("Chat", "ChatUnary"):
            message = self._chat()
        elif method == "Resume":
            message = inference_pb2.ResumeRequest(request_id=self._word(), next_index=one.choice([0, 1, 2**32 - 1]))
        elif method == "Tokenize":
            message = inference_pb2.TokenizeRequest(text=self._word() * one.choice([1, 1, 100]))
        elif method == "Detokenize":
            message = inference_pb2.DetokenizeRequest(
                token_ids=one.choices([0, 1, 77, 2**32 - 1], k=one.randint(0, 20))
            )
        elif method == "Embed":
            inputs = [inference_pb2.EmbedInput(text=self._word()) for _ in range(one.randint(0, 5))]
            message = inference_pb2.EmbedRequest(inputs=inputs, dimensions=one.choice([0, 0, 1, 2**32 - 1]))
        elif method == "Cluster/Drain":
            message = cluster_pb2.DrainRequest(worker_id=self._word())
        elif method == "Cluster/SetPrefill":
            message = cluster_pb2.SetPrefillRequest(choice=one.choice([0, 1, 2, 3, 99]))
        else:
            message = inference_pb2.ListModelsRequest()
        what = method
        for _ in range(one.randint(0, 3)):
            what += " " + self._spoil(message)
        bound_message(message)
        data = message.SerializeToString()
        if data and one.random() < 0.2:
            changed = bytearray(data)
            for _ in range(one.randint(1, 3)):
                changed[one.randrange(len(changed))] = one.randrange(256)
            return what + " flipped", bounded_bytes(bytes(changed), method)
        return what, data

    def _chat(self) -> inference_pb2.ChatRequest:
        """A conversation, with odd turns, tools, answers and words for the template."""
        one = self._random
        message = inference_pb2.ChatRequest()
        message.sampling.max_tokens = one.randint(1, MAX_TOKENS)
        for _ in range(one.choice([0, 1, 1, 2, 50])):
            role = one.choice(["user", "user", "assistant", "system", "tool", "", "x" * 300])
            turn = message.messages.add(role=role, content=self._word())
            if one.random() < 0.2:
                turn.tool_calls.add(id=one.choice(["", "1"]), name=one.choice(["f", ""]), arguments=one.choice(SCHEMAS))
            if one.random() < 0.2:
                turn.tool_call_id = one.choice(["", "1", "x" * 300])
        for _ in range(one.choice([0, 0, 1, 2, 200])):
            message.tools.add(
                name=one.choice(["f", "g", "", "x" * 300]), parameters=one.choice(SCHEMAS), strict=one.random() < 0.3
            )
        if one.random() < 0.2:
            message.tool_choice.mode = one.choice([0, 1, 2, 99])
            message.tool_choice.name = one.choice(["", "f", "nonsense"])
        if one.random() < 0.2:
            message.response_format.json_schema = one.choice(SCHEMAS)
        if one.random() < 0.2:
            message.chat_template_kwargs[one.choice(["enable_thinking", "messages", "", "x"])] = one.choice(SCHEMAS)
        message.num_choices = one.choice([0, 0, 1, 2, 129, 2**32 - 1])
        return message

    def _spoil(self, message: Any) -> str:
        """Sets one field of the message, or of its sampling, to something odd; returns its name."""
        target = message
        if "sampling" in message.DESCRIPTOR.fields_by_name and self._random.random() < 0.7:
            target = message.sampling
        fields = [one for one in target.DESCRIPTOR.fields if one.message_type is None and not one.is_repeated]
        if not fields:
            return "-"
        spoiled = self._random.choice(fields)
        values: tuple[Any, ...] = (
            *NUMBERS,
            *(junk for junk in JUNK if isinstance(junk, str)),
            float("nan"),
            float("inf"),
        )
        for _ in range(20):
            value = self._random.choice(values)
            try:
                setattr(target, spoiled.name, value)
            except (TypeError, ValueError):
                continue
            break
        return str(spoiled.name)
