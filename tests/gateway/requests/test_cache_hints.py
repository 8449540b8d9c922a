"""Which pages a request is expected to leave behind."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.requests.cache_hints import CacheHints
from services.scheduling.routing.route import Route
from services.scheduling.routing.views import WorkerView

LAYOUT = ("m", 16)


class View:
    def __init__(self) -> None:
        self.expected: list[str] = []

    def expect(self, worker_id: str, keys: list[bytes], *, ttl_s: float) -> None:
        assert len(keys) == 2
        self.expected.append(worker_id)


def view_of(worker_id: str) -> WorkerView:
    return WorkerView(worker_id, "1", 100, 100, 0, 0, 4096, page_size=16)


@pytest.mark.parametrize(
    ("is_remote", "max_tokens", "expected"),
    [(True, 2, ["d", "p"]), (True, 1, ["p"]), (False, 1, ["d"])],
    ids=["handed over", "one token", "local"],
)
def test_pages_are_expected_where_they_will_be(is_remote: bool, max_tokens: int, expected: list[str]) -> None:
    spec = SimpleNamespace(model="m", prompt_token_ids=list(range(40)), sampling=SimpleNamespace(max_tokens=max_tokens))
    request = SimpleNamespace(spec=spec, cache_salt="", page_keys={})
    view, topology = View(), SimpleNamespace(cache_layouts=lambda _model: [LAYOUT])
    route = Route(view_of("d"), (view_of("p"),), is_remote, "r", 0.1, 0.01, 0, {})
    CacheHints(cast("Any", view), cast("Any", topology)).expect(cast("Any", request), route)
    assert view.expected == expected
