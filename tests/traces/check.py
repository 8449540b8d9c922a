"""What is wrong with the traces of a cluster: structure, times, OpenTelemetry's conventions. Pure."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

CLOCK_NS = 1_000_000
"""What two readings of one machine's clock in two processes may differ by, each rounded and slewed."""
SERVER, UNSET, ERROR = 2, 0, 2
OPERATIONS = {"chat", "embeddings", "text_completion"}
REASONS = {"stop", "length", "content_filter", "tool_calls", "error"}
"""The finish reasons of the conventions."""
PHASES = {"queue", "route", "prefill", "kv_transfer", "decode"}
RESOURCE = ("service.name", "service.namespace", "service.instance.id", "service.version", "host.name")


@dataclass(frozen=True)
class Received:
    """A span as a collector has it, with its attributes and its process's as plain values."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    status: int
    said: dict[str, Any] = field(default_factory=dict)
    resource: dict[str, Any] = field(default_factory=dict)


def problems(spans: Sequence[Received], *, client_spans: dict[str, str]) -> Iterator[str]:
    """What is wrong, a sentence each. `client_spans`: the span of the client that a trace's root has as its parent."""
    traces: dict[str, list[Received]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
        missing = [name for name in RESOURCE if not span.resource.get(name)]
        if missing:
            yield f"{span.trace_id} {span.name}: its process does not say {', '.join(missing)}"
    for trace_id, trace in traces.items():
        for problem in _of_trace(trace, client_spans.get(trace_id, "")):
            yield f"{trace_id} {problem}"


def _beside(span: Received, parent: Received) -> str:
    begin_ms, end_ms = (span.start_ns - parent.start_ns) / 1e6, (span.end_ns - parent.end_ns) / 1e6
    return f"begins {begin_ms:+.3f} ms, ends {end_ms:+.3f} ms"


def _of_trace(trace: Sequence[Received], client_span: str) -> Iterator[str]:
    by_id = {span.span_id: span for span in trace}
    if len(by_id) != len(trace):
        yield "two spans have one id"
    roots = [span for span in trace if span.parent_id in ("", client_span)]
    if len(roots) != 1:
        yield f"{len(roots)} roots: {[span.name for span in roots]}"
        return
    for span in trace:
        if span.end_ns < span.start_ns:
            yield f"{span.name} ends before it begins"
        if span is roots[0]:
            yield from _of_request(span)
            continue
        parent = by_id.get(span.parent_id)
        if parent is None:
            yield f"{span.name} is an orphan"
            continue
        if span.kind == SERVER:
            yield f"{span.name} is of the kind SERVER and not a root"
        slack_ns = 0 if span.resource == parent.resource else CLOCK_NS
        if not parent.start_ns - slack_ns <= span.start_ns <= span.end_ns <= parent.end_ns + slack_ns:
            yield f"{span.name} is not within {parent.name}: {_beside(span, parent)}"
    yield from _phases(roots[0], trace)


def _of_request(root: Received) -> Iterator[str]:
    """The conventions for servers of HTTP and for generative AI."""
    said = root.said
    operation, model = said.get("gen_ai.operation.name"), said.get("gen_ai.request.model")
    is_served = "gen_ai.response.model" in said
    if operation not in OPERATIONS or root.name != (f"{operation} {model}" if is_served else operation):
        yield f"its root is called {root.name!r}, with the operation {operation!r} and the model {model!r}"
    if root.kind != SERVER:
        yield f"its root is of the kind {root.kind}"
    http_status = said.get("http.response.status_code")
    if said.get("http.request.method") != "POST" or not str(said.get("http.route", "")).startswith("/v1/"):
        yield "its root has no http.request.method or http.route"
    if http_status is not None and root.status != (ERROR if http_status >= 500 else UNSET):
        yield f"its root has the status {root.status} with the HTTP status {http_status}"
    if http_status is not None and (http_status >= 400) != ("error.type" in said):
        yield f"its root has error.type {said.get('error.type')!r} with the HTTP status {http_status}"
    if http_status == 200 and is_served:
        for name in ("gen_ai.response.id", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"):
            if not said.get(name) and (operation, name) != ("embeddings", "gen_ai.usage.output_tokens"):
                yield f"its root has no {name}"
    if not set(said.get("gen_ai.response.finish_reasons", ())) <= REASONS:
        yield f"its root has the finish reasons {said['gen_ai.response.finish_reasons']!r}"


def _phases(root: Received, trace: Sequence[Received]) -> Iterator[str]:
    """The phases of each answer follow one another without a gap, from the request's arrival on."""
    answers: dict[Any, list[Received]] = defaultdict(list)
    for span in trace:
        if span.parent_id == root.span_id and span.name in PHASES:
            answers[span.said.get("tandem.choice", 0)].append(span)
    for choice, phases in answers.items():
        phases.sort(key=lambda span: (span.start_ns, span.end_ns))
        if phases[0].start_ns != root.start_ns:
            yield f"answer {choice} does not begin with the request"
        for one, other in itertools.pairwise(phases):
            if one.end_ns != other.start_ns:
                gap_ms = (other.start_ns - one.end_ns) / 1e6
                yield f"answer {choice}: {gap_ms:+.3f} ms between {one.name} and {other.name}"
