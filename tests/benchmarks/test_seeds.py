"""The table of the plans' numbers: how it is written, and that what it says is measured."""

import asyncio

from benchmarks.gateway import http_request
from benchmarks.seeds import BATCH, ask_at_rate, batching, compaction, scaling


def test_batches_are_full_while_others_wait() -> None:
    efficiency = batching(num_requests=3 * BATCH)[-1]
    assert efficiency.is_met, efficiency


def test_worn_out_memory_gives_all_its_pages_at_once() -> None:
    found = compaction(num_pages=3000, num_moves=3000)
    assert found.is_met, found
    assert "from 1 places" not in found.reached, "the moves have mixed the pages"


def test_twice_as_many_workers_serve_nearly_twice_as_much() -> None:
    shares = [float(row.reached.split(", ")[1].split(" ×")[0]) for row in scaling(num_requests=150)]
    assert shares[0] == 1.0
    assert 1.6 < shares[1] < 2.2
    assert 3.0 < shares[2] < 4.4


async def test_a_rate_is_kept_and_a_latency_counts_from_when_its_request_was_due() -> None:
    answered: list[asyncio.StreamWriter] = []
    is_open = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            await is_open.wait()
            status = b"503 Busy" if len(answered) % 10 == 9 else b"200 OK"
            answered.append(writer)
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\nok")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    asyncio.get_running_loop().call_later(0.5, is_open.set)
    async with server:
        found = await ask_at_rate(server.sockets[0].getsockname()[1], http_request(b"{}"), 200.0, 1.0)
        for writer in answered:
            writer.close()
    total = found["answered"] + found["refused"]
    assert 120 < total < 300
    assert found["refused"] == total // 10
    assert len(found["latencies_ms"]) == found["answered"]
    assert max(found["latencies_ms"]) > 400, "the first ones were due while nothing was answered"
