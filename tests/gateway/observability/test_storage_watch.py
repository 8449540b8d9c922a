"""What a gateway says of Redis' memory: figures for each kind, and each thing that is wrong once."""

import logging

import pytest
import redis

from gateway.observability.metrics import Metrics
from gateway.observability.storage_watch import StorageWatch
from services.cluster.answers import AnswerRoom, AnswerStore
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.files import FileStore, Room, new_id
from services.cluster.memory import StorageBounds
from services.cluster.redis_store import Store


@pytest.fixture
def server():
    with EmbeddedRedis() as started:
        yield started


async def test_figures_and_warnings(server, caplog):
    metrics, store = Metrics(), Store(server.url, cluster="test", timeout_s=2.0)
    try:
        files = FileStore(store, room=Room())
        answers = AnswerStore(store, room=AnswerRoom(), life_s=100.0)
        bounds = StorageBounds(1, 2, 3)
        told = []
        watch = StorageWatch(
            store,
            files=files,
            answers=answers,
            bounds=bounds,
            on_use=metrics.note_storage,
            on_complaints=told.append,
        )
        await files.put_chunk(new_id("file-"), "acme", 0, b"x" * 1000)
        with caplog.at_level(logging.WARNING, logger="gateway.observability.storage_watch"):
            await watch.look()
            assert told == [[]]
            with redis.Redis.from_url(server.url) as client:
                client.config_set("maxmemory-policy", "allkeys-lru")
                client.config_set("maxmemory", 2**40)
            for _ in range(2):
                await watch.look()
            assert [[one.subject for one in look] for look in told[1:]] == [["maxmemory-policy"]] * 2
            assert not caplog.records
            with redis.Redis.from_url(server.url) as client:
                client.set("hint", b"x" * 2**20)
                client.config_set("maxmemory", client.info("memory")["used_memory"] - 2**18)
                client.set("another", b"x" * 2**18)
            await watch.look()
        assert "Redis has evicted keys" in caplog.text
        shown = metrics.render(()).decode()
        assert 'tandem_redis_memory_bytes{kind="files"}' in shown
        assert 'tandem_redis_memory_limit_bytes{kind="journals"} 2.0' in shown
        assert 'tandem_redis_memory_limit_bytes{kind="answers"} 3.0' in shown
        assert "tandem_redis_evicted_keys 0.0" not in shown
    finally:
        await store.close()
