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
        self.published: set[tuple[str, bytes]] = set()

    def expect(self, worker_id: str, keys: list[bytes], *, ttl_s: float) -> None:
        assert len(keys) == 2
        self.expected.append(worker_id)

    def has_published(self, worker_id: str, key: bytes) -> bool:
        return (worker_id, key) in self.published


def view_of(worker_id: str) -> WorkerView:
    return WorkerView(worker_id, "1", 100, 100, 0, 0, 4096, page_size=16)


def asked() -> Any:
    return SimpleNamespace(
        spec=SimpleNamespace(model="m", prompt_token_ids=list(range(40))), cache_salt="", page_keys={}
    )


@pytest.mark.parametrize(("is_remote", "expected"), [(True, ["d", "p"]), (False, ["d"])])
def test_pages_are_expected_where_they_will_be(is_remote: bool, expected: list[str]) -> None:
    view, topology = View(), SimpleNamespace(cache_layouts=lambda _model: [LAYOUT])
    route = Route(view_of("d"), (view_of("p"),), is_remote, "r", 0.1, 0.01, 0, {})
    CacheHints(cast("Any", view), cast("Any", topology)).expect(asked(), route)
    assert view.expected == expected


@pytest.mark.parametrize(("num_tokens", "page"), [(40, 1), (32, 1), (31, 0), (16, 0), (15, None), (64, None)])
def test_what_is_published_is_judged_by_the_last_whole_page(num_tokens: int, page: int | None) -> None:
    view, topology = View(), SimpleNamespace(cache_layouts=lambda _model: [LAYOUT])
    hints, request = CacheHints(cast("Any", view), cast("Any", topology)), asked()
    hints.expect(request, Route(view_of("d"), (), False, "r", 0.1, 0.01, 0, {}))
    assert not hints.has_published(request, "d", num_tokens=num_tokens), "it is only expected"
    (keys,) = request.page_keys.values()
    view.published = {("d", keys[0]), ("d", keys[1])}
    assert hints.has_published(request, "d", num_tokens=num_tokens) is (page is not None)
    view.published = {("p", key) for key in keys}
    assert not hints.has_published(request, "d", num_tokens=num_tokens)
    if page is not None:
        view.published = {("d", keys[page])}
        assert hints.has_published(request, "d", num_tokens=num_tokens)
