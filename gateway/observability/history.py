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
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gateway.topology.events import PrefillStarted
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
    "pull_s": "fetching what another worker holds",
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
        **dict.fromkeys(("prefill_queue_s", "pull_s", "transfer_s", "displaced_s", "hot_spot_s"), 1.0),
        **dict.fromkeys(("prefill_pressure_s", "prefill_place_s", "remote_redone_s"), 1.0),
        "decode_queue_s": INTERFERENCE,
    },
    False: {"decode_queue_s": 1.0, "itl_cost_s": 1.0, "local_redone_s": 1.0},
}
"""The terms of a prompt that a prefill worker computes and of one that the decode worker does, and what each counts."""


Terms = Mapping[str, float | int | str | None]
"""The terms of a route's price, in seconds where the name ends so; None: a worker reports an impossible figure."""


class PullStory(NamedTuple):
    """The beginning of a prompt that was to be fetched from `holder`, and the predicted times of both ways."""

    holder: str
    num_tokens: int
    predicted_us: int
    computing_us: int


class AttemptStory(msgspec.Struct, omit_defaults=True):
    """One try of an answer. Microseconds, since the request came where they are moments.

    `began_us`: it was offered to workers; `placed_us`: they took it. `reason` is the router's word, `move` or
    `rebalance`. `rival` is the decode worker that came second, for `rival_s` in all. `cached_tokens` were believed to
    be in a cache. `waited_us` is the wait in the worker that computed the prompt, which had `ahead_tokens` of other
    prompts to compute. `chunks` are the parts in which a prefill worker computed it: (since that began, how long,
    tokens). `failure`: what ended the attempt before the answer was complete. `pulled_tokens` came from another worker,
    for which `pull_us` were spent.

    What was predicted is kept in seconds, as the route has it: few stories are ever read. `terms` are its `inputs`,
    `first_s` and `second_s` the times of the first two tokens since `began_us`, and `uncorrected_s` both before earlier
    predictions corrected them (None: nothing was corrected). `queue_s` is the wait for workers, `itl_s` the time of
    each token after the second. `has_other_way`: a prefill worker could have computed the prompt.
    """

    began_us: int
    placed_us: int
    decode: str
    prefill: str = ""
    reason: str = ""
    is_remote: bool = False
    cached_tokens: int = 0
    terms: Terms = {}
    has_other_way: bool = False
    rival: str = ""
    rival_s: float | None = None
    waited_us: int = 0
    num_pages: int = 0
    num_bytes: int = 0
    exposed_us: int = 0
    transport: str = ""
    chunks: list[tuple[int, int, int]] = []
    failure: str = ""
    first_s: float | None = 0.0
    second_s: float | None = 0.0
    uncorrected_s: tuple[float | None, float | None] | None = None
    queue_s: float | None = None
    itl_s: float | None = 0.0
    ahead_tokens: int = 0
    pulled_tokens: int = 0
    pull_us: int = 0

    @property
    def predicted_ttft_us(self) -> int:
        """The predicted time of the first token since `began_us`."""
        return _us(self.first_s) or 0

    @property
    def predicted_second_us(self) -> int:
        """The predicted time of the second token since `began_us`; 0: none was predicted."""
        return _us(self.second_s) or 0

    @property
    def predicted_exposed_us(self) -> int:
        """What of the second token's time is for pages on their way; 0: they are computed where it is."""
        return (_us(self.terms.get("exposed_s")) or 0) if self.is_remote else 0

    @property
    def predicted_queue_us(self) -> int:
        """The predicted wait for workers."""
        return _us(self.queue_s) or 0

    @property
    def predicted_wait_us(self) -> int:
        """The predicted wait in the worker that computes the prompt."""
        return _us(self.terms.get("prefill_queue_s" if self.is_remote else "decode_queue_s")) or 0

    @property
    def predicted_itl_us(self) -> int:
        """The predicted time of each token after the second."""
        return _us(self.itl_s) or 0

    @property
    def price_us(self) -> int | None:
        """What the way was chosen by."""
        return _us(self.terms.get("price_s"))

    @property
    def pull(self) -> PullStory | None:
        """What its prefill worker was to fetch; None: nothing."""
        terms = self.terms
        if not self.prefill or self.prefill != terms.get("prefill_worker") or "pull_from" not in terms:
            return None
        predicted_us, computing_us = _us(terms["pull_s"]) or 0, _us(terms["pull_computing_s"]) or 0
        return PullStory(str(terms["pull_from"]), int(terms["pull_tokens"] or 0), predicted_us, computing_us)

    @property
    def way_us(self) -> int | None:
        """The cost of computing the prompt where it was computed."""
        return _us(self.terms.get("remote_cost_s" if self.is_remote else "local_cost_s"))

    @property
    def other_way_us(self) -> int | None:
        """The cost of computing the prompt on the decode worker instead, or not on it; None: no other way existed."""
        other = "local_cost_s" if self.is_remote else "remote_cost_s"
        return _us(self.terms.get(other)) if self.has_other_way else None

    @property
    def rival_us(self) -> int | None:
        """The price at `rival`."""
        return _us(self.rival_s)

    @property
    def parts_us(self) -> dict[str, int]:
        """The terms of the price of the way that was taken; they sum up to `price_us`."""
        price_us = self.price_us
        if price_us is None:
            return {}
        weights = _COMMON_TERMS | _TERMS_OF_WAY[self.is_remote]
        terms = {name: float(self.terms.get(name) or 0.0) * weight for name, weight in weights.items()}
        parts = {name: spent_us for name, term_s in terms.items() if (spent_us := _us(term_s))}
        return {**parts, "prompt": price_us - sum(parts.values())}

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
        prefills, decode = route.prefills, route.decode
        attempt = AttemptStory(
            began_us,
            placed_us,
            decode.worker_id,
            prefill,
            route.reason,
            route.is_remote,
            route.num_cached_tokens,
            route.inputs,
            bool(prefills),
            first_s=route.predicted_ttft_s,
            second_s=route.predicted_second_s,
            uncorrected_s=route.uncorrected_s,
            itl_s=route.predicted_itl_s,
            ahead_tokens=next((one.waiting_tokens for one in prefills if one.worker_id == prefill), 0)
            if route.is_remote
            else decode.waiting_tokens,
        )
        if rival is not None:
            attempt.rival, attempt.rival_s = rival
        self._add(attempt)

    def note_wait(self, predicted_s: float | None) -> None:
        """Notes how long it was predicted to wait for the workers of its last attempt; None: it was not judged."""
        if self.attempts:
            self.attempts[-1].queue_s = predicted_s

    def note_move(self, decode: str, at_us: int, *, reason: str) -> None:
        """Notes that it continues at another decode worker, with its pages: `move` or `rebalance`."""
        self._add(AttemptStory(at_us, at_us, decode, reason=reason))

    def note_prompt(self, prefill: str, started: PrefillStarted | None) -> None:
        """Notes which worker has computed the prompt, and what it said of the beginning, if it did."""
        if self.attempts:
            last = self.attempts[-1]
            last.prefill = prefill
            if started is not None:
                last.waited_us = _us(started.queue_s) or 0
                last.pulled_tokens, last.pull_us = started.num_pulled_tokens, _us(started.pull_s) or 0

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
        return first if first is not None and first.second_s and not first.failure else None

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
    operation: str = ""
    """What was asked for: chat, text_completion or embeddings."""
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
            f"{row.code}\n{row.operation}\n{row.workers}\n{row.field}\n{row.limit}"
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


def _us(seconds: float | int | str | None) -> int | None:
    """Returns the time in microseconds; None where a worker reports an impossible one."""
    microseconds = math.nan if seconds is None else float(seconds) * 1e6
    return round(microseconds) if -1e15 < microseconds < 1e15 else None
