"""`tandem chat`: talks to a cluster from the terminal and says how fast it answers. Uses only the public HTTP API."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from cli.commands import CommandParser
from services.runtime.api_client import ApiRefused, ApiUnreachable, GatewaySettings, get_json, post_events
from services.runtime.config import option
from services.runtime.errors import TandemError
from services.runtime.kinds import integer, number, text

PROMPT = "> "
Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class ChatSettings(GatewaySettings):
    """Chats with a running cluster. Text from a pipe is one question; on a terminal an empty line or Ctrl-D ends it."""

    model_name: str | None = option(
        text(), default=None, help="Model to talk to; the first of /v1/models if not given."
    )
    message: str | None = option(text(), default=None, help="Asks this one question and ends.")
    system: str | None = option(text(), default=None, help="System message that comes first.")
    max_tokens: int = option(integer(1), default=256, help="Longest answer in tokens.")
    temperature: float = option(number(0, 2), default=0.7, help="0 always takes the likeliest token.")
    seed: int | None = option(integer(0, 2**63 - 1), default=None, help="Makes sampled answers repeatable.")
    timeout: float = option(number(0.1, 3600), default=120.0, help="Longest silence of the server in seconds.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ChatSettings, lambda settings: run(settings, sys.stdin, sys.stdout, sys.stderr))


@dataclass
class Timing:
    """Times of one answer, in seconds of the client's clock; None before the event."""

    sent_at_s: float
    first_at_s: float | None = None
    last_at_s: float | None = None
    num_tokens: int = 0
    finish_reason: str | None = None

    def note_text(self, now_s: float) -> None:
        """Another piece of the answer has come."""
        self.first_at_s = now_s if self.first_at_s is None else self.first_at_s
        self.last_at_s = now_s

    def summary(self) -> str:
        """One line for the person who asked."""
        if self.first_at_s is None or self.last_at_s is None:
            return "[no text]"
        parts = [f"TTFT {(self.first_at_s - self.sent_at_s) * 1000:.0f} ms"]
        duration_s = self.last_at_s - self.first_at_s
        if self.num_tokens > 1 and duration_s > 0:
            parts.append(f"{(self.num_tokens - 1) / duration_s:.1f} tokens/s")
        parts.append(f"{self.num_tokens} tokens" if self.num_tokens else "interrupted")
        if self.finish_reason == "length":
            parts.append("cut off by --max-tokens")
        return f"[{', '.join(parts)}]"


def run(settings: ChatSettings, stdin: TextIO, stdout: TextIO, stderr: TextIO) -> int:
    """Chats until the input ends; returns the exit code. Raises ApiUnreachable, ApiRefused or TandemError."""
    model = settings.model_name or first_model(settings)
    chat = Chat(settings, model, stdout, stderr)
    if settings.message is not None:
        chat.ask(settings.message)
    elif not stdin.isatty():
        question = stdin.read().strip()
        if not question:
            raise TandemError("standard input is empty: it has no question")
        chat.ask(question)
    else:
        _converse(chat, model, settings.url, stderr)
    return 0


def first_model(settings: ChatSettings) -> str:
    """Name of the first model that the server has."""
    tls = settings.tls()
    models = get_json(settings.url, "/v1/models", timeout_s=settings.timeout, api_key=settings.api_key, tls=tls)
    try:
        return str(models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise TandemError(f"{settings.url} serves no model; give one with --model-name") from None


class Chat:
    """A conversation: what was said so far, and where the next answer is written to."""

    def __init__(
        self,
        settings: ChatSettings,
        model: str,
        stdout: TextIO,
        stderr: TextIO,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._tls = settings.tls()
        self._model = model
        self._stdout, self._stderr = stdout, stderr
        self._clock = clock
        self.messages: list[Message] = []
        if settings.system is not None:
            self.messages.append({"role": "system", "content": settings.system})

    def ask(self, question: str) -> None:
        """Streams the answer and remembers both; Ctrl-C ends the answer early, what came of it stays.

        Raises ApiUnreachable or ApiRefused; then the question is forgotten.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        timing, pieces = Timing(sent_at_s=self._clock()), list[str]()
        try:
            for piece in self._answer(messages, timing):
                pieces.append(piece)
                self._stdout.write(piece)
                self._stdout.flush()
        except KeyboardInterrupt:
            pass
        finally:
            self._stdout.write("\n" if pieces else "")
            self._stdout.flush()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self._stderr.write(timing.summary() + "\n")

    def _answer(self, messages: list[Message], timing: Timing) -> Iterator[str]:
        """The pieces of text as they come; fills `timing`."""
        events = post_events(
            self._settings.url,
            "/v1/chat/completions",
            body=self._body(messages),
            timeout_s=self._settings.timeout,
            api_key=self._settings.api_key,
            tls=self._tls,
        )
        for event in events:
            usage = event.get("usage") or {}
            timing.num_tokens = usage.get("completion_tokens", timing.num_tokens)
            for choice in event.get("choices", [])[:1]:
                timing.finish_reason = choice.get("finish_reason") or timing.finish_reason
                if piece := (choice.get("delta") or {}).get("content"):
                    timing.note_text(self._clock())
                    yield piece

    def _body(self, messages: list[Message]) -> dict[str, Any]:
        seed = {} if self._settings.seed is None else {"seed": self._settings.seed}
        return {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._settings.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self._settings.temperature,
            **seed,
        }


def _converse(chat: Chat, model: str, url: str, stderr: TextIO) -> None:
    """Question after question, until an empty one, Ctrl-D or Ctrl-C at the prompt."""
    with suppress(ImportError):  # not in every Python; where it is, `input` has line editing and a history
        import readline  # noqa: F401
    stderr.write(f"{model} at {url}. An empty line ends the chat, Ctrl-C an answer.\n")
    while True:
        try:
            question = input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            stderr.write("\n")
            return
        if not question:
            return
        try:
            chat.ask(question)
        except (ApiUnreachable, ApiRefused) as error:
            stderr.write(f"error: {error.message}\n")
