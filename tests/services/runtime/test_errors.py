"""What an error keeps in memory."""

import gc
import weakref

import pytest

from services.runtime.errors import InternalError, Overloaded, RateLimited, TandemError, forget_frames


class Prompt:
    """Something large in a frame of a traceback."""


class Holder:
    """Keeps the error that it raises, as an attempt does: a cycle through the frame of its own method."""

    def __init__(self, prompt: Prompt, error: TandemError) -> None:
        self.prompt = prompt
        self.error = error

    def fail(self) -> None:
        raise self.error

    def fail_again(self) -> None:
        raise self.error.again()

    def fail_because_of_it(self) -> None:
        try:
            self.fail()
        except TandemError as error:
            raise Overloaded("no room") from error

    def fail_after_it(self) -> None:
        try:
            self.fail()
        except TandemError:
            raise Overloaded("no room")  # noqa: B904 - without a cause, but with a context


@pytest.mark.parametrize("way", ["fail", "fail_because_of_it", "fail_after_it"])
@pytest.mark.parametrize("is_forgotten", [True, False])
def test_what_the_frames_of_an_error_hold_is_free_without_the_collector(way: str, is_forgotten: bool) -> None:
    holder = Holder(Prompt(), InternalError("a fault"))
    prompt = weakref.ref(holder.prompt)
    gc.disable()
    try:
        try:
            getattr(holder, way)()
        except TandemError as error:
            if is_forgotten:
                forget_frames(error)
        del holder
        assert (prompt() is None) is is_forgotten
    finally:
        gc.enable()


def test_an_error_that_is_raised_again_keeps_nothing_of_the_first_place() -> None:
    holder = Holder(Prompt(), Overloaded("no room", retry_after_s=2.0, reason="pages"))
    prompt = weakref.ref(holder.prompt)
    limited = RateLimited("too many", limit="requests", headers=(("x", "1"),)).again()
    assert (limited.message, limited.limit, limited.headers) == ("too many", "requests", (("x", "1"),))
    gc.disable()
    try:
        try:
            holder.fail_again()
        except Overloaded as error:
            told = str(error), error.retry_after_s, error.reason, error is holder.error
        assert told == ("no room", 2.0, "pages", False)
        del holder
        assert prompt() is None
    finally:
        gc.enable()


def test_errors_that_led_to_each_other_end() -> None:
    one, other = InternalError("one"), InternalError("other")
    for error in (one, other):
        with pytest.raises(InternalError):
            raise error
    one.__context__, other.__context__ = other, one
    forget_frames(one)
    assert one.__traceback__ is None
    assert other.__traceback__ is None
