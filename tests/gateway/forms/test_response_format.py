"""`response_format` over both APIs: what is refused and why, and what workers are told."""

import json

import grpc
import msgspec
import pytest

from gateway.forms.response_format import form_in, json_schema_in, json_schema_of
from gateway.limits import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH
from gateway.named.journal import decode_call, encode_call
from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.requests import parse
from gateway.requests.call import Call, StoredCall
from gateway.types import AskedSampling
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.engine.steps.step import NothingAllowed
from services.runtime.errors import InvalidRequest, Overloaded
from services.structured.compiler import FormChecks
from services.structured.form import AnswerForm
from services.structured.grammar import ANY_OBJECT
from services.structured.grammar_text import GRAMMAR
from tests.schemas import PERSON, UNUSABLE
from tests.waiting import HANG_LIMIT_S

OK = [{"role": "user", "content": "hi"}]
PERSON_TEXT = json.dumps(PERSON, separators=(",", ":"))


def named(schema, **others):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **others}}


def nested(depth):
    """A schema of `depth` objects within one another."""
    schema = {}
    for _ in range(depth - 1):
        schema = {"additionalProperties": schema}
    return schema


def sized(num_bytes):
    return {"const": "x" * (num_bytes - len('{"const":""}'))}


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    await system.add_pair(pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1]))
    return system


# --- what a client writes, and what comes of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "text", "json_schema": 5}, ""),
        ({"type": "json_object"}, ANY_OBJECT),
        (named(PERSON), PERSON_TEXT),
        (named(PERSON, strict=True, description="who"), PERSON_TEXT),
        (named(PERSON, strict=None), PERSON_TEXT),
        ({"type": "json_schema", "json_schema": {"schema": PERSON}}, PERSON_TEXT),
        (named({}), "{}"),
        (named({"properties": {"b": {}, "a": {}}}), '{"properties":{"b":{},"a":{}}}'),
        (named({"const": "é🙂"}), '{"const":"é🙂"}'),
        (named(nested(MAX_SCHEMA_DEPTH)), json.dumps(nested(MAX_SCHEMA_DEPTH), separators=(",", ":"))),
        (named(sized(MAX_SCHEMA_BYTES)), json.dumps(sized(MAX_SCHEMA_BYTES), separators=(",", ":"))),
    ],
    ids=lambda value: str(value)[:40],
)
def test_read(asked, schema):
    assert json_schema_of(asked) == schema
    for body_type, body in ((CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": OK})):
        request, ignored = parse(json.dumps({**body, "response_format": asked}).encode(), body_type)
        assert request.call().sampling.json_schema == schema
        assert ignored == []


BAD = {
    "text": ("json_object", "an object"),
    "list": ([{"type": "json_object"}], "an object"),
    "no-type": ({}, "type must be one of text, json_object, json_schema"),
    "unknown-type": ({"type": "json_lines"}, "type must be one of"),
    "type-list": ({"type": ["json_object"]}, "type must be one of"),
    "no-json_schema": ({"type": "json_schema"}, "json_schema must be an object"),
    "json_schema-text": ({"type": "json_schema", "json_schema": "{}"}, "json_schema must be an object"),
    "no-schema": ({"type": "json_schema", "json_schema": {"name": "a"}}, "schema is missing"),
    "name-number": ({"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}, "name must be"),
    "name-with-blank": ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "name must be"),
    "name-65": ({"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": {}}}, "name must be"),
    "strict-text": (named({}, strict="yes"), "strict must be true or false"),
    "schema-null": (named(None), "must be a JSON object"),
    "schema-true": (named(True), "must be a JSON object"),
    "schema-text": (named("{}"), "must be a JSON object"),
    "too-deep": (named(nested(MAX_SCHEMA_DEPTH + 1)), f"at most {MAX_SCHEMA_DEPTH} levels"),
    "far-too-deep": (named(nested(400)), f"at most {MAX_SCHEMA_DEPTH} levels"),
    "too-large": (named(sized(MAX_SCHEMA_BYTES + 1)), f"at most {MAX_SCHEMA_BYTES} bytes"),
    "half-surrogate": (named({"const": "\ud800"}), "surrogate"),
    "infinite": (named({"const": 1e999}), "not finite"),
}


@pytest.mark.parametrize("row", BAD, ids=BAD)
def test_refused(row):
    asked, words = BAD[row]
    with pytest.raises(InvalidRequest, match=words) as caught:
        json_schema_of(asked)
    assert caught.value.field == "response_format"
    assert "response_format" in caught.value.message
    assert len(caught.value.message) < 200


def test_members_that_ask_for_the_same_form_are_one_wish():
    """Guidance sends its grammar to older and newer vLLMs at once."""
    grammar = 'start: "a"'
    asked = {"response_format": None, "structured_outputs": {"grammar": grammar}, "guided_grammar": grammar}
    assert form_in(asked) == (GRAMMAR + grammar, "structured_outputs")
    with pytest.raises(InvalidRequest, match="structured_outputs and guided_grammar both ask") as caught:
        form_in({**asked, "guided_grammar": grammar + "i"})
    assert caught.value.field == "guided_grammar"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"a": 1e999}', "not finite"),
        ('{"a": {"b": 1, "b": 2}}', "twice"),
        ('{"a":' * 100_000, f"at most {MAX_SCHEMA_BYTES} bytes"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "nested at most"),
        (" " * MAX_SCHEMA_BYTES + "{}", f"at most {MAX_SCHEMA_BYTES} bytes"),
    ],
    ids=lambda text: str(text)[:20],
)
def test_text_refused(text, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        json_schema_in(text)
    assert caught.value.field == "response_format"


# --- on its way to the workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "schema"), [(None, ""), ({"type": "json_object"}, ANY_OBJECT), (named(PERSON), PERSON_TEXT)], ids=str
)
async def test_workers_are_told_over_http(system, asked, schema):
    for response in (
        await system.complete(max_tokens=5, response_format=asked),
        await system.chat(response_format=asked),
    ):
        assert response.status_code == 200, response.text
        assert "x-tandem-ignored" not in response.headers
    for worker in system.workers.values():
        assert [attempt.spec.json_schema for attempt in worker.attempts] == [schema] * 2
        assert all(list(attempt.spec.eos_token_ids) == [1] for attempt in worker.attempts)


@pytest.mark.parametrize(
    ("asked", "schema"),
    [
        (None, ""),
        ({}, ""),
        ({"json_object": {}}, ANY_OBJECT),
        ({"json_schema": json.dumps(PERSON, indent=2)}, PERSON_TEXT),
    ],
    ids=str,
)
async def test_workers_are_told_over_grpc(system, asked, schema):
    request = inference_pb2.GenerateRequest(text="a", response_format=asked)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        assert (
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, timeout=HANG_LIMIT_S)
        ).text == "ok"
    for worker in system.workers.values():
        assert [attempt.spec.json_schema for attempt in worker.attempts] == [schema]


async def test_every_attempt_and_every_gateway_is_told(system):
    """A stored call has the schema, and a call that was stored before schemas existed is still read."""
    sampling = AskedSampling(json_schema=PERSON_TEXT, max_tokens=9)
    call = Call(operation="text_completion", request_id="named", prompts=[[5, 6, 7]], sampling=sampling)
    with await system.gateway.requests.accept(call) as accepted:
        stored = accepted.to_stored()
    again, _ = decode_call(encode_call(stored, created_unix_s=1), request_id="named")
    assert again.choices[0].sampling == stored.choices[0].sampling
    with system.gateway.requests.adopt(msgspec.structs.replace(again, remaining_s=9.0)) as adopted:
        assert adopted.specs[0].sampling.form == AnswerForm(PERSON_TEXT)
    document = msgspec.to_builtins(stored)
    del document["choices"][0]["sampling"]["form"]
    older = msgspec.convert(document, StoredCall)
    assert older.choices[0].sampling.form is None


async def test_a_stored_schema_is_not_believed(system):
    call = Call(
        operation="text_completion",
        request_id="named",
        prompts=[[5, 6, 7]],
        sampling=AskedSampling(json_schema=ANY_OBJECT, max_tokens=9),
    )
    with await system.gateway.requests.accept(call) as accepted:
        stored = accepted.to_stored()
    for changes in ({"form": AnswerForm("x" * (MAX_SCHEMA_BYTES + 1))}, {"min_tokens": 3}):
        choice = stored.choices[0]
        choice = msgspec.structs.replace(choice, sampling=msgspec.structs.replace(choice.sampling, **changes))
        with pytest.raises(InvalidRequest):
            system.gateway.requests.adopt(msgspec.structs.replace(stored, choices=[choice], remaining_s=9.0))


# --- what cannot be served --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", UNUSABLE, ids=UNUSABLE)
async def test_what_cannot_be_compiled_is_named_over_http(system, row):
    schema, words = UNUSABLE[row]
    response = await system.chat(response_format=named(schema))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "response_format",
        "invalid_value",
    )
    assert words in error["message"]
    assert not any(worker.attempts for worker in system.workers.values())


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "multipleOf": -1}, "multipleOf must be a number greater than 0, not -1"),
        ({"type": "object", "$defs": 5}, "$defs must be an object, not 5"),
        ({"anyOf": [{"minItems": 3, "maxItems": 1}, {}]}, "anyOf[0]: minItems (3) is greater than maxItems (1)"),
    ],
)
async def test_a_mistake_that_the_grammar_library_skips_is_refused_with_its_place(system, schema, words):
    response = await system.chat(response_format=named(schema))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == "response_format"
    assert words in error["message"]


async def test_what_costs_too_much_to_compile_has_a_code_of_its_own(system):
    for schema in ({"type": "integer", "multipleOf": 107_972_737}, {"type": "string", "pattern": "a?" * 3000}):
        response = await system.chat(response_format=named(schema))
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("response_format", "grammar_too_complex")
    assert not any(worker.attempts for worker in system.workers.values())


async def test_what_cannot_be_compiled_is_named_over_grpc(system):
    schema, words = UNUSABLE["unique"]
    request = inference_pb2.GenerateRequest(text="a", response_format={"json_schema": json.dumps(schema)})
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, timeout=HANG_LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in refused.value.details()
    assert "response_format" in refused.value.details()


@pytest.mark.parametrize(
    ("field", "value"),
    [("ignore_eos", True), ("min_tokens", 1), ("stop_token_ids", [5])],
    ids=str,
)
async def test_what_contradicts_a_schema(system, field, value):
    response = await system.complete(max_tokens=5, response_format={"type": "json_object"}, **{field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert "response_format" in error["message"]
    for harmless in ({"response_format": {"type": "text"}, field: value}, {"response_format": {"type": "json_object"}}):
        assert (await system.complete(max_tokens=5, **harmless)).status_code == 200


async def test_what_contradicts_a_schema_over_grpc(system):
    request = inference_pb2.GenerateRequest(
        text="a", response_format={"json_object": {}}, sampling={"ignore_eos": True, "max_tokens": 4}
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference_pb2_grpc.InferenceStub(channel).GenerateUnary(request, timeout=HANG_LIMIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.ignore_eos" in refused.value.details()


async def test_a_check_that_is_too_busy_is_an_overload(system, monkeypatch):
    async def busy(self, schema, *, tenant=""):
        raise Overloaded("too many schemas are being checked", retry_after_s=2.0)

    monkeypatch.setattr(FormChecks, "check", busy)
    response = await system.complete(max_tokens=5, response_format={"type": "json_object"})
    assert response.status_code in (429, 503)
    assert response.headers["retry-after"] == "2"


async def test_an_answer_that_cannot_go_on_is_held_against_no_worker(make_system, worker_type, tokenizer):
    """A schema that turns out too complex fails wherever it is tried, so it is tried once."""
    system = await make_system()
    start = tokenizer.encode('{"a', add_special_tokens=False).ids

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, start)
        if attempt.spec.json_schema:
            attempt.fail(
                NothingAllowed("the schema is too complex for this answer to continue", field="response_format")
            )
        else:
            attempt.finish(inference_pb2.FINISH_REASON_STOP)

    for name in ("decode-0", "decode-1"):
        await system.add(worker_type("decode", name, decode))
    for _ in range(5):
        response = await system.complete(max_tokens=9, response_format={"type": "json_object"})
        assert response.status_code == 400, response.text
        assert "too complex" in response.json()["error"]["message"]
        assert (await system.complete(max_tokens=9)).status_code == 200
    assert sum(len(worker.attempts) for worker in system.workers.values()) == 10
