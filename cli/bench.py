"""`tandem bench`: measures any OpenAI-compatible endpoint under a recorded workload or under lengths, with plots."""

import asyncio
import html
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from cli.bench_load import Ask, Endpoint, Load, Reply, Unusable, measured_words, poisson
from cli.commands import CommandParser
from planning.simulator.html_report import STYLE, Curve, chart
from planning.simulator.report import aligned, cdf, percentile
from planning.simulator.traces import Trace, compressed, read_trace
from services.runtime.api_client import GatewaySettings, get_json
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import choice, flag, integer, number, path, text

MAX_PROMPT_TOKENS = 1 << 20
SHARES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class BenchSettings(GatewaySettings):
    """Measures an OpenAI-compatible endpoint: time to first token, between tokens, goodput. Exit code 1 if all fail."""

    model_name: str | None = option(text(), default=None, help="The model; the first one of /v1/models if not given.")
    api: str = option(choice("completions", "chat"), default="completions", help="Which of the two APIs is asked.")
    trace: Path | None = option(path(), default=None, help="A recorded workload, as tandem replay reads it.")
    speed: float = option(number(1e-6), default=1.0, help="Factor by which a trace's arrivals come faster.")
    requests: int | None = option(
        integer(1), default=None, help="Number of requests; 100 if not given, or all of a trace."
    )
    rate: float | None = option(
        number(1e-6), default=None, help="Requests per second of Poisson arrivals, also in place of a trace's."
    )
    concurrency: int | None = option(
        integer(1, 10_000), default=None, help="Clients that each wait for their answer, instead of arrivals at times."
    )
    prompt_tokens: int = option(integer(1, MAX_PROMPT_TOKENS), default=512, help="Length of prompts, without --trace.")
    new_tokens: int = option(
        integer(1, MAX_PROMPT_TOKENS), default=128, help="Most tokens of answers, without --trace."
    )
    max_context_tokens: int | None = option(
        integer(2), default=None, help="Requests of a trace that are longer than this are left out, and counted."
    )
    ignore_eos: bool = option(
        flag(), default=False, help="Asks for answers of full length; not every endpoint knows ignore_eos."
    )
    slo_ttft: float = option(number(0), default=2.0, help="Target: seconds to the first token.")
    slo_tpot: float = option(number(0), default=0.1, help="Target: seconds per later token.")
    timeout: float = option(number(0.1, 86_400), default=600.0, help="Longest silence of an answer, in seconds.")
    seed: int = option(integer(0), default=0, help="Seed of the arrivals and of the prompts.")
    json: Path | None = option(path(), default=None, help="Writes all figures and every request to this file.")
    report: Path | None = option(path(), default=None, help="Writes a report with plots to this HTML file.")

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("--concurrency and --rate are both given; requests come when others end, or at times")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(BenchSettings, lambda settings: run(settings, sys.stdout, stderr=sys.stderr))


def run(settings: BenchSettings, stdout: TextIO, *, stderr: TextIO) -> int:
    """Measures, prints and writes; returns the exit code. Raises ConfigError, ApiUnreachable or Unusable."""
    asks, num_left_out = asks_of(settings)
    model = settings.model_name or first_model(settings, timeout_s=settings.timeout)
    replies = asyncio.run(_measure(settings, model, asks, stderr))
    figures = {
        "url": settings.url,
        "model": model,
        "left_out": num_left_out,
        **figures_of(replies, slo_ttft_s=settings.slo_ttft, slo_tpot_s=settings.slo_tpot),
    }
    stdout.write(shown(figures))
    if settings.json is not None:
        _write(settings.json, json.dumps({**figures, "replies": [_row(reply) for reply in replies]}, indent=1) + "\n")
    if settings.report is not None:
        _write(settings.report, report_of(figures, replies))
    return 0 if figures["answered"] else 1


def asks_of(settings: BenchSettings) -> tuple[list[Ask], int]:
    """The requests to send, and how many of a trace are too long. Raises ConfigError."""
    if settings.trace is None:
        lengths = [(settings.prompt_tokens, settings.new_tokens)] * (settings.requests or 100)
        return list(poisson(lengths, rate_per_s=settings.rate, seed=settings.seed)), 0
    trace = read_trace(settings.trace, rate_per_s=settings.rate, seed=settings.seed)
    trace = compressed(trace, speed=settings.speed, limit=settings.requests)
    limit = settings.max_context_tokens or sys.maxsize
    fitting = [each for each in _asks_of_trace(trace) if each.num_prompt_tokens + each.num_new_tokens <= limit]
    if not fitting:
        raise ConfigError(f"no request of {settings.trace} has at most --max-context-tokens {limit} tokens")
    return fitting, len(trace.requests) - len(fitting)


def _asks_of_trace(trace: Trace) -> list[Ask]:
    asks = []
    for number_of, request in enumerate(trace.requests):
        left, parts = request.num_prompt_tokens, []
        for block in request.block_ids:  # equal blocks are equal text, so that prefix caches find what they did then
            parts.append((block, min(left, trace.block_tokens)))
            left -= parts[-1][1]
        if left > 0 or not parts:
            parts.append((-1 - number_of, max(1, left)))
        asks.append(Ask(request.arrival_s, tuple(parts), max(1, request.num_output_tokens)))
    return asks


def first_model(settings: GatewaySettings, *, timeout_s: float) -> str:
    """Returns the first model that an endpoint lists. Raises ApiUnreachable, ApiRefused or Unusable."""
    found = get_json(
        settings.url.rstrip("/").removesuffix("/v1"),
        "/v1/models",
        timeout_s=timeout_s,
        api_key=settings.api_key,
        tls=settings.tls(),
    )
    try:
        return str(found["data"][0]["id"])
    except (LookupError, TypeError) as error:
        raise Unusable(f"{settings.url} lists no model; name one with --model-name") from error


async def _measure(settings: BenchSettings, model: str, asks: Sequence[Ask], stderr: TextIO) -> list[Reply]:
    endpoint = Endpoint(
        url=settings.url,
        model=model,
        is_chat=settings.api == "chat",
        api_key=settings.api_key,
        fields={"ignore_eos": True} if settings.ignore_eos else {},
        timeout_s=settings.timeout,
    )
    replies: list[Reply] = []

    def on_end(reply: Reply) -> None:
        replies.append(reply)
        if stderr.isatty() or len(replies) % max(1, len(asks) // 10) == 0:
            end = "\r" if stderr.isatty() and len(replies) < len(asks) else "\n"
            print(f"{len(replies)} of {len(asks)} requests have ended", end=end, file=stderr, flush=True)

    async with endpoint.client(settings.tls()) as client:
        load = Load(endpoint, client, tokens_per_word=await measured_words(endpoint, client))
        if settings.concurrency is None:
            await load.open_loop(asks, on_end)
        else:
            await load.closed_loop(asks, on_end, clients=settings.concurrency)
    return replies


def figures_of(replies: Sequence[Reply], *, slo_ttft_s: float, slo_tpot_s: float) -> dict[str, Any]:
    """What the answers come to; times in seconds, None where no answer has one."""
    good = [reply for reply in replies if not reply.error]
    span_s = max((reply.end_s for reply in replies), default=0.0)
    within = [reply for reply in good if reply.ttft_s <= slo_ttft_s and (reply.tpot_s or 0.0) <= slo_tpot_s]
    return {
        "requests": len(replies),
        "answered": len(good),
        "errors": dict(Counter(reply.error for reply in replies if reply.error).most_common(10)),
        "span_s": span_s,
        "answered_per_s": _rate(len(good), span_s),
        "prompt_tokens_per_s": _rate(sum(reply.num_prompt_tokens for reply in good), span_s),
        "tokens_per_s": _rate(sum(reply.num_tokens for reply in good), span_s),
        "targets": {"ttft_s": slo_ttft_s, "tpot_s": slo_tpot_s},
        "within_targets": len(within),
        "goodput_per_s": _rate(len(within), span_s),
        "ttft_s": _spread([reply.ttft_s for reply in good]),
        "itl_s": _spread([gap for reply in good for gap in reply.gaps_s]),
        "tpot_s": _spread([reply.tpot_s for reply in good if reply.tpot_s is not None]),
        "e2e_s": _spread([reply.end_s - reply.sent_at_s for reply in good]),
        # How late requests left: where this is not small, this program was the bottleneck and not the endpoint.
        "late_s": _spread([max(0.0, reply.sent_at_s - reply.ask.at_s) for reply in replies]),
    }


def _rate(number_of: int, span_s: float) -> float:
    return number_of / span_s if span_s > 0 else 0.0


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    ordered = sorted(values)
    if not ordered:
        return None
    found = {f"p{share}": percentile(ordered, share / 100) for share in SHARES}
    return {"mean": sum(ordered) / len(ordered), **found, "max": ordered[-1]}


def shown(figures: dict[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{figures['answered']} of {figures['requests']} requests to {figures['model']} were answered in "
        f"{figures['span_s']:.1f} s"
    ]
    if figures["left_out"]:
        lines.append(f"{figures['left_out']} requests of the trace are longer than the context and were left out")
    lines += [f"{count} failed: {error}" for error, count in figures["errors"].items()]
    cells = [["MS", "MEAN", *(f"P{share}" for share in SHARES), "MAX"]]
    names = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT", "e2e_s": "E2E"}
    for key, name in names.items():
        if (spread := figures[key]) is not None:
            cells.append([name, *(f"{value * 1e3:.1f}" for value in spread.values())])
    targets = figures["targets"]
    lines += [
        "",
        aligned(cells).rstrip("\n"),
        "",
        f"answers   {figures['answered_per_s']:.2f}/s, {figures['tokens_per_s']:.1f} tokens/s, "
        f"prompts {figures['prompt_tokens_per_s']:.1f} tokens/s",
        f"goodput   {figures['goodput_per_s']:.2f}/s: {figures['within_targets']} of {figures['requests']} with TTFT "
        f"<= {targets['ttft_s']:g} s and TPOT <= {targets['tpot_s']:g} s",
    ]
    late = figures["late_s"]
    if late is not None and late["p99"] > 0.1 and figures["span_s"] > 0:
        lines.append(f"note      requests left up to {late['max']:.2f} s late: this machine was too slow to send them")
    return "\n".join(lines) + "\n"


def report_of(figures: dict[str, Any], replies: Sequence[Reply]) -> str:
    """A page with the figures and plots, which loads nothing."""
    good = sorted((reply for reply in replies if not reply.error), key=lambda reply: reply.sent_at_s)
    targets = figures["targets"]
    ttft = cdf([reply.ttft_s for reply in good])
    itl = cdf([gap for reply in good for gap in reply.gaps_s])
    over_time = [(reply.sent_at_s, reply.ttft_s) for reply in good]
    plots = [
        chart("Time to first token", "seconds", "share of answers", [Curve("TTFT", ttft)], mark=targets["ttft_s"]),
        chart("Between tokens", "seconds", "share of gaps", [Curve("ITL", itl)], mark=targets["tpot_s"]),
        chart("Over time", "seconds after the start", "seconds", [Curve("TTFT", over_time)]),
        chart("Tokens", "seconds after the start", "tokens/s", [Curve("tokens", _per_second(good))]),
    ]
    body = f"<h1>tandem bench</h1><pre>{html.escape(shown(figures))}</pre>{''.join(plots)}"
    return f'<!doctype html><meta charset="utf-8"><title>tandem bench</title><style>{STYLE}</style>{body}\n'


def _per_second(replies: Sequence[Reply]) -> list[tuple[float, float]]:
    """Tokens of each second; those of an answer are shared out over its events."""
    counts: dict[int, float] = {}
    for reply in replies:
        for at_s in reply.at_s:
            counts[int(at_s)] = counts.get(int(at_s), 0.0) + reply.num_tokens / len(reply.at_s)
    return [(float(second), counts.get(second, 0.0)) for second in range(max(counts, default=-1) + 1)]


def _row(reply: Reply) -> dict[str, Any]:
    return {
        "at_s": reply.ask.at_s,
        "sent_at_s": reply.sent_at_s,
        "ttft_s": reply.ttft_s if reply.at_s else None,
        "tpot_s": reply.tpot_s,
        "end_s": reply.end_s,
        "prompt_tokens": reply.num_prompt_tokens,
        "tokens": reply.num_tokens,
        "error": reply.error,
    }


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror})") from None
