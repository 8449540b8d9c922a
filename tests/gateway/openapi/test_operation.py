"""Statuses and headers that rows of the table refer to."""

from gateway.openapi.operation import ANSWER_HEADERS, HEADERS_OF_STATUS, REQUEST_HEADERS, STATUSES
from gateway.openapi.operations import OPERATIONS


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
