"""What a routing decision sees: workers as plain data, put together when they are looked at, and the request.

Knows nothing of sessions, registries or clocks.
"""

import heapq
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, overload

import msgspec

from services.scheduling.disaggregation import PrefillChoice
from services.scheduling.links import NO_LINKS, PeerLink, PeerLinks
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeSpeed,
    LinkSpeed,
    PrefillSpeed,
)


class WorkerView(msgspec.Struct, eq=False):
    """What the gateway knows about one worker at the moment of a decision; it never changes.

    `pages_available` counts pages that are free or only cached, less those promised to admitted requests.
    `num_requests` counts requests that run or wait there, including those that the worker has not yet reported;
    `num_less_urgent` of them wait behind the request that asks. `num_running` sequences are in a decode worker's steps,
    with `context_tokens` tokens between them, and all of them have ended after `steps_left` steps. `waiting_tokens`
    counts prompt tokens that wait for computation there; `queue_s`, where it is known, says how long that takes.
    `links` are the measured ones to other workers, `link_speed` that to any other. With `can_pull` it gives pages of
    its cache to prefill workers and, as one of them, takes some. `tenants` are the only ones it works for; empty:
    everybody. `pool` is its label. `measured` is its own speed with prompts now, for predictions: of two workers that
    are alike one would get everything if prices used it.
    """

    worker_id: str
    incarnation: str
    pages_total: int
    pages_available: int
    num_requests: int
    waiting_tokens: int
    max_sequence_tokens: int
    num_running: int = 0
    steps_left: float = math.inf
    context_tokens: int = 0
    model: str = ""
    region: str = ""
    can_pull: bool = False
    tenants: frozenset[str] = frozenset()
    pool: str = ""
    page_size: int = 16
    prefill_speed: PrefillSpeed = DEFAULT_PREFILL
    decode_speed: DecodeSpeed = DEFAULT_DECODE
    link_speed: LinkSpeed = DEFAULT_LINK
    links: PeerLinks = msgspec.field(default_factory=lambda: NO_LINKS)
    queue_s: float | None = None
    num_less_urgent: int = 0
    measured: PrefillSpeed | None = None
    as_prefill: tuple[Any, ...] | None = None
    """What `price` has worked out of this view alone and keeps here, like the two below."""
    usual_link: PeerLink | None = None
    as_decode: tuple[Any, ...] | None = None

    def replaced(self, **changes: Any) -> "WorkerView":
        """Returns a view that differs in these fields, of which nothing is worked out yet."""
        return msgspec.structs.replace(self, as_prefill=None, usual_link=None, as_decode=None, **changes)


class Views(Sequence[WorkerView]):
    """Views of workers, each put together when it is looked at: of many workers a decision looks at few.

    `view(index)` puts one together; it is kept.
    """

    def __init__(self, worker_ids: Sequence[str], view: Callable[[int], WorkerView]) -> None:
        self.worker_ids = worker_ids
        self._view = view
        self._views: dict[int, WorkerView] = {}

    def __len__(self) -> int:
        return len(self.worker_ids)

    @overload
    def __getitem__(self, index: int) -> WorkerView: ...
    @overload
    def __getitem__(self, index: slice) -> list[WorkerView]: ...
    def __getitem__(self, index: int | slice) -> WorkerView | list[WorkerView]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._at(range(len(self.worker_ids))[index])

    def _at(self, index: int) -> WorkerView:
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._view(index)
        return view

    def __iter__(self) -> Iterator[WorkerView]:
        return map(self._at, range(len(self.worker_ids)))

    def only(self, worker_ids: Container[str]) -> "Views":
        """Returns the views of these workers, in the same order."""
        places = [place for place, worker_id in enumerate(self.worker_ids) if worker_id in worker_ids]
        return Views([self.worker_ids[place] for place in places], lambda index: self[places[index]])

    def changed(self, change: Callable[[WorkerView], WorkerView], worker_ids: Container[str]) -> "Views":
        """Returns all views, with a change to those of these workers."""
        ids = self.worker_ids
        return Views(ids, lambda index: change(self[index]) if ids[index] in worker_ids else self[index])


class RouteRequest(msgspec.Struct, frozen=True):
    """What a request needs. An empty `model` fits every worker, an empty `region` is near to every one.

    `affinity_key`: session or user, for `sticky`. `cached_tokens`: worker id → tokens of the prompt whose pages that
    worker is believed to hold. `kv_bytes_per_token`: what a transfer moves; 0 where it is not known. `prefill`: which
    role computes the prompt, where the client or the operator has chosen. `pool` is the request's; None: labels say
    nothing.
    """

    num_prompt_tokens: int
    max_new_tokens: int
    model: str = ""
    tenant: str = ""
    region: str = ""
    affinity_key: str = ""
    cached_tokens: Mapping[str, int] = MappingProxyType({})
    kv_bytes_per_token: int = 0
    prefill: PrefillChoice = "auto"
    pool: str | None = None


def strangeness(view: WorkerView, request: RouteRequest) -> int:
    """Returns in how many ways a worker is not the request's own: kept for its tenant, of its pool."""
    is_shared = bool(request.tenant) and not view.tenants
    return is_shared + (request.pool is not None and view.pool != request.pool)


class Pull(NamedTuple):
    """The first `num_tokens` tokens of a prompt, of which a prefill worker is to fetch what it lacks from `holder`.

    Fetching is predicted to take `time_s`, and computing them `computing_s`.
    """

    holder: WorkerView
    num_tokens: int
    num_bytes: int
    time_s: float
    computing_s: float


CanPull = Callable[[WorkerView, WorkerView], bool]
"""(holder, prefill worker) → whether pages may go from one to the other before the prompt is computed."""

Fits = Callable[[WorkerView, WorkerView], bool]
"""(prefill worker, decode worker) → whether pages can go from one to the other."""


def able(views: Sequence[WorkerView], request: RouteRequest, num_tokens: int) -> list[WorkerView]:
    """Returns the workers of its model, open to its tenant, and large enough for `num_tokens`, in the order given."""
    model, tenant = request.model, request.tenant
    return [
        view
        for view in views
        if view.max_sequence_tokens >= num_tokens
        and view.pages_total * view.page_size >= num_tokens
        and (not model or view.model == model)
        and (not (tenants := view.tenants) or tenant in tenants)
    ]


def holders(views: Sequence[WorkerView], cached_tokens: Mapping[str, int]) -> Iterator[WorkerView]:
    """Yields the workers that hold a part of the prompt, the holder of the longest part first."""
    ids = views.worker_ids if isinstance(views, Views) else [view.worker_id for view in views]
    found = [(-cached_tokens[worker_id], place) for place, worker_id in enumerate(ids) if worker_id in cached_tokens]
    heapq.heapify(found)  # Few of them are asked for.
    while found:
        yield views[heapq.heappop(found)[1]]
