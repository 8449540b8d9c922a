"""When an answer's first and second token were expected and when they came: a metric, a warning where it is far off,
and what the next predictions learn from it.

The second token is the first one that needs the prompt's pages at the decode worker, so it tells whether the price of
the link was true. Knows no request.
"""

import logging
import math

from gateway.observability.history import AttemptStory
from gateway.observability.metrics import RequestFigures
from services.runtime.logs import LineBudget
from services.scheduling.corrections import Corrections
from services.scheduling.routing.route import Route

FAR_RATIO, FAR_S = 2.0, 1.0
"""A token is far from its prediction where it is off by more than both."""
WARNINGS_PER_S, WARNINGS_BURST = 0.1, 5
PAIR_S = 30.0
"""The time in which a pair of workers is warned of at most once."""
MAX_PAIRS = 4096
LEARN_S = 0.02
"""One prediction of a way is learnt from in this time: those of one moment met with the same accident."""

logger = logging.getLogger(__name__)


class Promises:
    """Compares predictions with what became of them."""

    def __init__(self) -> None:
        self._budget = LineBudget(per_s=WARNINGS_PER_S, burst=WARNINGS_BURST)
        self._warned_s: dict[tuple[str, str], float] = {}
        self._corrections = Corrections(), Corrections()
        """Those of first and of second tokens."""
        self._learnt_s: tuple[dict[tuple[str, str], float], dict[tuple[str, str], float]] = {}, {}
        """When each way was last learnt from."""

    def corrected(self, route: Route, prefill: str) -> Route:
        """Returns the route that workers have taken, its predictions corrected by how earlier ones turned out.

        `prefill`: the worker that computes the prompt, if it is not the decode worker. The choice of a route does not
        use corrections: a worker whose requests met with an accident would get none, and so never show that it is over.
        """
        way = prefill if route.is_remote else "", route.decode.worker_id
        first, second = self._corrections
        return route.corrected(first.factor(way, route.predicted_ttft_s), second.factor(way, route.predicted_second_s))

    def note(
        self, figures: RequestFigures, attempt: AttemptStory, seen_s: float, *, now_s: float, is_second: bool
    ) -> None:
        """Notes that an answer's first or second token came `seen_s` after its only attempt was offered to workers."""
        predicted_s = (attempt.second_s if is_second else attempt.first_s) or 0.0
        if not 0 < predicted_s < math.inf:
            return
        ratios = figures.second_predictions if is_second else figures.first_predictions
        ratios.observe(seen_s / predicted_s)
        if attempt.uncorrected_s is not None:
            self._learn(attempt.way, attempt.uncorrected_s[is_second] or 0.0, seen_s, now_s=now_s, is_second=is_second)
        if not is_second or not is_far(predicted_s, seen_s):
            return
        prefill, decode = pair = attempt.way
        if now_s - self._warned_s.get(pair, -PAIR_S) < PAIR_S or not self._budget.take(now_s):
            return
        if len(self._warned_s) >= MAX_PAIRS:  # workers come and go
            self._warned_s.clear()
        self._warned_s[pair] = now_s
        way = f"{prefill} → {decode}" if prefill else decode
        said = {
            "prefill_worker": prefill,
            "decode_worker": decode,
            "predicted_transfer_s": round(attempt.predicted_exposed_us / 1e6, 3),
        }
        logger.warning(
            "%s: a second token was expected after %.3g s and came after %.3g s", way, predicted_s, seen_s, extra=said
        )

    def _learn(self, way: tuple[str, str], predicted_s: float, seen_s: float, *, now_s: float, is_second: bool) -> None:
        learnt_s = self._learnt_s[is_second]
        if now_s - learnt_s.get(way, -math.inf) < LEARN_S:
            return
        if len(learnt_s) >= MAX_PAIRS:  # workers come and go
            learnt_s.clear()
        learnt_s[way] = now_s
        self._corrections[is_second].observe(way, predicted_s=predicted_s, seen_s=seen_s)


def is_far(predicted_s: float, seen_s: float) -> bool:
    """Returns whether a prediction was so wrong that operators should know."""
    larger, smaller = max(predicted_s, seen_s), min(predicted_s, seen_s)
    return larger - smaller > FAR_S and larger > FAR_RATIO * smaller
