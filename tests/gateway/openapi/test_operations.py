"""The table of operations: it has every route that is served, and no other."""

import re

from gateway.openapi.operations import ANSWER_HEADERS, HEADERS_OF_STATUS, OPERATIONS, REQUEST_HEADERS, STATUSES


async def test_it_has_every_route_and_no_other(system):
    served = {
        (re.sub(r":[a-z]+}", "}", route.path), method.lower())
        for route in system.gateway.api.routes
        for method in route.methods - {"HEAD"}
        if not is_part_of_a_page(route.path)
    }
    assert {(operation.path, operation.method) for operation in OPERATIONS} == served


def is_part_of_a_page(path: str) -> bool:
    """Whether it is a file of the dashboard, which is no API of anybody's, or the way from the slash to the page."""
    return path.startswith("/dashboard/") and (path.endswith("/") or "." in path.rpartition("/")[2])


def test_what_rows_refer_to_is_described():
    for operation in OPERATIONS:
        assert {*operation.errors, *(status for status, _ in operation.others)} <= STATUSES.keys(), operation.route
        assert set(operation.request_headers) <= REQUEST_HEADERS.keys(), operation.route
        assert set(operation.answer_headers) <= ANSWER_HEADERS.keys(), operation.route
        assert operation.summary.endswith(".")
    assert {name for names in HEADERS_OF_STATUS.values() for name in names} <= ANSWER_HEADERS.keys()


def test_a_row_has_one_answer_to_a_method_of_a_path():
    routes = [operation.route for operation in OPERATIONS]
    assert len(routes) == len(set(routes)) > 20
