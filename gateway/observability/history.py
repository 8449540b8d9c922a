"""The requests that ended lately, as a gateway remembers them for the people who look at it: rows, and what happened.

The history is bounded in number and in bytes; the oldest requests are dropped first. It holds names, counts and times,
never a prompt, an answer, an error message (which may quote a client) or a key. This module knows neither HTTP nor the
readers.

A row is what a list shows and what is searched. A story is the rest: when an answer's phases began, which workers its
attempts went to, and what spoke for them. Stories are kept as JSON, so that the collector of garbage has nothing to
walk through and their bytes are known.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.scheduling.overload import Targets
from services.scheduling.routing.price import INTERFERENCE
from services.scheduling.routing.route import Route

MAX_REQUESTS = 2000
MAX_BYTES = 8 * 2**20
ROW_BYTES = 1024
"""About what a row takes in memory, beside its story."""
MAX_ANSWERS = 16
"""The answers of one request that a story tells of; further ones are left out."""
MAX_CHUNKS = 32
"""The parts of one prompt that a story tells of."""
MAX_STEPS = 64
"""The changes of phase, and the attempts, that a story tells of one answer."""

PRICE_PARTS = {
    "prefill_queue_s": "prefill worker's queue",
    "transfer_s": "transfer",
    "displaced_s": "those who come later",
    "hot_spot_s": "hot spot",
    "prefill_pressure_s": "prefill worker's last pages",
    "prefill_place_s": "prefill worker's place",
    "remote_redone_s": "computing again what others hold",
    "decode_queue_s": "decode worker's queue",
    "itl_cost_s": "answers there that wait for the prompt",
    "local_redone_s": "computing again what others hold",
    "decode_s": "generating",
    "decode_pressure_s": "decode worker's last pages",
    "decode_place_s": "decode worker's place",
    "prompt": "computing the prompt",
}
"""The terms of a price (`services.scheduling.routing`) that a story tells, and their names."""
_COMMON_TERMS = {"decode_s": 1.0, "decode_pressure_s": 1.0, "decode_place_s": 1.0}
_TERMS_OF_WAY = {
    True: {
        **dict.fromkeys(("prefill_queue_s", "transfer_s", "displaced_s", "hot_spot_s"), 1.0),
        **dict.fromkeys(("prefill_pressure_s", "prefill_place_s", "remote_redone_s"), 1.0),
        "decode_queue_s": INTERFERENCE,
    },
    False: {"decode_queue_s": 1.0, "itl_cost_s": 1.0, "local_redone_s": 1.0},
}
"""The terms of a prompt that a prefill worker computes and of one that the decode worker does, and what each counts."""


class AttemptStory(msgspec.Struct, omit_defaults=True):
    """One try of an answer. Microseconds, since the request came where they are moments.

    `began_us`: it was offered to workers; `placed_us`: they took it. `reason` is the router's word, or `move`.
    `predicted_ttft_us` and `predicted_second_us` are the predicted times of the first two tokens since `began_us`,
    and `predicted_exposed_us` what of the second one's is for pages on their way (0: they are computed where it is).
    `price_us` is what the way was chosen by, `other_way_us` the cost of computing the prompt elsewhere, on the decode
    worker or not, and `way_us` its own. `rival` is the decode worker that came second, for `rival_us` in all.
    `cached_tokens` were believed to be in a cache. `waited_us` is the wait in the worker that computed the prompt.
    `chunks` are the parts in which a prefill worker computed it: (since that began, how long, tokens). `failure`: what
    ended the attempt before the answer was complete. `uncorrected_us`: both predictions before earlier ones corrected
    them (0: they were not). `predicted_queue_us` is the predicted wait for workers, `predicted_wait_us` that in the
    worker that computes the prompt, which had `ahead_tokens` of other prompts to compute, and `predicted_itl_us` the
    time of each token after the second. `parts_us` sum up to `price_us`.
    """

    began_us: int
    placed_us: int
    decode: str
    prefill: str = ""
    reason: str = ""
    is_remote: bool = False
    predicted_ttft_us: int = 0
    cached_tokens: int = 0
    price_us: int | None = None
    way_us: int | None = None
    other_way_us: int | None = None
    rival: str = ""
    rival_us: int | None = None
    parts_us: dict[str, int] = {}
    waited_us: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    exposed_us: int = 0
    transport: str = ""
    chunks: list[tuple[int, int, int]] = []
    failure: str = ""
    predicted_second_us: int = 0
    predicted_exposed_us: int = 0
    uncorrected_us: tuple[int, int] = (0, 0)
    predicted_queue_us: int = 0
    predicted_wait_us: int = 0
    predicted_itl_us: int = 0
    ahead_tokens: int = 0

    @property
    def way(self) -> tuple[str, str]:
        """The workers that its first tokens come from: prefill, empty where the other one computes all, and decode."""
        return self.prefill if self.is_remote else "", self.decode


class AnswerStory(msgspec.Struct, omit_defaults=True):
    """One answer. `steps` are (phase, when it began); the last one lasts until `ended_us`.

    `tpot_us` is the mean time of a token after the first; 0: no token came after it.
    """

    steps: list[tuple[str, int]]
    attempts: list[AttemptStory] = []
    first_token_us: int | None = None
    tpot_us: int = 0
    tokens: int = 0
    ended_us: int = 0
    second_token_us: int | None = None

    def note_route(
        self, route: Route, rival: tuple[str, float] | None, *, prefill: str, began_us: int, placed_us: int
    ) -> None:
        """Notes the route by which workers took it. `rival`: the worker that came second, and its price in seconds."""
        inputs = route.inputs
        costs_s = inputs.get("remote_cost_s"), inputs.get("local_cost_s")
        way_s, other_s = costs_s if route.is_remote else costs_s[::-1]
        price_us, uncorrected_s = _us(inputs.get("price_s")), route.uncorrected_s
        attempt = AttemptStory(
            began_us,
            placed_us,
            route.decode.worker_id,
            prefill,
            route.reason,
            route.is_remote,
            _us(route.predicted_ttft_s) or 0,
            route.num_cached_tokens,
            price_us,
            _us(way_s),
            # Without a prefill worker there was no other way.
            _us(other_s) if route.prefills else None,
            *(("", None) if rival is None else (rival[0], _us(rival[1]))),
            _parts(route),
            predicted_second_us=_us(route.predicted_second_s) or 0,
            predicted_exposed_us=(_us(inputs.get("exposed_s", 0.0)) or 0) if route.is_remote else 0,
            uncorrected_us=(_us(uncorrected_s[0]) or 0, _us(uncorrected_s[1]) or 0) if uncorrected_s else (0, 0),
            predicted_wait_us=_us(inputs.get("prefill_queue_s" if route.is_remote else "decode_queue_s")) or 0,
            predicted_itl_us=_us(route.predicted_itl_s) or 0,
            ahead_tokens=next((one.waiting_tokens for one in route.prefills if one.worker_id == prefill), 0)
            if route.is_remote
            else route.decode.waiting_tokens,
        )
        self._add(attempt)

    def note_wait(self, predicted_s: float | None) -> None:
        """Notes how long it was predicted to wait for the workers of its last attempt; None: it was not judged."""
        if self.attempts:
            self.attempts[-1].predicted_queue_us = _us(predicted_s) or 0

    def note_move(self, decode: str, at_us: int) -> None:
        """Notes that it continues at another decode worker, with its pages."""
        self._add(AttemptStory(at_us, at_us, decode, reason="move"))

    def note_prompt(self, prefill: str, waited_s: float) -> None:
        """Notes which worker has computed the prompt, and how long the prompt had waited there."""
        if self.attempts:
            self.attempts[-1].prefill = prefill
            self.attempts[-1].waited_us = _us(waited_s) or 0

    def note_handoff(
        self,
        *,
        num_pages: int,
        num_bytes: int,
        exposed_s: float,
        transport: str,
        chunks: Sequence[tuple[float, float, int]] = (),
    ) -> None:
        """Notes the pages that the last decode worker has. `chunks`: (when each began, how long it took, tokens)."""
        if self.attempts:
            last = self.attempts[-1]
            last.num_pages, last.num_bytes, last.transport = num_pages, num_bytes, transport
            last.exposed_us = _us(exposed_s) or 0
            last.chunks = [(_us(began_s) or 0, _us(spent_s) or 0, num) for began_s, spent_s, num in chunks[:MAX_CHUNKS]]

    def predicted(self) -> AttemptStory | None:
        """Returns the only attempt, to compare its predictions with the first tokens; None: no such one exists."""
        first = self.attempts[0] if len(self.attempts) == 1 else None
        return first if first is not None and first.predicted_second_us and not first.failure else None

    def note_failure(self, reason: str) -> None:
        """Notes that the last attempt has failed."""
        if self.attempts and not self.attempts[-1].failure:
            self.attempts[-1].failure = reason

    def _add(self, attempt: AttemptStory) -> None:
        if len(self.attempts) < MAX_STEPS:
            self.attempts.append(attempt)


class Row(msgspec.Struct, kw_only=True, gc=False):
    """A request in the list. Microseconds; `ttft_us` and `tpot_us` are those of its slowest answer. `number` rises.

    `workers` are ids with blanks between them, in the order in which they came; `answers` 0: it was not accepted.
    """

    number: int = 0
    ended_unix_ms: int = 0
    request_id: str = ""
    trace_id: str = ""
    model: str = ""
    service_class: str = ""
    tenant: str = ""
    fallback: str = ""
    outcome: str
    code: str = ""
    finish_reason: str = ""
    workers: str = ""
    answers: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    attempts: int = 0
    moves: int = 0
    queue_us: int = 0
    prefill_us: int = 0
    transfer_us: int = 0
    decode_us: int = 0
    total_us: int = 0
    ttft_us: int | None = None
    tpot_us: int | None = None
    is_good: bool = False
    field: str = ""
    rule: str = ""
    limit: str = ""
    """What a refused request did not keep to: a field's rule, or a limit."""


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is looked for. `q`: words that must all occur somewhere; the others must be equal, empty: any.

    An `outcome` that begins with a minus is left out.

    `before`: only requests with a smaller number, for the next page of a list.
    """

    q: str = ""
    id: str = ""
    model: str = ""
    tenant: str = ""
    service_class: str = ""
    outcome: str = ""
    worker: str = ""
    before: int | None = None
    limit: int = 50


class _Kept(NamedTuple):
    row: Row
    story: bytes

    @property
    def text(self) -> str:
        """The text that is searched for words."""
        row = self.row
        return (
            f"{row.request_id}\n{row.trace_id}\n{row.model}\n{row.tenant}\n{row.service_class}\n{row.outcome}\n"
            f"{row.code}\n{row.workers}\n{row.field}\n{row.limit}"
        ).lower()


class History:
    """The ended requests of one gateway. `targets`: what makes one count as served well."""

    def __init__(
        self,
        *,
        targets: Targets | None = None,
        clock: Clock = SYSTEM_CLOCK,
        max_requests: int = MAX_REQUESTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.targets = targets or Targets()
        self.num_ended: Counter[str] = Counter()
        """The number of requests by outcome, and as `good` of those that finished and met the targets."""
        self.num_bytes = 0
        self.last_number = 0
        """The number of the request that was added last; 0: no request was."""
        self._clock = clock
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._kept: deque[_Kept] = deque()
        self._encoder = msgspec.json.Encoder()

    def __len__(self) -> int:
        return len(self._kept)

    def note_end(self, outcome: str, answers: Sequence[AnswerStory]) -> bool:
        """Counts a request that has ended, added or not. Returns whether it met the targets."""
        self.num_ended[outcome] += 1
        is_good = outcome == "finished" and all(map(self._is_in_time, answers))
        self.num_ended["good"] += is_good
        return is_good

    def add(self, row: Row, answers: Sequence[AnswerStory]) -> None:
        """Keeps a request, which gets the next number. `answers` are those of the model that answered."""
        self.last_number += 1
        row.number = self.last_number
        row.ended_unix_ms = self._clock.unix_ns() // 1_000_000
        for answer in answers:
            first_us, tpot_us = answer.first_token_us, answer.tpot_us
            if first_us is not None and first_us > (row.ttft_us or 0):
                row.ttft_us = first_us
            if tpot_us > (row.tpot_us or 0):
                row.tpot_us = tpot_us
        story = self._encoder.encode(answers[:MAX_ANSWERS])
        self._kept.append(_Kept(row, story))
        self.num_bytes += ROW_BYTES + len(story)
        while len(self._kept) > self._max_requests or self.num_bytes > self._max_bytes:
            self.num_bytes -= ROW_BYTES + len(self._kept.popleft().story)

    def find(self, query: Query) -> tuple[list[Row], bool]:
        """Returns the rows that fit, latest first, at most `limit`; and whether there are more."""
        found: list[Row] = []
        for row in self._matching(query):
            if len(found) >= query.limit:
                return found, True
            found.append(row)
        return found, False

    def story(self, request_id: str = "", *, number: int | None = None) -> tuple[Row, list[AnswerStory]] | None:
        """Returns the latest request with this id, or the one with this number; None: unknown or no longer kept."""
        for kept in reversed(self._kept):
            if kept.row.number == number if number is not None else kept.row.request_id == request_id:
                return kept.row, msgspec.json.decode(kept.story, type=list[AnswerStory])
        return None

    def _matching(self, query: Query) -> Iterator[Row]:
        words = query.q.lower().split()
        for kept in reversed(self._kept):
            row = kept.row
            if (
                (query.before is None or row.number < query.before)
                and (not words or _has_all(kept.text, words))
                and query.id in ("", row.request_id)
                and query.model in ("", row.model)
                and query.tenant in ("", row.tenant)
                and query.service_class in ("", row.service_class)
                and _has_outcome(row, query.outcome)
                and (not query.worker or query.worker in row.workers.split(" "))
            ):
                yield row

    def _is_in_time(self, answer: AnswerStory) -> bool:
        """Returns whether an answer met the targets; one that was begun elsewhere has no first token here."""
        ttft_s, itl_s = self.targets.ttft_s, self.targets.itl_s
        is_first_in_time = ttft_s is None or (answer.first_token_us or 0) <= ttft_s * 1e6
        return is_first_in_time and (itl_s is None or answer.tpot_us <= itl_s * 1e6)


def _has_outcome(row: Row, asked: str) -> bool:
    return asked[1:] != row.outcome if asked.startswith("-") else asked in ("", row.outcome)


def _has_all(text: str, words: Sequence[str]) -> bool:
    return all(word in text for word in words)


def _parts(route: Route) -> dict[str, int]:
    """Returns the terms of the price of the way that was taken, in microseconds; they sum up to it."""
    price_us = _us(route.inputs.get("price_s"))
    if price_us is None:
        return {}
    weights = _COMMON_TERMS | _TERMS_OF_WAY[route.is_remote]
    terms = {name: float(route.inputs.get(name, 0.0)) * weight for name, weight in weights.items()}
    parts = {name: spent_us for name, term_s in terms.items() if (spent_us := _us(term_s))}
    return {**parts, "prompt": price_us - sum(parts.values())}


def _us(seconds: float | int | str | None) -> int | None:
    """Returns the time in microseconds; None where a worker reports an impossible one."""
    microseconds = math.nan if seconds is None else float(seconds) * 1e6
    return round(microseconds) if -1e15 < microseconds < 1e15 else None
