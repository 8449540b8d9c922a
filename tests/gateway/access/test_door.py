"""The door over real HTTP and gRPC: keys, roles, models, tenants, classes, and limits that gateways share."""

import asyncio
import collections
import json
import os
import re
import signal
import socket
import stat

import grpc
import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.access.door import FrontDoor, shown_duration
from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.http.server import HttpServer
from protos import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2
from services.cluster import rate_limits as limits_module
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.rate_limits import Limiter
from services.cluster.redis_store import Store
from services.runtime.clock import ManualClock
from services.runtime.errors import ConfigError, Overloaded, Unauthenticated
from tests.waiting import HANG_LIMIT_S, until

KEYS = {
    "plain": ApiKey("", "acme"),
    "second": ApiKey("", "acme"),
    "other": ApiKey("", "other"),
    "urgent": ApiKey("", "acme", service_class="interactive", priority=10),
    "lowly": ApiKey("", "lowly", service_class="low", priority=-5),
    "elsewhere": ApiKey("", "acme", models=frozenset({"another-model"})),
    "here": ApiKey("", "acme", models=frozenset({"tiny"})),
    "admin": ApiKey("", "ops", is_admin=True),
    "old": ApiKey("", "acme", expires_s=1.0),
}
BODY = {"prompt": [5, 6, 7], "max_tokens": 20}


def secret(name):
    return f"tandem-{name}-0123456789"


def key_text(limits=""):
    entries = [
        toml_entry(
            ApiKey(
                digest_of_key(secret(name)),
                key.tenant,
                models=key.models,
                service_class=key.service_class,
                priority=key.priority,
                is_admin=key.is_admin,
                expires_s=key.expires_s,
            )
        )
        for name, key in KEYS.items()
    ]
    return "\n".join(entries) + limits


def shows(name):
    return {"authorization": f"Bearer {secret(name)}"}


class Script:
    """The script of a decode worker: sends two tokens, and the others when `gate` is open."""

    def __init__(self, answer):
        self.answer = answer
        self.gate = asyncio.Event()
        self.gate.set()

    async def decode(self, attempt):
        attempt.emit(worker_pb2.Admitted())
        attempt.emit(worker_pb2.DecodeStarted())
        first = len(attempt.spec.emitted_token_ids)
        num_tokens = min(len(self.answer), attempt.spec.sampling.max_tokens)
        for index in range(first, num_tokens):
            if index >= 2:
                await self.gate.wait()
            attempt.tokens(index, self.answer[index : index + 1])
        is_whole = num_tokens == len(self.answer)
        attempt.finish(inference_pb2.FINISH_REASON_STOP if is_whole else inference_pb2.FINISH_REASON_LENGTH)


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(key_text())
    return path


@pytest.fixture
def script():
    return Script([9, 10, 11, 12, 13, 1])


@pytest.fixture
def guarded(make_system, worker_type, key_file, script):
    """Makes a gateway that asks for keys, with a worker; `limits` is TOML."""

    async def make(limits="", *, num_gateways=1, **changes):
        key_file.write_text(key_text(limits))
        systems = [await make_system(api_keys=key_file, **changes) for _ in range(num_gateways)]
        await systems[0].add(worker_type("decode", "decode-0", script.decode))
        for system in systems:
            await system.until(lambda system=system: system.gateway.topology.num_ready("decode") == 1)
        return systems[0] if num_gateways == 1 else systems

    return make


async def post(system, name=None, path="/v1/completions", headers=None, **changes):
    sent = {**(shows(name) if name else {}), **(headers or {})}
    return await system.http.post(path, json={**BODY, **changes}, headers=sent)


def error_of(response, http_status):
    assert response.status_code == http_status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# --- whose request it is ---------------------------------------------------------------------------------------------


async def test_without_a_file_everybody_may_do_everything(make_system, worker_type, script):
    system = await make_system()
    worker = await system.add(worker_type("decode", "decode-0", script.decode))
    response = await post(system, service_class="critical", priority=100, tenant="anybody")
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]
    assert (await system.http.get("/cluster")).status_code == 200
    assert (await system.http.get("/nothing")).status_code == 404
    assert len(worker.attempts) == 1


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([], "an API key is needed"),
        ([("authorization", "")], "must be there once"),
        ([("authorization", "Bearer")], "must be there once"),
        ([("authorization", secret("plain"))], "must be there once"),
        ([("authorization", f"Basic {secret('plain')}")], "must be there once"),
        ([("authorization", f"Bearer {secret('plain')} x")], "must be there once"),
        ([("authorization", f"Bearer {secret('plain')}")] * 2, "must be there once"),
        ([("authorization", "Bearer tandem-unknown")], "not known"),
        ([("authorization", f"Bearer {digest_of_key(secret('plain'))}")], "not known"),
        ([("authorization", f"Bearer {secret('old')}")], "has expired"),
    ],
)
async def test_no_good_key(guarded, headers, words):
    system = await guarded()
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
        content = json.dumps(BODY).encode() if method == "POST" else None
        response = await system.http.request(method, path, content=content, headers=headers)
        error = error_of(response, 401)
        assert words in error["message"]
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_api_key", None)
        assert response.headers["www-authenticate"] == 'Bearer realm="tandem"'
        assert secret("plain") not in response.text


async def test_a_good_key_and_its_spellings(guarded):
    system = await guarded()
    for value in (f"Bearer {secret('plain')}", f"bearer  {secret('plain')}", f"BEARER {secret('plain')}"):
        response = await post(system, headers={"authorization": value})
        assert response.status_code == 200, response.text


async def test_a_body_is_not_read_for_nobody(guarded):
    """A client without a key is refused before its body has come, and loses the connection."""
    system = await guarded()
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: 8000000\r\n\r\n{"
    )
    async with asyncio.timeout(HANG_LIMIT_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in head
    writer.close()


async def test_probes_are_open_and_operators_pages_are_not(guarded):
    system = await guarded()
    for path in ("/health", "/ready"):
        assert (await system.http.get(path)).status_code == 200
    closed, missing = ("/metrics", "/cluster", "/dashboard/data"), ("/nothing/there", "/health/x", "//cluster", "/v1")
    for path in closed + missing:
        assert error_of(await system.http.get(path), 401)["code"] == "invalid_api_key"
    for path in closed:
        error = error_of(await system.http.get(path, headers=shows("plain")), 403)
        assert (error["code"], error["type"]) == ("admin_required", "permission_error")
    for path in missing:
        assert error_of(await system.http.get(path, headers=shows("plain")), 404)["code"] == "not_found"
    for path in ("/metrics", "/cluster"):
        assert (await system.http.get(path, headers=shows("admin"))).status_code == 200
    assert (await system.http.get("/nothing/there", headers=shows("admin"))).status_code == 404


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/embeddings"])
async def test_what_generates_nothing_needs_a_key_for_the_model_and_counts_as_a_request(guarded, path):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\n")
    body = {"model": "tiny", "prompt": "a"} if path == "/tokenize" else {"model": "tiny", "tokens": [5]}
    for headers in ({}, {"authorization": "Bearer tandem-unknown"}):
        assert error_of(await system.http.post(path, json=body, headers=headers), 401)["code"] == "invalid_api_key"
    if path == "/v1/embeddings":
        error_of(await system.http.post(path, json=body, headers=shows("plain")), 400)
        return
    error_of(await system.http.get(path, headers=shows("plain")), 405)
    refused = error_of(await system.http.post(path, json=body, headers=shows("elsewhere")), 403)
    assert refused["code"] == "model_not_allowed"
    response = await system.http.post(path, json=body, headers=shows("plain"))
    assert (response.status_code, response.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert (
        "requests_per_minute"
        in error_of(await system.http.post(path, json=body, headers=shows("plain")), 429)["message"]
    )


OPERATORS_PAGES = ("/health?verbose", "/metrics", "/cluster", "/dashboard/data", "/dashboard/requests")


async def check_operators_port(base_url, good, bad):
    """Checks a page's access; `good` and `bad` are headers that open it and that do not."""
    async with httpx.AsyncClient(base_url=base_url) as http:
        for path in ("/health", "/ready", "/dashboard"):
            assert (await http.get(path)).status_code in (200, 503)
        for path in OPERATORS_PAGES:
            for headers, status in bad:
                error_of(await http.get(path, headers=headers), status)
            for headers in good:
                assert (await http.get(path, headers=headers)).status_code == 200
        for headers in good:
            assert (await http.get("/v1/models", headers=headers)).status_code == 404
            assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 404


async def test_a_port_for_operators_asks_for_an_admins_key(guarded):
    system = await guarded(admin_port=0)
    url = f"http://127.0.0.1:{system.gateway.admin_port}"
    await check_operators_port(url, [shows("admin")], [({}, 401), (shows("plain"), 403)])


async def test_a_port_for_operators_may_have_a_key_of_its_own(guarded, make_system):
    scraper = {"authorization": "Bearer tandem-scraper"}
    digest = digest_of_key("tandem-scraper")
    system = await guarded(admin_port=0, admin_key_digest=digest)
    url = f"http://127.0.0.1:{system.gateway.admin_port}"
    await check_operators_port(url, [scraper, shows("admin")], [({}, 401), (shows("plain"), 403)])
    assert (await system.http.get("/metrics", headers=scraper)).status_code == 401
    opened = await make_system(admin_port=0, admin_key_digest=digest)
    url = f"http://127.0.0.1:{opened.gateway.admin_port}"
    await check_operators_port(url, [scraper], [({}, 401), (shows("admin"), 401)])


async def test_a_port_for_operators_asks_for_no_key_where_none_is_asked_for(make_system):
    system = await make_system(admin_port=0)
    await check_operators_port(f"http://127.0.0.1:{system.gateway.admin_port}", [{}], [])


async def test_a_socket_for_operators_is_only_this_users(guarded, tmp_path):
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    system = await guarded(admin_socket=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://gateway") as http:
        for page in OPERATORS_PAGES:
            assert (await http.get(page)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 404
    with pytest.raises(ConfigError, match="cannot listen"):
        await HttpServer(None).start_on_socket(path)
    await system.gateway.stop()
    assert not path.exists()


async def test_the_key_of_whoever_started_the_gateway(guarded):
    system = await guarded(starter_key_digest=digest_of_key("tandem-starter"))
    starter = {"authorization": "Bearer tandem-starter"}
    assert (await system.http.get("/cluster", headers=starter)).status_code == 200


def test_an_expired_key_is_refused_from_that_moment_on(key_file):
    clock = ManualClock(unix_ns=999_999_999)
    door = FrontDoor(None, key_file=key_file, clock=clock)
    assert door.authenticate([f"Bearer {secret('old')}"]).tenant == "acme"
    clock.advance(0.001)
    with pytest.raises(Unauthenticated, match="expired"):
        door.authenticate([f"Bearer {secret('old')}"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    value=st.text(max_size=60)
    | st.text(st.characters(max_codepoint=255), max_size=60).map(lambda text: f"Bearer {text}")
    | st.sampled_from([secret("plain"), f"Bearer\t{secret('plain')}", f"Bearer {secret('plain')}\n"])
)
def test_no_other_header_opens_the_door(key_file, value):
    door = FrontDoor(None, key_file=key_file)
    with pytest.raises(Unauthenticated):
        door.authenticate([value])


async def test_any_bytes_in_the_header_get_an_answer(guarded):
    system = await guarded()

    async def ask(value):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
        writer.write(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: " + value + b"\r\n\r\n"
        )
        async with asyncio.timeout(HANG_LIMIT_S):
            answer = await reader.read()
        writer.close()
        return answer

    values = [
        b"\xff\xfe",
        b"Bearer \xe4\xf6",
        b"Bearer " + b"a" * 15_000,
        b"Bearer a\tb",
        b"\x7f",
        b"Bearer \x01",
        b"=" * 600,
    ]
    for value in values:
        assert re.match(rb"HTTP/1.1 (400|401|431) ", await ask(value)), value
    assert (await ask(f"Bearer {secret('plain')}".encode())).startswith(b"HTTP/1.1 200 ")


async def test_keys_change_while_the_gateway_runs(guarded, key_file):
    system = await guarded()
    assert (await post(system, "plain")).status_code == 200
    key_file.write_text(key_text() + "\n[[key]]\nnonsense = 1\n")
    door = system.gateway.door
    await system.until(lambda: door.key_file.error is not None)
    assert "nonsense" in door.key_file.error.message
    assert (await post(system, "plain")).status_code == 200
    key_file.write_text(toml_entry(ApiKey(digest_of_key("tandem-new"), "acme")))
    await system.until(lambda: door.key_file.error is None and len(door.key_file.keys.keys) == 1)
    error_of(await post(system, "plain"), 401)
    assert (await post(system, headers={"authorization": "Bearer tandem-new"})).status_code == 200


async def test_the_official_client(guarded):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\n")
    url = f"{system.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=secret("plain"), max_retries=0) as client:
        raw = await client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=3)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model="tiny", prompt="x", max_tokens=3)
        assert limited.value.code == "rate_limit_exceeded"
    async with openai.AsyncOpenAI(base_url=url, api_key="tandem-wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with openai.AsyncOpenAI(base_url=url, api_key=secret("elsewhere"), max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.completions.create(model="tiny", prompt="x", max_tokens=3)


# --- what may it do --------------------------------------------------------------------------------------------------


async def test_models(guarded):
    system = await guarded()
    for name, models in (("plain", ["tiny"]), ("here", ["tiny"]), ("elsewhere", [])):
        listed = await system.http.get("/v1/models", headers=shows(name))
        assert [model["id"] for model in listed.json()["data"]] == models
    assert (await system.http.get("/v1/models/tiny", headers=shows("here"))).status_code == 200
    for model in ({}, {"model": "tiny"}):
        error = error_of(await post(system, "elsewhere", **model), 403)
        assert (error["param"], error["code"]) == ("model", "model_not_allowed")
    error_of(await system.http.get("/v1/models/tiny", headers=shows("elsewhere")), 403)
    error_of(await post(system, "here", model="secret-model"), 403)
    error_of(await post(system, "elsewhere", model="another-model"), 404)


async def test_tenant_is_the_keys(guarded):
    system = await guarded()
    assert (await post(system, "plain", tenant="acme")).status_code == 200
    assert error_of(await post(system, "plain", tenant="other"), 400)["param"] == "tenant"
    assert (await post(system, "admin", tenant="other")).status_code == 200


async def test_names_of_one_tenant_are_not_anothers(guarded):
    system = await guarded()
    named = {"headers": {"idempotency-key": "k"}}
    first = await post(system, "plain", **named)
    assert (await post(system, "second", **named)).text == first.text
    other = await post(system, "other", max_tokens=2, **named)
    assert other.status_code == 200
    assert other.json()["id"] != first.json()["id"]


@pytest.mark.parametrize(
    ("name", "changes", "param"),
    [
        ("plain", {"service_class": "interactive"}, "service_class"),
        ("plain", {"service_class": "critical"}, "service_class"),
        ("plain", {"headers": {"x-service-class": "Critical"}}, "service_class"),
        ("urgent", {"service_class": "critical"}, "service_class"),
        ("lowly", {"service_class": "normal"}, "service_class"),
        ("plain", {"priority": 1}, "priority"),
        ("urgent", {"priority": 11}, "priority"),
        ("lowly", {"priority": -4}, "priority"),
    ],
)
async def test_above_the_ceiling(guarded, name, changes, param):
    system = await guarded()
    error = error_of(await post(system, name, **changes), 403)
    assert (error["param"], error["code"]) == (param, "permission_denied")
    assert re.search(rf"{param} is .* but this API key allows at most ", error["message"])


async def test_class_priority_and_session_reach_the_request(guarded, monkeypatch):
    system = await guarded()
    seen = []
    accept = system.gateway.requests.accept

    async def note(call):
        accepted = await accept(call)
        facts = accepted.facts
        seen.append((facts.service_class, facts.priority, facts.tenant, facts.affinity_key))
        return accepted

    monkeypatch.setattr(system.gateway.requests, "accept", note)
    session = {"x-session-id": "s" * 256}
    await post(system, "plain")
    await post(system, "lowly")
    await post(system, "urgent", service_class="interactive", priority=10, user="u" * 256)
    await post(system, "plain", headers={**session, "x-service-class": "batch"}, user="u")
    await post(system, "plain", headers={"idempotency-key": "k", **session}, service_class="low")
    assert seen == [
        ("normal", 0, "acme", ""),
        ("low", -5, "lowly", ""),
        ("interactive", 10, "acme", "u" * 256),
        ("batch", 0, "acme", "s" * 256),
        ("low", 0, "acme", "s" * 256),
    ]
    for headers, param in (
        ({"x-session-id": ""}, "X-Session-Id"),
        ({"x-session-id": "s" * 257}, "X-Session-Id"),
        ({"x-service-class": "batch"}, "service_class"),
    ):
        error = error_of(await post(system, "plain", headers=headers, service_class="low"), 400)
        assert error["param"] == param
    assert error_of(await post(system, "plain", headers={"x-service-class": "soon"}), 400)["param"] == "service_class"


# --- how much --------------------------------------------------------------------------------------------------------


async def test_requests_per_minute_are_shared_by_gateways_keys_and_apis(guarded):
    first, second = await guarded("[tenant.acme]\nrequests_per_minute = 3\n", num_gateways=2)
    remaining = []
    for system, name in ((first, "plain"), (second, "second"), (first, "urgent")):
        response = await post(system, name)
        assert response.headers["x-ratelimit-limit-requests"] == "3"
        remaining.append(response.headers["x-ratelimit-remaining-requests"])
    assert remaining == ["2", "1", "0"]
    assert re.fullmatch(r"(59|5\d\.\d+)s|1m0s", response.headers["x-ratelimit-reset-requests"])
    refused = await post(second, "plain")
    error = error_of(refused, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "requests_per_minute of tenant acme is 3 requests per minute" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert "x-ratelimit-limit-tokens" not in refused.headers
    assert (await post(second, "other")).status_code == 200
    async with channel(second) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(grpc_request(), metadata=metadata("plain"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(caught.value.trailing_metadata())
    assert trailing["x-ratelimit-limit-requests"] == "3"
    assert int(trailing["grpc-retry-pushback-ms"]) > 0


async def test_every_request_beyond_the_limit_is_refused(guarded):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\n")
    await post(system, "plain")
    for _ in range(20):
        error_of(await post(system, "plain"), 429)


async def test_tokens_are_corrected_at_the_end(guarded):
    system = await guarded("[tenant.acme]\ntokens_per_minute = 100\n")
    response = await post(system, "plain", max_tokens=90)
    assert response.json()["usage"]["total_tokens"] == 9
    assert response.headers["x-ratelimit-limit-tokens"] == "100"
    assert response.headers["x-ratelimit-remaining-tokens"] == "7"
    assert "x-ratelimit-limit-requests" not in response.headers

    async def is_back():
        limits = system.gateway.door.key_file.keys.limits_of("acme")
        return (await system.gateway.limiter.take("acme", limits)).tokens.remaining >= 91

    await until(is_back)
    refused = await post(system, "plain", max_tokens=98)
    assert refused.headers["x-should-retry"] == "false"  # it would be in vain
    error = error_of(refused, 429)
    assert (
        "tokens_per_minute of tenant acme is 100 tokens per minute, and this request alone may need 101"
        in error["message"]
    )
    # Eleven answers to one prompt are one request: its prompt once, and eleven times its answer.
    several = await post(system, "plain", max_tokens=4, n=11)
    assert several.json()["usage"]["total_tokens"] == 3 + 11 * 4
    refused = await post(system, "plain", max_tokens=10, n=6)
    assert "x-should-retry" not in refused.headers
    assert "tokens_per_minute" in error_of(refused, 429)["message"]


async def test_a_refused_request_gives_everything_back(guarded, script):
    limits = "[tenant.acme]\nrequests_per_minute = 2\ntokens_per_minute = 50\nconcurrency = 1\n"
    system = await guarded(limits)

    async def is_refused_for_its_tokens_alone():
        """Whether tokens alone are the reason; what the refusal before took is given back a moment after its answer."""
        return "tokens_per_minute" in error_of(await post(system, "plain", max_tokens=60), 429)["message"]

    for _ in range(4):
        await until(is_refused_for_its_tokens_alone)

    async def is_served():
        return (await post(system, "plain", max_tokens=10)).status_code == 200

    await until(is_served)


async def test_a_full_gateway_asks_no_limit(guarded, monkeypatch):
    """The cheapest refusal comes first: nothing is taken, so nothing has to be given back."""
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\nconcurrency = 1\n")
    taken = []
    take = system.gateway.limiter.take

    async def note(*arguments, **changes):
        taken.append(changes)
        return await take(*arguments, **changes)

    def full(*_):
        raise Overloaded("the cluster is full", retry_after_s=3.0)

    monkeypatch.setattr(system.gateway.limiter, "take", note)
    with monkeypatch.context() as patch:
        patch.setattr(system.gateway.requests._accepting, "_check_room", full)
        for headers in ({}, {"idempotency-key": "k"}):
            refused = await post(system, "plain", headers=headers)
            assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("server_overloaded", "3")
    assert not taken
    assert (await post(system, "plain")).status_code == 200
    assert taken


async def test_refusals_are_counted_by_limit_and_not_by_tenant(guarded):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 1\n[tenant.other]\ntokens_per_minute = 5\n")
    for name, http_status in (("plain", 200), ("plain", 429), ("second", 429), ("other", 429)):
        assert (await post(system, name)).status_code == http_status
    async with channel(system) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=metadata("plain"))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    shown = (await system.http.get("/metrics", headers=shows("admin"))).text
    assert re.findall(r"^tandem_tenant_refusals_total.*$", shown, re.MULTILINE) == [
        'tandem_tenant_refusals_total{limit="requests_per_minute"} 3.0',
        'tandem_tenant_refusals_total{limit="tokens_per_minute"} 1.0',
    ]


async def test_a_wrong_request_counts_as_one(guarded):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 2\ntokens_per_minute = 100\n")
    for _ in range(2):
        error_of(await post(system, "plain", prompt="word " * 600), 400)
    error_of(await post(system, "plain", temperature=9), 400)
    assert "requests_per_minute" in error_of(await post(system, "plain"), 429)["message"]


async def test_concurrency_across_gateways_and_after_a_death(guarded, script, monkeypatch):
    monkeypatch.setattr(limits_module, "HOLD_TTL_S", 2.0)
    monkeypatch.setattr(limits_module, "RENEW_INTERVAL_S", 0.3)
    first, second = await guarded("[tenant.acme]\nconcurrency = 2\n", num_gateways=2)
    script.gate.clear()
    running = [asyncio.create_task(post(system, "plain")) for system in (first, second)]
    for system in (first, second):
        await system.until(lambda system=system: system.gateway.requests.num_running == 1)
    refused = await post(first, "second")
    assert "concurrency of tenant acme is 2 requests at once" in error_of(refused, 429)["message"]
    assert refused.headers["retry-after"] == "1"
    # The second gateway dies, as far as Redis can see: it renews nothing and gives nothing back.
    second.gateway.limiter._task.cancel()
    monkeypatch.setattr(second.gateway.limiter, "_write", silent)

    async def has_room():
        response = await first.http.post("/v1/completions", json={**BODY, "max_tokens": 1}, headers=shows("plain"))
        return response.status_code == 200

    await until(has_room)
    script.gate.set()
    assert [(await task).status_code for task in running] == [200, 200]


async def silent(**changes):
    """Writes nothing."""


async def test_a_client_that_leaves_gives_its_place_back(guarded, script):
    system = await guarded("[tenant.acme]\nconcurrency = 1\n")
    script.gate.clear()
    request = asyncio.create_task(post(system, "plain"))
    await system.until(lambda: system.gateway.requests.num_running == 1)
    error_of(await post(system, "plain"), 429)
    request.cancel()
    script.gate.set()

    async def is_served():
        return (await post(system, "plain")).status_code == 200

    await until(is_served)


@pytest.fixture
def paid(monkeypatch):
    """What was taken at all gateways, less what was given back. A level says less, since buckets fill up meanwhile."""
    taken = collections.Counter()
    take, settle = Limiter.take, Limiter.settle

    async def noted_take(self, *args, **asked):
        verdict = await take(self, *args, **asked)
        if not verdict.limit:
            taken.update(requests=verdict.num_requests, tokens=asked.get("num_tokens", 0))
        return verdict

    def noted_settle(self, *args, **asked):
        taken.update(requests=asked["num_requests"], tokens=asked["num_tokens"])
        settle(self, *args, **asked)

    monkeypatch.setattr(Limiter, "take", noted_take)
    monkeypatch.setattr(Limiter, "settle", noted_settle)
    return taken


async def test_named_requests_are_paid_once(guarded, paid):
    limits = "[tenant.acme]\nrequests_per_minute = 3\ntokens_per_minute = 60\nconcurrency = 1\n"
    first, second = await guarded(limits, num_gateways=2)
    named = {"headers": {"idempotency-key": "k"}, "max_tokens": 20}
    original = await post(first, "plain", **named)
    assert original.headers["x-ratelimit-remaining-requests"] == "2"
    await first.flush_journals()
    for _ in range(4):
        again = await post(first, "plain", **named)
        assert again.text == original.text
        assert not [name for name in again.headers if name.startswith("x-ratelimit")]
    for _ in range(4):
        assert (await post(second, "plain", **named)).text == original.text
    limits_now = first.gateway.door.key_file.keys.limits_of("acme")

    async def is_settled():
        left = await first.gateway.limiter.take("acme", limits_now)
        return left.requests.remaining >= 2 and left.tokens.remaining >= 60 - 9

    await until(is_settled)
    assert paid == {"requests": 1, "tokens": 9}


async def test_a_request_that_was_known_gives_nothing_back(redis_url, key_file, cluster_name):
    key_file.write_text(key_text("[tenant.acme]\nrequests_per_minute = 2\nconcurrency = 1\n"))
    store = Store(redis_url, cluster=cluster_name, timeout_s=2.0)
    doors = [FrontDoor(Limiter(store, gateway=name), key_file=key_file) for name in ("first", "second")]
    tickets = [door.ticket("acme") for door in doors]
    for ticket in tickets:
        ticket.hold = "same"
        await ticket.enter()
    assert [dict(ticket.headers)["x-ratelimit-remaining-requests"] for ticket in tickets] == ["1", "1"]
    tickets[1].leave(num_prompt_tokens=0, num_new_tokens=0, has_run=False)
    await doors[1].close()
    left = await Limiter(store, gateway="third").take("acme", doors[0].key_file.keys.limits_of("acme"))
    assert left.requests.remaining == 1
    await store.close()


async def post_until_known(system, body, headers):
    """The answer to a named call; a gateway for which Redis was too busy takes it for a new one, beyond the limit."""
    while (answer := await system.http.post("/v1/completions", json=body, headers=headers)).status_code == 429:  # noqa: ASYNC110 - a socket
        await asyncio.sleep(0.1)
    return answer


async def test_a_request_goes_on_elsewhere_though_the_tenant_is_at_its_limit(guarded, script):
    first, second = await guarded("[tenant.acme]\nrequests_per_minute = 1\nconcurrency = 1\n", num_gateways=2)
    script.gate.clear()
    sent = {**shows("plain"), "idempotency-key": "k"}
    body = {**BODY, "stream": True, "return_token_ids": True}
    said = {"x-service-class": "low", "x-session-id": "a session"}
    async with first.http.stream("POST", "/v1/completions", json=body, headers={**sent, **said}) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()  # kept: with the iterator the connection would end
        await anext(lines)
        await first.flush_journals()
        # Its gateway still runs, but the client asks another one.
        second_try = asyncio.create_task(post_until_known(second, body, sent))
        await second.until(lambda: second.gateway.requests.num_running == 1)
        error_of(await post(second, "second"), 429)
        # What its client has not said again is known from the journal.
        (journal,) = set(second.gateway._journals._journals.values())
        spec = journal.specs[0]
        assert (spec.facts.service_class, spec.facts.affinity_key) == ("low", "a session")
        assert (spec.facts.tenant, spec.model) == ("acme", "tiny")
        script.gate.set()
        text = (await second_try).text
    assert '"finish_reason":"stop"' in text


@pytest.mark.parametrize("how", ["frozen", "killed"])
async def test_limits_without_redis(make_system, worker_type, key_file, script, how, monkeypatch):
    with EmbeddedRedis() as redis:
        monkeypatch.setattr(limits_module, "RETRY_INTERVAL_S", 0.1)
        key_file.write_text(key_text("[tenant.acme]\nrequests_per_minute = 4\n"))
        system = await make_system(api_keys=key_file, redis=redis.url)
        await system.add(worker_type("decode", "decode-0", script.decode))
        assert (await post(system, "plain")).status_code == 200
        if how == "frozen":
            os.kill(redis.pid, signal.SIGSTOP)
        else:
            redis.kill()
        try:
            codes = [(await post(system, "plain")).status_code for _ in range(5)]
            assert codes == [200, 200, 200, 429, 429]
            assert (await post(system, "other")).status_code == 200
        finally:
            if how == "frozen":
                os.kill(redis.pid, signal.SIGCONT)
            else:
                redis.start()
        await system.until(lambda: not system.gateway.limiter.is_alone)
        if how == "frozen":
            error_of(await post(system, "plain"), 429)
        else:
            # It has forgotten the first request, and was told of the three since.
            assert (await post(system, "plain")).headers["x-ratelimit-remaining-requests"] == "0"


async def test_changed_limits_count_at_once(guarded, key_file):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 0\n")
    error = error_of(await post(system, "plain"), 429)
    assert "requests_per_minute of tenant acme is 0" in error["message"]
    key_file.write_text(key_text("[default_limits]\nrequests_per_minute = 5\n"))

    async def is_served():
        return (await post(system, "plain")).status_code == 200

    await until(is_served)
    for name in ("plain", "other"):
        assert (await post(system, name)).headers["x-ratelimit-limit-requests"] == "5"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (59.9999, "1m0s"),
        (360, "6m0s"),
        (432.5, "7m12.5s"),
        (3600, "1h0m0s"),
        (90061.001, "25h1m1.001s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds, text):
    assert shown_duration(seconds) == text


# --- gRPC ------------------------------------------------------------------------------------------------------------


class channel:
    """A stub of the gateway's public service."""

    def __init__(self, system, stub=inference_pb2_grpc.InferenceStub):
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{system.gateway.grpc_port}")
        self._stub = stub

    async def __aenter__(self):
        return self._stub(self._channel)

    async def __aexit__(self, *exc_info):
        await self._channel.close()


def metadata(name, *more):
    return (("authorization", f"Bearer {secret(name)}"), *more)


def grpc_request(**changes):
    ids = inference_pb2.TokenIds(ids=[5, 6, 7])
    return inference_pb2.GenerateRequest(token_ids=ids, sampling=inference_pb2.SamplingParams(max_tokens=20), **changes)


async def test_grpc_needs_a_key_everywhere(guarded):
    system = await guarded()
    async with channel(system) as stub:
        calls = [
            lambda sent: stub.GenerateUnary(grpc_request(), metadata=sent),
            lambda sent: read_all(stub.Generate(grpc_request(), metadata=sent)),
            lambda sent: read_all(stub.Resume(inference_pb2.ResumeRequest(request_id="x"), metadata=sent)),
            lambda sent: stub.ListModels(inference_pb2.ListModelsRequest(), metadata=sent),
            lambda sent: stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=sent),
            lambda sent: stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[5]), metadata=sent),
        ]
        for call in calls:
            for sent in ((), (("authorization", "Bearer tandem-unknown"),), metadata("old"), metadata("plain") * 2):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(sent)
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        for number, call in enumerate(calls):
            if number != 2:  # nothing is left to resume
                await call(metadata("plain"))


async def read_all(responses):
    return [response async for response in responses]


@pytest.mark.parametrize(
    ("name", "changes", "code"),
    [
        ("elsewhere", {}, grpc.StatusCode.PERMISSION_DENIED),
        ("plain", {"service_class": "critical"}, grpc.StatusCode.PERMISSION_DENIED),
        ("plain", {"priority": 1}, grpc.StatusCode.PERMISSION_DENIED),
        ("plain", {"tenant": "other"}, grpc.StatusCode.INVALID_ARGUMENT),
        ("plain", {"service_class": "soon"}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_grpc_refusals(guarded, name, changes, code):
    system = await guarded()
    async with channel(system) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(grpc_request(**changes), metadata=metadata(name))
        assert caught.value.code() is code
        for field in changes:
            assert field in caught.value.details()


async def test_grpc_says_what_is_left(guarded):
    system = await guarded("[tenant.acme]\nrequests_per_minute = 10\ntokens_per_minute = 1000\n")
    async with channel(system) as stub:
        call = stub.GenerateUnary(grpc_request(), metadata=metadata("plain"))
        assert (await call).finish_reason == inference_pb2.FINISH_REASON_STOP
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-ratelimit-limit-requests"], trailing["x-ratelimit-remaining-requests"]) == ("10", "9")
        assert trailing["x-ratelimit-remaining-tokens"] == "977"
        stream = stub.Generate(grpc_request(request_id="named"), metadata=metadata("plain"))
        await read_all(stream)
        assert dict(await stream.trailing_metadata())["x-ratelimit-remaining-requests"] == "8"
        tokenize = stub.Tokenize(inference_pb2.TokenizeRequest(text="a"), metadata=metadata("plain"))
        await tokenize
        assert dict(await tokenize.trailing_metadata())["x-ratelimit-remaining-requests"] == "7"


async def test_grpc_resume_is_its_tenants_only(guarded):
    system = await guarded()
    async with channel(system) as stub:
        await stub.GenerateUnary(grpc_request(request_id="mine"), metadata=metadata("plain"))
        resume = inference_pb2.ResumeRequest(request_id="mine", next_index=1)
        parts = await read_all(stub.Resume(resume, metadata=metadata("second")))
        assert [token for part in parts for token in part.token_ids] == [10, 11, 12, 13, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(stub.Resume(resume, metadata=metadata("other")))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_grpc_cluster_is_for_admins(guarded):
    system = await guarded()
    async with channel(system, cluster_pb2_grpc.ClusterStub) as stub:
        drain = cluster_pb2.DrainRequest(worker_id="decode-0")
        calls = [
            lambda sent: stub.GetTopology(cluster_pb2.GetTopologyRequest(), metadata=sent),
            lambda sent: stub.WatchTopology(cluster_pb2.WatchTopologyRequest(), metadata=sent).read(),
            lambda sent: stub.Drain(drain, metadata=sent),
        ]
        for sent, code in (((), "UNAUTHENTICATED"), (metadata("plain"), "PERMISSION_DENIED")):
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(sent)
                assert caught.value.code().name == code
        assert not system.workers["decode-0"].is_drained
        for call in calls:
            await call(metadata("admin"))
