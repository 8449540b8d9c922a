"""The rows of a batch on their way: which is asked next, what the API answers, and when a row is asked again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from gateway.batches.rows import Line
from gateway.http.connections import in_process_scope
from gateway.http.exchange import App

DEFAULT_RETRY_S = 1.0
MAX_TIMEOUTS = 8
"""How often a row may end with its deadline until that is its result: it may have waited for others all the time."""
TIMEOUT_RETRY_S = 60.0
"""The wait after the first time; it doubles after each further one."""


@dataclass(slots=True)
class PendingRow:
    """A row that has no result, and where its line is in the input file, in bytes."""

    number: int
    start: int
    num_bytes: int
    num_timeouts: int = 0


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The API's answer to a row. `status` is that of HTTP; 0: none came."""

    status: int
    headers: dict[str, str]
    body: bytes


class PendingRows:
    """The rows that are to be asked: those of the file in order, and those that were put off once their time comes.

    The file has `num_rows` of them, as `rows`; `read` reads the line of one that was put off. A task that holds the
    `turn` may wait for a row and take it.
    """

    def __init__(
        self, rows: AsyncIterator[tuple[int, Line]], num_rows: int, read: Callable[[PendingRow], Awaitable[bytes]]
    ) -> None:
        self.turn = asyncio.Lock()
        self._rows = rows
        self._num_in_file = num_rows
        self._read = read
        self._later: list[tuple[float, int, PendingRow]] = []
        self._is_closed = False
        self._has_news = asyncio.Event()

    async def is_due(self) -> bool:
        """Waits until a row can be taken. Returns False if no row is left for this task.

        A row that is put off later is taken by the task that put it off.
        """
        loop = asyncio.get_running_loop()
        while not self._is_closed:
            if self._num_in_file:
                return True
            if not self._later:
                return False
            wait_s = self._later[0][0] - loop.time()
            if wait_s <= 0:
                return True
            self._has_news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_news.wait()
        return False

    async def take(self) -> tuple[PendingRow, bytes]:
        """Returns a row that is due, and its line."""
        if self._later and self._later[0][0] <= asyncio.get_running_loop().time():
            row = heappop(self._later)[2]
            return row, await self._read(row)
        self._num_in_file -= 1
        number, line = await anext(self._rows)
        return PendingRow(number, line.start, len(line.data)), line.data

    def put_off(self, row: PendingRow, wait_s: float) -> None:
        """Has the row come again after this time."""
        heappush(self._later, (asyncio.get_running_loop().time() + wait_s, row.number, row))
        self._has_news.set()

    def close(self) -> None:
        """Lets no further row be taken."""
        self._is_closed = True
        self._has_news.set()


ROW_HEADERS: tuple[tuple[bytes, bytes], ...] = ((b"x-service-class", b"batch"),)


async def ask(
    app: App,
    endpoint: str,
    body: bytes,
    *,
    headers: Sequence[tuple[bytes, bytes]] = ROW_HEADERS,
    take: Callable[[bytes], None] | None = None,
) -> RowAnswer:
    """Asks the HTTP API, in this process, and returns its answer. Parts of a good one go to `take`, if it is given."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status = 0
    answer_headers: dict[str, str] = {}
    parts: list[bytes] = []

    async def receive() -> MutableMapping[str, Any]:
        return messages.pop() if messages else {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers.update({name.decode(): value.decode("latin-1") for name, value in message["headers"]})
        elif take is not None and status == 200:
            take(message["body"])
        else:
            parts.append(message["body"])

    told = [(b"content-type", b"application/json"), *headers]
    await app(in_process_scope("POST", endpoint, told), receive, send)
    return RowAnswer(status, answer_headers, b"".join(parts))


def later_s(answer: RowAnswer, row: PendingRow) -> float | None:
    """Returns the time after which the row is to be asked again; None: the answer is its result."""
    if answer.status == 504:
        row.num_timeouts += 1
        return TIMEOUT_RETRY_S * 2 ** (row.num_timeouts - 1) if row.num_timeouts < MAX_TIMEOUTS else None
    return retry_s(answer)


def retry_s(answer: RowAnswer) -> float | None:
    """Returns the time after which what was refused may be asked again; None: the answer is final."""
    if answer.status not in (0, 429, 503) or answer.headers.get("x-should-retry") == "false":
        return None
    said = answer.headers.get("retry-after", "")
    return float(said) if said.isdecimal() else DEFAULT_RETRY_S
