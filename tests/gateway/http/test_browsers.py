"""What web pages may ask: under which names the gateway answers, and pages of which sites may call it."""

import asyncio
import socket

import pytest

from gateway.config import GatewayConfig
from gateway.http.browsers import Hosts
from services.runtime import config
from services.runtime.errors import ConfigError
from tests.waiting import HANG_LIMIT_S

APP = "https://chat.example"
EVIL = "https://evil.example"
PATHS = (
    "/cluster",
    "/metrics",
    "/dashboard",
    "/dashboard/data",
    "/dashboard/requests",
    "/v1/files",
    "/v1/models",
    "/no",
)
BODY = {"prompt": "a", "max_tokens": 1}


@pytest.fixture
def make(make_system, worker_type, pair_type, tokenizer):
    async def build(**settings):
        system = await make_system(**settings)
        pair = pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1])
        await system.add(worker_type("decode", "decode-0", pair.decode))
        return system

    return build


def code_of(response):
    return response.status_code, response.json()["error"]["code"]


HOSTS = {
    "localhost": True,
    "LOCALHOST:8000": True,
    "localhost.": True,
    "127.0.0.1:8000": True,
    "10.1.2.3": True,
    "[::1]:8000": True,
    "app.localhost:3": True,
    "gateway.internal:8000": True,
    "api.example": True,
    "a.b.cdn.example:443": True,
    "cdn.example": False,
    "evil.example:8000": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "notlocalhost": False,
    "": False,
    ":8000": False,
    "[evil.example]": False,
    "a@localhost": False,
    "*": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_names_that_are_ours(host):
    assert Hosts("api.example,*.cdn.example", bound_to="gateway.internal").allows(host) is HOSTS[host]


def test_a_port_of_all_addresses_has_the_machines_name():
    assert Hosts(None, bound_to="0.0.0.0").allows(f"{socket.gethostname()}:8000")
    assert not Hosts(None, bound_to="127.0.0.1").allows("a-machine")


def test_any_name_may_be_ours():
    assert Hosts("*", bound_to="127.0.0.1").allows("evil.example")


@pytest.mark.parametrize("setting", ["--allowed-hosts=a b", "--allowed-hosts=http://a", "--allowed-hosts=a,,b"])
def test_names_that_are_none_are_refused(setting, tmp_path):
    with pytest.raises(ConfigError, match="allowed-hosts"):
        config.load(GatewayConfig, [f"--model={tmp_path}", setting], prog="x")


@pytest.mark.parametrize("origin", ["chat.example", "https://a/b", "https://a https://b", "*,https://a"])
def test_origins_that_are_none_are_refused(origin, tmp_path):
    with pytest.raises(ConfigError, match="cors-origins"):
        config.load(GatewayConfig, [f"--model={tmp_path}", f"--cors-origins={origin}"], prog="x")


async def test_requests_under_strange_names_are_refused_at_both_ports(make_system):
    system = await make_system(admin_port=0)
    for port in (system.gateway.http_port, system.gateway.admin_port):
        for path in PATHS:
            reply = await system.http.get(f"http://127.0.0.1:{port}{path}", headers={"host": f"evil.example:{port}"})
            assert code_of(reply) == (403, "host_not_allowed"), path
            assert "--allowed-hosts" in reply.json()["error"]["message"]
        # A balancer's probe may come under any name.
        probe = await system.http.get(f"http://127.0.0.1:{port}/health", headers={"host": "evil.example"})
        assert probe.status_code == 200


async def test_a_request_needs_one_host(make_system):
    system = await make_system()
    for hosts in (b"", b"host: localhost\r\n" * 2):
        reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + hosts + b"\r\n")
        assert (await asyncio.wait_for(reader.readline(), HANG_LIMIT_S)).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_names_may_be_given_or_not_looked_at(make_system):
    system = await make_system(allowed_hosts="api.example")
    assert (await system.http.get("/v1/models", headers={"host": "api.example"})).status_code == 200
    system = await make_system(allowed_hosts="*")
    assert (await system.http.get("/v1/models", headers={"host": "evil.example"})).status_code == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1", "https://127.0.0.1", "x"])
async def test_pages_of_other_sites_may_not_call(make, origin):
    system = await make()
    for reply in (
        await system.http.post("/v1/completions", json=BODY, headers={"origin": origin}),
        await system.http.get("/v1/models", headers={"origin": origin}),
        await system.http.options(
            "/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}
        ),
    ):
        assert code_of(reply) == (403, "origin_not_allowed")
        assert not [name for name in reply.headers if name.startswith("access-control")]


async def test_the_gateways_own_pages_may_call(make):
    system = await make()
    headers = {"origin": system.base_url, "sec-fetch-site": "same-origin"}
    assert (await system.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
    # A proxy has taken TLS away, and the port with it.
    headers = {"origin": "https://localhost", "host": "localhost:443"}
    assert (await system.http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


FORM = {"purpose": (None, "batch"), "file": ("rows.jsonl", b"{}")}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_forms_of_other_sites_store_no_file(make_system, site):
    system = await make_system()
    reply = await system.http.post("/v1/files", files=FORM, headers={"sec-fetch-site": site})
    assert code_of(reply) == (403, "origin_not_allowed")
    for allowed in ("same-origin", "none"):
        reply = await system.http.post("/v1/files", files=FORM, headers={"sec-fetch-site": allowed})
        assert reply.status_code == 200
    # A link to the dashboard in a page of another site.
    assert (await system.http.get("/dashboard", headers={"sec-fetch-site": site})).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/batches", "/tokenize"])
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_what_a_form_can_send_is_no_json(make_system, path, kind):
    system = await make_system()
    headers = {} if kind is None else {"content-type": kind}
    reply = await system.http.post(path, content=b"{}", headers=headers)
    assert code_of(reply) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in reply.json()["error"]["message"]


async def test_a_web_app_that_is_named_may_call_and_read(make):
    system = await make(cors_origins=f"{APP},http://localhost:3000")
    asked = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization, x-a",
    }
    told = await system.http.options("/v1/chat/completions", headers=asked)
    assert told.status_code == 204
    assert told.headers["access-control-allow-origin"] == APP
    assert told.headers["access-control-allow-headers"] == "authorization, x-a"
    assert "POST" in told.headers["access-control-allow-methods"]
    assert told.headers["vary"] == "origin"
    for path, body, status in (("/v1/completions", BODY, 200), ("/v1/completions", {**BODY, "n": 0}, 400)):
        for stream in (False, True):
            reply = await system.http.post(path, json={**body, "stream": stream}, headers={"origin": APP})
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == APP
            assert "retry-after" in reply.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in reply.headers
    assert code_of(await system.http.get("/v1/models", headers={"origin": EVIL})) == (403, "origin_not_allowed")
    plain = await system.http.get("/v1/models")
    assert not [name for name in plain.headers if name.startswith("access-control")]


async def test_all_web_apps_may_be_let_in_without_credentials(make_system):
    system = await make_system(cors_origins="*")
    reply = await system.http.get("/v1/models", headers={"origin": EVIL})
    assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in reply.headers


async def test_refusals_are_counted(make_system):
    system = await make_system()
    await system.http.get("/v1/models", headers={"host": "evil.example"})
    shown = (await system.http.get("/metrics")).text
    assert 'code="host_not_allowed"' in shown
