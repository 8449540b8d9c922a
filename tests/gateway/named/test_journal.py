"""The journal of an answer: positions, what a reader gets from each, and what is written of a call."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.named.journal import (
    MAX_DELTA_TOKENS,
    START,
    Answer,
    AnswerReader,
    Position,
    Shown,
    cost_of_call,
    decode_call,
    digest_of,
    encode_call,
    encode_end,
    event_id,
    parse_event_id,
    restore,
)
from gateway.requests.call import RequestFacts, StoredCall, StoredChoice
from gateway.types import Delta, TokenLogprobs
from services.runtime.errors import (
    InternalError,
    InvalidRequest,
)
from services.runtime.identity import identity_key
from services.structured.form import AnswerForm
from tests.examples import examples
from tests.gateway.named.calls import USAGE, sampling, text_of

# --- positions -------------------------------------------------------------------------------------------------------

positions = st.lists(
    st.builds(Position, st.integers(0, 10**9), st.sampled_from([Shown.TOKENS, Shown.TEXT, Shown.END])) | st.just(START),
    min_size=1,
    max_size=20,
)


@settings(deadline=None)
@given(positions)
def test_event_ids_are_read_as_they_were_written(given_positions):
    assert parse_event_id(event_id("a.b:c-d_e", given_positions)) == ("a.b:c-d_e", given_positions)


def test_event_id_is_short_and_says_the_tokens():
    end = [Position(12, Shown.TOKENS), Position(7, Shown.END), Position(3, Shown.TEXT), START]
    assert event_id("abc", end) == "abc/12,7f,3t,-"


@pytest.mark.parametrize(
    "text",
    [
        *("", "abc", "abc/", "abc/1,", "abc/-1", "abc/01", "abc/1x", "abc/1f2", "abc/ 1", "abc/1 ", "abc/٣", "abc/--"),
        *("abc/1/2", "abc/" + "1," * 2000 + "1", "abc/" + "9" * 11),
    ],
)
def test_what_no_event_had_as_its_id_is_refused(text):
    with pytest.raises(InvalidRequest) as refusal:
        parse_event_id(text)
    assert refusal.value.code == "invalid_event_id"


# --- one answer ------------------------------------------------------------------------------------------------------


def filled(token_ids, reason="stop", logprobs=False):
    answer = Answer()
    entries = [TokenLogprobs(-0.5, [(token_id, -0.5)]) for token_id in token_ids] if logprobs else None
    answer.add(Delta(0, list(token_ids), "", entries, reason, USAGE))
    return answer


def collect(reader):
    return list(reader.read())


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_reader_from_any_position_gets_the_one_text(model_tokenizer, answer_ids, data):
    num_tokens = data.draw(st.integers(1, len(answer_ids)))
    stop = data.draw(st.sampled_from([(), ("ld, na",), ("never there", "🙂 x"), ("end",), (" it, hello there!",)]))
    how = sampling(stop=stop, min_tokens=data.draw(st.integers(0, 4)))
    token_ids = answer_ids[:num_tokens]
    taken = text_of(model_tokenizer, how).push(token_ids)
    token_ids = token_ids[: taken.num_tokens]
    whole_text = text_of(model_tokenizer, how)
    expected = whole_text.push(token_ids).text + ("" if taken.is_stopped else whole_text.finish())

    answer, text, seen, ends = Answer(), "", [], 0
    reader = AnswerReader(answer, text_of(model_tokenizer, how))
    while not reader.is_done:
        if data.draw(st.booleans()):
            # The client comes again, to a gateway that has only some of what it read before, or all.
            answer = Answer()
            reader = AnswerReader(answer, text_of(model_tokenizer, how), reader.position)
        group = data.draw(st.integers(1, 5))
        first = len(answer.token_ids)
        if not answer.is_finished:
            part = token_ids[first : first + group]
            is_last = first + len(part) == len(token_ids)
            answer.add(Delta(first, part, "?", None, "stop" if is_last else None, USAGE if is_last else None))
        for delta in reader.read():
            assert delta.first_index == len(seen)
            seen += delta.token_ids
            text += delta.text
            ends += delta.finish_reason is not None
            if data.draw(st.integers(0, 3)) == 0:
                break
    assert (seen, text, ends) == (token_ids, expected, 1)


def test_a_long_way_to_catch_up_is_taken_in_parts(model_tokenizer):
    answer = filled([40] * 1000, logprobs=True)
    deltas = collect(AnswerReader(answer, text_of(model_tokenizer, sampling())))
    assert max(len(delta.token_ids) for delta in deltas) == MAX_DELTA_TOKENS
    assert sum(len(delta.logprobs or ()) for delta in deltas) == 1000


def test_what_was_held_back_until_the_end_has_a_position_of_its_own(model_tokenizer, answer_ids):
    how = sampling(stop=("world, never",))
    token_ids = answer_ids[: next(n for n in range(20) if "wor" in model_tokenizer.decode(answer_ids[:n]))]
    answer = filled(token_ids, "length")
    shown = {position: "" for position in ()}
    reader = AnswerReader(answer, text_of(model_tokenizer, how))
    for delta in reader.read():
        shown[reader.position] = delta.text
    assert list(shown) == [Position(len(token_ids), kind) for kind in (Shown.TOKENS, Shown.TEXT, Shown.END)]
    held = list(shown.values())[1]
    assert held.startswith("wor")
    for position, rest in zip(shown, ([held, ""], [""], []), strict=True):
        again = collect(AnswerReader(answer, text_of(model_tokenizer, how), position))
        assert [delta.text for delta in again] == rest


@pytest.mark.parametrize(
    "position", [Position(5, Shown.TOKENS), Position(3, Shown.TEXT), Position(3, Shown.END), Position(9, Shown.END)]
)
def test_a_position_that_the_answer_never_had_is_refused(model_tokenizer, position):
    reader = AnswerReader(filled([40, 41, 42, 43]), text_of(model_tokenizer, sampling()), position)
    with pytest.raises(InvalidRequest):
        collect(reader)


def test_a_client_that_is_ahead_is_shown_nothing_until_it_is_caught_up_with(model_tokenizer):
    answer = Answer()
    reader = AnswerReader(answer, text_of(model_tokenizer, sampling()), Position(3, Shown.TOKENS))
    for index in range(5):
        answer.add(Delta(index, [40 + index], ""))
        assert [delta.token_ids for delta in reader.read()] == ([] if index < 3 else [[40 + index]])


def test_parts_of_an_answer_must_follow_each_other():
    answer = filled([1, 2])
    with pytest.raises(InternalError):
        answer.add(Delta(2, [3], ""))
    for wrong in (Delta(1, [3], ""), Delta(3, [3], "")):
        open_answer = Answer()
        open_answer.add(Delta(0, [1, 2], ""))
        with pytest.raises(InternalError):
            open_answer.add(wrong)


def test_a_call_is_kept_with_each_prompt_once():
    prompt = [1, 2, 3]
    call = StoredCall(
        request_id="abc",
        choices=[StoredChoice(prompt, sampling(seed=seed, logit_bias={5: 1.5}, stop=("x",))) for seed in (-1, 2**62)],
        facts=RequestFacts(operation="chat", tenant="t", priority=3, service_class="batch", affinity_key="a session"),
        model="large",
        fallback="huge -> large; reason=overloaded",
        is_settled=False,
        remaining_s=1.0,
    )
    packed = encode_call(call, created_unix_s=17)
    decoded, created_unix_s = decode_call(packed, request_id="abc")
    assert decoded == msgspec.structs.replace(call, remaining_s=0.0)
    assert created_unix_s == 17
    assert decoded.choices[0].prompt_token_ids is decoded.choices[1].prompt_token_ids
    for cut in range(len(packed)):
        assert decode_call(packed[:cut], request_id="abc") is None


def test_what_several_answers_share_is_kept_once():
    form = AnswerForm(json_schema='{"description": "%s"}' % ("d" * 10_000))
    choices = [StoredChoice([1, 2], sampling(seed=seed, form=form, max_tokens=10 + (seed > 64))) for seed in range(128)]
    call = StoredCall(request_id="abc", choices=choices, facts=RequestFacts(operation="chat"), remaining_s=0.0)
    packed = encode_call(call, created_unix_s=17)
    assert len(packed) < 2 * 10_000 + 128 * 60 + 2_000
    decoded, _ = decode_call(packed, request_id="abc")
    assert decoded == call
    assert len({id(choice.sampling.form) for choice in decoded.choices}) == 2
    assert cost_of_call(decoded) < 10 * 10_000 + 128 * 2_000


def test_a_call_of_a_gateway_that_kept_each_sampling_with_its_answer_is_read():
    choices = [StoredChoice([1, 2], sampling(seed=seed, stop=("xy",))) for seed in range(3)]
    call = StoredCall(request_id="abc", choices=choices, facts=RequestFacts(operation="chat"), remaining_s=0.0)
    document = msgspec.msgpack.decode(encode_call(call, created_unix_s=17))
    shared = document.pop("samplings")
    assert len(shared) == 1
    document["choices"] = [
        [prompt, shared[at] | {"seed": seed}, layout] for prompt, at, layout, seed in document["choices"]
    ]
    decoded, _ = decode_call(msgspec.msgpack.encode(document), request_id="abc")
    assert decoded == call


def test_a_call_with_one_answer_is_written_as_gateways_of_before_read_it():
    document = msgspec.msgpack.decode(encode_call(kept_call(), created_unix_s=17))
    assert document["choices"][0][1]["stop"] == ["xy"]


@pytest.mark.parametrize("place", [1, -1, 2**40])
def test_a_sampling_that_is_not_there_counts_as_no_journal(place):
    choices = [StoredChoice([1, 2], sampling(seed=seed)) for seed in range(2)]
    call = StoredCall(request_id="abc", choices=choices, facts=RequestFacts(operation="chat"), remaining_s=0.0)
    document = msgspec.msgpack.decode(encode_call(call, created_unix_s=17))
    document["choices"][1][1] = place
    assert decode_call(msgspec.msgpack.encode(document), request_id="abc") is None


def test_a_call_of_before_there_were_several_models_and_classes_is_read():
    document = msgspec.msgpack.decode(encode_call(kept_call(), created_unix_s=17))
    for name in ("model", "fallback", "is_settled", "service_class", "affinity_key"):
        del document[name]
    document["choices"] = [choice[:2] for choice in document["choices"]]  # nor was it known which weights began it
    call, _ = decode_call(msgspec.msgpack.encode(document), request_id="abc")
    assert (call.model, call.fallback, call.is_settled) == ("", "", True)
    assert (call.facts.service_class, call.facts.affinity_key) == ("normal", "")
    assert call.choices == kept_call().choices


def test_the_weights_of_each_answer_are_kept_and_no_text_that_is_none():
    keys = [identity_key(text, layout="f" * 32, incarnation="1" * 32) for text in ("", "weights=f dtype=bfloat16")]
    for layout, is_read in (*((key, True) for key in keys), ("f" * 32, True), ("f" * 64, True), ("f" * 65, False)):
        choices = [msgspec.structs.replace(kept_call().choices[0], layout=layout)]
        packed = encode_call(msgspec.structs.replace(kept_call(), choices=choices), created_unix_s=17)
        decoded = decode_call(packed, request_id="abc")
        assert (decoded is not None) == is_read
        assert decoded is None or decoded[0].choices[0].layout == layout


def test_a_session_longer_than_any_client_may_name_counts_as_no_journal():
    for length, is_read in ((256, True), (257, False)):
        packed = encode_call(
            msgspec.structs.replace(kept_call(), facts=RequestFacts(operation="chat", affinity_key="s" * length)),
            created_unix_s=17,
        )
        assert (decode_call(packed, request_id="abc") is not None) == is_read


def kept_call():
    return StoredCall(
        request_id="abc",
        choices=[StoredChoice([1, 2], sampling(stop=("xy",)))],
        facts=RequestFacts(operation="chat"),
        remaining_s=1.0,
    )


def test_texts_that_are_no_utf8_count_as_no_journal():
    packed = encode_call(kept_call(), created_unix_s=17)
    for text in (b"chat", b"xy", b"tenant"):
        assert decode_call(packed.replace(text, b"\xff" * len(text)), request_id="abc") is None
    end = encode_end(filled([1, 2, 3], "length"))
    answer = restore([1, 2, 3], end.replace(b"length", b"\xff" * 6))
    assert (answer.is_finished, answer.token_ids) == (False, [1, 2, 3])


def test_a_call_nested_too_deep_counts_as_no_journal():
    packed = encode_call(kept_call(), created_unix_s=17)
    num_members = packed[0] - 0x80
    deep = bytes([0x80 + num_members + 1]) + b"\xa4deep" + b"\x91" * 10**5 + b"\x90" + packed[1:]
    assert decode_call(deep, request_id="abc") is None


@settings(deadline=None, max_examples=examples(500))
@given(data=st.data())
def test_no_bytes_from_redis_raise(data):
    packed = bytearray(
        data.draw(
            st.sampled_from([encode_call(kept_call(), created_unix_s=17), encode_end(filled([1, 2, 3], "length"))])
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    decode_call(bytes(packed), request_id="abc")
    assert restore([1, 2, 3], bytes(packed)).token_ids == [1, 2, 3]


def test_an_end_that_does_not_fit_its_tokens_counts_as_none():
    answer = filled([1, 2, 3], "length")
    end = encode_end(answer)
    assert (restore([1, 2, 3], end).finish_reason, restore([1, 2, 3], end).usage) == ("length", USAGE)
    assert not restore([1, 2], end).is_finished
    assert not restore([1, 2, 3], end[:-1]).is_finished
    assert not restore([1, 2, 3], b"").is_finished


def test_digests_differ_wherever_the_parts_do():
    digests = {
        digest_of(*parts) for parts in (("a", "b", "c"), ("a", "bc"), ("a", "b\0001:c"), ("ab", "c"), ("a", "cb"))
    }
    assert len(digests) == 5
