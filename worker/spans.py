"""The spans that both kinds of worker record of an attempt."""

import asyncio

from kv_transfer.send_link import HandoffStats
from services.runtime import telemetry
from services.runtime.errors import RequestCancelled
from services.runtime.telemetry import TraceContext, Value


def record_chunk(
    trace: TraceContext | None, start_unix_ns: int, end_unix_ns: int, *, start: int, num_tokens: int
) -> None:
    """The step that computed `num_tokens` of a prompt from position `start`, as a part of the attempt's `prefill`."""
    if trace is not None:
        attributes = {"tandem.start": start, "tandem.tokens": num_tokens}
        telemetry.record("prefill.chunk", trace, during_unix_ns=(start_unix_ns, end_unix_ns), attributes=attributes)


def record_sending(
    trace: TraceContext | None,
    start_unix_ns: int,
    end_unix_ns: int,
    *,
    sent: HandoffStats | None = None,
    error: BaseException | None = None,
) -> None:
    """Pages on their way from this worker: from the first that left to their commit, or to the error that ended it."""
    if trace is None:
        return
    attributes: dict[str, Value] = {}
    if sent is not None:
        attributes = {
            "tandem.kv.pages": sent.num_pages,
            "tandem.kv.bytes": sent.num_bytes,
            "tandem.kv.transport": sent.transport,
            "tandem.kv.exposed_s": sent.exposed_s,
        }
        if sent.carried is not None:
            attributes["tandem.kv.gb_per_s"] = sent.carried.num_bytes / sent.carried.time_s / 1e9
    if isinstance(error, asyncio.CancelledError | RequestCancelled):
        attributes["tandem.is_cancelled"], error = True, None
    during_unix_ns = (start_unix_ns, end_unix_ns)
    telemetry.record("kv_transfer.send", trace, during_unix_ns=during_unix_ns, attributes=attributes, error=error)
