"""Which request is where: its states, the compare-and-set in Redis, and the writer that keeps Redis off its path.

Writes are fenced by (begin of the request, attempt). Redis may forget a placement at any time, so a write over
nothing is always taken. Knows neither how a request is routed nor what its tokens are.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

import msgspec

from services.cluster.redis_store import Script, Store
from services.runtime.background_tasks import supervise
from services.runtime.errors import StoreRefused, StoreUnavailable

ACTIVE_TTL_S = 3600.0
TERMINAL_TTL_S = 60.0
MAX_ENDED = 50_000
"""Placements of ended requests that one gateway keeps for TERMINAL_TTL_S, about 13 MB in Redis; others for less."""
SHORT_TTL_S = 1.0
MAX_TEXT_BYTES = 256
MAX_ATTEMPT = 10**6

FLUSH_INTERVAL_S = 0.02
MAX_BATCH = 256
MAX_PENDING = 65_536
RETRY_INTERVAL_S = 0.2

logger = logging.getLogger(__name__)


class State(StrEnum):
    """Where one attempt of a request stands."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


class ShownState(StrEnum):
    """A State for a person to read, or INTERRUPTED: the gateway of the request died. No gateway writes that one."""

    QUEUED = State.QUEUED
    ADMITTED = State.ADMITTED
    PREFILLING = State.PREFILLING
    TRANSFERRING = State.TRANSFERRING
    DECODING = State.DECODING
    FINISHED = State.FINISHED
    FAILED = State.FAILED
    CANCELLED = State.CANCELLED
    INTERRUPTED = "interrupted"


TERMINAL = frozenset({State.FINISHED, State.FAILED, State.CANCELLED})
ACTIVE = frozenset(State) - TERMINAL
PLACED = ACTIVE - {State.QUEUED}
FINAL = frozenset({State.FINISHED, State.CANCELLED})
"""States after which no further attempt follows."""

_FORWARD: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ADMITTED}),
    State.ADMITTED: frozenset({State.PREFILLING}),
    # A local prefill has no transfer, and the first token may be the last.
    State.PREFILLING: frozenset({State.TRANSFERRING, State.DECODING, State.FINISHED}),
    State.TRANSFERRING: frozenset({State.DECODING, State.FINISHED}),
    State.DECODING: frozenset({State.FINISHED}),
}


def can_move(before: State, after: State) -> bool:
    """Whether an attempt may go from one state directly to another."""
    if before in TERMINAL:
        return False
    return after in _FORWARD[before] or after in {State.FAILED, State.CANCELLED}


def can_reach(before: State, after: State) -> bool:
    """Whether an attempt may go from one state to another in one step or several, or is in it already."""
    return after in _REACHABLE[before]


class Placement(msgspec.Struct, frozen=True):
    """Where one attempt of one request is; a write replaces the whole of it."""

    request_id: str
    attempt: int
    """Number of the attempt, from 1."""
    state: State
    gateway: str
    """Incarnation of the gateway that owns the request."""
    prefill_worker: str = ""
    """Worker id; empty: not chosen yet, or no prefill worker takes part."""
    decode_worker: str = ""
    """Worker id; empty: not chosen yet."""
    began_unix_ns: int = 0
    """When the request began: the same in all its placements, other than that of an earlier request of its id."""
    has_lost_owner: bool = False
    """Whether Redis no longer lists its gateway as present. Only what was read from Redis can say so."""

    @property
    def shown_state(self) -> ShownState:
        """The state for a person to read."""
        return ShownState.INTERRUPTED if self.has_lost_owner and self.state in ACTIVE else ShownState(self.state)


def accepts(current: Placement | None, update: Placement) -> bool:
    """Whether `update` may replace `current`. The script in Redis applies the same rule.

    A request that began later replaces an earlier one of the same id, a later attempt an earlier one unless that has
    finished or was cancelled, and within an attempt its own gateway moves it forward.
    """
    if current is None:
        return True
    if update.began_unix_ns != current.began_unix_ns:
        return update.began_unix_ns > current.began_unix_ns
    if update.attempt != current.attempt:
        return update.attempt > current.attempt and current.state not in FINAL
    return update.gateway == current.gateway and can_reach(current.state, update.state)


class PlacementStore:
    """Placements in Redis; every method may wait for one round trip and raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def move(self, placement: Placement) -> bool:
        """Writes one placement. False: a newer attempt or another owner holds the request."""
        return not await self.move_many([placement])

    async def move_many(self, placements: Sequence[Placement], *, ended_ttl_s: float = TERMINAL_TTL_S) -> list[int]:
        """Writes many at once, those that have ended for `ended_ttl_s`; returns the indices of those fenced off."""
        rows = [
            (
                placement.request_id,
                f"{placement.began_unix_ns:020d}",
                placement.attempt,
                placement.gateway,
                placement.state,
                placement.prefill_worker,
                placement.decode_worker,
            )
            for placement in placements
        ]
        keys = (self._store.keys.request_prefix,)
        args = (_ENCODER.encode(rows), round(ACTIVE_TTL_S * 1000), round(ended_ttl_s * 1000))
        return [number - 1 for number in await self._store.run(_MOVE, keys, args)]

    async def get(self, request_id: str) -> Placement | None:
        """The placement of a request; None: unknown, ended a while ago, or not readable (which is counted).

        Asks patiently, because it is a person that waits for the answer.
        """
        keys = (self._store.keys.request(request_id), self._store.keys.gateways)
        answer = await self._store.run_patiently(_GET, keys, (MAX_TEXT_BYTES,))
        if not answer:
            return None
        placement = _parse(request_id, answer)
        if placement is None:
            self._store.stats.num_rejected_values += 1
        return placement


class PlacementWriter:
    """Writes placements behind the requests' back: `post` costs about a microsecond and never waits.

    Only the latest placement of a request waits to be written, and it waits until Redis has it. Without Redis they wait
    in memory, at most `max_pending` of them; what does not fit is dropped and counted, because Redis holds hints only.
    `on_fenced` is called on the loop for a write that lost against a newer attempt or another owner.
    """

    def __init__(
        self,
        store: PlacementStore,
        *,
        on_fenced: Callable[[Placement], None] | None = None,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        max_pending: int = MAX_PENDING,
        max_ended: int = MAX_ENDED,
    ) -> None:
        self._store = store
        self._on_fenced = on_fenced
        self._max_ended = max_ended
        self._ended: deque[tuple[float, int]] = deque()
        self._num_ended = 0
        self._flush_interval_s = flush_interval_s
        self._max_pending = max_pending
        self._pending: dict[str, Placement] = {}
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self.num_written = 0
        self.num_fenced = 0
        self.num_dropped = 0

    @property
    def num_pending(self) -> int:
        """Placements that wait to be written."""
        return len(self._pending)

    def start(self) -> None:
        """Begins to write, on the running loop."""
        self._task = supervise(self._write_behind, name="placement-writer")

    def post(self, placement: Placement) -> None:
        """Notes the latest placement of a request, to be written soon."""
        before = self._pending.get(placement.request_id)
        if before is None:
            if len(self._pending) >= self._max_pending:
                self.num_dropped += 1
                return
            self._has_work.set()
        elif not accepts(before, placement):
            self._fenced(placement)
            return
        self._pending[placement.request_id] = placement

    async def find(self, request_id: str) -> Placement | None:
        """The placement of a request: the one that waits to be written, or what Redis holds. None: neither.

        Raises StoreUnavailable.
        """
        return self._pending.get(request_id) or await self._store.get(request_id)

    async def flush(self) -> None:
        """Writes all that waits now, and waits for what is being written.

        Raises StoreUnavailable; what was not written waits on.
        """
        async with self._writing:
            while self._pending:
                await self._write_batch()

    async def close(self, *, timeout_s: float = 3.0) -> None:
        """Writes what waits, for at most `timeout_s`, and stops."""
        self._is_closing = True
        self._has_work.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._flush_patiently()

    async def _flush_patiently(self) -> None:
        """What a leaving gateway does not write stays wrong until it expires, so one slow answer is not the end."""
        while True:
            try:
                await self.flush()
                return
            except StoreUnavailable:
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_behind(self) -> None:
        while not self._is_closing:
            await self._has_work.wait()
            await asyncio.sleep(self._flush_interval_s)
            try:
                await self.flush()
                self._has_work.clear()
            except StoreUnavailable:
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write_batch(self) -> None:
        taken = list(itertools.islice(self._pending.values(), MAX_BATCH))
        fenced: list[int] = []
        try:
            fenced = await self._store.move_many(taken, ended_ttl_s=self._ended_ttl_s(taken))
        except StoreRefused as error:
            self.num_dropped += len(taken)
            logger.error("placements refused", extra={"num_placements": len(taken), "reason": str(error)})
        for placement in taken:
            if self._pending[placement.request_id] is placement:  # or something later has been posted since
                del self._pending[placement.request_id]
        self.num_written += len(taken) - len(fenced)
        for index in fenced:
            self._fenced(taken[index])

    def _ended_ttl_s(self, taken: Sequence[Placement]) -> float:
        """Seconds for which ended placements are kept, by the number that is kept already."""
        now_s = time.monotonic()
        while self._ended and self._ended[0][0] <= now_s - TERMINAL_TTL_S:
            self._num_ended -= self._ended.popleft()[1]
        num_ended = sum(placement.state in TERMINAL for placement in taken)
        if self._num_ended + num_ended > self._max_ended:
            return SHORT_TTL_S
        self._ended.append((now_s, num_ended))
        self._num_ended += num_ended
        return TERMINAL_TTL_S

    def _fenced(self, placement: Placement) -> None:
        self.num_fenced += 1
        if self._on_fenced is not None:
            self._on_fenced(placement)


def _parse(request_id: str, fields: Sequence[bytes]) -> Placement | None:
    try:
        began, attempt, gateway, state, prefill, decode, presence = (field.decode() for field in fields)
        if not (attempt.isascii() and attempt.isdigit() and 1 <= int(attempt) <= MAX_ATTEMPT and len(began) == 20):
            return None
        lost = presence == "lost"
        return Placement(request_id, int(attempt), State(state), gateway, prefill, decode, int(began), lost)
    except ValueError:
        return None


def _closure(forward: Mapping[State, frozenset[State]]) -> dict[State, frozenset[State]]:
    reachable: dict[State, frozenset[State]] = {state: frozenset({state}) for state in TERMINAL}
    for state in reversed(list(forward)):
        further = (reachable[after] for after in forward[state])
        reachable[state] = frozenset({state, State.FAILED, State.CANCELLED}).union(*further)
    return reachable


def _lua_set(states: frozenset[State]) -> str:
    return "{" + ",".join(f"{state.value}=true" for state in sorted(states)) + "}"


def _lua_reachable() -> str:
    return "{" + ",".join(f"{state.value}={_lua_set(after)}" for state, after in _REACHABLE.items()) + "}"


_ENCODER = msgspec.msgpack.Encoder()
_REACHABLE = _closure(_FORWARD)

# KEYS: prefix of placements. ARGV: rows of (request id, begin, attempt, gateway, state, prefill, decode) in msgpack,
# TTL of an active and of an ended placement in ms. Answers the numbers (from 1) of the rows that were fenced off.
# `accepts` says the same in Python. What is not a placement protects nothing. Begins are texts of 20 digits, because
# Lua's numbers do not hold nanoseconds.
_MOVE = Script(f"""
local reachable = {_lua_reachable()}
local terminal = {_lua_set(TERMINAL)}
local final = {_lua_set(FINAL)}
local now = redis.call('TIME')
local now_ms = string.format('%d%03d', now[1], math.floor(now[2] / 1000))

local function accepts(key, began, attempt, gateway, state)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return true end
  if kind ~= 'hash' then redis.call('DEL', key) return true end
  local held = redis.call('HMGET', key, 'state', 'attempt', 'gateway', 'began')
  local held_state, held_attempt, held_began = held[1], tonumber(held[2] or ''), held[4] or ''
  local is_sound = reachable[held_state] and held_attempt and held_attempt >= 1 and held_attempt <= {MAX_ATTEMPT}
    and #held_began == 20 and not string.find(held_began, '%D') and redis.call('PTTL', key) > 0
  if not is_sound then redis.call('DEL', key) return true end
  if began ~= held_began then return began > held_began end
  if attempt ~= held_attempt then return attempt > held_attempt and not final[held_state] end
  return held[3] == gateway and reachable[held_state][state] or false
end

local fenced = {{}}
for number, row in ipairs(cmsgpack.unpack(ARGV[1])) do
  local id, began, attempt, gateway, state, prefill, decode = unpack(row)
  local key = KEYS[1] .. id
  if accepts(key, began, attempt, gateway, state) then
    redis.call('HSET', key, 'state', state, 'attempt', attempt, 'gateway', gateway,
               'prefill', prefill, 'decode', decode, 'began', began, 'changed', now_ms)
    redis.call('PEXPIRE', key, terminal[state] and ARGV[3] or ARGV[2])
  else
    table.insert(fenced, number)
  end
end
return fenced
""")

# KEYS: one placement, the set of gateways. ARGV: most bytes of a field. Returns its fields, and `lost` if the set does
# not have its gateway. Returns nothing if the key does not exist, and empty texts, which no reader takes for a
# placement, if it is another kind of value or too large.
_GET = Script("""
local kind = redis.call('TYPE', KEYS[1]).ok
local unreadable = {'', '', '', '', '', '', ''}
if kind == 'none' then return {} end
if kind ~= 'hash' then return unreadable end
local answer = {}
for index, name in ipairs({'began', 'attempt', 'gateway', 'state', 'prefill', 'decode'}) do
  if redis.call('HSTRLEN', KEYS[1], name) > tonumber(ARGV[1]) then return unreadable end
  answer[index] = redis.call('HGET', KEYS[1], name) or ''
end
answer[7] = ''
if redis.call('TYPE', KEYS[2]).ok == 'zset' then
  local now, ends_ms = redis.call('TIME'), redis.call('ZSCORE', KEYS[2], answer[3])
  if not ends_ms or tonumber(ends_ms) < now[1] * 1000 + math.floor(now[2] / 1000) then answer[7] = 'lost' end
end
return answer
""")
