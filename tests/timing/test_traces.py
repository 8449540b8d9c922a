"""The log line of a request, its attributes, and its phases agree on its times."""

import pytest

from tests.gateway.observability.test_tracing import phases_of, sums_of, trace_of


async def test_the_log_has_the_same_phases(system, spans, caplog):
    caplog.set_level("INFO", logger="gateway.observability.request_log")
    await system.complete()
    request, trace = await trace_of(system, spans)
    (line,) = [record for record in caplog.records if record.getMessage() == "request"]
    spent_ms = {name: 1e3 * spent_s for name, spent_s in sums_of(phases_of(request, trace)).items()}
    assert line.queue_ms == pytest.approx(spent_ms["queue"] + spent_ms["route"], abs=2)
    assert line.prefill_ms == pytest.approx(spent_ms["prefill"], abs=2)
    assert line.transfer_ms == pytest.approx(spent_ms["kv_transfer"], abs=2)
    assert line.decode_ms == pytest.approx(spent_ms["decode"], abs=2)
    assert line.total_ms == pytest.approx(sum(spent_ms.values()), abs=2)


async def test_the_time_to_the_first_token_is_the_sum_of_the_phases_before_it(system, spans):
    await system.chat("a prompt", max_tokens=50)
    request, trace = await trace_of(system, spans)
    spent = sums_of(phases_of(request, trace))
    before_s = spent["queue"] + spent["route"] + spent["prefill"]
    assert request.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(before_s, abs=1e-3)
