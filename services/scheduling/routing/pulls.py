"""Where the beginning of a prompt is fetched from another worker instead of being computed, and what that takes. Pure.

A prefill worker P that lacks what a holder H has can pull the pages from H. That pays where

    pull_s(H, P) + crowd · work_s(P with them) < crowd · work_s(P without them)

with pull_s the time of the lacking bytes over the measured link from H to P, and the wait for a step of each side's
engine, which look into their caches between two steps. `price` says what work_s and crowd are.
"""

import heapq
from collections.abc import Sequence
from itertools import chain, islice

from services.scheduling.routing.price import PrefillTerms, Prices, Terms
from services.scheduling.routing.views import CanPull, Pull, WorkerView, holders

ASK_S = 0.005
"""The time of the question and of the answers to it, without pages: two calls and a proof."""
BUSY_STEP_S = 0.05
"""The length of a step of a worker that computes prompts (`StepTargets.alone_s` of prefill workers)."""


def add_pulls(
    prices: Prices, priced: list[Terms], *, workers: Sequence[Sequence[WorkerView]], can_pull: CanPull
) -> None:
    """Changes, in place, the terms of prefill workers that fetch sooner than they compute, and notes the pulls.

    `workers` are those of each role. The holders of the longest beginnings are looked at, and the prefill workers that
    are cheapest without a pull: what one saves is about the same at all that lack as much.
    """
    cached_tokens = prices.request.cached_tokens
    found = [islice(holders(views, cached_tokens), prices.settings.num_holders) for views in workers]
    held = [view for view in chain.from_iterable(found) if view.can_pull]
    if not held:
        return
    for place in heapq.nsmallest(prices.settings.num_choices, range(len(priced)), key=lambda place: priced[place][0]):
        terms = PrefillTerms._make(priced[place])
        pull = _best(prices, terms, held, can_pull)
        if pull is not None:
            priced[place] = _with(prices, terms, pull)
            prices.pulls[terms.view.worker_id] = pull


def _best(prices: Prices, terms: PrefillTerms, held: list[WorkerView], can_pull: CanPull) -> Pull | None:
    """Returns the pull that saves a worker most; None: it computes sooner."""
    view, best, most_s = terms.view, None, 0.0
    if not view.can_pull:
        return None
    for holder in held:
        num_tokens = _num_tokens(prices, view, holder)
        if num_tokens <= terms.cached_tokens or not can_pull(holder, view):
            continue
        num_bytes = (num_tokens - terms.cached_tokens) * prices.request.kv_bytes_per_token
        time_s = ASK_S + _step_s(holder) + _step_s(view) + prices.link(holder, view).time_s(num_bytes)
        computing_s = terms.work_s - _work_s(prices, view, num_tokens)
        if prices.crowd * computing_s - time_s > most_s and num_bytes:
            most_s, best = prices.crowd * computing_s - time_s, Pull(holder, num_tokens, num_bytes, time_s, computing_s)
    return best


def _with(prices: Prices, terms: PrefillTerms, pull: Pull) -> Terms:
    """Returns a worker's terms with a pull."""
    speed, held = terms.view.prefill_speed, prices.held_tokens
    weight = prices.settings.disaggregation.redone_weight if terms.redone_s else 0.0
    redone_s = speed.computed_twice_s(pull.num_tokens, held) if weight and pull.num_tokens < held else 0.0
    less_s = prices.crowd * pull.computing_s - pull.time_s + weight * (terms.redone_s - redone_s)
    return terms._replace(
        price_s=terms.price_s - less_s,
        cached_tokens=pull.num_tokens,
        work_s=terms.work_s - pull.computing_s,
        redone_s=redone_s,
        pull_s=pull.time_s,
    )


def _num_tokens(prices: Prices, view: WorkerView, holder: WorkerView) -> int:
    """Returns the tokens in whole pages of a worker that a holder has; the last one of a prompt is always computed."""
    request = prices.request
    num_tokens = min(request.cached_tokens[holder.worker_id], request.num_prompt_tokens - 1)
    return num_tokens - num_tokens % view.page_size


def _work_s(prices: Prices, view: WorkerView, num_cached_tokens: int) -> float:
    return view.prefill_speed.time_s(prices.request.num_prompt_tokens - num_cached_tokens, num_cached_tokens)


def _step_s(view: WorkerView) -> float:
    """Returns the length of a worker's step now."""
    if view.waiting_tokens:
        return BUSY_STEP_S
    return view.decode_speed.step_s(view.num_running, view.context_tokens) if view.num_running else 0.0
