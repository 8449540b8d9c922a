"""What benchmarks make of times, and their client over a real socket."""

import asyncio
import math
import random
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import Endpoint, Targets, Timing, ask_at, ask_in_turn, percentile, poisson
from tests.waiting import HANG_LIMIT_S

LINES = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer(*times_s: float, sent_s: float = 0.0, failure: str = "") -> Timing:
    return Timing(sent_s, [(time_s, 1) for time_s in times_s], failure)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([3.0, 1.0, 2.0], 0, 1.0),
        ([3.0, 1.0, 2.0], 100, 3.0),
        ([1.0], 99, 1.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 101)], 95, 95.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_a_percentile_of_nothing_is_no_number() -> None:
    assert math.isnan(percentile([], 50))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_so_many_are_not_above_a_percentile(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < max(1, math.ceil(len(values) * percent / 100))


def test_the_times_of_an_answer() -> None:
    timing = Timing(10.0, [(10.5, 1), (10.6, 2), (11.0, 2)])
    assert timing.num_tokens == 5
    assert timing.ttft_s == pytest.approx(0.5)
    assert timing.itls_s == pytest.approx([0.1, 0.4])
    assert timing.tpot_s == pytest.approx(0.5 / 4)
    assert answer(1.0).tpot_s == 0.0


def test_goodput_counts_who_is_content() -> None:
    targets = Targets(ttft_s=1.0, itl_s=0.15, itl_percent=75)
    good = answer(0.9, 1.0, 1.1, 1.2, 1.9)  # one of four gaps is too long
    late = answer(1.1, 1.2)
    slow = answer(0.9, 1.0, 1.2, 1.4, 1.5)
    lone = answer(0.5)
    assert [targets.are_met_by(one) for one in (good, late, slow, lone)] == [True, False, False, True]
    assert targets.goodput([good, late, slow, lone], 4.0) == 0.5


def test_who_was_not_answered_is_not_content() -> None:
    targets = Targets(ttft_s=10.0, itl_s=10.0)
    assert not targets.are_met_by(Timing(0.0, failure="503"))
    assert not targets.are_met_by(answer(0.1, 0.2, failure="broke off"))


def test_arrivals_come_at_the_rate_and_again_with_the_same_seed() -> None:
    times_s = poisson(20.0, 100.0, random.Random(1))
    assert times_s == poisson(20.0, 100.0, random.Random(1))
    assert times_s == sorted(times_s)
    assert times_s[0] > 0
    assert times_s[-1] < 100.0
    assert len(times_s) == pytest.approx(2000, abs=150)


async def test_clients_ask_again_when_they_were_answered() -> None:
    running = highest = 0

    async def ask() -> Timing:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0)
        running -= 1
        return answer(1.0)

    answers, elapsed_s = await ask_in_turn(ask, num_requests=11, num_at_once=3)
    assert (len(answers), highest) == (11, 3)
    assert elapsed_s >= 0


async def test_users_do_not_wait_for_each_other() -> None:
    all_there = asyncio.Event()
    waiting = 0

    async def ask() -> Timing:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            all_there.set()
        await all_there.wait()
        return answer(1.0)

    assert len(await asyncio.wait_for(ask_at([0.0, 0.001, 0.002], ask), HANG_LIMIT_S)) == 3


@pytest.fixture
async def endpoint(request: pytest.FixtureRequest) -> AsyncIterator[Endpoint]:
    """A server that reads a request and writes the given pieces, the connection closed after them."""
    pieces: list[bytes] = request.param

    ended: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        assert await reader.readexactly(length) == b'{"prompt": [7], "n": 2}'
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Endpoint(f"http://127.0.0.1:{port}/x", lambda prompt, n: {"prompt": list(prompt), "n": n})
    await asyncio.wait_for(
        asyncio.gather(*ended, return_exceptions=True), HANG_LIMIT_S
    )  # a client that left may cut it short
    server.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


FIRST, SECOND = b'data: {"token_ids":[5]}\n\n', b'data: {"tokens": [6, 7]}\n\n'


@pytest.mark.parametrize(
    "endpoint",
    [
        [LINES, chunk(FIRST), chunk(SECOND), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"],
        [LINES + chunk(FIRST)[:9], chunk(FIRST)[9:], chunk(SECOND[:12]) + chunk(SECOND[12:]), b"0\r\n\r\n"],
    ],
    indirect=True,
)
async def test_tokens_are_counted_however_they_are_cut(endpoint: Endpoint) -> None:
    timing = await endpoint.ask([7], 2)
    assert timing.failure == ""
    assert [count for _, count in timing.arrivals_s] == [1, 2]
    assert 0 < timing.ttft_s < 20


@pytest.mark.parametrize(
    ("endpoint", "failure"),
    [
        ([LINES, chunk(FIRST)], "broke off"),
        ([LINES, chunk(b'data: {"usage": {}}\n\n'), b"0\r\n\r\n"], "without tokens"),
        ([b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull"], "503: full"),
        ([b"nonsense\r\n\r\n"], "no HTTP"),
        ([], "broke off"),
    ],
    indirect=["endpoint"],
)
async def test_failures_are_told(endpoint: Endpoint, failure: str) -> None:
    timing = await endpoint.ask([7], 2)
    assert timing.failure
    assert failure in timing.failure


async def test_a_server_that_is_not_there() -> None:
    nowhere = Endpoint("http://127.0.0.1:1/x", lambda prompt, n: {})
    assert (await nowhere.ask([7], 2)).failure
