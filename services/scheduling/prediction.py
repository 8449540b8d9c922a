"""How long a prompt, a decode step and a transfer will take: three small laws, and meters that fit them to work done.

The law of a prompt is that of DistServe (Zhong et al., OSDI 2024, appendix A) with a cached prefix: the linear layers
cost the same for every token, attention costs each new token as much as there are tokens before it. The law of a
decode step is linear in the sequences of the batch and in the tokens that they look back on. A transfer is a latency
and a bandwidth. Seconds, tokens and bytes throughout; the caller says what time it is.

A law changes slowly, because its shape is found from work of many sizes. A machine may change at once: a neighbour
takes half of it from one second to the next. So computations have a pace beside their law: the total time of the last
seconds' work over the time that the law gave it. The pace also makes up for a fit over relative errors being too short
where a few steps take much longer than most: a prompt waits for the sum of its steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

TIME_CONSTANT_S = 30.0
"""An observation this old counts 1/e of a new one."""
MIN_REMEMBERED = 10.0
"""After a pause the past still counts as much as this many observations."""
OUTLIER_RATIO = 4.0
"""Times that are off by more than this factor are taken as if they were off by it."""
NUM_BEFORE_DOUBT = 5
"""The first observations are taken as they are: they know better than the default."""
SLOW_RATIO = 1.3
NUM_YOUNG, SLOW_WEIGHT = 24, 0.1
"""Among the first `NUM_YOUNG` observations, one slower than the law by `SLOW_RATIO` has only this weight: a neighbour
can make work slower and never faster, and one disturbed step of five would teach that steps cost nothing, or that
nothing else does."""
NUM_TO_CHANGE = 8
"""This many outliers in a row on the same side are not outliers: the past is dropped."""
SOLVE_AFTER = 8
"""Where observations come fast, only every eighth moves the factors, at least once a second: a step may take 1 ms."""
PACE_S = 3.0
"""Work this old counts 1/e in the pace: how many times as long work takes just now as the law says."""
PACE_PRIOR_S = 0.1
"""Seconds of work as long as the law says that are always a part of the pace."""
PRIOR_OBSERVATIONS = 0.2
"""How many observations the default's shape counts for; it decides only what observations leave open."""


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """The time of a prompt or a part of one: overhead_s + s_per_token·n + s_per_token_squared·(n² + 2·n·cached)."""

    overhead_s: float
    s_per_token: float
    s_per_token_squared: float = 0.0

    def time_s(self, num_tokens: float, num_cached_tokens: float = 0) -> float:
        """Returns the seconds for `num_tokens` tokens that come after `num_cached_tokens` computed ones."""
        pairs = num_tokens * (num_tokens + 2 * num_cached_tokens)
        return self.overhead_s + self.s_per_token * num_tokens + self.s_per_token_squared * pairs

    def computed_twice_s(self, num_held_here: float, num_held_there: float) -> float:
        """Returns the seconds of a worker's prefill for tokens that it lacks and another worker holds already."""
        if num_held_there <= num_held_here:
            return 0.0
        pairs = num_held_there * num_held_there - num_held_here * num_held_here
        return self.s_per_token * (num_held_there - num_held_here) + self.s_per_token_squared * pairs

    def times(self, factor: float) -> "PrefillSpeed":
        """Returns the speed of a worker that takes `factor` times as long."""
        return PrefillSpeed(self.overhead_s * factor, self.s_per_token * factor, self.s_per_token_squared * factor)


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """The time of a decode step: overhead_s + s_per_sequence·sequences + s_per_context_token·(tokens of contexts)."""

    overhead_s: float
    s_per_sequence: float
    s_per_context_token: float = 0.0

    def step_s(self, num_sequences: float, context_tokens: float = 0) -> float:
        """Returns the seconds of a step over `num_sequences` sequences with `context_tokens` tokens between them."""
        return self.overhead_s + self.s_per_sequence * num_sequences + self.s_per_context_token * context_tokens

    def times(self, factor: float) -> "DecodeSpeed":
        """Returns the speed of a worker that takes `factor` times as long."""
        return DecodeSpeed(self.overhead_s * factor, self.s_per_sequence * factor, self.s_per_context_token * factor)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The time of a transfer between two workers: latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def time_s(self, num_bytes: float) -> float:
        """Returns the seconds until `num_bytes` bytes have arrived."""
        return self.latency_s + num_bytes / self.bytes_per_s


DEFAULT_PREFILL = PrefillSpeed(overhead_s=0.010, s_per_token=1e-4)
"""The guess before anything was observed: a model of about eight billion parameters on one GPU."""
DEFAULT_DECODE = DecodeSpeed(overhead_s=0.010, s_per_sequence=1e-4, s_per_context_token=2e-8)
DEFAULT_LINK = LinkSpeed(latency_s=0.002, bytes_per_s=1e9)


class PrefillMeter:
    """Fits a PrefillSpeed to the computations that a worker did."""

    def __init__(self, default: PrefillSpeed = DEFAULT_PREFILL, *, time_constant_s: float = TIME_CONSTANT_S) -> None:
        self._fit = _Fit((default.overhead_s, default.s_per_token, default.s_per_token_squared), time_constant_s)
        self._speed = default

    @property
    def speed(self) -> PrefillSpeed:
        """The best guess so far; before the first observation the default."""
        return self._speed

    @property
    def speed_now(self) -> PrefillSpeed:
        """The best guess at the pace of the last seconds."""
        return self._speed.times(self._fit.pace)

    def observe(self, num_tokens: int, num_cached_tokens: int, time_s: float, now_s: float) -> None:
        """Takes `num_tokens` tokens after `num_cached_tokens` computed ones, which took `time_s` until `now_s`.

        A time that is not positive and finite, or of no tokens, says nothing and is left out.
        """
        if num_tokens > 0 and _says_something(time_s):
            pairs = num_tokens * (num_tokens + 2 * num_cached_tokens)
            self._fit.observe((1.0, num_tokens, pairs), time_s, now_s)
            self._speed = PrefillSpeed(*self._fit.factors)


class DecodeMeter:
    """Fits a DecodeSpeed to the steps that a worker did."""

    def __init__(self, default: DecodeSpeed = DEFAULT_DECODE, *, time_constant_s: float = TIME_CONSTANT_S) -> None:
        self._fit = _Fit((default.overhead_s, default.s_per_sequence, default.s_per_context_token), time_constant_s)
        self._speed = default

    @property
    def speed(self) -> DecodeSpeed:
        """The best guess so far; before the first observation the default."""
        return self._speed

    @property
    def speed_now(self) -> DecodeSpeed:
        """The best guess at the pace of the last seconds."""
        return self._speed.times(self._fit.pace)

    def observe(self, num_sequences: int, context_tokens: int, time_s: float, now_s: float) -> None:
        """Takes a step over `num_sequences` sequences, which took `time_s` seconds until `now_s`.

        A time that is not positive and finite, or of no sequences, says nothing and is left out.
        """
        if num_sequences > 0 and _says_something(time_s):
            self._fit.observe((1.0, num_sequences, context_tokens), time_s, now_s)
            self._speed = DecodeSpeed(*self._fit.factors)


class TransferMeter:
    """Fits a LinkSpeed to the transfers that were made."""

    MAX_BYTES_PER_S = 1e13
    """The rate where size seems to cost nothing."""

    def __init__(self, default: LinkSpeed = DEFAULT_LINK, *, time_constant_s: float = TIME_CONSTANT_S) -> None:
        self._fit = _Fit((default.latency_s, 1 / default.bytes_per_s), time_constant_s)
        self._speed = default

    @property
    def speed(self) -> LinkSpeed:
        """The best guess so far; before the first observation the default."""
        return self._speed

    def observe(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Takes a transfer of `num_bytes` bytes, which took `time_s` seconds until `now_s`.

        A time that is not positive and finite, or of no bytes, says nothing and is left out.
        """
        if num_bytes > 0 and _says_something(time_s):
            self._fit.observe((1.0, num_bytes), time_s, now_s)
            latency_s, s_per_byte = self._fit.factors
            self._speed = LinkSpeed(latency_s, 1 / max(s_per_byte, 1 / self.MAX_BYTES_PER_S))


def _says_something(time_s: float) -> bool:
    return math.isfinite(time_s) and time_s > 0


class _Fit:
    """Least squares of time = Σ factor·amount with forgetting, over relative errors; no factor is ever negative.

    Keeps only the sums of the normal equations: a few numbers, however much it has seen. What observations leave open
    (with all prompts of one length, overhead or tokens?) is shared out as in the default, scaled to what was seen.
    """

    def __init__(self, default: Sequence[float], time_constant_s: float) -> None:
        self.factors = tuple(default)
        self._default = self.factors
        self._time_constant_s = time_constant_s
        self._last_s = self._solved_s = -math.inf
        self._num_unsolved = 0
        self._outliers = 0
        """How many in a row until now: positive, too slow ones; negative, too fast ones."""
        self._drop_past()

    @property
    def pace(self) -> float:
        """How many times as long work took in the last seconds as the law says."""
        return (self._took_s + PACE_PRIOR_S) / (self._lawful_s + PACE_PRIOR_S)

    def observe(self, amounts: Sequence[float], time_s: float, now_s: float) -> None:
        expected_s = max(_dot(self.factors, amounts), 1e-9)
        time_s = self._without_outliers(time_s, expected_s)
        self._forget(now_s)
        if self._num >= NUM_BEFORE_DOUBT:
            self._took_s += time_s
            self._lawful_s += expected_s
        # Relative errors: a short prompt counts as much as a long one. They are relative to the larger of both times,
        # so that neither a time that is far too long nor a bad first guess counts more than the rest.
        weight = 1 / max(time_s, expected_s) ** 2
        if 0 < self._num_seen < NUM_YOUNG and time_s > SLOW_RATIO * expected_s:
            weight *= SLOW_WEIGHT
        self._num_seen += 1
        self._num += 1
        for row, amount in enumerate(amounts):
            self._products[row] += weight * amount * time_s
            for column, other in enumerate(amounts):
                self._squares[row][column] += weight * amount * other
        self._num_unsolved += 1
        if self._num <= SOLVE_AFTER or self._num_unsolved >= SOLVE_AFTER or now_s - self._solved_s >= 1.0:
            self.factors = self._solve()
            self._num_unsolved = 0
            self._solved_s = now_s

    def _without_outliers(self, time_s: float, expected_s: float) -> float:
        if expected_s / OUTLIER_RATIO <= time_s <= expected_s * OUTLIER_RATIO:
            self._outliers = 0
        elif self._num >= NUM_BEFORE_DOUBT:
            side = 1 if time_s > expected_s else -1
            self._outliers = self._outliers + side if self._outliers * side > 0 else side
            if abs(self._outliers) < NUM_TO_CHANGE:
                return expected_s * OUTLIER_RATIO**side
            self._outliers = 0
            self._drop_past()
        return time_s

    def _drop_past(self) -> None:
        size = len(self._default)
        self._num, self._num_seen = 0.0, 0
        self._took_s = self._lawful_s = 0.0
        self._squares = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size

    def _forget(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._last_s)
        self._last_s = max(self._last_s, now_s)
        keep = math.exp(-passed_s / PACE_S)
        self._took_s, self._lawful_s = self._took_s * keep, self._lawful_s * keep
        keep = math.exp(-passed_s / self._time_constant_s)
        if self._num * keep < MIN_REMEMBERED:
            keep = min(1.0, MIN_REMEMBERED / self._num) if self._num else 1.0
        self._num *= keep
        self._products = [value * keep for value in self._products]
        self._squares = [[value * keep for value in row] for row in self._squares]

    def _solve(self) -> tuple[float, ...]:
        """Returns the factors with the least error; those that would be negative are set to 0, the worst first."""
        squares, products = self._with_prior()
        sizes = [math.sqrt(row[place]) for place, row in enumerate(squares)]
        used = list(range(len(products)))
        while used:
            some_squares = [[squares[row][column] for column in used] for row in used]
            values = _solved(some_squares, [products[row] for row in used])
            found = dict(zip(used, values, strict=True))
            worst = min(used, key=lambda place: found[place] * sizes[place])
            if found[worst] >= 0:
                return tuple(found.get(place, 0.0) for place in range(len(products)))
            used.remove(worst)
        return self.factors

    def _with_prior(self) -> tuple[list[list[float]], list[float]]:
        """Returns the sums with the default in them, at the scale of what was observed."""
        default = self._default
        squares, products = [list(row) for row in self._squares], list(self._products)
        expected = sum(factor * _dot(row, default) for factor, row in zip(default, squares, strict=True))
        scale = _dot(default, products) / expected if expected > 0 else 1.0
        share = PRIOR_OBSERVATIONS / self._num
        for place, row in enumerate(squares):
            # A little for every factor, also for one that was never seen at work: the equations stay solvable.
            strength = share * row[place] or 1e-12
            row[place] += strength
            products[place] += strength * scale * default[place]
        return squares, products


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(left * right for left, right in zip(one, other, strict=True))


def _solved(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solves a small symmetric positive system by Cholesky's method, with rows scaled to the same size first."""
    size = len(products)
    scale = [1 / math.sqrt(squares[row][row]) for row in range(size)]
    lower = [[0.0] * size for _ in range(size)]
    halfway = [0.0] * size
    for row in range(size):
        for column in range(row + 1):
            rest = squares[row][column] * scale[row] * scale[column]
            rest -= sum(lower[row][k] * lower[column][k] for k in range(column))
            lower[row][column] = math.sqrt(max(rest, 1e-15)) if row == column else rest / lower[column][column]
        known = sum(lower[row][k] * halfway[k] for k in range(row))
        halfway[row] = (products[row] * scale[row] - known) / lower[row][row]
    values = [0.0] * size
    for row in reversed(range(size)):
        known = sum(lower[k][row] * values[k] for k in range(row + 1, size))
        values[row] = (halfway[row] - known) / lower[row][row]
    return [value * factor for value, factor in zip(values, scale, strict=True)]
