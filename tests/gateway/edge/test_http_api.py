"""Routes over HTTP: which keys may see which page, and where, and the answer to a path that leads nowhere."""

import pytest

from gateway.access.keys import ApiKey, digest_of_key, new_key, toml_entry

ADMIN, USER = new_key(), new_key()
SHOWN = {"nobody": {}, "a user": {"authorization": f"Bearer {USER}"}, "an admin": {"authorization": f"Bearer {ADMIN}"}}


@pytest.fixture
async def system(make_system, tmp_path):
    file = tmp_path / "keys.toml"
    keys = (ApiKey(digest_of_key(ADMIN), "ops", is_admin=True), ApiKey(digest_of_key(USER), "acme"))
    file.write_text("\n".join(map(toml_entry, keys)))
    return await make_system(api_keys=file, admin_port=0)


PAGES = [
    *(("/health", key, 200) for key in ("nobody", "a user")),
    *(("/health?verbose", key, status) for key, status in (("nobody", 401), ("a user", 403), ("an admin", 200))),
    *(("/ready", key, 503) for key in ("nobody", "a user")),
    *(("/v1/models", key, status) for key, status in (("nobody", 401), ("a user", 200), ("an admin", 200))),
    *(("/openapi.json", key, status) for key, status in (("nobody", 401), ("a user", 200))),
    *(("/metrics", key, status) for key, status in (("nobody", 401), ("a user", 403), ("an admin", 200))),
    *(("/metrics/targets", key, status) for key, status in (("nobody", 401), ("a user", 403), ("an admin", 200))),
    *(("/cluster", key, status) for key, status in (("nobody", 401), ("a user", 403), ("an admin", 200))),
    *(("/nothing", key, status) for key, status in (("nobody", 401), ("a user", 404), ("an admin", 404))),
    *(("/v1/nothing", key, status) for key, status in (("nobody", 401), ("a user", 404))),
]


@pytest.mark.parametrize(("path", "who", "status"), PAGES)
async def test_who_may_see_a_page(system, path, who, status):
    assert (await system.http.get(path, headers=SHOWN[who])).status_code == status


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/input_tokens"),
        *("/v1/embeddings", "/tokenize", "/detokenize"),
    ],
)
async def test_no_endpoint_answers_without_a_key(system, path):
    for headers in ({}, {"authorization": f"Bearer {new_key()}"}):
        response = await system.http.post(path, json={}, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == 'Bearer realm="tandem"'
    assert (await system.http.post(path, json={}, headers=SHOWN["a user"])).status_code == 400


async def test_a_path_that_is_nearly_right_is_told_of(system):
    for method, path, status, code in (
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/completion", 404, "not_found"),
        ("GET", "/v1/responses/resp_1", 404, "response_not_found"),
    ):
        response = await system.http.request(method, path, headers=SHOWN["a user"])
        assert (response.status_code, response.json()["error"]["code"]) == (status, code), path


async def test_the_operators_address_has_their_pages_and_no_api(system):
    base = f"http://127.0.0.1:{system.gateway.admin_port}"
    assert (await system.http.get(f"{base}/health")).status_code == 200
    assert (await system.http.get(f"{base}/metrics")).status_code == 401
    assert (await system.http.get(f"{base}/metrics", headers=SHOWN["a user"])).status_code == 403
    assert (await system.http.get(f"{base}/metrics", headers=SHOWN["an admin"])).status_code == 200
    assert (await system.http.get(f"{base}/v1/models", headers=SHOWN["an admin"])).status_code == 404


async def test_what_is_refused_is_counted(system):
    async def counted():
        text = (await system.http.get("/metrics", headers=SHOWN["an admin"])).text
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("tandem_http_errors_total") or 'code="invalid_api_key"' in line
        )

    before = await counted()
    await system.http.get("/cluster")
    await system.http.post("/v1/completions", json={})
    assert await counted() >= before + 2


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/responses", "/messages", "/embeddings"])
async def test_a_client_may_leave_the_prefix_out(system, path):
    for prefix in ("", "/v1"):
        refused = await system.http.post(prefix + path, json={}, headers=SHOWN["a user"])
        assert refused.status_code == 400, prefix
    assert (await system.http.post(path, json={})).status_code == 401
    assert (await system.http.get("/models", headers=SHOWN["a user"])).json()["object"] == "list"
