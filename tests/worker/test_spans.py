import asyncio

import pytest

from kv_transfer.send_link import HandoffStats
from services.runtime import telemetry
from services.runtime.errors import RequestCancelled, TransferFailed
from services.scheduling.links import Carried
from tests.kept_spans import KeptSpans
from worker.spans import record_chunk, record_sending

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> KeptSpans:
    return KeptSpans.install(monkeypatch)


def test_a_chunk_says_what_it_computed(kept: KeptSpans) -> None:
    record_chunk(telemetry.sampled(TRACEPARENT, ""), 10, 30, start=16, num_tokens=8)
    span = kept.one("prefill.chunk")
    assert (span.start_unix_ns, span.end_unix_ns) == (10, 30)
    assert span.attributes == {"tandem.start": 16, "tandem.tokens": 8}


def test_without_a_trace_nothing_is_recorded(kept: KeptSpans) -> None:
    record_chunk(None, 10, 30, start=0, num_tokens=8)
    record_sending(None, 10, 30)
    assert kept.spans == []


def test_a_sending_says_how_fast_it_was_if_that_is_known(kept: KeptSpans) -> None:
    trace = telemetry.sampled(TRACEPARENT, "")
    record_sending(trace, 10, 30, sent=HandoffStats(3, 4000, 0.25, "tcp", Carried(2_000_000_000, 0.5)))
    record_sending(trace, 10, 30, sent=HandoffStats(3, 4000, 0.25, "tcp"))
    fast, unknown = kept.named("kv_transfer.send")
    assert fast.attributes == {
        "tandem.kv.pages": 3,
        "tandem.kv.bytes": 4000,
        "tandem.kv.transport": "tcp",
        "tandem.kv.exposed_s": 0.25,
        "tandem.kv.gb_per_s": 4.0,
    }
    assert "tandem.kv.gb_per_s" not in unknown.attributes


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RequestCancelled("x")])
def test_a_sending_that_was_cancelled_is_no_failure(kept: KeptSpans, error: BaseException) -> None:
    record_sending(telemetry.sampled(TRACEPARENT, ""), 10, 30, error=error)
    span = kept.one("kv_transfer.send")
    assert span.attributes == {"tandem.is_cancelled": True}
    assert not span.error_type


def test_a_sending_that_failed_is_a_failed_span(kept: KeptSpans) -> None:
    record_sending(telemetry.sampled(TRACEPARENT, ""), 10, 30, error=TransferFailed("x"))
    assert kept.one("kv_transfer.send").error_type
