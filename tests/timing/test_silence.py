"""How soon a gateway gives up a worker whose event loop and lease are silent."""

from typing import Any

import pytest

from tests.gateway import test_slow_workers as slow_tests
from tests.timing.limits import within

_impatient, stalled = slow_tests._impatient, slow_tests.stalled


async def test_a_silent_worker_is_given_up_before_its_lease_ends(stalled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, worker, session = stalled
    monkeypatch.setattr("gateway.topology.session.SLOW_LIMIT_S", 60.0)
    worker.stall()
    worker.stop_renewing()
    with within(3.0):
        await slow_tests.silent_for(session, 20.0)
    assert not session.is_up
