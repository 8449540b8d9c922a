"""Spans of this process in a list instead of a collector."""

from collections.abc import Sequence

import pytest

from services.runtime import telemetry
from services.runtime.telemetry import Span, TraceContext, Value


class KeptSpans:
    """In the place of the exporter: everything is in the sample, or nothing."""

    def __init__(self, *, samples_all: bool = True) -> None:
        self.samples_all = samples_all
        self.spans: list[Span] = []
        self.num_exported = self.num_dropped = 0

    @classmethod
    def install(cls, monkeypatch: pytest.MonkeyPatch, *, samples_all: bool = True) -> "KeptSpans":
        """From now on until the test's end."""
        kept = cls(samples_all=samples_all)
        monkeypatch.setattr(telemetry, "_exporter", kept)
        return kept

    def is_sampled(self, trace_id: int, parent: TraceContext | None) -> bool:
        return self.samples_all if parent is None else parent.is_sampled

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans

    def close(self) -> None:
        """Nothing is left to do."""

    def named(self, name: str) -> list[Span]:
        """Those of a name; "request": the spans of whole requests, whose names are their operations and models."""
        if name == "request":
            return [span for span in self.spans if span.is_server and span.name != "attach"]
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        (span,) = self.named(name)
        return span


def events_of(span: Span) -> list[tuple[str, dict[str, Value]]]:
    """Name and attributes of each event of a span."""
    return [(event.name, dict(event.attributes)) for event in span.events]
