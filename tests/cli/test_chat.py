"""`tandem chat` against a small HTTP server."""

import builtins
import io
from collections.abc import Iterator
from typing import Any

import pytest

from cli.chat import Chat, ChatSettings, Timing, run
from cli.main import main
from services.runtime.api_client import ApiRefused, ApiUnreachable
from tests.waiting import HANG_LIMIT_S

DONE = b"data: [DONE]\n\n"


def piece(text: str | None, finish_reason: str | None = None) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def usage(num_tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}


@pytest.fixture
def chat_api(api: Any) -> Any:
    api.routes["GET /v1/models"] = (200, {"data": [{"id": "demo"}]})
    api.routes["POST /v1/chat/completions"] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
        b": keep-alive\n\n",
        piece("def "),
        piece("f():\n"),
        piece(None, "stop"),
        usage(2),
        DONE,
    ]
    return api


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_message_prints_the_answer_and_its_speed(chat_api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", chat_api.url, "--message", "hi", "--seed", "3", "--system", "be brief"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "def f():\n\n"
    assert captured.err.startswith("[TTFT ")
    assert "2 tokens" in captured.err
    body = chat_api.requests[-1][1]
    assert body["model"] == "demo"
    assert body["stream"] is True
    assert body["seed"] == 3
    assert body["messages"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert body["temperature"] == 0.7


def test_text_from_a_pipe_is_one_question(chat_api: Any) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    assert run(ChatSettings(url=chat_api.url), io.StringIO("two\nlines\n"), stdout, stderr) == 0
    assert chat_api.requests[-1][1]["messages"] == [{"role": "user", "content": "two\nlines"}]
    assert stdout.getvalue() == "def f():\n\n"


def test_an_empty_pipe_asks_nothing(
    chat_api: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "--url", chat_api.url]) == 1
    assert "empty" in capsys.readouterr().err


def test_a_conversation_remembers_what_was_said(chat_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = iter(["first", "second", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    assert run(ChatSettings(url=chat_api.url), Terminal(), io.StringIO(), io.StringIO()) == 0
    assert chat_api.requests[-1][1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "def f():\n"},
        {"role": "user", "content": "second"},
    ]


def test_an_error_does_not_end_a_conversation_and_is_forgotten(chat_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = chat_api.routes["POST /v1/chat/completions"]
    answers: Iterator[Any] = iter([(503, {"error": {"message": "the cluster is full"}}), good])
    chat_api.routes["POST /v1/chat/completions"] = lambda: next(answers)
    questions = iter(["first", "second", ""])
    monkeypatch.setattr(builtins, "input", lambda prompt: next(questions))
    stderr = io.StringIO()
    assert run(ChatSettings(url=chat_api.url), Terminal(), io.StringIO(), stderr) == 0
    assert "error: the cluster is full" in stderr.getvalue()
    assert chat_api.requests[-1][1]["messages"] == [{"role": "user", "content": "second"}]


@pytest.mark.parametrize("interruption", [EOFError, KeyboardInterrupt])
def test_the_end_of_input_ends_the_chat_cleanly(
    chat_api: Any, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    def interrupted(prompt: str) -> str:
        raise interruption

    monkeypatch.setattr(builtins, "input", interrupted)
    assert run(ChatSettings(url=chat_api.url), Terminal(), io.StringIO(), io.StringIO()) == 0


def test_ctrl_c_ends_the_answer_and_keeps_what_came(chat_api: Any) -> None:
    class Interrupting(io.StringIO):
        def write(self, text: str) -> int:
            if "f()" in text:
                raise KeyboardInterrupt
            return super().write(text)

    stdout, stderr = Interrupting(), io.StringIO()
    chat = Chat(ChatSettings(url=chat_api.url), "demo", stdout, stderr)
    chat.ask("hi")
    assert stdout.getvalue() == "def \n"
    assert "interrupted" in stderr.getvalue()
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_an_error_in_the_stream_is_raised(chat_api: Any) -> None:
    chat_api.routes["POST /v1/chat/completions"] = [piece("a"), {"error": {"message": "worker lost"}}]
    chat = Chat(ChatSettings(url=chat_api.url), "demo", io.StringIO(), io.StringIO())
    with pytest.raises(ApiRefused, match="worker lost"):
        chat.ask("hi")
    assert chat.messages == []


def test_a_stream_that_breaks_off_is_not_an_answer(chat_api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    chat_api.routes["POST /v1/chat/completions"] = [piece("a")]
    assert main(["chat", "--url", chat_api.url, "--message", "hi"]) == 1
    assert "before it was complete" in capsys.readouterr().err


def test_a_silent_server_is_given_up(api: Any) -> None:
    import threading

    silence = threading.Event()
    api.routes["GET /v1/models"] = lambda: (silence.wait(HANG_LIMIT_S), (200, {}))[1]
    try:
        with pytest.raises(ApiUnreachable, match="within"):
            run(ChatSettings(url=api.url, timeout=0.2), io.StringIO("hi"), io.StringIO(), io.StringIO())
    finally:
        silence.set()


def test_a_server_without_models_is_said(api: Any, capsys: pytest.CaptureFixture[str]) -> None:
    api.routes["GET /v1/models"] = (200, {"data": []})
    assert main(["chat", "--url", api.url, "--message", "hi"]) == 1
    assert "no model" in capsys.readouterr().err


def test_the_speed_does_not_count_the_first_token() -> None:
    timing = Timing(sent_at_s=10.0, num_tokens=11)
    timing.note_text(10.25)
    timing.note_text(12.25)
    assert timing.summary() == "[TTFT 250 ms, 5.0 tokens/s, 11 tokens]"
