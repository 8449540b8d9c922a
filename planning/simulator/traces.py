"""Recorded workloads, read and checked: JSON lines with prefix blocks, or CSV with lengths and maybe arrivals.

The format is told by content, not by name; a file may be gzip-compressed. Four are known:

- JSON lines as Mooncake publishes them (Qin et al., FAST 2025): `timestamp` in ms, `input_length`, `output_length`,
  `hash_ids` with one id for each 512 tokens; an id stands for its block and everything before it.
- CSV with `arrival_s`, `input_tokens`, `output_tokens`.
- CSV as Azure publishes it: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.
- CSV with `input_tokens`, `output_tokens` and perhaps `unit_arrival_s` (one request per second): needs a rate.

Further columns are read where they exist: `tenant`, `class`, `region` (where the request came to a gateway) and
`residency` (the regions to which its data is held, separated by commas). Others are left alone.
"""

import csv
import gzip
import json
import math
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Never

from services.runtime.errors import ConfigError
from services.scheduling.regions import REGION, Residency, residency_of

GZIP_MAGIC = b"\x1f\x8b"
MOONCAKE_BLOCK_TOKENS = 512
MAX_TOKENS = 2**31 - 1
MAX_LINE_CHARACTERS = 16 * 2**20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came, how long it was and how long its answer.

    `block_ids` name the blocks of `Trace.block_tokens` tokens of the prompt, the last of which may be partial; equal
    ids mean equal tokens up to the block's end. Empty where the trace knows nothing of prefixes. It came to a gateway
    in `region`, and its data is held to the regions in `residency`, if any.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()
    tenant: str = ""
    service_class: str = "normal"
    region: str = ""
    residency: Residency = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; `block_tokens` is 0 where there are no block ids."""

    name: str
    format: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]


def read_trace(path: Path, *, rate_per_s: float | None = None, seed: int = 0) -> Trace:
    """Reads a trace, with `rate_per_s` under Poisson arrivals of that rate instead of its own.

    Raises ConfigError that names file, line, field and rule.
    """
    lines = _Lines(path)
    first = lines.peek()
    if first is None:
        raise ConfigError(f"{path} is empty; a trace has at least one request")
    if first.lstrip().startswith("{"):
        kind, block_tokens, requests = "mooncake", MOONCAKE_BLOCK_TOKENS, _read_mooncake(lines)
    else:
        kind, requests = _read_csv(lines, rate_per_s)
        block_tokens = 0
    if not requests:
        raise ConfigError(f"{path} has no request")
    if rate_per_s is not None and kind != "unit_arrivals":
        requests = with_poisson_arrivals(requests, rate_per_s, seed)
    first_s = min(request.arrival_s for request in requests)
    requests = [replace(request, arrival_s=request.arrival_s - first_s) for request in requests]
    requests.sort(key=lambda request: request.arrival_s)  # stable: equal times keep the order of the file
    return Trace(path.name, kind, block_tokens, tuple(requests))


def with_poisson_arrivals(requests: Sequence[TraceRequest], rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Returns the requests in their order, with exponential gaps of mean 1 / rate_per_s."""
    source, now_s, moved = random.Random(seed), 0.0, []  # noqa: S311 - made-up load
    for request in requests:
        now_s += source.expovariate(rate_per_s)
        moved.append(replace(request, arrival_s=now_s))
    return moved


def compressed(trace: Trace, *, speed: float = 1.0, limit: int | None = None) -> Trace:
    """The first `limit` requests, arriving `speed` times as fast."""
    kept = trace.requests[:limit]
    return replace(trace, requests=tuple(replace(request, arrival_s=request.arrival_s / speed) for request in kept))


class _Lines:
    """Lines of a file that may be compressed, with their numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        self._iterator = self._read()
        self._peeked: list[str] = []

    def peek(self) -> str | None:
        """The first line that is not blank, without taking it."""
        for line in self._iterator:
            if line.strip():
                self._peeked.append(line)
                return line
        return None

    def __iter__(self) -> Iterator[str]:
        while self._peeked:
            yield self._peeked.pop(0)
        yield from self._iterator

    def wrong(self, field: str, rule: str) -> Never:
        raise ConfigError(f"{self.path}, line {self.number}, field {field!r}: must be {rule}")

    def _read(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                is_compressed = file.read(2) == GZIP_MAGIC
            with (
                gzip.open(self.path, "rt", encoding="utf-8")
                if is_compressed
                else self.path.open(encoding="utf-8") as text
            ):
                while line := text.readline(MAX_LINE_CHARACTERS + 1):
                    self.number += 1
                    if len(line) > MAX_LINE_CHARACTERS:
                        raise ConfigError(f"{self.path}, line {self.number}: is too long (over {MAX_LINE_CHARACTERS})")
                    yield line
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            # Only the kind of error: its text may quote what the file holds.
            raise ConfigError(f"{self.path} cannot be read after line {self.number} ({type(error).__name__})") from None


def _read_mooncake(lines: _Lines) -> list[TraceRequest]:
    requests = []
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{lines.path}, line {lines.number}: is not JSON") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{lines.path}, line {lines.number}: must be a JSON object")
        num_prompt_tokens = _tokens(lines, "input_length", row.get("input_length"))
        requests.append(
            TraceRequest(
                arrival_s=_seconds(lines, "timestamp", row.get("timestamp")) / 1000,
                num_prompt_tokens=num_prompt_tokens,
                num_output_tokens=_tokens(lines, "output_length", row.get("output_length")),
                block_ids=_block_ids(lines, row.get("hash_ids"), num_prompt_tokens),
                tenant=_word(lines, "tenant", row.get("tenant", "")),
                service_class=_class(lines, row.get("class")),
                region=_region(lines, row.get("region", "")),
                residency=_residency(lines, row.get("residency", "")),
            )
        )
    return requests


def _read_csv(lines: _Lines, rate_per_s: float | None) -> tuple[str, list[TraceRequest]]:
    rows = csv.reader(iter(lines), strict=True)
    try:
        header = [name.strip() for name in next(rows)]
        kind, prompt, output, arrival = _csv_kind(lines, header)
        if kind in ("lengths", "unit_arrivals") and rate_per_s is None:
            raise ConfigError(f"{lines.path} has no arrival times: give a rate in requests per second (--rate)")
        requests = []
        for row in rows:
            if not row:
                continue
            if len(row) != len(header):
                raise ConfigError(f"{lines.path}, line {lines.number}: has {len(row)} fields, the header {len(header)}")
            cells = dict(zip(header, row, strict=True))
            arrival_s = 0.0
            if kind == "azure":
                arrival_s = _timestamp(lines, arrival, cells[arrival])
            elif arrival:
                arrival_s = _seconds(lines, arrival, cells[arrival])
            if kind == "unit_arrivals":
                assert rate_per_s is not None
                arrival_s /= rate_per_s
            requests.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    num_prompt_tokens=_tokens(lines, prompt, cells[prompt]),
                    num_output_tokens=_tokens(lines, output, cells[output]),
                    tenant=cells.get("tenant", ""),
                    service_class=_class(lines, cells.get("class") or None),
                    region=_region(lines, cells.get("region", "").strip()),
                    residency=_residency(lines, cells.get("residency", "")),
                )
            )
    except csv.Error:
        raise ConfigError(f"{lines.path}, line {lines.number}: is not CSV") from None
    return kind, requests


def _csv_kind(lines: _Lines, header: Sequence[str]) -> tuple[str, str, str, str]:
    """(format, column of the prompt's length, of the answer's, of the arrival)"""
    names = set(header)
    if len(names) != len(header):
        raise ConfigError(f"{lines.path}, line {lines.number}: a column is named twice")
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return "azure", "ContextTokens", "GeneratedTokens", "TIMESTAMP"
    if {"input_tokens", "output_tokens"} <= names:
        if "arrival_s" in names:
            return "csv", "input_tokens", "output_tokens", "arrival_s"
        if "unit_arrival_s" in names:
            return "unit_arrivals", "input_tokens", "output_tokens", "unit_arrival_s"
        return "lengths", "input_tokens", "output_tokens", ""
    raise ConfigError(
        f"{lines.path}, line {lines.number}: is neither JSON lines nor a CSV header with input_tokens and "
        "output_tokens (arrival_s, unit_arrival_s) or TIMESTAMP, ContextTokens and GeneratedTokens"
    )


def _tokens(lines: _Lines, field: str, value: object) -> int:
    rule = f"a whole number from 1 to {MAX_TOKENS}"
    if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        lines.wrong(field, rule)
    return value


def _seconds(lines: _Lines, field: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not 0 <= number < 1e12:
        lines.wrong(field, "a number of at least 0")
    return number


def _timestamp(lines: _Lines, field: str, value: str) -> float:
    text = value.strip()
    whole, dot, fraction = text.partition(".")
    digits = fraction.rstrip("0123456789")
    try:
        # Azure writes seven digits of a second; datetime takes six.
        moment = datetime.fromisoformat(f"{whole}{dot}{fraction[: len(fraction) - len(digits)][:6]}{digits}")
    except ValueError:
        lines.wrong(field, "a time such as 2023-11-16 18:15:46.6805900")
    return (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()


def _block_ids(lines: _Lines, value: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    num_blocks = -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        lines.wrong("hash_ids", "a list of whole numbers")
    if len(value) != num_blocks:
        lines.wrong("hash_ids", f"one id for each {MOONCAKE_BLOCK_TOKENS} tokens: {num_blocks}, not {len(value)}")
    if len(set(value)) != num_blocks:
        lines.wrong("hash_ids", "without an id twice: an id stands for its block and all before it")
    return tuple(value)


def _word(lines: _Lines, field: str, value: object) -> str:
    if not isinstance(value, str):
        lines.wrong(field, "a text")
    return value


def _region(lines: _Lines, value: object) -> str:
    if not isinstance(value, str) or (value and not re.fullmatch(REGION, value, re.ASCII)):
        lines.wrong("region", "a region's name")
    return value


def _residency(lines: _Lines, value: object) -> Residency:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) and value.strip() else []
    if not isinstance(value, str) or not all(re.fullmatch(REGION, name, re.ASCII) for name in names):
        lines.wrong("residency", "names of regions, separated by commas")
    return residency_of(names)


def _class(lines: _Lines, value: object) -> str:
    names = ("critical", "interactive", "normal", "low", "batch")
    if value is None:
        return "normal"
    if value not in names:
        lines.wrong("class", "one of " + ", ".join(names))
    return str(value)
