"""What a client is told of tokens that were not computed for it, and whose pages its request may find."""

import contextlib

import grpc
import msgspec
import pytest

from gateway.access.keys import ApiKey, Tenant, digest_of_key, toml_entry, toml_tenant
from gateway.named.journal import decode_call, encode_call
from gateway.requests.call import Call
from gateway.requests.tokens import TokenLog
from gateway.types import AskedSampling
from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from services.runtime.errors import InternalError
from services.runtime.page_keys import sharers

PROMPT = [5, 6, 7, 8, 9]


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def prefill_finding(pair, *num_cached, fails=0):
    """A prefill worker that finds `num_cached[N]` tokens for its attempt N; the first `fails` attempts fail."""

    async def prefill(attempt):
        attempt.emit(worker_pb2.PrefillStarted(num_cached_tokens=num_cached[attempt.key[1] - 1]))
        if attempt.key[1] <= fails:
            attempt.fail(InternalError("broken"))
            return
        attempt.tokens(0, pair.answer[:1])
        attempt.emit(worker_pb2.HandedOff(num_pages=1, num_bytes=64, exposed_s=0.001, transport="none"))
        pair.event(attempt).set()

    return prefill


@pytest.mark.parametrize(
    ("num_cached", "fails", "expected"),
    [
        ((0,), 0, 0),
        ((3,), 0, 3),
        # What the first attempt computed, the second finds; the request has computed it all the same.
        ((0, 4), 1, 0),
        ((2, 5), 1, 2),
        ((4, 0), 1, 0),
    ],
)
async def test_usage_says_what_no_attempt_computed(make_system, pair_type, worker_type, num_cached, fails, expected):
    system, pair = await make_system(), pair_type([11, 12, 1])
    await system.add(worker_type("prefill", "prefill-0", prefill_finding(pair, *num_cached, fails=fails)))
    await system.add(worker_type("decode", "decode-0", pair.decode))
    body = (await system.complete(prompt=PROMPT, max_tokens=10)).json()
    assert (body["usage"]["prompt_tokens"], cached(body)) == (5, expected)


async def test_a_decode_worker_that_computes_the_prompt_says_it(make_system, pair_type, worker_type):
    system, pair = await make_system(), pair_type([11, 12, 1])

    async def decode(attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.PrefillStarted(num_cached_tokens=4))
        await pair.generate(attempt, 0)

    await system.add(worker_type("decode", "decode-0", decode))
    assert cached((await system.complete(prompt=PROMPT, max_tokens=10)).json()) == 4


def test_of_an_answer_that_was_begun_elsewhere_nothing_is_known_to_be_cached():
    log = TokenLog(10, [1, 2])
    log.note_prefill(7)
    assert log.num_cached_tokens == 0


def grpc_request(**changes):
    sampling = inference_pb2.SamplingParams(max_tokens=3, seed=1)
    return inference_pb2.GenerateRequest(text="hello world", sampling=sampling, **changes)


@contextlib.asynccontextmanager
async def inference_of(system):
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def salts_of(system):
    """What each worker was told, request by request; both roles must be told the same."""
    prefill, decode = (
        [attempt.spec.cache_salt for attempt in system.workers[name].attempts] for name in ("prefill-0", "decode-0")
    )
    assert prefill == decode
    return decode


async def test_pages_are_shared_by_the_requests_of_a_tenant_with_the_same_salt(make_system, pair_type):
    system = await make_system()
    await system.add_pair(pair_type([11, 12, 1]))
    # The last ones would have the pages of others if names and salts were only put together.
    asked = [("", ""), ("ab", ""), ("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("a", ""), ("", "2:ta")]
    async with inference_of(system) as inference:
        for tenant, salt in asked:
            await inference.GenerateUnary(grpc_request(tenant=tenant, cache_salt=salt))
    over_grpc = salts_of(system)
    assert len(set(over_grpc)) == len(asked)
    for tenant, salt in asked:
        body = {"tenant": tenant, **({"cache_salt": salt} if salt else {})}
        assert (await system.complete(max_tokens=3, **body)).status_code == 200
        assert (await system.chat(max_tokens=3, **body)).status_code == 200
    assert salts_of(system)[len(asked) :] == [salt for salt in over_grpc for _ in range(2)]


async def test_grpc_refuses_a_salt_as_http_does(make_system, pair_type):
    system = await make_system()
    await system.add_pair(pair_type([11, 12, 1]))
    refused = (await system.complete(max_tokens=3, cache_salt="s" * 65)).json()["error"]
    assert refused["param"] == "cache_salt"
    async with inference_of(system) as inference:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference.GenerateUnary(grpc_request(cache_salt="s" * 65))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused["message"] in caught.value.details()
    assert "cache_salt must have 1 to 64 characters" in refused["message"]


async def test_tenants_share_pages_only_under_a_name_that_the_key_file_gives_them(make_system, pair_type, tmp_path):
    """Also a tenant that is called as the others' name, or that puts that name into its salt, has only its own."""
    tenants = ("one", "two", "team", "loner")
    tables = [toml_entry(ApiKey(digest_of_key(f"tandem-{tenant}"), tenant)) for tenant in tenants]
    tables += [toml_tenant(tenant, Tenant(share_cache="team")) for tenant in ("one", "two")]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(tables))
    system = await make_system(api_keys=path)
    await system.add_pair(pair_type([11, 12, 1]))

    async def ask(tenant, **body):
        headers = {"authorization": f"Bearer tandem-{tenant}"}
        body = {"prompt": PROMPT, "max_tokens": 3, **body}
        assert (await system.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        return salts_of(system)[-1]

    shared = [await ask(tenant) for tenant in tenants]
    assert shared[0] == shared[1]
    salted = [await ask(tenant, cache_salt="s") for tenant in tenants]
    assert salted[0] == salted[1]
    tricks = [await ask("loner", cache_salt=salt) for salt in ("team", "gteam", shared[0], salted[0])]
    assert len({*shared, *salted, *tricks}) == 3 + 3 + len(tricks)
    tables[-1] = ""
    path.write_text("\n".join(tables))
    await system.gateway.door.key_file.check()
    assert await ask("one") == shared[0]
    assert await ask("two") not in {*shared, *salted, *tricks}


async def test_a_stored_call_goes_on_with_the_pages_that_it_began_with(make_system, pair_type):
    system = await make_system()
    await system.add_pair(pair_type([11, 12, 1]))
    for salt, group in (("", ""), ("s", ""), ("s", "team")):
        call = Call(
            operation="text_completion",
            prompts=[PROMPT],
            tenant="one",
            cache_salt=salt,
            share_cache=group,
            sampling=AskedSampling(max_tokens=3),
        )
        with await system.gateway.requests.accept(call) as accepted:
            packed = encode_call(accepted.to_stored(), created_unix_s=1)
        stored, _ = decode_call(packed, request_id=accepted.request_id)
        with system.gateway.requests.adopt(msgspec.structs.replace(stored, remaining_s=10.0)) as adopted:
            async with contextlib.aclosing(system.gateway.requests.run(adopted.specs[0])) as deltas:
                assert [delta async for delta in deltas]
        assert salts_of(system)[-1] == sharers(tenant="one", group=group, salt=salt)
