"""Files as OpenAI's own client sends and reads them, and what the gateway refuses of them."""

import asyncio
import functools

import openai
import pytest

import gateway.batches.files_api
from gateway.access.keys import ApiKey, digest_of_key, toml_entry
from gateway.batches.files_api import MAX_UPLOADS, MAX_UPLOADS_OF_TENANT
from services.cluster.files import CHUNK_BYTES, Room
from services.runtime.errors import StoreUnavailable
from tests.waiting import HANG_LIMIT_S, until

LARGEST = 3 * CHUNK_BYTES


@pytest.fixture
async def system(make_system):
    return await make_system(max_file_size=LARGEST)


@pytest.fixture
async def client(system):
    async with openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def sent(client, content=b"{}\n", **fields):
    return await client.files.create(file=("näme.jsonl", content), purpose="batch", **fields)


async def test_a_file_comes_back_as_it_was_sent(system, client):
    for num_bytes in (1, CHUNK_BYTES, CHUNK_BYTES + 1, LARGEST):
        content = bytes(number % 251 for number in range(num_bytes))
        file = await sent(client, content)
        assert (file.object, file.bytes, file.filename, file.purpose) == ("file", num_bytes, "näme.jsonl", "batch")
        assert file.status == "processed"
        assert file.expires_at == file.created_at + 30 * 86_400
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).read() == content
        assert (await client.files.delete(file.id)).deleted
        for ask in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(file.id)
    assert await system.gateway.batches.files.num_bytes() == 0


async def test_files_are_listed_in_order_by_purpose_and_in_pages(system, client):
    ids = []
    for _ in range(3):
        ids.append((await sent(client)).id)
        await asyncio.sleep(0.002)  # ids sort by the millisecond
    assert [file.id async for file in await client.files.list(limit=1)] == ids[::-1]
    assert [file.id for file in (await client.files.list(order="asc")).data] == ids
    page = await client.files.list(order="asc", limit=2)
    assert (page.has_more, [file.id for file in page.data]) == (True, ids[:2])
    assert (await client.files.list(purpose="batch_output")).data == []
    assert len((await client.files.list(purpose="batch")).data) == 3
    long = "limit=000000001" + "9" * 4300
    for query in ("order=up", "limit=0", "limit=10001", "limit=-1", "limit=000000001", long, "after=a%2Fb"):
        response = await system.http.get(f"/v1/files?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]


async def test_a_file_lives_as_long_as_its_sender_says(client):
    file = await sent(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for wrong in (3599, 30 * 86_400 + 1):
        with pytest.raises(openai.BadRequestError) as refused:
            await sent(client, expires_after={"anchor": "created_at", "seconds": wrong})
        assert refused.value.param == "expires_after.seconds"
    with pytest.raises(openai.BadRequestError) as refused:
        await sent(client, expires_after={"anchor": "now", "seconds": 3600})
    assert refused.value.param == "expires_after.anchor"


PURPOSE = {"purpose": (None, "batch")}
FILE = {"file": ("a.jsonl", b"{}")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (FILE, "purpose"),
        (PURPOSE, "file"),
        ({**FILE, "purpose": (None, "fine-tune")}, "purpose"),
        ({**FILE, "purpose": (None, "x" * 300)}, "purpose"),
        ({**FILE, "purpose": ("a", b"batch")}, "purpose"),
        ({**PURPOSE, "file": (None, "text")}, "file"),
        ({**PURPOSE, "file": ("a", b"")}, "file"),
        ({**PURPOSE, "file": ("a" * 256, b"x")}, "file"),
        ({**PURPOSE, "file": ("a\u200b", b"x")}, "file"),
        ({**PURPOSE, **FILE, "other": (None, "x")}, "other"),
    ],
)
async def test_a_form_that_is_not_right_is_refused_and_leaves_nothing(system, fields, param):
    response = await system.http.post("/v1/files", files=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert await system.gateway.batches.files.num_bytes() == 0


async def test_other_methods_are_refused_with_those_that_there_are(system):
    for method, path, allowed in (
        ("DELETE", "/v1/files", {"GET", "HEAD", "POST"}),
        ("POST", "/v1/files/file-x", {"GET", "HEAD", "DELETE"}),
        ("POST", "/v1/files/file-x/content", {"GET", "HEAD"}),
        ("PUT", "/v1/batches", {"GET", "HEAD", "POST"}),
        ("DELETE", "/v1/batches/batch_x", {"GET", "HEAD"}),
        ("GET", "/v1/batches/batch_x/cancel", {"POST"}),
    ):
        response = await system.http.request(method, path)
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == allowed
        assert response.json()["error"]["code"] == "method_not_allowed"
    response = await system.http.head("/v1/files")
    assert (response.status_code, response.content) == (200, b"")


async def test_what_is_no_form_is_refused(system):
    for content_type, body in (
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=a", b""),
        ("multipart/form-data; boundary=a", b"--a\r\nx"),
    ):
        response = await system.http.post("/v1/files", content=body, headers={"content-type": content_type})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_form"
    response = await system.http.post("/v1/files", files=[("file", ("a", b"x")), ("file", ("b", b"x"))])
    assert response.json()["error"]["param"] == "file"


async def test_a_file_that_is_too_large_is_refused_whether_its_size_is_said_or_not(system, client):
    with pytest.raises(openai.APIStatusError) as refused:
        await sent(client, b"x" * (LARGEST + 1))
    assert refused.value.status_code == 413
    assert refused.value.code == "request_too_large"

    async def endless():
        yield b'--a\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=a"}
    for content in (endless(), b"x" * (LARGEST + 70_000)):
        response = await system.http.post("/v1/files", content=content, headers=headers)
        assert response.status_code == 413
    assert await system.gateway.batches.files.num_bytes() == 0


async def test_storage_is_bounded_and_deleting_helps(system, client):
    system.gateway.batches.files.room = Room(tenant_bytes=100_000)
    first = await sent(client, b"x" * 60_000)
    with pytest.raises(openai.APIStatusError) as refused:
        await sent(client, b"x" * 60_000)
    assert refused.value.status_code == 413
    assert refused.value.code == "storage_full"
    await client.files.delete(first.id)
    await sent(client, b"x" * 60_000)


async def test_a_sender_that_is_slow_or_leaves_keeps_no_place(system, monkeypatch):
    monkeypatch.setattr(gateway.batches.files_api, "MAX_UPLOAD_S", 0.3)
    monkeypatch.setattr(gateway.batches.files_api, "CHUNK_BYTES", 4)
    files = system.gateway.batches.files
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=a\r\n"
    part = b'--a\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 100
    writer.write(head + b"content-length: 1000\r\n\r\n" + part)
    assert b" 408 " in await asyncio.wait_for(reader.readline(), HANG_LIMIT_S)
    writer.close()
    monkeypatch.setattr(gateway.batches.files_api, "MAX_UPLOAD_S", 60)
    _, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    writer.write(head + b"content-length: 1000\r\n\r\n" + part)
    await until(files.num_bytes)
    writer.close()

    async def is_empty():
        return await files.num_bytes() == 0

    await until(is_empty)


async def test_a_file_is_kept_once_or_not_at_all_where_redis_answers_too_late(system, client, monkeypatch):
    monkeypatch.setattr(gateway.batches.files_api, "STORE_PATIENCE_S", 0.5)
    files = system.gateway.batches.files
    commit, is_late = files.commit, iter([True, False])

    async def late(*args, **kwargs):
        file = await commit(*args, **kwargs)
        if next(is_late, True):
            raise StoreUnavailable("Redis did not answer in time")
        return file

    monkeypatch.setattr(files, "commit", late)
    file = await sent(client)
    assert [one.id for one in (await client.files.list()).data] == [file.id]
    with pytest.raises(openai.InternalServerError) as refused:
        await sent(client)
    assert refused.value.status_code == 503
    assert [one.id for one in (await client.files.list()).data] == [file.id]


async def test_a_file_that_is_being_fetched_comes_whole_where_redis_is_away_for_a_moment(system, client, monkeypatch):
    content = bytes(number % 251 for number in range(LARGEST))
    file = await sent(client, content)
    files = system.gateway.batches.files
    chunk, is_away = files.chunk, iter([False, True, True])

    async def away(*args):
        if next(is_away, False):
            raise StoreUnavailable("Redis did not answer a moment ago")
        return await chunk(*args)

    monkeypatch.setattr(files, "chunk", away)
    assert (await client.files.content(file.id)).read() == content


async def test_only_so_many_files_are_taken_at_once_and_of_one_tenant(make_system, tmp_path):
    tenants = [f"t{number}" for number in range(MAX_UPLOADS // MAX_UPLOADS_OF_TENANT + 1)]
    path = tmp_path / "keys.toml"
    path.write_text("\n".join(toml_entry(ApiKey(digest_of_key(f"tandem-{name}"), name)) for name in tenants))
    system = await make_system(api_keys=path)
    head = "POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer tandem-%s\r\ncontent-length: 1000\r\n"
    form = "content-type: multipart/form-data; boundary=a\r\n\r\n--a"

    async def send_slowly(tenant):
        writers = []
        for _ in range(MAX_UPLOADS_OF_TENANT):
            _, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
            writer.write((head % tenant + form).encode())
            writers.append(writer)
        return writers

    async def answered(tenant, status):
        headers = {"authorization": f"Bearer tandem-{tenant}"}
        response = await system.http.post("/v1/files", files={**PURPOSE, **FILE}, headers=headers)
        assert response.headers.get("retry-after") == (None if response.status_code == 200 else "5")
        return response.status_code == status

    first = await send_slowly(tenants[0])
    await until(functools.partial(answered, tenants[0], 429))
    assert await answered(tenants[-1], 200)
    others = [writer for tenant in tenants[1:-1] for writer in await send_slowly(tenant)]
    await until(functools.partial(answered, tenants[-1], 503))
    for writer in first:
        writer.close()
    await until(functools.partial(answered, tenants[-1], 200))
    await until(functools.partial(answered, tenants[0], 200))
    for writer in others:
        writer.close()
