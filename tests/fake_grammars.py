"""Stands for services.structured.grammar.Grammars in tests of the workers: a grammar of one answer, made when told."""

import threading
from collections.abc import Sequence

from services.structured.form import AnswerForm
from tests.waiting import HANG_LIMIT_S

EOS = 7
NUM_TOKENS = 4


class Countdown:
    """Allows one answer: the tokens 103, 102, 101 and the end of sequence."""

    def __init__(self) -> None:
        self.given: list[int] = []

    @property
    def num_tokens(self) -> int:
        return len(self.given)

    def advance(self, token_ids: Sequence[int]) -> None:
        self.given += token_ids

    def allowed(self) -> bytes:
        wanted = [103, 102, 101, EOS]
        is_right = self.given == wanted[: len(self.given)] and len(self.given) < len(wanted)
        return (1 << wanted[len(self.given)]).to_bytes(16, "little") if is_right else b""


class FakeGrammars:
    """Makes Countdowns; not before `gate` is open, and not if there is an `error`."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.begun: list[tuple[str, list[int], list[int]]] = []
        """Schema, ends of sequence and emitted tokens of each call."""
        self.threads: set[int] = set()

    def begin(self, form: AnswerForm, *, eos_token_ids: Sequence[int], token_ids: Sequence[int] = ()) -> Countdown:
        self.begun.append((form.json_schema, list(eos_token_ids), list(token_ids)))
        self.threads.add(threading.get_ident())
        assert self.gate.wait(HANG_LIMIT_S)
        if self.error is not None:
            raise self.error
        state = Countdown()
        state.advance(token_ids)
        return state


def allowed_token(bits: bytes) -> int | None:
    """The lowest one, or None."""
    number = int.from_bytes(bits, "little")
    return (number & -number).bit_length() - 1 if number else None
