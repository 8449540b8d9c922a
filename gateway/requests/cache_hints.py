"""Which worker is believed to hold how much of a prompt: the cluster's index of pages, asked in a request's words.

Keys are computed once for each way of cutting a prompt into pages that the model's workers have; usually there is one.
A hint may be wrong, and costs a recompute then.
"""

from collections.abc import Mapping, Sequence

from gateway.requests.answer import RunningAnswer
from gateway.topology.members import Topology
from gateway.topology.prefix_view import PrefixView
from services.runtime.page_keys import cache_salt, page_keys
from services.scheduling.routing.route import Route

EXPECTED_S = 5.0
"""The time for which pages that a worker is about to compute count as held; by its end they are published."""


class CacheHints:
    """Asks and tells the gateway's view of the index."""

    def __init__(self, view: PrefixView, topology: Topology) -> None:
        self._view = view
        self._topology = topology

    def cached_tokens(self, request: RunningAnswer) -> Mapping[str, int]:
        """Returns worker id → tokens from the prompt's start whose pages it has. Workers without any are left out."""
        cached: dict[str, int] = {}
        for layout in self._topology.cache_layouts(request.spec.model):
            keys, page_size = self._keys(request, layout), layout[1]
            for worker_id, num_pages in self._view.longest(keys).items() if keys else ():
                cached[worker_id] = max(cached.get(worker_id, 0), num_pages * page_size)
        return cached

    def expect(self, request: RunningAnswer, route: Route) -> None:
        """Notes the request's route, so that the next requests with the same prefix know of it."""
        views = (route.decode, *(route.prefills[:1] if route.is_remote else ()))
        for layout in self._topology.cache_layouts(request.spec.model):
            keys = self._keys(request, layout)
            for view in views if keys else ():
                if view.page_size == layout[1]:
                    self._view.expect(view.worker_id, keys, ttl_s=EXPECTED_S)

    def has_published(self, request: RunningAnswer, worker_id: str, *, num_tokens: int) -> bool:
        """Returns whether a worker has said itself that it has the first tokens of a prompt, up to whole pages."""
        for layout in self._topology.cache_layouts(request.spec.model):
            keys, num_pages = self._keys(request, layout), num_tokens // layout[1]
            if 0 < num_pages <= len(keys) and self._view.has_published(worker_id, keys[num_pages - 1]):
                return True
        return False

    def forget(self, worker_id: str) -> None:
        """Drops what was expected of a worker that has refused or failed."""
        self._view.forget_expected(worker_id)

    def _keys(self, request: RunningAnswer, layout: tuple[str, int]) -> Sequence[bytes]:
        if len(request.spec.prompt_token_ids) < layout[1]:
            return ()
        keys = request.page_keys.get(layout)
        if keys is None:
            salt = cache_salt(model=layout[0], tenant=request.cache_salt)
            keys = page_keys(request.spec.prompt_token_ids, salt=salt, page_size=layout[1])
            request.page_keys[layout] = keys
        return keys
