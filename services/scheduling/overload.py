"""Which requests are refused at once, so that those let in are served in time. Pure: data and a time in, a verdict out.

Nothing here is configured with a capacity. How fast the queue drains is measured: the work that starts while others
wait for room, over the time in which they wait. Until enough have started so, Little's law helps: work under way over
the time that a request stays is what is served now; that over the share of pages in use is what a full cluster would
serve. Until then, too, no predicted wait is shorter than the prompts ahead take by the speeds that workers have
measured before the first request. A request waits for the work of its class and of higher ones ahead of it, at the
drain rate less what higher classes keep bringing: W / (μ − λ). What they bring is known for a short time only, so it
counts for as long ahead as it was measured over, and no prediction is longer than that time and W / μ. Work is counted
in tokens of prompt and answer.

A standstill, in which nothing starts or ends though requests run, says nothing of the time after it: while it lasts the
predicted wait grows, and when it is over it counts neither as time to drain nor as a wait that was predicted badly.

That is a mean, and half of all requests would wait longer. So the prediction is multiplied by a caution before it is
compared with a limit. The caution follows a quantile of real over predicted waits: a step up after a wait that was
longer, a small step down after one that was not.
"""

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from services.scheduling.entry import QueueEntry, ServiceClass

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
PRIOR_STARTS = 8
"""How many starts with a backlog the estimate by Little's law counts for."""

LONG_GAP = 4.0
"""A gap is long if it is this many times the mean gap."""
STANDSTILL_STAYS = 2.0
"""Nothing that starts or ends for this many times the usual stay of a request is a standstill ..."""
MAX_STANDSTILLS = 3
"""... but with more than this many in a row it is the usual pace."""
TOGETHER_S = 0.005
"""Starts and ends within this time count as one."""
LATE_SHARE = 0.02
"""The share of requests let in just below a limit that may wait longer than it."""
CAUTION_STEP = 0.05
FIRST_CAUTION = 1.5
MAX_CAUTION = 10.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a class is promised, in seconds; None: no promise."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def stricter(self, other: "Targets") -> "Targets":
        """Returns the shorter of each target, if either is set."""
        if other.ttft_s is None and other.itl_s is None:
            return self
        return Targets(_sooner(self.ttft_s, other.ttft_s), _sooner(self.itl_s, other.itl_s))


NO_TARGETS = Targets()


class ClusterLoad(msgspec.Struct, frozen=True):
    """What one request would meet now.

    `num_ahead` and `tokens_ahead` are what waits in its class and in higher ones, `num_waiting` counts all that wait.
    `free_page_share` is the share of pages that are neither held nor promised, 0 to 1. From its turn to its first token
    it is predicted to wait for `prefill_queue_s` behind other prompts and to be computed for `prefill_s`; `step_s` is
    the predicted time of a decode step with it in the batch. `prompts_ahead_s` is how long the prompts ahead take
    all workers together that compute prompts, by the speeds that these have measured.
    """

    num_ahead: int = 0
    tokens_ahead: int = 0
    num_waiting: int = 0
    free_page_share: float = 1.0
    prefill_s: float = 0.0
    prefill_queue_s: float = 0.0
    step_s: float = 0.0
    prompts_ahead_s: float = 0.0


class Admit(msgspec.Struct, frozen=True):
    """Let it in, with the predicted wait for its turn."""

    queue_delay_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Do not let it in. `kind` says what is short: time until its `deadline`, or what a retry after `retry_after_s` may
    find: the targets for the first token (`ttft`) and the next ones (`itl`), `pages`, room in the `queue`.
    """

    reason: str
    retry_after_s: float
    kind: Literal["deadline", "ttft", "itl", "pages", "queue"]
    is_final: bool = False
    """Whether the same request would be refused by an idle cluster too, so that a retry is in vain."""


Verdict = Admit | Refuse


@dataclass(frozen=True, slots=True)
class OverloadSettings:
    """Limits; shares are of the target or of all pages. A class that is not named in a mapping is not held to it."""

    ttft_share: Mapping[ServiceClass, float] = field(
        default_factory=lambda: {ServiceClass.INTERACTIVE: 1.0, ServiceClass.NORMAL: 0.9, ServiceClass.LOW: 0.8}
    )
    """A request is refused when its predicted TTFT, caution included, is over this share of the target."""
    itl_share: Mapping[ServiceClass, float] = field(
        default_factory=lambda: {ServiceClass.INTERACTIVE: 1.2, ServiceClass.NORMAL: 1.0, ServiceClass.LOW: 0.9}
    )
    pages_high: float = 0.95
    """When this share of pages is in use, new low-class requests are refused and batch work does not start ..."""
    pages_low: float = 0.85
    """... until no more than this share is."""
    reserve: Mapping[ServiceClass, float] = field(
        default_factory=lambda: {ServiceClass.LOW: 0.05, ServiceClass.BATCH: 0.10}
    )
    """Pages that a class leaves free for higher ones when it starts."""
    max_prefill_queue_s: Mapping[ServiceClass, float] = field(
        default_factory=lambda: {ServiceClass.NORMAL: 0.5, ServiceClass.LOW: 0.2, ServiceClass.BATCH: 0.05}
    )
    """A class's turn does not come while prompts wait longer than this for their computation: at the workers its
    prompts would stand before later ones of higher classes, in the queue they stand behind them."""
    min_wait_share: float = 0.25
    """What a prompt that takes longer than the target may wait for others, as a share of the target."""
    time_constant_s: float = 10.0
    """The time constant of all that is measured."""


class OverloadPolicy:
    """One gateway's admission. Interactive and critical requests are refused last: they wait for the least work.

    A critical request is refused for its deadline only. One of the batch class is let in whatever is predicted, and
    waits until its deadline comes. The bound of the queue holds for all (`when_full`).
    """

    def __init__(self, settings: OverloadSettings | None = None) -> None:
        self._settings = settings or OverloadSettings()
        time_constant_s = self._settings.time_constant_s
        self._is_short_of_pages = False
        self._caution = FIRST_CAUTION
        self._clock = _WorkingClock(time_constant_s)
        """The clock of the times below, except for rates and means, which forget in real time."""
        self._close: dict[Hashable, Admit] = {}
        """What was said of requests whose wait teaches the caution, until it does."""
        self._running: dict[Hashable, float] = {}
        """When each request started."""
        self._tokens = _Mean(time_constant_s)
        """The tokens of one request."""
        self._stay_s = _Mean(time_constant_s)
        self._expected_stay_s = _Mean(time_constant_s)
        """The stays predicted for requests that started: the best guess until the first one ends."""
        self._started = {one: _Rate(time_constant_s) for one in ServiceClass}
        self._backlogged_since_s: float | None = None
        self._drained = _Mean(time_constant_s)
        """Tokens per second with a backlog; its weights are seconds."""

    def note_start(self, entry: QueueEntry, now_s: float, *, is_backlogged: bool) -> None:
        """Notes that workers took a request.

        `is_backlogged`: another one now waits for room, not only for `may_start`.
        """
        self._running[entry.key] = work_s = self._note_life(now_s)
        self._tokens.add_sum(entry.cost_tokens, 1.0, now_s)
        self._started[entry.service_class].add(entry.cost_tokens, now_s)
        self._expected_stay_s.add_sum(entry.service_s, 1.0, now_s)
        if self._backlogged_since_s is not None:
            self._drained.add_sum(entry.cost_tokens, work_s - self._backlogged_since_s, now_s)
        self._backlogged_since_s = work_s if is_backlogged else None
        self._note_wait(entry, now_s)

    def note_late(self, entry: QueueEntry, now_s: float) -> None:
        """Notes that a request that waits has missed what its class is promised; it may wait much longer now."""
        self._note_wait(entry, now_s)

    def note_backlog(self, now_s: float, *, is_backlogged: bool) -> None:
        """Notes, without a start, that a request began to wait for room, or that the last one that did left early."""
        if not is_backlogged:
            self._backlogged_since_s = None
        elif self._backlogged_since_s is None:
            self._backlogged_since_s = self._clock.time_s(now_s)

    def note_end(self, key: Hashable, now_s: float) -> None:
        """Notes that a request is over, which may have started, however it ended."""
        self._close.pop(key, None)
        if key in self._running:
            work_s = self._note_life(now_s)
            self._stay_s.add_sum(max(0.0, work_s - self._running.pop(key)), 1.0, now_s)

    def drain_tokens_per_s(self, now_s: float, used_share: float = 1.0) -> float:
        """Returns the work that starts per second while others wait; infinite while nothing is known.

        `used_share` is the share of pages that requests hold now, 0 to 1.
        """
        tokens, time_s = self._drained.total, self._drained.weight
        if self._backlogged_since_s is not None and time_s > 0:
            waited_s = self._clock.time_s(now_s) - self._backlogged_since_s
            # The time since the last start counts only once it is long for a gap: perhaps nothing moves any longer.
            if waited_s > LONG_GAP * time_s / self._drained.num:
                time_s += waited_s
        if self._running and self._usual_stay_s:
            tokens += PRIOR_STARTS * self._tokens.value
            time_s += PRIOR_STARTS * self._usual_stay_s * used_share / len(self._running)
        return tokens / time_s if time_s > 0 else math.inf

    def queue_delay_s(
        self, service_class: ServiceClass, tokens_ahead: int, now_s: float, used_share: float = 1.0
    ) -> float:
        """Returns the predicted wait of a new request behind `tokens_ahead` of its class and of higher ones."""
        if tokens_ahead <= 0:
            return 0.0
        rate = self.drain_tokens_per_s(now_s, used_share)
        if rate <= 0:
            return math.inf
        higher = sum(self._started[one].value(now_s) for one in ServiceClass if one < service_class)
        horizon_s = self._settings.time_constant_s
        within = max(0.0, rate - higher) * horizon_s if math.isfinite(rate) else math.inf
        if within >= tokens_ahead:
            return tokens_ahead / (rate - higher) if math.isfinite(rate) else 0.0
        return horizon_s + (tokens_ahead - within) / rate

    def judge(
        self, entry: QueueEntry, load: ClusterLoad, targets: Targets, now_s: float, *, jitter: float = 0.0
    ) -> Verdict:
        """Returns whether to let a new request in. `jitter`, from 0 to 1, spreads the retries of refused requests."""
        delay_s = self._delay_s(entry, load, now_s)
        if entry.service_class == ServiceClass.BATCH:
            return Admit(delay_s)
        is_close = False
        wait_s = delay_s + load.prefill_queue_s
        if now_s + wait_s + max(load.prefill_s, entry.service_s) > entry.deadline_s:
            reason = f"it would end after its deadline: {_said(wait_s)} in queues, then {_said(entry.service_s)}"
            is_final = now_s + max(load.prefill_s, entry.service_s) > entry.deadline_s
            return Refuse(reason, _retry_after_s(wait_s, jitter), "deadline", is_final)
        settings, one = self._settings, entry.service_class
        if targets.ttft_s is not None and one in settings.ttft_share:
            limit_s = targets.ttft_s * settings.ttft_share[one]
            wait_s = delay_s * self._caution + load.prefill_queue_s
            # A prompt that is too long for the target is so at any time, without an overload.
            max_wait_s = max(limit_s - load.prefill_s, limit_s * settings.min_wait_share)
            is_close = wait_s > max_wait_s / 2
            if wait_s > max_wait_s:
                reason = f"the first token might take {_said(wait_s + load.prefill_s)}, the limit is {_said(limit_s)}"
                return Refuse(reason, _retry_after_s(wait_s - max_wait_s, jitter), "ttft")
        if targets.itl_s is not None and one in settings.itl_share:
            limit_s = targets.itl_s * settings.itl_share[one]
            if load.step_s > limit_s:
                reason = f"a token would take {_said(load.step_s)}, the limit is {_said(limit_s)}"
                shrink_s = (1 - limit_s / load.step_s) * self._stay_s.value
                return Refuse(reason, _retry_after_s(shrink_s, jitter), "itl")
        if self._note_pages(load) and one == ServiceClass.LOW:
            reason = f"{1 - load.free_page_share:.0%} of the pages are in use"
            return Refuse(reason, _retry_after_s(self._stay_s.value / 2, jitter), "pages")
        verdict = Admit(delay_s)
        if is_close and delay_s > 0 and entry.key is not None:
            self._close[entry.key] = verdict
        return verdict

    def promised_s(self, service_class: ServiceClass, targets: Targets, *, arrived_s: float, prompt_s: float) -> float:
        """Returns when the turn of a request of this class must have come to keep its target; `math.inf`: no target."""
        if targets.ttft_s is None or service_class not in self._settings.ttft_share:
            return math.inf
        return arrived_s + max(targets.ttft_s - prompt_s, targets.ttft_s * self._settings.min_wait_share)

    def when_full(self, entry: QueueEntry, load: ClusterLoad, now_s: float, *, jitter: float = 0.0) -> Refuse:
        """Returns the refusal of a request for which the queue had no room."""
        delay_s = self._delay_s(entry, load, now_s)
        # One start makes room for one; for all that were refused with it, a part of the queue must start.
        wait_s = delay_s / 4 if math.isfinite(delay_s) else delay_s
        return Refuse(f"the queue is full: {load.num_waiting} wait", _retry_after_s(wait_s, jitter), "queue")

    def may_start(self, entry: QueueEntry, load: ClusterLoad) -> bool:
        """Whether its turn may come now: work of the lowest classes leaves room for requests that cannot wait."""
        is_short = self._note_pages(load)
        if entry.service_class == ServiceClass.BATCH and is_short:
            return False
        if load.prefill_queue_s > self._settings.max_prefill_queue_s.get(entry.service_class, math.inf):
            return False
        return load.free_page_share >= self._settings.reserve.get(entry.service_class, 0.0)

    def _delay_s(self, entry: QueueEntry, load: ClusterLoad, now_s: float) -> float:
        delay_s = self.queue_delay_s(entry.service_class, load.tokens_ahead, now_s, 1 - load.free_page_share)
        if self._drained.num < PRIOR_STARTS:
            # Too few have drained from a queue yet; what is cached of prompts is not known either.
            delay_s = max(delay_s, load.prompts_ahead_s)
        return delay_s

    @property
    def _usual_stay_s(self) -> float:
        return self._stay_s.value or self._expected_stay_s.value

    def _note_life(self, now_s: float) -> float:
        """Notes that something starts or ends. Returns the time on the working clock."""
        clock = self._clock
        gap_s = clock.gap_s(now_s)
        if gap_s >= TOGETHER_S and (self._running or self._backlogged_since_s is not None):
            has_resumed = clock.note_gap(gap_s, now_s, usual_stay_s=self._usual_stay_s)
            if has_resumed and self._backlogged_since_s is not None:
                # Only the wait from here on of a request that waits for room teaches anything.
                self._backlogged_since_s = clock.time_s(now_s)
        return clock.time_s(now_s)

    def _note_wait(self, entry: QueueEntry, now_s: float) -> None:
        admitted = self._close.pop(entry.key, None)
        if admitted is None or entry.arrived_s < self._clock.resumed_s:
            return  # a wait through a standstill says nothing of predictions
        is_longer = now_s - entry.arrived_s > admitted.queue_delay_s * self._caution
        step = 1 - LATE_SHARE if is_longer else -LATE_SHARE
        self._caution = min(max(1.0, self._caution * (1 + CAUTION_STEP * step)), MAX_CAUTION)

    def _note_pages(self, load: ClusterLoad) -> bool:
        used = 1 - load.free_page_share
        if used >= self._settings.pages_high:
            self._is_short_of_pages = True
        elif used <= self._settings.pages_low:
            self._is_short_of_pages = False
        return self._is_short_of_pages


def _sooner(one_s: float | None, other_s: float | None) -> float | None:
    return min((time_s for time_s in (one_s, other_s) if time_s is not None), default=None)


def _retry_after_s(wait_s: float, jitter: float) -> float:
    """Returns `wait_s` to twice that, within bounds, so that requests refused together do not come back together."""
    return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S / 2) * (1 + jitter)


def _said(time_s: float) -> str:
    if not math.isfinite(time_s):
        return "for ever"
    return f"{time_s:.1f} s" if time_s >= 1 else f"{time_s * 1e3:.0f} ms"


@dataclass(slots=True)
class _Mean:
    """A weighted mean with exponential forgetting."""

    time_constant_s: float
    total: float = 0.0
    weight: float = 0.0
    num: float = 0.0
    last_s: float = -math.inf

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight > 0 else 0.0

    def add_sum(self, total: float, weight: float, now_s: float) -> None:
        keep, num = 1.0, self.num
        if now_s > self.last_s:
            keep, self.last_s = math.exp((self.last_s - now_s) / self.time_constant_s), now_s
        if num * keep < 10:  # after a pause the last ten are remembered
            keep = 10 / num if num > 10 else 1.0
        self.total = self.total * keep + total
        self.weight = self.weight * keep + weight
        self.num = num * keep + 1


class _WorkingClock:
    """A clock that does not count standstills."""

    def __init__(self, time_constant_s: float) -> None:
        self.resumed_s = -math.inf
        """When the last standstill ended, in real time."""
        self._stood_still_s = 0.0
        self._alive_s = math.inf
        self._gaps = _Mean(time_constant_s)
        self._num_standstills = 0
        """Standstills in a row until now."""

    def time_s(self, now_s: float) -> float:
        """Returns what the clock shows; a standstill that still lasts is not known to be one, and counts."""
        return now_s - self._stood_still_s

    def gap_s(self, now_s: float) -> float:
        """Notes that something starts or ends. Returns how long nothing had."""
        gap_s, self._alive_s = now_s - self._alive_s, now_s
        return gap_s

    def note_gap(self, gap_s: float, now_s: float, *, usual_stay_s: float) -> bool:
        """Notes a gap of TOGETHER_S at least, in which something ran or waited. Returns whether it was a standstill."""
        usual_s = max(LONG_GAP * self._gaps.value, STANDSTILL_STAYS * usual_stay_s)
        self._num_standstills = self._num_standstills + 1 if 0 < usual_s < gap_s else 0
        if 0 < self._num_standstills <= MAX_STANDSTILLS:
            # At the usual pace something would have ended within a usual stay, which therefore counts as time.
            self._stood_still_s += max(0.0, gap_s - usual_stay_s)
            self.resumed_s = now_s
            return True
        self._gaps.add_sum(gap_s, 1.0, now_s)
        return False


@dataclass(slots=True)
class _Rate:
    """The amount that comes per second."""

    time_constant_s: float
    total: float = 0.0
    last_s: float = -math.inf
    first_s: float = math.inf

    def add(self, amount: float, now_s: float) -> None:
        self.total = self._kept(now_s) + amount
        self.last_s = max(self.last_s, now_s)
        self.first_s = min(self.first_s, now_s)

    def value(self, now_s: float) -> float:
        # The weights of a short past add up to less; under a second of it is too little to go by.
        seen_s = max(1.0, now_s - self.first_s)
        return self._kept(now_s) / (self.time_constant_s * -math.expm1(-seen_s / self.time_constant_s))

    def _kept(self, now_s: float) -> float:
        return self.total * math.exp(-max(0.0, now_s - self.last_s) / self.time_constant_s) if self.total else 0.0
