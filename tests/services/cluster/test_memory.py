"""What Redis' memory is used for, and what is wrong with it."""

import pytest
import redis

from services.cluster.answers import AnswerRoom, AnswerStore
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.files import OVERHEAD_BYTES, FileStore, Room, new_id
from services.cluster.journal_room import cost_bytes
from services.cluster.journals import JournalStore, Mode, Record
from services.cluster.memory import MemoryUse, StorageBounds, complaints, memory_use

BOUNDS = StorageBounds(2**20, 2**20, 2**20)


async def test_each_kind_is_counted(patient_store, client):
    files = FileStore(patient_store, room=Room())
    answers = AnswerStore(patient_store, room=AnswerRoom(), life_s=100.0)
    before = await memory_use(patient_store, files=files, answers=answers)
    assert (before.file_bytes, before.journal_bytes, before.answer_bytes) == (0, 0, 0)
    await files.put_chunk(new_id("file-"), "acme", 0, b"x" * 100_000)
    record = Record("a" * 32, "1" * 64, "r", "owner", b"c" * 50_000, [[]], [b""], tenant="acme")
    await JournalStore(patient_store).claim(Mode.JOIN, record)
    await answers.put("acme", "resp_a", document=b"d" * 30_000, input_items=b"[]")
    use = await memory_use(patient_store, files=files, answers=answers)
    assert use.answer_bytes == 30_002 + OVERHEAD_BYTES
    assert (use.file_bytes, use.journal_bytes) == (100_000 + OVERHEAD_BYTES, cost_bytes(50_000, 1))
    assert use.used_bytes - before.used_bytes > 150_000
    assert (use.policy, use.num_evicted_keys) == ("noeviction", 0)
    assert use.max_bytes == int(client.config_get("maxmemory")["maxmemory"])


@pytest.mark.parametrize(
    ("max_bytes", "policy", "words"),
    [
        (0, "noeviction", []),
        (0, "allkeys-lru", []),
        (BOUNDS.all_bytes, "noeviction", []),
        (BOUNDS.all_bytes - 1, "noeviction", ["may need"]),
        (2**40, "allkeys-lru", ["set maxmemory-policy to noeviction"]),
        (2**40, "volatile-ttl", ["set maxmemory-policy to noeviction"]),
        (2**20, "allkeys-random", ["throws keys away", "may need"]),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(max_bytes, policy, words):
    use = MemoryUse(0, max_bytes, policy, 0, 0, 0, 0)
    said = list(complaints(use, BOUNDS))
    assert len(said) == len(words)
    assert all(word in f"{line.what}: {line.advice}" for word, line in zip(words, said, strict=True))


def test_the_embedded_server_refuses_and_throws_nothing_away():
    with EmbeddedRedis(max_memory_bytes=8 * 2**20) as server, redis.Redis.from_url(server.url) as client:
        client.set("lease", "x", ex=600)
        answers = client.pipeline(transaction=False)
        for number in range(100):
            answers.set(f"hint-{number}", b"x" * 2**18, ex=600)
        told = answers.execute(raise_on_error=False)
        assert told[0] is True
        assert isinstance(told[-1], redis.exceptions.OutOfMemoryError)
        assert client.get("lease") == b"x"
        assert client.get("hint-0") is not None
        assert client.info("stats")["evicted_keys"] == 0
