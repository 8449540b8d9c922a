"""Several models in one cluster: each request at workers of its own model, aliases, and fallbacks that say so."""

import asyncio
import json
import shutil

import grpc
import pytest
from tokenizers import Tokenizer

from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.requests.call import Call
from gateway.topology.session import DecodeSession
from gateway.types import AskedSampling
from protos import cluster_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime import telemetry
from services.runtime.errors import Overloaded, WorkerUnavailable
from tests.kept_spans import KeptSpans, events_of
from tests.waiting import HANG_LIMIT_S

LARGE_CONTEXT, SMALL_CONTEXT = 512, 64
PROMPT = "hello world, naïve café"
LARGE_ANSWER, SMALL_ANSWER = [20, 21, 22, 23, 1], [30, 31, 32, 1]


@pytest.fixture(scope="module")
def folders(model_folder, tmp_path_factory):
    """`large` and `small` have one tokenizer and different contexts; `foreign` has another tokenizer."""
    root = tmp_path_factory.mktemp("several")
    for name, context in (("large", LARGE_CONTEXT), ("small", SMALL_CONTEXT), ("foreign", LARGE_CONTEXT)):
        shutil.copytree(model_folder, root / name)
        config = json.loads((root / name / "config.json").read_text())
        (root / name / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    tokenizer = Tokenizer.from_file(str(root / "foreign" / "tokenizer.json"))
    tokenizer.add_tokens(["world"])
    tokenizer.save(str(root / "foreign" / "tokenizer.json"))
    config = json.loads((root / "foreign" / "config.json").read_text())
    (root / "foreign" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    return root


@pytest.fixture
def models_file(folders, tmp_path):
    """`models_file(large={"fallback": ["small"]}, small={})` writes one of these models, in this order."""

    def write(**entries):
        lines = []
        for name, entry in entries.items():
            values = {"name": name, "path": str(folders / name), **entry}
            lines += ["[[model]]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        (tmp_path / "models.toml").write_text("\n".join(lines))
        return tmp_path / "models.toml"

    return write


@pytest.fixture
def two_models(make_system, models_file):
    async def make(*, after_s=HANG_LIMIT_S, chain=("small",), large=None, small=None, **settings):
        named = {"aliases": ["default", "gpt-4"], "fallback": list(chain), "fallback_after_s": after_s}
        large = named | (large or {})
        others = {name: {} for name in chain if name != "small"}
        file = models_file(large=large, small=small or {}, **others)
        return await make_system(models=file, **settings)

    return make


class Answering:
    """Decode worker's script: all of an answer, computed by the decode worker itself or after a prefill worker."""

    def __init__(self, answer):
        self.answer = list(answer)
        self.may_begin = asyncio.Event()
        self.may_begin.set()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        await self.may_begin.wait()
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        attempt.tokens(first, self.answer[first:])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


async def refuses(attempt):
    attempt.refuse(Overloaded("no pages", retry_after_s=1.0))


async def add_decode(system, worker_type, model, script, number=0, **fields):
    return await system.add(worker_type("decode", f"decode-{model}-{number}", script, model=model, **fields))


def complete(system, model="large", *, headers=None, **body):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, **body}
    return system.http.post("/v1/completions", json=body, headers=headers)


def token_ids(answer):
    return answer.json()["choices"][0]["token_ids"]


def said(answer):
    return answer.headers["x-tandem-model"], answer.headers.get("x-tandem-fallback")


# --- several models ---------------------------------------------------------------------------------------------------


async def test_every_request_is_computed_by_workers_of_its_own_model(two_models, worker_type, pair_type):
    system = await two_models()
    pairs = {"large": pair_type(LARGE_ANSWER), "small": pair_type(SMALL_ANSWER)}
    workers = {}
    for model, pair in pairs.items():
        # All have the same fingerprint of their pages, so that nothing but the model's name tells them apart.
        prefill = await system.add(worker_type("prefill", f"prefill-{model}", pair.prefill, model=model))
        decodes = [await add_decode(system, worker_type, model, pair.decode, number) for number in range(2)]
        workers[model] = [prefill, *decodes]

    models = ["large", "small", "default"] * 8
    answers = await asyncio.gather(*(complete(system, model) for model in models))
    for model, answer in zip(models, answers, strict=True):
        served = "small" if model == "small" else "large"
        assert token_ids(answer) == (SMALL_ANSWER if model == "small" else LARGE_ANSWER)
        assert answer.json()["model"] == served
        assert said(answer) == (served, None)
    assert [len(workers[model][0].attempts) for model in pairs] == [16, 8]
    assert sum(len(worker.attempts) for worker in workers["large"][1:]) == 16
    assert sum(len(worker.attempts) for worker in workers["small"][1:]) == 8


async def test_another_model_s_workers_are_never_asked_not_even_when_there_is_nobody_else(
    two_models, worker_type, pair_type
):
    system = await two_models()
    pair = pair_type(SMALL_ANSWER)
    prefill = await system.add(worker_type("prefill", "prefill-small", pair.prefill, model="small"))
    decode = await add_decode(system, worker_type, "small", pair.decode)
    answer = await complete(system, "large")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert not prefill.attempts
    assert not decode.attempts

    # With a decode worker of its own, but no prefill worker: that one does all of it.
    large = await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
    assert token_ids(await complete(system, "large")) == LARGE_ANSWER
    assert large.attempts[0].request.local_prefill
    assert not prefill.attempts
    assert not decode.attempts


async def test_what_dies_or_leaves_is_not_followed_by_a_worker_of_another_model(
    two_models, worker_type, tokenizer, read_sse
):
    system = await two_models(failover_wait_s=0.3)
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    held = asyncio.Event()

    async def begins(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        attempt.tokens(0, LARGE_ANSWER[:1])
        attempt.worker.drain()
        await held.wait()
        await attempt.worker.die()

    large = await add_decode(system, worker_type, "large", begins)
    task = asyncio.create_task(complete(system, "large", stream=True, allow_fallback=True))
    await system.until(lambda: bool(large.attempts))
    await system.until(lambda: large.attempts[0].worker.load.state == cluster_pb2.WORKER_STATE_DRAINING)
    held.set()
    events = read_sse((await task).text)
    assert events[0]["model"] == "large"
    assert "error" in events[-1]
    # The answer is neither moved there nor begun again there, whatever was allowed: the client has a token already.
    assert not small.attempts


async def test_names_aliases_and_no_name(two_models, worker_type):
    system = await two_models()
    await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)

    listed = (await system.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["root"]) for model in listed] == [
        ("large", "large"),
        ("default", "large"),
        ("gpt-4", "large"),
        ("small", "small"),
    ]
    assert [model["max_model_len"] for model in listed] == [LARGE_CONTEXT] * 3 + [SMALL_CONTEXT]
    shown = (await system.http.get("/v1/models/gpt-4")).json()
    assert (shown["id"], shown["root"]) == ("gpt-4", "large")

    answer = await complete(system, "gpt-4")
    assert (answer.json()["model"], said(answer)) == ("large", ("large", None))
    chat = await system.chat(model="default")
    assert chat.json()["model"] == "large"

    for path in ("/v1/models/none", "/v1/models/Large"):
        assert (await system.http.get(path)).status_code == 404
    unknown = await complete(system, "Large")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    nameless = await complete(system, None)
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
    # The limits are each model's own.
    long = await complete(system, "small", prompt=[5] * 60, max_tokens=10)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (await complete(system, "large", prompt=[5] * 60, max_tokens=10)).status_code == 200


async def test_grpc_knows_the_models_too(two_models, worker_type, folders):
    system = await two_models(chain=("foreign", "small"))
    await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        inference = inference_pb2_grpc.InferenceStub(channel)
        listed = (await inference.ListModels(inference_pb2.ListModelsRequest())).models
        assert [model.name for model in listed] == ["default", "foreign", "gpt-4", "large", "small"]
        assert {model.name: model.context_length_tokens for model in listed}["small"] == SMALL_CONTEXT

        text = inference_pb2.TokenizeRequest(model="foreign", text=PROMPT, without_special_tokens=True)
        ids = list((await inference.Tokenize(text)).token_ids)
        foreign = Tokenizer.from_file(str(folders / "foreign" / "tokenizer.json"))
        assert ids == foreign.encode(PROMPT, add_special_tokens=False).ids
        back = await inference.Detokenize(inference_pb2.DetokenizeRequest(model="foreign", token_ids=ids))
        assert back.text == PROMPT
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await inference.Tokenize(inference_pb2.TokenizeRequest(text="a"))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        call = inference.GenerateUnary(inference_pb2.GenerateRequest(model="gpt-4", text=PROMPT))
        assert list((await call).token_ids) == LARGE_ANSWER
        said = dict(await call.initial_metadata())
        assert said["x-tandem-model"] == "large"
        assert "x-tandem-fallback" not in said


async def test_ready_when_every_model_is(two_models, worker_type):
    system = await two_models(min_prefill=1, small={"prefill": 0})
    seen = []
    for role, model in (("decode", "small"), ("decode", "large"), ("prefill", "large")):
        seen.append((await system.http.get("/ready")).status_code)
        await system.add(worker_type(role, f"{role}-{model}", Answering([1]).decode, model=model))
    assert seen == [503, 503, 503]
    assert (await system.http.get("/ready")).status_code == 200


async def test_a_worker_of_an_unknown_model_is_named_once_in_the_log(two_models, worker_type, caplog):
    caplog.set_level("INFO", logger="gateway.assembly")
    system = await two_models()
    await system.add(worker_type("decode", "decode-typo", Answering([1]).decode, model="lrage"))
    await system.add(worker_type("decode", "decode-large", Answering(LARGE_ANSWER).decode, model="large"))
    assert token_ids(await complete(system, "large")) == LARGE_ANSWER
    said = [record for record in caplog.records if record.message == "a worker has a model not served here"]
    assert [(record.worker, record.model) for record in said] == [("decode-typo", "lrage")]


async def test_a_model_without_room_does_not_hold_up_another(two_models, worker_type):
    system = await two_models()
    await add_decode(system, worker_type, "large", refuses)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    waiting = [asyncio.create_task(complete(system, "large")) for _ in range(3)]
    await system.until(lambda: system.gateway.requests.num_queued == 3)
    assert token_ids(await complete(system, "small")) == SMALL_ANSWER
    assert system.gateway.requests.num_queued == 3
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await system.until(lambda: system.gateway.requests.num_queued == 0)


# --- fallbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({}, {"allow_fallback": True}),
        ({"x-allow-fallback": "true"}, {}),
        ({"x-allow-fallback": "false"}, {"allow_fallback": True}),
    ],
)
async def test_without_workers_the_next_model_answers_and_the_answer_says_so(
    two_models, worker_type, headers, body, read_sse
):
    system = await two_models()
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, "default", headers=headers, seed=7, **body)
    assert token_ids(answer) == SMALL_ANSWER
    assert answer.json()["model"] == "small"
    assert said(answer) == ("small", "large -> small; reason=unavailable")
    assert small.attempts[0].spec.sampling.seed == 7

    stream = await complete(system, headers=headers, stream=True, **body)
    events = read_sse(stream.text)
    assert {event["model"] for event in events[:-1]} == {"small"}
    assert said(stream) == ("small", "large -> small; reason=unavailable")

    chat = await system.http.post(
        "/v1/chat/completions",
        json={"model": "large", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **body},
        headers=headers,
    )
    assert (chat.json()["model"], said(chat)[1]) == ("small", "large -> small; reason=unavailable")
    metrics = (await system.http.get("/metrics")).text
    assert 'tandem_fallbacks_total{answering="small",asked="large",reason="unavailable"} 3.0' in metrics


@pytest.mark.parametrize("headers", [{}, {"x-allow-fallback": "false"}])
@pytest.mark.parametrize("body", [{}, {"allow_fallback": False}, {"allow_fallback": None}])
async def test_without_permission_nobody_else_answers(two_models, worker_type, headers, body):
    system = await two_models()
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, headers=headers, **body)
    assert answer.status_code == 503
    assert "x-tandem-fallback" not in answer.headers
    assert not small.attempts


async def test_a_field_goes_before_the_header_and_both_have_a_rule(two_models, worker_type):
    system = await two_models()
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    refused = await complete(system, headers={"x-allow-fallback": "true"}, allow_fallback=False)
    assert refused.status_code == 503
    for headers, body in (({"x-allow-fallback": "yes"}, {}), ({}, {"allow_fallback": "true"})):
        wrong = await complete(system, headers=headers, **body)
        assert wrong.status_code == 400
        assert "allow" in wrong.json()["error"]["param"].lower()
    assert not small.attempts


async def test_overload_leads_to_the_next_model_after_the_wait_that_the_file_says(two_models, worker_type, tokenizer):
    system = await two_models(after_s=0.2)
    large = await add_decode(system, worker_type, "large", refuses)
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    started_s = asyncio.get_running_loop().time()
    answer = await complete(system, n=3, allow_fallback=True, seed=11, max_tokens=40)
    assert asyncio.get_running_loop().time() - started_s >= 0.2
    assert said(answer) == ("small", "large -> small; reason=overloaded")
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == [SMALL_ANSWER] * 3
    assert large.attempts
    assert {tuple(attempt.spec.prompt_token_ids) for attempt in small.attempts} == {tuple(tokenizer.encode(PROMPT).ids)}
    # Each choice has the seed that it would have had.
    seeds = {attempt.key[0].rpartition(".")[2]: attempt.spec.sampling.seed for attempt in large.attempts}
    assert {attempt.key[0].rpartition(".")[2]: attempt.spec.sampling.seed for attempt in small.attempts} == seeds
    assert seeds["0"] == 11
    await system.until(lambda: system.gateway.requests.num_queued == system.gateway.requests.num_running == 0)


async def test_a_full_queue_leads_to_the_next_model_at_once(two_models, worker_type):
    system = await two_models(after_s=60.0, max_queued_requests=0)
    await add_decode(system, worker_type, "large", refuses)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    async with asyncio.timeout(HANG_LIMIT_S):
        answer = await complete(system, allow_fallback=True)
    assert said(answer) == ("small", "large -> small; reason=overloaded")


async def test_a_worker_that_takes_the_call_in_time_keeps_it(two_models, worker_type):
    system = await two_models(after_s=0.05)
    slow = Answering(LARGE_ANSWER)
    slow.may_begin.clear()
    large = await add_decode(system, worker_type, "large", slow.decode)
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    task = asyncio.create_task(complete(system, allow_fallback=True))
    await system.until(lambda: bool(large.attempts))
    # Several times the patience: it is about room, not about how long a prompt takes.
    await asyncio.sleep(0.3)
    slow.may_begin.set()
    answer = await task
    assert (token_ids(answer), said(answer)) == (LARGE_ANSWER, ("large", None))
    assert not small.attempts


async def test_a_shorter_answer_is_the_last_that_is_tried(two_models, worker_type):
    """The large model's only worker has too few pages for the whole answer, and the small one refuses."""
    system = await two_models(large={"fallback_max_tokens": 4})
    large, small = Answering(LARGE_ANSWER[:4]), await add_decode(system, worker_type, "small", refuses)

    async def decode(attempt):
        await (refuses if attempt.spec.sampling.max_tokens > 4 else large.decode)(attempt)

    worker = await add_decode(system, worker_type, "large", decode)
    answer = await complete(system, allow_fallback=True, max_tokens=20)
    assert said(answer) == ("large", "large -> large (shorter); reason=overloaded; max_tokens=4")
    assert token_ids(answer) == LARGE_ANSWER[:4]
    assert small.attempts
    assert {attempt.spec.sampling.max_tokens for attempt in worker.attempts} == {20, 4}
    metrics = (await system.http.get("/metrics")).text
    assert 'tandem_fallbacks_total{answering="large (shorter)",asked="large",reason="overloaded"} 1.0' in metrics


async def test_an_answer_that_is_as_short_already_has_no_shorter_one(two_models, worker_type):
    system = await two_models(large={"fallback_max_tokens": 4}, max_queue_wait_s=1.0)
    large = Answering(LARGE_ANSWER[:4])

    async def decode(attempt):
        is_first = attempt.key[0] == worker.attempts[0].key[0]
        await (refuses if is_first else large.decode)(attempt)

    worker = await add_decode(system, worker_type, "large", decode)
    small = await add_decode(system, worker_type, "small", refuses)
    answer = await complete(system, allow_fallback=True, max_tokens=4)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    assert small.attempts
    assert len({attempt.key[0] for attempt in worker.attempts}) == 1


async def test_a_kept_answer_goes_before_all_others(two_models, worker_type):
    system = await two_models(after_s=0.1, large={"fallback_kept": True})
    script, small = Answering(LARGE_ANSWER), await add_decode(system, worker_type, "small", refuses)
    is_full = False

    async def decode(attempt):
        await (refuses if is_full else script.decode)(attempt)

    worker = await add_decode(system, worker_type, "large", decode)
    first = await complete(system, temperature=0, n=2)
    assert said(first) == ("large", None)
    is_full, num_attempts = True, len(small.attempts)
    again = await complete(system, temperature=0, n=2, allow_fallback=True, seed=5)
    assert said(again) == ("large", "large -> large (kept); reason=overloaded")
    told = [
        [(choice["text"], choice["token_ids"], choice["finish_reason"]) for choice in answer.json()["choices"]]
        for answer in (first, again)
    ]
    assert told[0] == told[1]
    assert first.json()["usage"]["completion_tokens"] == again.json()["usage"]["completion_tokens"]
    assert len(small.attempts) == num_attempts
    async with system.http.stream(
        "POST",
        "/v1/completions",
        json={
            "model": "large",
            "prompt": PROMPT,
            "max_tokens": 20,
            "temperature": 0,
            "stream": True,
            "allow_fallback": True,
        },
    ) as stream:
        events = [
            json.loads(line[6:]) for line in [line async for line in stream.aiter_lines()] if line[:7] == "data: {"
        ]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == told[0][0][0]
    await worker.stop()
    await system.until(lambda: system.gateway.topology.num_ready("decode", "large") == 0)
    gone = await complete(system, temperature=0, allow_fallback=True)
    assert said(gone) == ("large", "large -> large (kept); reason=unavailable")
    metrics = (await system.http.get("/metrics")).text
    assert 'tandem_fallbacks_total{answering="large (kept)",asked="large",reason="overloaded"} 2.0' in metrics


async def test_another_request_than_the_kept_one_is_answered_by_the_next_of_the_chain(two_models, worker_type):
    system = await two_models(large={"fallback_kept": True})
    worker = await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    assert said(await complete(system, temperature=0)) == ("large", None)
    await worker.stop()
    await system.until(lambda: system.gateway.topology.num_ready("decode", "large") == 0)
    for body in ({"temperature": 0.5}, {"temperature": 0, "max_tokens": 19}, {"temperature": 0, "logprobs": 1}):
        answer = await complete(system, allow_fallback=True, **body)
        assert said(answer) == ("small", "large -> small; reason=unavailable")


async def test_each_model_of_the_chain_tokenizes_for_itself(two_models, worker_type, folders):
    system = await two_models(chain=("small", "foreign"))
    foreign = await add_decode(system, worker_type, "foreign", Answering(LARGE_ANSWER).decode)
    # `small` has no worker, and nothing is tried there.
    answer = await complete(system, allow_fallback=True)
    assert said(answer) == ("foreign", "large -> foreign; reason=unavailable")
    expected = Tokenizer.from_file(str(folders / "foreign" / "tokenizer.json")).encode(PROMPT).ids
    assert list(foreign.attempts[0].spec.prompt_token_ids) == expected


TOO_MUCH = {
    "context": ("small", {"max_tokens": SMALL_CONTEXT}),
    "prompt": ("small", {"prompt": "hello " * 70}),
    "prompt-token-ids": ("foreign", {"prompt": [5, 6, 7]}),
    "stop-token-ids": ("foreign", {"stop_token_ids": [9]}),
    "logit-bias": ("foreign", {"logit_bias": {"9": 5.0}}),
}


@pytest.mark.parametrize("row", TOO_MUCH, ids=TOO_MUCH)
async def test_what_a_model_cannot_take_over_it_does_not_answer(two_models, worker_type, row):
    model, body = TOO_MUCH[row]
    system = await two_models(chain=(model,), max_queue_wait_s=0.5)
    await add_decode(system, worker_type, "large", refuses)
    other = await add_decode(system, worker_type, model, Answering(SMALL_ANSWER).decode)
    answer = await complete(system, allow_fallback=True, **body)
    # It waited for its own model, as without permission.
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_overloaded")
    assert not other.attempts


async def test_token_ids_are_taken_over_by_a_model_with_the_same_tokenizer(two_models, worker_type):
    system = await two_models()
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, allow_fallback=True, prompt=[5, 6, 7], stop_token_ids=[9])
    assert said(answer)[0] == "small"
    assert list(small.attempts[0].spec.prompt_token_ids) == [5, 6, 7]


async def test_when_all_are_full_the_error_is_that_of_the_model_asked_for(two_models, worker_type):
    system = await two_models(max_queue_wait_s=0.3)
    await add_decode(system, worker_type, "small", refuses)
    answer = await complete(system, allow_fallback=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    await system.until(lambda: system.gateway.requests.num_queued == system.gateway.requests.num_running == 0)


async def test_a_deadline_is_not_begun_anew(two_models, worker_type):
    system = await two_models(max_request_s=0.6, after_s=0.2)
    await add_decode(system, worker_type, "large", refuses)
    await add_decode(system, worker_type, "small", refuses)
    started_s = asyncio.get_running_loop().time()
    answer = await complete(system, allow_fallback=True)
    assert answer.status_code == 504
    assert asyncio.get_running_loop().time() - started_s >= 0.5


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(two_models, worker_type):
    system = await two_models(after_s=30.0)
    large = await add_decode(system, worker_type, "large", refuses)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    for stream in (False, True):
        task = asyncio.create_task(complete(system, allow_fallback=True, stream=stream, n=2))
        await system.until(lambda: system.gateway.requests.num_queued == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await system.until(lambda: system.gateway.requests.num_queued == 0)
    assert await system.gateway.requests.wait_until_idle(timeout_s=HANG_LIMIT_S)
    assert large.attempts


async def test_a_leaving_gateway_begins_nothing_with_another_model(two_models, worker_type):
    system = await two_models(after_s=30.0)
    await add_decode(system, worker_type, "large", refuses)
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    task = asyncio.create_task(complete(system, allow_fallback=True))
    await system.until(lambda: system.gateway.requests.num_queued == 1)
    leaving = Overloaded("the gateway is leaving", retry_after_s=1.0)
    system.gateway.requests.refuse_new(leaving)
    system.gateway.requests.end_all(leaving)
    assert (await task).status_code == 503
    assert not small.attempts


async def test_a_tenant_falls_back_only_to_models_that_it_may_use(two_models, worker_type):
    system = await two_models(chain=("small", "foreign"))
    call = Call(
        operation="text_completion",
        model="large",
        prompts=[PROMPT],
        sampling=AskedSampling(max_tokens=4),
        allow_fallback=True,
        allowed_models=frozenset({"large", "foreign"}),
    )
    with await system.gateway.requests.accept(call) as accepted:
        assert accepted.fallbacks == ("foreign",)


@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
async def test_grpc_falls_back_and_says_so(two_models, worker_type, method):
    system = await two_models()
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        begin = getattr(inference_pb2_grpc.InferenceStub(channel), method)

        async def ask(allowed, request_id=""):
            request = inference_pb2.GenerateRequest(model="large", text=PROMPT, request_id=request_id)
            call = begin(request, metadata=() if allowed is None else (("x-allow-fallback", allowed),))
            parts = [await call] if method == "GenerateUnary" else [part async for part in call]
            said = dict(await call.initial_metadata())
            return [token for part in parts for token in part.token_ids], said

        for request_id in ("", "mine"):
            tokens, said = await ask("true", request_id)
            assert tokens == SMALL_ANSWER
            assert said["x-tandem-model"] == "small"
            assert said["x-tandem-fallback"] == "large -> small; reason=unavailable"
        for allowed, code in ((None, "UNAVAILABLE"), ("false", "UNAVAILABLE"), ("perhaps", "INVALID_ARGUMENT")):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ask(allowed)
            assert refused.value.code().name == code


# --- named requests ---------------------------------------------------------------------------------------------------


class Gated(Answering):
    """Gives some tokens, and the rest when it may."""

    def __init__(self, answer, num_at_once):
        super().__init__(answer)
        self.num_at_once = num_at_once
        self.may_go_on = asyncio.Event()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        if first < self.num_at_once:
            attempt.tokens(first, self.answer[first : self.num_at_once])
        await self.may_go_on.wait()
        first = max(first, self.num_at_once)
        attempt.tokens(first, self.answer[first:])
        attempt.finish(inference_pb2.FINISH_REASON_STOP)


KEY = {"idempotency-key": "order-4711"}


async def test_a_named_request_goes_on_elsewhere_with_the_model_that_has_answered(two_models, worker_type, read_sse):
    first, second = await two_models(), await two_models()
    script = Gated(SMALL_ANSWER, 2)
    small = await add_decode(first, worker_type, "small", script.decode)
    await second.until(lambda: second.gateway.topology.num_ready("decode", "small") == 1)
    body = {
        "model": "large", "prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, "stream": True,
        "allow_fallback": True,
    }  # fmt: skip
    had, last_id = [], ""
    async with first.http.stream("POST", "/v1/completions", json=body, headers=KEY) as stream:
        assert said(stream) == ("small", "large -> small; reason=unavailable")
        async for line in stream.aiter_lines():
            if line.startswith("id: "):
                last_id = line.removeprefix("id: ")
            if line.startswith("data: "):
                had += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids", [])
            if len(had) == 2 and not line:
                break
    # A worker of the model that was asked for has come; the answer is not its own.
    large = await add_decode(second, worker_type, "large", Answering(LARGE_ANSWER).decode)
    script.may_go_on.set()
    rest = await second.http.post("/v1/completions", json=body, headers=KEY | {"last-event-id": last_id})
    assert rest.status_code == 200, rest.text
    assert said(rest) == ("small", "large -> small; reason=unavailable")
    lines = [line for line in rest.text.splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert {event["model"] for event in events} == {"small"}
    assert had + [token for event in events for token in event["choices"][0].get("token_ids", [])] == SMALL_ANSWER
    assert not large.attempts
    assert len(small.attempts) == 2

    # Again from the start: the same answer of the same model, computed by nobody.
    again = await second.http.post("/v1/completions", json=body, headers=KEY)
    assert said(again) == ("small", "large -> small; reason=unavailable")
    assert len(small.attempts) == 2
    # The other gateway may not know of the end yet, and has no other model compute it.
    again = await first.http.post("/v1/completions", json=body, headers=KEY)
    assert said(again) == ("small", "large -> small; reason=unavailable")
    assert not large.attempts


async def test_two_clients_of_a_named_request_get_one_model(two_models, worker_type):
    system = await two_models(after_s=0.3)
    large = await add_decode(system, worker_type, "large", refuses)
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answers = await asyncio.gather(*(complete(system, headers=KEY, allow_fallback=True) for _ in range(4)))
    assert {said(answer) for answer in answers} == {("small", "large -> small; reason=overloaded")}
    assert {answer.content for answer in answers} == {answers[0].content}
    assert len(small.attempts) == 1
    assert large.attempts


async def test_a_named_request_that_nobody_could_answer_may_fall_back_when_it_comes_again(two_models, worker_type):
    first, second = await two_models(), await two_models()
    for system in (first, second):
        answer = await complete(system, headers=KEY, allow_fallback=True)
        assert answer.json()["error"]["code"] == "worker_unavailable"
    await add_decode(first, worker_type, "small", Answering(SMALL_ANSWER).decode)
    await second.until(lambda: second.gateway.topology.num_ready("decode", "small") == 1)
    answers = [await complete(system, headers=KEY, allow_fallback=True) for system in (second, first)]
    assert [said(answer)[0] for answer in answers] == ["small", "small"]
    assert answers[0].content == answers[1].content


async def test_a_named_request_that_its_own_model_has_begun_stays_with_it(two_models, worker_type):
    first, second = await two_models(failover_wait_s=0.2), await two_models(failover_wait_s=0.2)
    script = Gated(LARGE_ANSWER, 1)
    large = await add_decode(first, worker_type, "large", script.decode)
    small = await add_decode(first, worker_type, "small", Answering(SMALL_ANSWER).decode)
    await second.until(lambda: second.gateway.topology.num_ready("decode", "small") == 1)
    body = {"model": "large", "prompt": PROMPT, "max_tokens": 20, "stream": True, "allow_fallback": True}
    async with first.http.stream("POST", "/v1/completions", json=body, headers=KEY) as stream:
        assert said(stream) == ("large", None)
        async for line in stream.aiter_lines():
            if line.startswith("data: "):
                break
    await large.stop()
    del first.workers[large.worker_id]
    for system in (first, second):
        await system.until(lambda system=system: system.gateway.topology.num_ready("decode", "large") == 0)
        again = await system.http.post("/v1/completions", json=body, headers=KEY)
        assert again.status_code == 503 or '"error"' in again.text
        assert "x-tandem-fallback" not in again.headers
    assert not small.attempts


async def test_a_worker_that_cannot_be_reached_is_no_worker(two_models, worker_type):
    system = await two_models(max_attempts=1, failover_wait_s=0.2)

    async def fails(attempt):
        attempt.refuse(WorkerUnavailable("leaving"))

    await add_decode(system, worker_type, "large", fails)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, allow_fallback=True)
    assert said(answer) == ("small", "large -> small; reason=unavailable")


# --- API keys ---------------------------------------------------------------------------------------------------------

KEYS = {
    "all": {"allow_fallback": True},
    "asks": {},
    "large": {"models": frozenset({"large"}), "allow_fallback": True},
    "small": {"models": frozenset({"small"})},
    "alias": {"models": frozenset({"default"})},
}


def secret(name):
    return f"tandem-{name}-0123456789"


def shows(name, **headers):
    return {"authorization": f"Bearer {secret(name)}", **headers}


@pytest.fixture
def guarded_models(two_models, tmp_path):
    async def make(limits="", **settings):
        file = tmp_path / "keys.toml"
        entries = [toml_entry(ApiKey(digest_of_key(secret(name)), "acme", **fields)) for name, fields in KEYS.items()]
        file.write_text("".join(entries) + limits)
        return await two_models(api_keys=file, **settings)

    return make


async def test_a_key_names_models_by_their_own_names(guarded_models, worker_type):
    system = await guarded_models()
    await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
    names = {"all": ["large", "default", "gpt-4", "small"], "large": ["large", "default", "gpt-4"], "small": ["small"]}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for name in KEYS:
            allowed = names.get(name, names["all"] if name == "asks" else [])
            listed = await system.http.get("/v1/models", headers=shows(name))
            assert [model["id"] for model in listed.json()["data"]] == allowed
            sent = tuple(shows(name).items())
            models = (await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=sent)).models
            assert [model.name for model in models] == sorted(allowed)
            for alias in ("large", "gpt-4"):
                shown = await system.http.get(f"/v1/models/{alias}", headers=shows(name))
                answer = await complete(system, alias, headers=shows(name))
                tokenized = stub.Tokenize(inference_pb2.TokenizeRequest(model=alias, text="a"), metadata=sent)
                if alias in allowed:
                    assert (shown.json()["root"], token_ids(answer)) == ("large", LARGE_ANSWER)
                    assert (await tokenized).token_ids
                    continue
                for refused in (shown, answer):
                    error = refused.json()["error"]
                    assert (refused.status_code, error["code"]) == (403, "model_not_allowed")
                    assert repr(alias) in error["message"]
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await tokenized
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        # A client that may not use a model is not told whether it exists.
        assert (await complete(system, "none", headers=shows("small"))).status_code == 403
        assert (await complete(system, "none", headers=shows("all"))).status_code == 404
        assert (await complete(system, None, headers=shows("small"))).json()["error"]["param"] == "model"


async def test_a_key_decides_whether_another_model_may_answer_unless_the_request_does(guarded_models, worker_type):
    system = await guarded_models()
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    for name, changes, falls_back in (
        ("all", {}, True),
        ("all", {"allow_fallback": False}, False),
        ("all", {"headers": {"x-allow-fallback": "false"}}, False),
        ("asks", {}, False),
        ("asks", {"allow_fallback": True}, True),
        ("asks", {"headers": {"x-allow-fallback": "true"}}, True),
    ):
        answer = await complete(system, **{**changes, "headers": shows(name, **changes.get("headers", {}))})
        assert answer.status_code == (200 if falls_back else 503)
        if falls_back:
            assert said(answer) == ("small", "large -> small; reason=unavailable")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        begin = inference_pb2_grpc.InferenceStub(channel).GenerateUnary
        request = inference_pb2.GenerateRequest(model="large", text=PROMPT)
        assert (await begin(request, metadata=tuple(shows("all").items()))).token_ids == SMALL_ANSWER
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await begin(request, metadata=(*shows("all").items(), ("x-allow-fallback", "false")))
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_fallback_never_goes_to_a_model_that_the_key_does_not_allow(guarded_models, worker_type):
    system = await guarded_models()
    small = await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    for headers in ({}, KEY, {"x-request-id": "mine"}):
        answer = await complete(system, headers=shows("large", **headers), allow_fallback=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")
    assert not small.attempts


async def test_an_answer_is_shown_to_no_key_that_does_not_allow_its_model(guarded_models, worker_type):
    first, second = await guarded_models(), await guarded_models()
    small = await add_decode(first, worker_type, "small", Answering(SMALL_ANSWER).decode)
    await second.until(lambda: second.gateway.topology.num_ready("decode", "small") == 1)
    named = {"idempotency-key": "k", "x-request-id": "mine"}
    answer = await complete(first, headers=shows("all", **named))
    assert said(answer) == ("small", "large -> small; reason=unavailable")
    await first.gateway._journals._writer.flush()
    for system in (first, second):
        again = await complete(system, headers=shows("all", **named))
        assert (again.text, said(again)) == (answer.text, said(answer))
        refused = await complete(system, headers=shows("large", **named))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
            resume = inference_pb2_grpc.InferenceStub(channel).Resume
            request = inference_pb2.ResumeRequest(request_id="mine", next_index=1)
            parts = [part async for part in resume(request, metadata=tuple(shows("small").items()))]
            assert [token for part in parts for token in part.token_ids] == SMALL_ANSWER[1:]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await resume(request, metadata=tuple(shows("large").items())).read()
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert len(small.attempts) == 1


async def test_what_another_model_answers_is_paid_once_and_as_that_model_counts(guarded_models, worker_type):
    system = await guarded_models("[tenant.acme]\nrequests_per_minute = 2\ntokens_per_minute = 1000\n")
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, headers=shows("all"))
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    limits = system.gateway.door.key_file.keys.limits_of("acme")
    used = answer.json()["usage"]["total_tokens"]
    async with asyncio.timeout(HANG_LIMIT_S):
        while True:
            left = await system.gateway.limiter.take("acme", limits)
            if left.tokens.remaining >= 1000 - used:
                break
            await asyncio.sleep(0.02)  # until the end has been booked
    assert left.requests.remaining == 1
    assert said(await complete(system, headers=shows("all")))[0] == "small"
    assert (await complete(system, headers=shows("all"))).json()["error"]["code"] == "rate_limit_exceeded"


async def test_what_no_model_had_room_for_costs_nothing(guarded_models, worker_type):
    system = await guarded_models("[tenant.acme]\nrequests_per_minute = 1\n", max_queue_wait_s=0.3)
    small = await add_decode(system, worker_type, "small", refuses)

    async def tried(*refusals):
        """Asks until the status is not in `refusals`: what is given back is booked beside the answer."""
        while (answer := await complete(system, headers=shows("all"))).status_code in refusals:  # noqa: ASYNC110 - across sockets
            await asyncio.sleep(0.02)
        return answer

    async with asyncio.timeout(HANG_LIMIT_S):  # one request a minute would take longer
        for _ in range(3):
            assert (await tried(429)).json()["error"]["code"] == "worker_unavailable"
        assert small.attempts
        await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
        # On a busy machine the worker may have its turn too late, which costs nothing either.
        assert token_ids(await tried(429, 503)) == LARGE_ANSWER
    assert (await complete(system, headers=shows("all"))).status_code == 429


async def test_a_model_whose_workers_are_away_is_stood_in_for_at_once(two_models, worker_type, monkeypatch):
    system = await two_models(after_s=60.0)
    large = await add_decode(system, worker_type, "large", Answering(LARGE_ANSWER).decode)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    monkeypatch.setattr(DecodeSession, "run", lambda session: asyncio.Event().wait())
    large.sessions.close()
    await system.until(lambda: system.gateway.topology.num_ready("decode", "large") == 0)
    async with asyncio.timeout(HANG_LIMIT_S):
        answer = await complete(system, allow_fallback=True)
    assert said(answer) == ("small", "large -> small; reason=unavailable")


async def test_a_fallback_is_in_the_trace(two_models, worker_type, monkeypatch):
    spans = KeptSpans.install(monkeypatch)
    system = await two_models(after_s=0.2)
    await add_decode(system, worker_type, "large", refuses)
    await add_decode(system, worker_type, "small", Answering(SMALL_ANSWER).decode)
    answer = await complete(system, allow_fallback=True)
    await system.until(lambda: spans.named("request"))
    request, *phases = sorted(spans.spans, key=lambda span: (not span.is_server, span.start_unix_ns))
    assert answer.headers["traceparent"] == telemetry.inject(request.context)
    assert [span.name for span in phases] == ["queue", "queue", "route", "prefill", "decode"]
    first, second, route = phases[:3]
    assert first.attributes["tandem.is_cancelled"] is True
    assert (first.start_unix_ns, first.end_unix_ns) == (request.start_unix_ns, second.start_unix_ns)
    assert sum(span.end_unix_ns - span.start_unix_ns for span in phases) == request.end_unix_ns - request.start_unix_ns
    assert route.attributes["tandem.model"] == "small"
    assert [request.attributes[f"gen_ai.{what}.model"] for what in ("request", "response")] == ["large", "small"]
    assert request.attributes["tandem.fallback"] == "large -> small; reason=overloaded"
    assert "fallback" in [name for name, _ in events_of(request)]
