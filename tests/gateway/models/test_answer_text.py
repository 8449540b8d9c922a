"""Stop texts and stop tokens, however the tokens are grouped."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.models.answer_text import AnswerText
from tests.examples import examples


class Letters:
    """A detokenizer whose tokens are code points; token 0 holds nothing back and shows nothing."""

    def push(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)

    def finish(self):
        return ""


def run(text, *, groups=(), **settings):
    """(everything shown, number of tokens taken, whether a stop ended it), pushing in groups of these sizes."""
    answer = AnswerText(Letters(), **settings)
    tokens = [ord(letter) for letter in text]
    shown, num_taken, start = "", 0, 0
    for size in [*groups, len(tokens)]:
        taken = answer.push(tokens[start : start + size])
        start += size
        shown += taken.text
        num_taken += taken.num_tokens
        if taken.is_stopped:
            return shown, num_taken, True
    return shown + answer.finish(), num_taken, False


def test_no_stop_shows_everything():
    assert run("abc") == ("abc", 3, False)


def test_stop_text_is_cut_and_its_tokens_counted():
    assert run("hello STOP more", stop_texts=["STOP"]) == ("hello ", 10, True)


def test_earliest_stop_text_wins():
    assert run("abcd", stop_texts=["bcd", "bc"]) == ("a", 3, True)


def test_beginning_of_a_stop_text_is_shown_once_it_is_none():
    answer = AnswerText(Letters(), stop_texts=["aab"])
    shown = [answer.push([ord(letter)]).text for letter in "aaac"]
    assert shown == ["", "", "a", "aac"]


def test_held_text_is_shown_at_the_end():
    assert run("xSTO", stop_texts=["STOP"]) == ("xSTO", 4, False)


def test_stop_token_is_counted_and_hidden():
    assert run("ab!cd", stop_token_ids=frozenset({ord("!")})) == ("ab", 3, True)
    assert run("ab!cd", stop_token_ids=frozenset({ord("!")}), stop_texts=["zz", "ab!"]) == ("ab", 3, True)


def test_minimum_defers_both_kinds_of_stop():
    assert run("a!b!c", stop_token_ids=frozenset({ord("!")}), min_tokens=3) == ("a!b", 4, True)
    assert run("xyxyxy", stop_texts=["xy"], min_tokens=3) == ("xy", 4, True)
    assert run("xy", stop_texts=["xy"], min_tokens=5) == ("xy", 2, False)


alphabet = st.text("ab", max_size=30)


@settings(max_examples=examples(400), deadline=None)
@given(
    alphabet,
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 4), max_size=30),
    st.integers(0, 10),
    st.booleans(),
)
def test_grouping_changes_nothing(text, stops, groups, minimum, has_stop_token):
    options = {
        "stop_texts": stops,
        "min_tokens": minimum,
        "stop_token_ids": frozenset({ord("b")}) if has_stop_token else frozenset(),
    }
    alone = run(text, groups=[1] * len(text), **options)
    assert run(text, groups=groups, **options) == alone
    shown, _, is_stopped = alone
    assert text.startswith(shown)
    if minimum <= 1 and not has_stop_token:
        first = min((text.find(stop) for stop in stops if stop in text), default=-1)
        assert is_stopped == (first >= 0)
        assert not any(stop in shown for stop in stops)
