"""The served OpenAPI document: it describes what is served, all of it, and what is served keeps to it."""

import asyncio
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from gateway import limits as validation
from gateway.access.keys import digest_of_key, new_key
from gateway.dashboard.feed import _Watcher
from gateway.http.bodies import Bodies
from gateway.openai.shapes import SAMPLING
from gateway.openapi.answers import Error
from gateway.openapi.operation import EVENTS
from gateway.openapi.operations import OPERATIONS
from tests.gateway.openapi.described import DOCUMENT, check, schema_of

SCHEMAS = DOCUMENT["components"]["schemas"]


def keeps_to(value: Any, schema: Any) -> bool:
    return jsonschema_rs.is_valid({**schema, "components": DOCUMENT["components"]}, value)


# --- the document ----------------------------------------------------------------------------------------------------


async def test_it_is_served_and_good(system):
    response = await system.http.get("/openapi.json")
    assert response.json() == DOCUMENT
    assert DOCUMENT["openapi"].startswith("3.1")
    for name, schema in SCHEMAS.items():
        jsonschema_rs.meta.validate(schema)
        assert schema["description"], name
    for reference in set(re.findall(r'"#/components/schemas/([^"]+)"', response.text)):
        assert reference in SCHEMAS
    ids = [operation.name for operation in OPERATIONS]
    assert len(ids) == len(set(ids))


async def test_it_says_who_needs_a_key_where_keys_are_asked_for(make_system, tmp_path):
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsha256 = "{digest_of_key(key)}"\ntenant = "acme"\n')
    system = await make_system(api_keys=keys)
    assert (await system.http.get("/openapi.json")).status_code == 401
    served = (await system.http.get("/openapi.json", headers={"authorization": f"Bearer {key}"})).json()
    assert served["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in served["paths"].items():
        for method, operation in methods.items():
            response = await system.http.request(method, path.replace("{name}", "tiny"))
            assert (response.status_code == 401) == bool(operation["security"]), path
            if response.status_code == 401:
                check(response.json(), schema_of(path, 401, method=method))
                assert response.headers["www-authenticate"]


def test_every_field_of_every_request_is_described():
    bodies = {operation.body.__name__ for operation in OPERATIONS if isinstance(operation.body, type)}
    assert len(bodies) > 5
    fields = {
        f"{body}.{name}": schema
        for body in sorted({*bodies, "StreamOptions"} - {"CreateBatch", "CountedInput"})
        for name, schema in SCHEMAS[body]["properties"].items()
    }
    assert [name for name, schema in fields.items() if not schema.get("description")] == []
    in_requests = {name.partition(".")[2] for name in fields}
    assert SAMPLING.keys() - in_requests == set(), "described and in no request"


# --- bounds ----------------------------------------------------------------------------------------------------------

CHAT, TEXT = SCHEMAS["ChatRequest"]["properties"], SCHEMAS["CompletionRequest"]["properties"]
HEADERS = {
    each["name"]: each["schema"]
    for each in DOCUMENT["paths"]["/v1/completions"]["post"]["parameters"]
    if each["in"] == "header"
}
LIMITS_IN_THE_DOCUMENT = {
    "MAX_MESSAGES": CHAT["messages"]["maxItems"],
    "MAX_CHOICES": CHAT["n"]["maximum"],
    "MAX_SEQUENCES": TEXT["prompt"]["anyOf"][1]["maxItems"],
    "MAX_INPUTS": SCHEMAS["EmbeddingRequest"]["properties"]["input"]["anyOf"][1]["maxItems"],
    "MAX_STOP_TEXTS": TEXT["stop"]["anyOf"][1]["maxItems"],
    "MAX_STOP_TEXT_BYTES": TEXT["stop"]["anyOf"][0]["maxLength"],
    "MAX_STOP_TOKEN_IDS": TEXT["stop_token_ids"]["maxItems"],
    "MAX_LOGIT_BIASES": TEXT["logit_bias"]["maxProperties"],
    "MAX_LOGIT_BIAS": TEXT["logit_bias"]["additionalProperties"]["maximum"],
    "MAX_PRIORITY": TEXT["priority"]["maximum"],
    "MAX_NAME_CHARS": TEXT["cache_salt"]["maxLength"],
    "MAX_KEY_CHARS": HEADERS["Idempotency-Key"]["maxLength"],
    "MAX_AFFINITY_CHARS": TEXT["user"]["maxLength"],
}
IN_WORDS = {
    "MAX_PROMPT_LOGPROBS": "at each place, {} in all",
    "MAX_BODY_BYTES": "body has more than {} bytes",
    "MAX_BODY_READ_S": "did not arrive within {:g} s",
    "MAX_UPLOAD_S": "a file within {:g} s",
    "MAX_SCHEMA_BYTES": "schema has at most {} bytes",
    "MAX_SCHEMA_DEPTH": "bytes and {} levels",
}
NOT_A_CLIENTS = {"MAX_TOKENIZE_CHARS"}
"""Those that an operator sets."""


def test_every_limit_is_in_the_document():
    limits = {name: value for name, value in vars(validation).items() if name.startswith("MAX_")}
    assert LIMITS_IN_THE_DOCUMENT.keys() | IN_WORDS.keys() | NOT_A_CLIENTS == limits.keys()
    assert {name: limits[name] for name in LIMITS_IN_THE_DOCUMENT} == LIMITS_IN_THE_DOCUMENT
    for name, words in IN_WORDS.items():
        assert words.format(limits[name]) in json.dumps(DOCUMENT), name


def bounds_of(field: str, schema: Any) -> list[tuple[str, Any, Any]]:
    """(name, value at the bound, value one past it) of each bound of a field."""
    found: list[tuple[str, Any, Any]] = []
    whole = "integer" in schema.get("type", ())

    def add(rule: str, good: Any, bad: Any) -> None:
        found.append((f"{field}-{rule}", good, bad))

    if "minimum" in schema:
        low = schema["minimum"]
        add("minimum", low, low - 1 if whole else math.nextafter(low, -math.inf))
    if "maximum" in schema:
        high = schema["maximum"]
        add("maximum", high, high + 1 if whole else math.nextafter(high, math.inf))
    if "maxLength" in schema:
        add("max-length", "x" * schema["maxLength"], "x" * (schema["maxLength"] + 1))
    if "minLength" in schema:
        add("min-length", "x" * schema["minLength"], "x" * (schema["minLength"] - 1))
    if "enum" in schema:
        add("enum", next(value for value in schema["enum"] if value), "something else")
    if "pattern" in schema:
        add("pattern", "x" * 64, "x" * 65)
        add("pattern-kind", "Aa0_.:-", "a b")
    return found


ONE_MESSAGE = {"role": "user", "content": "hi"}
ONE_TOOL = {"type": "function", "function": {"name": "f"}}
OF_LISTS = [
    ("prompt-texts", ["a"] * 128, ["a"] * 129),
    ("prompt-empty", [[1]], []),
    ("stop-many", ["x"] * 16, ["x"] * 17),
    ("stop-long", ["x" * 256], ["x" * 257]),
    ("stop-empty", ["x"], [""]),
    ("stop_token_ids-many", [1] * 128, [1] * 129),
    ("logit_bias-value", {"1": 100, "2": -100}, {"1": math.nextafter(100, 101)}),
    ("logit_bias-least", {"2": -100}, {"1": math.nextafter(-100, -101)}),
    ("logit_bias-many", None, {str(number): 1 for number in range(1025)}),
    ("logit_bias-key", {"1": 1}, {"x": 1}),
]
BOUNDS = {
    name: ("/v1/completions", name.partition("-")[0], good, bad)
    for name, good, bad in (*(each for name, schema in TEXT.items() for each in bounds_of(name, schema)), *OF_LISTS)
}
BOUNDS |= {
    f"chat-{name}": ("/v1/chat/completions", name.partition("-")[0], good, bad)
    for field in ("top_logprobs", "max_completion_tokens")
    for name, good, bad in bounds_of(field, CHAT[field])
}
BOUNDS |= {
    "chat-messages": ("/v1/chat/completions", "messages", [ONE_MESSAGE], []),
    "chat-message-name": (
        "/v1/chat/completions",
        "messages",
        [{**ONE_MESSAGE, "name": "n" * 64}],
        [{**ONE_MESSAGE, "name": "n" * 65}],
    ),
    "tokenize-messages": ("/tokenize", "messages", [ONE_MESSAGE], [ONE_MESSAGE] * 2049),
    "detokenize-tokens": ("/detokenize", "tokens", [0], [-1]),
}


BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [ONE_MESSAGE], "logprobs": True},
    "/tokenize": {},
    "/detokenize": {},
}


async def test_each_bound_is_accepted_and_one_past_it_refused(system):
    assert len(BOUNDS) >= 50
    wrong = [row for row in BOUNDS if not await is_kept(system, *BOUNDS[row])]
    assert wrong == []


async def is_kept(system: Any, path: str, field: str, good: Any, bad: Any) -> bool:
    """Whether the server and the document's schema agree that one value will do and the other will not."""
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = {**BASE[path], field: bad}
    refused = await system.http.post(path, json=body)
    if refused.status_code != 400 or re.split(r"[\[.]", refused.json()["error"]["param"])[0] != field:
        return False
    if keeps_to(body, schema):
        return False
    if good is None:
        return True
    body = {**BASE[path], field: good}
    accepted = await system.http.post(path, json=body)
    # The model's own context is another rule, and no document can know it; nor how long an answer takes.
    others = ("context_length_exceeded", "deadline_exceeded", "server_overloaded")
    is_accepted = accepted.status_code == 200 or accepted.json()["error"]["code"] in others
    return is_accepted and keeps_to(body, schema)


OF_HEADERS = [
    (header, good, bad)
    for header, schema in HEADERS.items()
    for rule, good, bad in bounds_of(header, schema)
    if not rule.startswith(("Idempotency-Key-pattern", "X-Tandem-Residency-pattern-kind"))
]


async def test_each_bound_of_a_header(system):
    assert len(OF_HEADERS) > 5
    for header, good, bad in OF_HEADERS:
        # Times that no answer could keep are good values all the same, and so are regions where this gateway is not.
        for value, statuses in ((good, (200, 403, 503, 504)), (bad, (400,))):
            response = await system.http.post("/v1/completions", json={"prompt": "a"}, headers={header: str(value)})
            assert response.status_code in statuses, (header, value)


# --- answers ---------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PLENTY = {"n": 2, "return_token_ids": True, "max_tokens": 100}
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
async def test_an_answer_with_everything_keeps_to_the_document(system, read_sse, path, streams, is_named):
    is_chat = "chat" in path
    body: dict[str, Any] = (
        {"messages": [ONE_MESSAGE], "logprobs": True, "top_logprobs": 1} if is_chat else {"prompt": "a"}
    )
    body |= PLENTY if is_chat else {**PLENTY, "logprobs": 1}
    headers = {"idempotency-key": "k"} if is_named else {}
    response = await system.http.post(path, json=body | (USAGE if streams else {}), headers=headers)
    described = DOCUMENT["paths"][path]["post"]["responses"]["200"]["headers"]
    assert {name for name, header in described.items() if header["required"]} <= {
        name for name in described if name.lower() in response.headers
    }
    if not streams:
        check(response.json(), schema_of(path))
        return
    assert response.headers["content-type"].startswith(EVENTS)
    schema = schema_of(path, media_type=EVENTS)["properties"]["data"]["anyOf"][1]["contentSchema"]
    blocks = [re.sub(r"\nid: .*", "", block) for block in response.text.strip().split("\n\n")]
    *events, done = read_sse("\n\n".join(blocks))
    assert done == "[DONE]"
    assert len(events) > 4
    for event in events:
        check(event, schema)
    with pytest.raises(jsonschema_rs.ValidationError):
        check({**events[0], "surprise": 1}, schema)


async def test_a_response_and_its_events_keep_to_the_document(system):
    body = {"input": "hello", "max_output_tokens": 100, "top_logprobs": 1}
    check((await system.http.post("/v1/responses", json=body)).json(), schema_of("/v1/responses"))
    response = await system.http.post("/v1/responses", json={**body, "stream": True})
    schema = schema_of("/v1/responses", media_type=EVENTS)["properties"]["data"]["anyOf"][1]["contentSchema"]
    events = [json.loads(data) for data in re.findall(r"^data: (.*)$", response.text, re.MULTILINE)]
    assert len(events) > 8
    for event in events:
        check(event, schema)
    counted = await system.http.post("/v1/responses/input_tokens", json={"input": "hello"})
    check(counted.json(), schema_of("/v1/responses/input_tokens"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/embeddings", {"input": [1, 2], "encoding_format": "base64"}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    ],
)
async def test_vectors_scores_and_ranks_are_as_described(system, path, body):
    response = await system.http.post(path, json=body)
    assert response.status_code == 200
    check(response.json(), schema_of(path, 200))


async def test_a_body_may_find_no_room(system, monkeypatch):
    no_room = Bodies(0)
    for pool in ("_rest", "_reserve"):
        monkeypatch.setattr(system.gateway._bodies, pool, getattr(no_room, pool))
    paths = [operation.path for operation in OPERATIONS if operation.method == "post" and "{" not in operation.path]
    for path in sorted({*paths} - {"/v1/files", "/v1/batches"}):
        response = await system.http.post(path, json={})
        assert response.status_code == 503, path
        check(response.json(), schema_of(path, 503))


async def test_refusals_have_their_headers(make_system, tmp_path):
    limited, other = new_key(), new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nsha256 = "{digest_of_key(limited)}"\ntenant = "acme"\n[tenant.acme]\nrequests_per_minute = 1\n'
        f'[[key]]\nsha256 = "{digest_of_key(other)}"\ntenant = "other"\n[tenant.other]\nrequests_per_minute = 9\n'
    )
    system = await make_system(api_keys=keys, failover_wait_s=0.0)
    for status, path, key in (
        (401, "/v1/completions", "tandem-nobody"),
        (503, "/v1/completions", other),
        (200, "/tokenize", limited),
        (429, "/tokenize", limited),
    ):
        response = await system.http.post(path, json={"prompt": "a"}, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == status
        described = DOCUMENT["paths"][path]["post"]["responses"][str(status)].get("headers", {})
        assert {name.lower() for name, header in described.items() if header["required"]} <= response.headers.keys()
        limits = {name for name in response.headers if name.startswith("x-ratelimit-")}
        assert limits <= described.keys()
        assert bool(limits) == (status != 401)
        if status != 200:
            check(response.json(), schema_of(path, status))


# --- schemathesis ----------------------------------------------------------------------------------------------------

NOT_CHECKED = "positive_data_acceptance"
"""Members that are good by themselves may not go together, and a prompt may not fit: 400 is a right answer then."""
SETTINGS = """
# A form knows texts and no types: a `false` instead of a file is a file in which `false` is written.
[[operations]]
include-name = "POST /v1/files"
checks.negative_data_rejection.enabled = false
"""


async def run_schemathesis(system: Any, folder: Path, *flags: str) -> dict[str, Any]:
    """Fails where something was found; how many good requests of each operation were accepted, by phase."""
    report = folder / "report.json"
    (folder / "schemathesis.toml").write_text(SETTINGS)
    command = [Path(sys.executable).with_name("schemathesis"), "run", f"{system.base_url}/openapi.json", "--no-color"]
    command += ["--phases", "coverage,fuzzing", "--exclude-checks", NOT_CHECKED, "--warnings", "off", *flags]
    process = await asyncio.create_subprocess_exec(
        *command,
        "--report-json-path",
        report,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(Path(__file__).parent)},
        cwd=folder,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()
    told = json.loads(report.read_text())
    assert told["complete"]
    assert told["operations"]["tested"] == len(OPERATIONS) - 1, "all but the document itself"
    return told["valid_rates"]


@pytest.fixture
def brief_updates(monkeypatch):
    """The dashboard's updates end after the first one: schemathesis waits 10 s for the end of an answer."""
    next_update = _Watcher.next

    async def first_update(watcher):
        update, watcher.next = await next_update(watcher), end
        return update

    async def end():
        return None

    monkeypatch.setattr(_Watcher, "next", first_update)


@pytest.mark.timeout(600)
async def test_schemathesis_finds_nothing(system, brief_updates, tmp_path):
    rates = await run_schemathesis(system, tmp_path, "--generation-deterministic", "--max-examples", "3")
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        accepted = [phase["accepted"] for phase in rates[f"POST {path}"].values()]
        assert sum(accepted) >= 5, (path, accepted)
    assert (await system.complete()).status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
async def test_schemathesis_finds_nothing_in_the_long_run(system, brief_updates, tmp_path, seed):
    await run_schemathesis(
        system, tmp_path, "--continue-on-failure", "--seed", str(seed), "--max-examples", "1000", "--max-time", "300"
    )
    assert (await system.complete()).status_code == 200


def test_errors_of_the_document_are_the_servers():
    assert schema_of("/v1/completions", 400) == {"$ref": f"#/components/schemas/{Error.__name__}"}
    for operation in OPERATIONS:
        for status in operation.errors:
            described = schema_of(operation.path, status, method=operation.method)
            assert described == {"$ref": f"#/components/schemas/{operation.error.__name__}"}
