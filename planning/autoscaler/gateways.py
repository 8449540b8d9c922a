"""What gateways know, by their HTTP API: requests that came, what waits, and the workers with their speeds.

Each gateway is asked for /metrics and /cluster. What it says is not believed where it cannot be: it is then left out,
with the reason, until its next answer. A gateway that is not asked for the first time has counted from the time before.
"""

import math
import socket
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from planning.autoscaler.need import WorkerFacts
from services.runtime.addresses import join_host_port
from services.runtime.api_client import ApiRefused, ApiUnreachable, get_json, get_text
from services.runtime.clock import SYSTEM_CLOCK, Clock
from services.runtime.errors import ConfigError, TandemError
from services.runtime.worker_state import WorkerState
from services.scheduling.prediction import DecodeSpeed, PrefillSpeed

TIMEOUT_S = 5.0
MOST_PER_S = 20_000.0
"""A gateway has one thread, which cannot take more requests a second than this: what says so is wrong."""
MOST_TOKENS = 10_000_000
"""No prompt and no answer has more tokens."""
MEAN_WEIGHT = 0.5
"""What the last interval counts in the mean lengths of prompts and answers."""


class NotBelieved(TandemError):
    """A gateway says what cannot be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the gateways that answered have told together. `elapsed_s` 0: none was asked before."""

    elapsed_s: float
    num_arrived: int
    mean_prompt: float
    mean_answer: float
    num_queued: int
    workers: Sequence[WorkerFacts]
    troubles: Sequence[str] = ()
    """Gateways that did not answer, or were not believed, in a sentence each."""
    num_gateways: int = 1
    """Those that answered and were believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """A gateway's counts since its start, and when they were read, in seconds of a monotonic clock."""

    at_s: float
    num_ended: float
    num_open: float
    num_queued: float
    prompts: tuple[float, float]
    """Prompts whose answers have ended, and their tokens."""
    answers: tuple[float, float]


@dataclass(slots=True)
class Gateways:
    """Asks gateways for what they know of one model; `model` None: of all. Blocks for up to TIMEOUT_S a gateway.

    A host name without TLS stands for all addresses that it has: gateways behind a headless Service.
    """

    urls: Sequence[str]
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None
    clock: Clock = SYSTEM_CLOCK
    _before: dict[str, _Counts] = field(default_factory=dict)
    _prompt: float = 0.0
    _answer: float = 0.0

    def look(self) -> Seen:
        """Returns what is known now."""
        troubles: list[str] = []
        rate, longest_s, num_queued, num_gateways = 0.0, 0.0, 0.0, 0
        workers: Sequence[WorkerFacts] = ()
        before, now = self._before, {}
        for url in self._addresses(troubles):
            try:
                counts, known = self._ask(url)
                arrived, elapsed_s = _arrived(before.get(url), counts)
            except (ApiUnreachable, ApiRefused, NotBelieved, ConfigError) as error:
                troubles.append(f"{url} is left out: {error.message}")
                continue
            self._learn_lengths(before.get(url), counts)
            now[url] = counts
            rate += arrived / elapsed_s if elapsed_s > 0 else 0.0
            longest_s = max(longest_s, elapsed_s)
            num_queued += counts.num_queued
            num_gateways += 1
            workers = max(workers, known, key=_num_ready)
        # A gateway that is away for a while comes back with the counts of then.
        self._before = {**{url: counts for url, counts in before.items() if url not in now}, **now}
        return Seen(
            elapsed_s=longest_s,
            num_arrived=round(rate * longest_s),
            mean_prompt=self._prompt,
            mean_answer=self._answer,
            num_queued=round(num_queued),
            workers=workers,
            troubles=troubles,
            num_gateways=num_gateways,
        )

    def _addresses(self, troubles: list[str]) -> list[str]:
        found: dict[str, None] = {}
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme == "https" or parts.hostname is None:
                found[url] = None
                continue
            try:
                hosts = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
            except OSError as error:
                troubles.append(f"{url} is left out: its host is not known ({error.strerror or error})")
                continue
            found |= {f"http://{join_host_port(str(where[0]), int(where[1]))}": None for *_, where in hosts}
        return list(found)

    def _ask(self, url: str) -> tuple[_Counts, list[WorkerFacts]]:
        """Raises ApiUnreachable, ApiRefused or NotBelieved."""
        at_s = self.clock.monotonic()
        page = get_text(url, "/metrics", timeout_s=TIMEOUT_S, api_key=self.api_key, tls=self.tls)
        cluster = get_json(url, "/cluster", timeout_s=TIMEOUT_S, api_key=self.api_key, tls=self.tls)
        try:
            return self._counts(page, at_s), [
                _worker(one) for one in cluster["workers"] if self.model in (None, one["model"])
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotBelieved(f"its answer is not that of a gateway ({type(error).__name__}: {error})") from error

    def _counts(self, page: str, at_s: float) -> _Counts:
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for name, labels, value, *_ in family.samples:
                if self.model is None or labels.get("model") == self.model:
                    key = f"{name}/{labels['state']}" if name == "tandem_requests" else name
                    sums[key] = sums.get(key, 0.0) + value
        queued = _amount(sums.get("tandem_requests/queued", 0.0))
        return _Counts(
            at_s=at_s,
            num_ended=_amount(sums.get("tandem_request_duration_seconds_count", 0.0)),
            num_open=queued + _amount(sums.get("tandem_requests/running", 0.0)),
            num_queued=queued,
            prompts=_histogram(sums, "tandem_request_prompt_tokens"),
            answers=_histogram(sums, "tandem_request_generated_tokens"),
        )

    def _learn_lengths(self, before: _Counts | None, now: _Counts) -> None:
        self._prompt = _mean(self._prompt, None if before is None else before.prompts, now.prompts)
        self._answer = _mean(self._answer, None if before is None else before.answers, now.answers)


def _arrived(before: _Counts | None, now: _Counts) -> tuple[float, float]:
    """Returns the requests since the last look, and the seconds. Raises NotBelieved."""
    if before is None:
        return 0.0, 0.0
    elapsed_s = now.at_s - before.at_s
    num_ended = now.num_ended - before.num_ended
    arrived = max(0.0, num_ended + now.num_open - before.num_open)
    if num_ended < 0:  # it has started anew
        arrived = now.num_ended + now.num_open
    if elapsed_s <= 0 or arrived > MOST_PER_S * elapsed_s:
        raise NotBelieved(f"it says that {arrived:.0f} requests came in {elapsed_s:.1f} s")
    return arrived, elapsed_s


def _mean(mean: float, before: tuple[float, float] | None, now: tuple[float, float]) -> float:
    """Returns the mean length, with what has ended since the last look."""
    count, tokens = now
    if before is not None and now[0] >= before[0]:
        count, tokens = now[0] - before[0], now[1] - before[1]
    if count <= 0 or not 0 <= tokens <= MOST_TOKENS * count:
        return mean
    return tokens / count if mean == 0 else mean + MEAN_WEIGHT * (tokens / count - mean)


def _histogram(sums: Mapping[str, float], name: str) -> tuple[float, float]:
    return _amount(sums.get(f"{name}_count", 0.0)), _amount(sums.get(f"{name}_sum", 0.0))


def _amount(value: Any) -> float:
    """Returns a number that something can be counted or measured by. Raises ValueError."""
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{value!r:.20} is no amount")
    return number


def _num_ready(workers: Iterable[WorkerFacts]) -> int:
    return sum(one.state == WorkerState.READY for one in workers)


def _worker(told: Mapping[str, Any]) -> WorkerFacts:
    """Reads a worker of /cluster. Raises ValueError, KeyError or TypeError."""
    prefill, decode = told["speed"]["prefill"], told["speed"]["decode"]
    prompt_line = None if prefill is None else PrefillSpeed(**{name: _amount(one) for name, one in prefill.items()})
    step_line = None if decode is None else DecodeSpeed(**{name: _amount(one) for name, one in decode.items()})
    return WorkerFacts(
        role=str(told["role"]),
        state=str(told["state"]),
        # A line by which work takes no time tells nothing.
        prefill=prompt_line if prompt_line is not None and prompt_line.time_s(512) > 0 else None,
        decode=step_line if step_line is not None and step_line.step_s(8, 4096) > 0 else None,
        kv_tokens=int(_amount(told["pages"]["total"]) * _amount(told["page_tokens"])),
        max_batch=int(_amount(told["max_running"])),
        waiting_tokens=int(_amount(told["waiting_tokens"])),
    )
