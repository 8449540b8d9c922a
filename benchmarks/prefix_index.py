"""What the cluster's index of cached pages costs: publishing, asking Redis, asking the gateway's own view, memory.

    python -m benchmarks.prefix_index [--workers 64] [--pages 4096] [--prompt-pages 200]

It starts a Redis of its own. Three ways to keep the keys in Redis are compared: (a) a set for each worker, which is
what Tandem does, (b) one hash from each key to a bitmap of workers, (c) a sorted set for each worker. All workers hold
the prompt's pages, which is the worst case of a question, and pages of their own.
"""

import argparse
import asyncio
import multiprocessing
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from multiprocessing.connection import Connection

import redis

from gateway.topology.prefix_view import PrefixView
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.prefix_index import FLUSH_KEYS, KEY_BYTES, PrefixIndex, PrefixPublisher
from services.cluster.redis_store import Script, Store
from services.cluster.registry import WorkerRecord, new_incarnation

ROUNDS = 200
PATIENT_S = 120.0

# KEYS: the hash. ARGV: number of the worker, keys. A bitmap for each key, read, changed and written.
_HASH_ADD = Script("""
local at = math.floor(ARGV[1] / 8)
local bit_value = 2 ^ (ARGV[1] % 8)
for index = 2, #ARGV do
  local map = redis.call('HGET', KEYS[1], ARGV[index]) or ''
  if #map <= at then map = map .. string.rep('\\0', at + 1 - #map) end
  local byte = string.byte(map, at + 1)
  if math.floor(byte / bit_value) % 2 == 0 then
    map = string.sub(map, 1, at) .. string.char(byte + bit_value) .. string.sub(map, at + 2)
    redis.call('HSET', KEYS[1], ARGV[index], map)
  end
end
return 1
""")

# KEYS: sets. ARGV: keys. By halves: right only for a set without holes, and here to see what it would save.
_HALVES = Script("""
local answer = {}
for index, set in ipairs(KEYS) do
  local low, high = 0, #ARGV
  while low < high do
    local middle = math.floor((low + high + 1) / 2)
    if redis.call('SISMEMBER', set, ARGV[middle]) == 1 then low = middle else high = middle - 1 end
  end
  answer[index] = low
end
return answer
""")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_index", description=__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--pages", type=int, default=4096, help="pages of each worker")
    parser.add_argument("--prompt-pages", type=int, default=200)
    settings = parser.parse_args()
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", 0)
        compare_designs(client, settings.workers, settings.pages, settings.prompt_pages)
        client.execute_command("FLUSHALL", "SYNC")
        asyncio.run(measure_product(server.url, settings.workers, settings.pages, settings.prompt_pages))
        client.execute_command("FLUSHALL", "SYNC")
        asyncio.run(measure_following(server.url))


def compare_designs(client: "redis.Redis", num_workers: int, num_pages: int, num_prompt: int) -> None:
    """Prints publication, question and memory of the three ways, without anything around them."""
    prompt = page_keys(num_prompt, seed=1_000_001)
    held = [prompt + page_keys(num_pages - num_prompt, seed=worker) for worker in range(num_workers)]
    names = [f"w{worker}" for worker in range(num_workers)]
    total = num_workers * num_pages

    def add_to_hash(worker: int, keys: list[bytes]) -> None:
        run(client, _HASH_ADD, ["hash"], [worker, *keys])

    def add_to_set(worker: int, keys: list[bytes]) -> None:
        client.sadd(names[worker], *keys)

    def add_to_sorted_set(worker: int, keys: list[bytes]) -> None:
        client.zadd(names[worker], dict.fromkeys(keys, 0))

    def ask_sets() -> object:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.smismember(name, prompt)
        return pipeline.execute()

    def ask_sorted_sets() -> object:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.zmscore(name, prompt)
        return pipeline.execute()

    ways: list[tuple[str, Callable[[int, list[bytes]], None], Callable[[], object]]] = [
        ("(a) set per worker", add_to_set, ask_sets),
        ("(b) hash key -> bitmap", add_to_hash, lambda: client.hmget("hash", prompt)),
        ("(c) sorted set per worker", add_to_sorted_set, ask_sorted_sets),
    ]
    print(f"{num_workers} workers, {num_pages} pages each, {num_prompt} of them the same; batches of {FLUSH_KEYS}")
    print(f"{'':28}{'publish, keys/s':>16}{'ask, ms':>10}{'bytes/key':>11}{'a worker goes, ms':>19}")
    for name, add, ask in ways:
        client.execute_command("FLUSHALL", "SYNC")
        before = client.info("memory")["used_memory"]
        began_s = time.perf_counter()
        for worker, keys in enumerate(held):
            for start in range(0, len(keys), FLUSH_KEYS):
                add(worker, keys[start : start + FLUSH_KEYS])
        publish_s = time.perf_counter() - began_s
        num_bytes = client.info("memory")["used_memory"] - before
        ask_s = median_s(ask, 20)
        gone_s = leave_hash(client, held[0]) if name.startswith("(b)") else median_s(lambda: client.unlink(names[0]), 1)
        print(f"{name:28}{total / publish_s:16,.0f}{ask_s * 1e3:10.2f}{num_bytes / total:11.0f}{gone_s * 1e3:19.2f}")
    client.execute_command("FLUSHALL", "SYNC")
    for worker, keys in enumerate(held):
        add_to_set(worker, keys)
    halves_s = median_s(lambda: run(client, _HALVES, names, prompt), 20)
    print(f"by halves instead of the run, sets: {halves_s * 1e3:.2f} ms (wrong with holes)")


def leave_hash(client: "redis.Redis", keys: list[bytes]) -> float:
    """Seconds to look at every field, which is what a dead worker costs the hash."""
    began_s = time.perf_counter()
    for _ in client.hscan_iter("hash", count=4096):
        pass
    return time.perf_counter() - began_s


async def measure_product(url: str, num_workers: int, num_pages: int, num_prompt: int) -> None:
    """Prints what the publisher, the index and the view cost."""
    prompt = page_keys(num_prompt, seed=1_000_001)
    publishers = []
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for worker in range(num_workers):
        publisher = PrefixPublisher(url, cluster="bench", record=record(f"w{worker}"))
        publisher.note(prompt + page_keys(num_pages - num_prompt, seed=worker))
        publisher.start()
        publishers.append(publisher)
    for publisher in publishers:
        await flushed(publisher)
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    total = num_workers * num_pages
    print(
        f"\nfull publication of {total:,} keys: {elapsed_s:.2f} s,"
        f" {cpu_s / total * 1e6:.2f} us of the workers' CPU a key"
    )
    store = Store(url, cluster="bench", timeout_s=5.0)
    index = PrefixIndex(store)
    answers = []
    for _ in range(20):
        began_s = time.perf_counter()
        answer = await index.longest(prompt)
        answers.append(time.perf_counter() - began_s)
        assert len(answer) == num_workers
    nobody = page_keys(num_prompt, seed=1_000_002)
    misses = []
    for _ in range(20):
        began_s = time.perf_counter()
        await index.longest(nobody)
        misses.append(time.perf_counter() - began_s)
    print(
        f"longest() in Redis: {statistics.median(answers) * 1e3:.2f} ms where all hold all,"
        f" {statistics.median(misses) * 1e3:.2f} ms where nobody holds any"
    )
    tracemalloc.start()
    memory_view = PrefixView(index)
    while not await memory_view.refresh():
        pass
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(f"memory of the view: {num_bytes / memory_view.num_pages:.0f} bytes a page ({memory_view.num_pages:,} pages)")
    view = PrefixView(index)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    slices = []
    while True:
        slice_s = time.thread_time()
        is_complete = await view.refresh()
        slices.append(time.thread_time() - slice_s)
        if is_complete:
            break
    print(
        f"a new gateway reads {total:,} keys: {time.perf_counter() - began_s:.2f} s,"
        f" {(time.process_time() - began_cpu_s):.2f} s of its CPU, at most {max(slices) * 1e3:.1f} ms of CPU a step"
    )
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    for _ in range(100):
        await view.refresh()
    print(
        f"a look without changes: {(time.perf_counter() - began_s) * 10:.2f} ms,"
        f" {(time.thread_time() - began_cpu_s) * 10:.2f} ms of the gateway's CPU"
    )
    # Their threads would be in the way of what follows.
    await asyncio.gather(*(asyncio.to_thread(publisher.release) for publisher in publishers))
    hit_s = median_s(lambda: view.longest(prompt), ROUNDS)
    miss_s = median_s(lambda: view.longest(nobody), ROUNDS)
    view.expect("w0", prompt, ttl_s=60.0)
    expected_s = median_s(lambda: view.longest(prompt), ROUNDS)
    expect_s = median_s(lambda: view.expect("w1", prompt, ttl_s=60.0), 50)
    print(
        f"longest() in the view: {hit_s * 1e6:.1f} us where all hold all, {miss_s * 1e6:.2f} us where nobody does,"
        f" {expected_s * 1e6:.1f} us with expected pages; expect(): {expect_s * 1e6:.0f} us"
    )
    noted = page_keys(1000, seed=1_000_003)
    idle = PrefixPublisher(url, cluster="bench", record=record("idle"))
    note_s = median_s(lambda: [idle.note((key,)) for key in noted], 20) / len(noted)
    print(f"note() of one key: {note_s * 1e6:.2f} us")
    await store.close()


async def measure_following(url: str, *, rate: int = 100_000, duration_s: float = 5.0) -> None:
    """Prints what it costs to follow changes at a rate, with the worker in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=churn, args=(there, url, rate, duration_s), daemon=True)
    process.start()
    store = Store(url, cluster="bench", timeout_s=5.0)
    view = PrefixView(PrefixIndex(store))
    await asyncio.to_thread(here.recv)
    while not await view.refresh():
        pass
    num_before = view.stats.num_changed_pages
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    ages = []
    while time.perf_counter() - began_s < duration_s:
        if await view.refresh():
            await asyncio.sleep(0.1)
        ages.append(view.age_s)
    elapsed_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    num_keys = view.stats.num_changed_pages - num_before
    num_noted, worker_cpu_s = await asyncio.to_thread(here.recv)
    print(
        f"following {num_keys / elapsed_s:,.0f} changed keys/s of one worker: {cpu_s / elapsed_s:.1%} of a core"
        f" ({cpu_s / max(1, num_keys) * 1e6:.2f} us a key), read again {view.stats.num_reads - 1} times,"
        f" at most {max(ages):.2f} s old"
    )
    print(
        f"its worker noted {num_noted / duration_s:,.0f} keys/s, {worker_cpu_s / num_noted * 1e6:.2f} us of CPU a key"
    )
    process.join()
    await store.close()


def churn(pipe: Connection, url: str, rate: int, duration_s: float) -> None:
    """A worker that adds and evicts keys in steps of 10 ms."""
    publisher = PrefixPublisher(url, cluster="bench", record=record("w0"))
    publisher.start()
    held = page_keys(20_000, seed=1)
    new = page_keys(20_000, seed=2)
    publisher.note(held)
    publisher.flush(timeout_s=PATIENT_S)
    pipe.send(None)
    half, num_noted, began_cpu_s = rate // 200, 0, time.process_time()
    began_s = time.perf_counter()
    at = 0
    while time.perf_counter() - began_s < duration_s:
        added, evicted = new[at : at + half], held[at : at + half]
        publisher.note(added, evicted)
        held[at : at + half], new[at : at + half] = added, evicted
        at = (at + half) % (len(held) - half)
        num_noted += 2 * half
        time.sleep(max(0.0, num_noted / rate - (time.perf_counter() - began_s)))
    pipe.send((num_noted, time.process_time() - began_cpu_s))
    publisher.release()


def record(worker_id: str) -> WorkerRecord:
    return WorkerRecord(
        id=worker_id,
        role="decode",
        pid=1,
        host="here",
        address="127.0.0.1:1",
        incarnation=new_incarnation(),
        started_unix_ns=time.time_ns(),
        state="ready",
        model="bench",
        exact=True,
        page_size=16,
        layout_fingerprint="f",
        max_sequence_tokens=1,
    )


def page_keys(count: int, *, seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(KEY_BYTES) for _ in range(count)]


async def flushed(publisher: PrefixPublisher) -> None:
    if not await asyncio.to_thread(publisher.flush, timeout_s=PATIENT_S):
        raise RuntimeError("Redis does not confirm")


def median_s(action: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        action()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def run(client: "redis.Redis", script: Script, keys: list[str], args: list[bytes] | list[int | bytes]) -> object:
    return client.eval(script.body, len(keys), *keys, *args)


if __name__ == "__main__":
    main()
