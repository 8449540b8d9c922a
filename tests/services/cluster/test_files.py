"""Files in a real Redis: whole or not there, listed in order, bounded, and gone in time."""

import asyncio

import pytest

from services.cluster.files import AGAIN, MAX_FILES, MAX_SWEPT, OVERHEAD_BYTES, FilesFull, FileStore, Room, new_id
from services.cluster.keys import Keys

KEYS = Keys("test")


@pytest.fixture
def files(patient_store):
    return FileStore(patient_store, room=Room(tenant_bytes=20_000, all_bytes=30_000))


async def put(files, *chunks, tenant="acme", purpose="batch", ttl_s=3600, file_id=None):
    file_id = file_id or new_id("file-")
    for index, chunk in enumerate(chunks):
        await files.put_chunk(file_id, tenant, index, chunk)
    num_bytes = sum(map(len, chunks))
    return await files.commit(
        file_id, tenant, filename="a näme", purpose=purpose, num_chunks=len(chunks), num_bytes=num_bytes, ttl_s=ttl_s
    )


async def test_a_file_is_what_was_sent(files, client):
    file = await put(files, b"\x00first", b"second\xff")
    assert (file.tenant, file.filename, file.purpose, file.num_bytes, file.num_chunks) == (
        ("acme", "a näme", "batch", 13, 2)
    )
    assert file.expires_s == file.created_s + 3600
    assert await files.find(file.id) == file
    assert [await files.chunk(file.id, index) for index in range(3)] == [b"\x00first", b"second\xff", None]
    for key in (file.id, f"{file.id}:0", f"{file.id}:1"):
        assert 3_590 < client.ttl(KEYS.file_prefix + key) <= 3_600


async def test_a_part_of_a_file_is_read_wherever_it_lies(files, monkeypatch):
    monkeypatch.setattr("services.cluster.files.CHUNK_BYTES", 4)
    file = await put(files, b"0123", b"4567", b"89")
    for start in range(10):
        for num_bytes in range(1, 11):
            assert await files.read(file.id, start, num_bytes) == b"0123456789"[start : start + num_bytes]
    assert await files.read("file-none", 0, 3) == b""


async def test_a_file_whose_chunks_are_gone_is_not_made(files, client):
    file_id = new_id("file-")
    await files.put_chunk(file_id, "acme", 0, b"x")
    assert 590 < client.ttl(f"{KEYS.file_prefix}{file_id}:0") <= 600
    client.delete(f"{KEYS.file_prefix}{file_id}:0")
    assert (
        await files.commit(file_id, "acme", filename="a", purpose="batch", num_chunks=1, num_bytes=1, ttl_s=60) is None
    )
    assert await files.find(file_id) is None


async def test_a_deleted_file_leaves_nothing(files, client):
    file = await put(files, b"one", b"two")
    assert not await files.delete(file.id, "bolt")
    assert await files.delete(file.id, "acme")
    assert not await files.delete(file.id, "acme")
    assert list(client.scan_iter("*")) == []


async def test_an_upload_that_is_given_up_leaves_nothing(files, client):
    file_id = new_id("file-")
    for index in range(3):
        await files.put_chunk(file_id, "acme", index, b"x")
    assert not await files.delete(file_id, "bolt")
    assert await files.num_bytes("acme") == 3 + OVERHEAD_BYTES
    assert not await files.delete(file_id, "acme")
    assert list(client.scan_iter("*")) == []


async def test_room_is_bounded_for_a_tenant_and_for_all(files):
    first = await put(files, b"x" * 10_000)
    with pytest.raises(FilesFull) as full:
        await put(files, b"x" * (10_000 - 2 * OVERHEAD_BYTES + 1))
    assert full.value.whose == "tenant"
    second = await put(files, b"x" * (10_000 - 2 * OVERHEAD_BYTES))
    assert await files.num_bytes("acme") == await files.num_bytes() == 20_000
    with pytest.raises(FilesFull) as full:
        await put(files, b"x" * (10_000 - OVERHEAD_BYTES + 1), tenant="bolt")
    assert full.value.whose == "all"
    await put(files, b"x" * (10_000 - OVERHEAD_BYTES), tenant="bolt")
    for file in (first, second):
        await files.delete(file.id, "acme")
    assert await files.num_bytes("acme") == 0
    assert await files.num_bytes() == await files.num_bytes("bolt") == 10_000


async def test_files_are_bounded_in_number(files, client):
    client.zadd(KEYS.files_prefix + "acme", {f"file-{number}": 0 for number in range(MAX_FILES - 1)})
    await put(files, b"x")
    with pytest.raises(FilesFull) as full:
        await put(files, b"x")
    assert full.value.whose == "files"
    await put(files, b"x", tenant="bolt")


async def test_what_has_expired_gives_its_room_back(files, client):
    kept = await put(files, b"x" * 5_000)
    gone = await put(files, b"x" * 12_000)
    unfinished = new_id("file-")
    await files.put_chunk(unfinished, "bolt", 0, b"x" * 5_000)
    # Their time is over: Redis itself has dropped the keys.
    for file_id in (gone.id, unfinished):
        client.zadd(KEYS.file_expiry, {file_id: 1})
        client.delete(KEYS.file_prefix + file_id, f"{KEYS.file_prefix}{file_id}:0")
    assert ([file.id for file in (await files.page("acme"))[0]]) == [kept.id]
    await put(files, b"x" * 12_000)
    assert await files.num_bytes("acme") == 17_000 + 2 * OVERHEAD_BYTES
    assert await files.num_bytes("bolt") == 0
    assert client.zscore(KEYS.files_prefix + "acme", gone.id) is None


async def test_pages_go_on_after_an_id_even_if_that_is_gone(files):
    ids = []
    for number in range(5):
        ids.append((await put(files, b"x", purpose="batch" if number % 2 else "batch_output")).id)
        await asyncio.sleep(0.002)  # ids sort by the millisecond
    await put(files, b"x", tenant="bolt")

    async def page(**options):
        found, has_more = await files.page("acme", **options)
        return [ids.index(file.id) for file in found], has_more

    assert await page() == ([4, 3, 2, 1, 0], False)
    assert await page(limit=2) == ([4, 3], True)
    assert await page(limit=3, after=ids[3]) == ([2, 1, 0], False)
    assert await page(limit=2, newest_first=False) == ([0, 1], True)
    assert await page(limit=1, purpose="batch") == ([3], True)
    assert await page(after=ids[3], purpose="batch") == ([1], False)
    await files.delete(ids[3], "acme")
    assert await page(limit=1, after=ids[3]) == ([2], True)


async def test_any_number_of_expired_files_makes_room(files, client):
    for number in range(18):
        await files.put_chunk(f"file-{number}", "acme", 0, b"x")
    expired = {f"file-old-{number}": 0 for number in range(3 * MAX_SWEPT)}
    client.zadd(KEYS.file_expiry, expired)
    client.hset(KEYS.file_sizes, mapping=dict.fromkeys(expired, "100 acme"))
    client.hincrby(KEYS.file_totals, "acme", 100 * len(expired))
    client.hincrby(KEYS.file_totals, "*", 100 * len(expired))
    await files.put_chunk("file-new", "acme", 0, b"x")
    assert await files.num_bytes("acme") == 19 * (OVERHEAD_BYTES + 1)


async def test_a_file_may_have_any_content(files):
    file = await put(files, AGAIN)
    assert await files.chunk(file.id, 0) == AGAIN
    assert await files.read(file.id, 0, len(AGAIN)) == AGAIN
