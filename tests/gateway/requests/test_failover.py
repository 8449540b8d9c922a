"""Which failures of an attempt are tried again, and what they are called."""

import pytest

from gateway.requests.failover import TRY_AGAIN, reason_of
from gateway.topology.events import Unfit
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    LayoutMismatch,
    Overloaded,
    Quarantined,
    TransferFailed,
    WorkerLost,
    WorkerUnavailable,
)


@pytest.mark.parametrize(
    ("error_type", "reason"),
    [
        (WorkerLost, "worker_lost"),
        (WorkerUnavailable, "worker_unavailable"),
        (Unfit, "worker_unavailable"),
        (TransferFailed, "transfer_failed"),
        (LayoutMismatch, "layout_mismatch"),
        (InternalError, "internal_error"),
    ],
)
def test_each_failure_that_is_tried_again_has_one_of_a_few_reasons(error_type: type, reason: str) -> None:
    assert issubclass(error_type, TRY_AGAIN)
    assert reason_of(error_type("words")) == reason


def test_every_kind_that_is_tried_again_has_a_reason() -> None:
    assert len({reason_of(kind("words")) for kind in TRY_AGAIN}) == len(TRY_AGAIN)


@pytest.mark.parametrize("error_type", [DeadlineExceeded, InvalidRequest, Overloaded, Quarantined])
def test_what_is_the_requests_own_or_has_no_room_is_not_tried_again(error_type: type) -> None:
    assert not issubclass(error_type, TRY_AGAIN)
