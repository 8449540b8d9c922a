"""Rows of a file: what makes one wrong, and how many a file may have."""

import json

import pytest

from gateway.batches.rows import MAX_ERRORS, MAX_ROWS, Checker, FileWrong, row_of
from tests.gateway.batches.clients import row


def test_what_a_row_does_not_need_may_be_anything():
    others = b'"x": "{}", "y": %s, "z": {"body": {}}, "body": {}}' % (b"9" * 5000)
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", ' + others
    checker = Checker("/v1/completions", lambda model: None)
    checker.check(1, line)
    assert checker.finish() == 1
    assert bytes(row_of(line).body) == b"{}"


def test_a_file_has_rows_but_not_too_many_and_not_all_its_errors_are_looked_for():
    line = json.dumps(row(0)).encode()
    checker = Checker("/v1/completions", lambda model: None)
    for number in range(1, MAX_ROWS + 1):
        checker.check(number, line.replace(b"row-0", b"row-%d" % number))
    assert checker.finish() == MAX_ROWS
    with pytest.raises(FileWrong, match="too_many_requests"):
        checker.check(MAX_ROWS + 1, line)
    with pytest.raises(FileWrong, match="empty_file"):
        Checker("/v1/completions", lambda model: None).finish()
    checker = Checker("/v1/completions", lambda model: None)
    for number in range(1, MAX_ERRORS):
        checker.check(number, b"{")
    with pytest.raises(FileWrong) as wrong:
        checker.check(MAX_ERRORS, b"{")
    assert len(wrong.value.errors) == MAX_ERRORS
