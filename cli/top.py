"""`tandem top`: the dashboard in a terminal, from a gateway's GET /dashboard/data and /dashboard/requests.

A frame is a list of lines made from plain data; only `_watch` knows the terminal. Names that come from requests may be
anything that a client wrote, so whatever is not printable is shown as `?`.
"""

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from cli.commands import CommandParser
from cli.status import turn_lines
from services.runtime.api_client import ApiRefused, ApiUnreachable, GatewaySettings, get_json
from services.runtime.config import option
from services.runtime.kinds import flag, number

EVERY_S = 1.0
SECONDS = 60
"""Time that the small charts span, in seconds."""
MAX_REQUESTS = 50
MAX_TROUBLES = 8
BAR_WIDTH = 24
PHASES = ("queue", "prefill", "transfer", "decode")
PAGES = {"used": "#", "reserved": "/", "cached": ":", "free": "."}
LEVELS = "▁▂▃▄▅▆▇█"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
OPEN_SCREEN, CLOSE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True, kw_only=True)
class TopSettings(GatewaySettings):
    """Watches a gateway in the terminal: workers, figures, requests. `q` or Ctrl-C ends it."""

    once: bool = option(flag(), default=False, help="Prints one frame and ends, as it does where no terminal is.")
    timeout: float = option(number(0.1, 600), default=5.0, help="Seconds to wait for an answer.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(TopSettings, lambda settings: run(settings, sys.stdin, sys.stdout))


def run(settings: TopSettings, stdin: TextIO, stdout: TextIO) -> int:
    """Shows frames until `q`; returns the exit code. Raises ApiUnreachable or ApiRefused for the first one."""
    tls = settings.tls()

    def read(place: str) -> Any:
        return get_json(settings.url, place, timeout_s=settings.timeout, api_key=settings.api_key, tls=tls)

    def look(num_lines: int) -> tuple[Any, Any]:
        wanted = max(1, min(MAX_REQUESTS, num_lines))
        data, requests = read(f"/dashboard/data?seconds={SECONDS}"), read(f"/dashboard/requests?limit={wanted}")
        try:
            frame(data, requests["requests"], width=1, height=sys.maxsize)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ApiUnreachable(f"{settings.url} does not speak Tandem's API: its answer is no dashboard") from error
        return data, requests["requests"]

    width, height = shutil.get_terminal_size()
    data, requests = look(height)
    if settings.once or not stdout.isatty():
        stdout.write("\n".join(frame(data, requests, width=width, height=height)) + "\n")
        return 0
    _watch(look, data, requests, stdin, stdout)
    return 0


def frame(
    data: Mapping[str, Any],
    requests: Sequence[Mapping[str, Any]],
    *,
    width: int,
    height: int,
    emphasis: tuple[str, str] = ("", ""),
    trouble: str = "",
) -> list[str]:
    """Lines that fit, at most `height` of them. `emphasis` goes around headings, `trouble` beside the first."""
    lines = [(_title(data, trouble), True), *((line, False) for line in _figures(data, width)), ("", False)]
    troubles = [f"!! {one['kind']} {one['subject']}: {one['cause']}" for one in data.get("troubles", ())]
    if troubles:
        lines += [*((line, True) for line in troubles[:MAX_TROUBLES]), ("", False)]
    held_back = [f"{one['model']} is held back: {one['said']}" for one in data.get("bottlenecks", ())]
    if held_back:
        lines += [*((line, True) for line in held_back[:MAX_TROUBLES]), ("", False)]
    lines += [(line, False) for line in turn_lines(data.get("turns") or {})]
    rows = [_WORKER_HEADINGS, *map(_worker, data["workers"])]
    if not any(worker.get("pool") for worker in data["workers"]):
        rows = [(name, *others) for name, _, *others in rows]
    workers = _table(rows[0], rows[1:])
    lines += _headed(workers if data["workers"] else ["no worker is registered"], is_table=bool(data["workers"]))
    found = [(f"{one['id']}: {one['circuit_found']}", False) for one in data["workers"] if one.get("circuit_found")]
    lines += [("", False), *found] if found else []
    lines.append(("", False))
    room = height - len(lines) - 1
    if not requests:
        lines.append(("no request has ended at this gateway since it started", False))
    elif room > 0:
        ids = max(8, width - 100)
        rows = [_request(request, min(36, ids)) for request in requests[:room]]
        lines += _headed(_table(_REQUEST_HEADINGS, rows), is_table=True)
    start, end = emphasis
    shown = [(_cut(_printable(line), width), is_heading) for line, is_heading in lines[:height]]
    return [f"{start}{line}{end}" if is_heading else line for line, is_heading in shown]


_PAGES_HEADING = "PAGES  # used / reserved : cached . free"
_WORKER_HEADINGS = ("WORKER", "POOL", "STATE", _PAGES_HEADING, "IN USE", "RUN", "WAIT", "SPEED")
_REQUEST_HEADINGS = ("ENDED", "REQUEST", "MODEL", "CLASS", "OUTCOME", "TOKENS", "TTFT", "TOTAL", "PHASES")
_RIGHT = frozenset({"IN USE", "RUN", "WAIT", "SPEED", "TOKENS", "TTFT", "TOTAL"})


def _title(data: Mapping[str, Any], trouble: str) -> str:
    gateway, requests = data["gateway"], data["requests"]
    up_s = data["now_unix_s"] - gateway["started_unix_s"]
    said = f"cluster {gateway['cluster']}, gateway {gateway['id']}, up {_time(up_s)}: "
    said += f"{requests['running']} running, {requests['queued']} queued"
    return f"{said}  !! {trouble}" if trouble else said


def _figures(data: Mapping[str, Any], width: int) -> list[str]:
    """The latest figures, each with its last minute."""
    series = data["series"]

    def now(name: str) -> Any:
        return series[name][-1] if series[name] else None

    def percentiles(name: str) -> str:
        return "  ".join(f"p{share} {_time(now(f'{name}_p{share}_s')):>7}" for share in (50, 90, 99))

    outcomes = "  ".join(f"{name} {_rate(now(f'{name}_per_s'))}" for name in ("finished", "refused", "failed"))
    rows = (
        ("first token", percentiles("ttft"), "ttft_p50_s"),
        ("later tokens", percentiles("itl"), "itl_p50_s"),
        (
            "tokens/s",
            f"{_rate(now('generated_per_s'))} generated, {_rate(now('prompt_per_s'))} prompts",
            "generated_per_s",
        ),
        ("cache hits", _share(now("hit_share")), "hit_share"),
        ("requests/s", f"{_rate(now('good_per_s'))} within targets  ({outcomes})", "good_per_s"),
    )
    used = max(len(said) for _, said, _ in rows)
    room = max(0, min(SECONDS, width - used - 17))
    return [
        f"{name:<13} {said:<{used}}  {sparkline(series[column][-room:] if room else [])}" for name, said, column in rows
    ]


def sparkline(values: Sequence[float | None]) -> str:
    """A value is a block between nothing and the largest one; a blank where nothing is known."""
    largest = max((value for value in values if value is not None), default=0.0)
    return "".join(
        " " if value is None else LEVELS[round(value / largest * (len(LEVELS) - 1)) if largest > 0 else 0]
        for value in values
    )


def _worker(worker: Mapping[str, Any]) -> tuple[str, ...]:
    pages, role = worker["pages"], worker["role"]
    state = worker["state"] if worker["circuit"] == "closed" else f"{worker['state']}, circuit {worker['circuit']}"
    gpu = worker["gpu"]
    if gpu is not None and gpu["state"] != "ok":
        state += f", GPU {gpu['state']}"
    busy = pages["used"] + pages["reserved"]
    speed = worker["step_s"] if role == "decode" else worker["prefill_tokens_per_s"]
    words = "-" if speed is None else f"{_time(speed)} a step" if role == "decode" else f"{_rate(speed)} tokens/s"
    return (
        str(worker["id"]),
        str(worker.get("pool") or "-"),
        state,
        bar([(PAGES[name], pages[name]) for name in PAGES], BAR_WIDTH),
        _share(busy / pages["total"] if pages["total"] else None),
        str(worker["running"]),
        str(worker["waiting"]),
        words,
    )


def _request(request: Mapping[str, Any], id_chars: int) -> tuple[str, ...]:
    outcome = request["outcome"]
    if request["code"] and request["code"] != outcome:
        outcome += f": {request['code']}"
    return (
        time.strftime("%H:%M:%S", time.localtime(request["ended_unix_ms"] / 1e3)),
        str(request["request_id"] or "(no id)")[:id_chars],
        str(request["model"] or "-")[:20],
        str(request["service_class"] or "-")[:11],
        outcome[:28],
        f"{request['prompt_tokens']} > {request['generated_tokens']}",
        _time(None if request["ttft_us"] is None else request["ttft_us"] / 1e6),
        _time(request["total_us"] / 1e6),
        bar([(phase[0], request[f"{phase}_us"]) for phase in PHASES], 12).rstrip(),
    )


def bar(parts: Sequence[tuple[str, float]], width: int) -> str:
    """A bar in which each part has its share of the width, in its letter; a part above 0 has one letter at least."""
    total = sum(amount for _, amount in parts)
    if total <= 0:
        return " " * width
    sizes = [max(1, round(amount / total * width)) if amount > 0 else 0 for _, amount in parts]
    while sum(sizes) != width:  # a few steps: by rounding, and by what is shown larger than it is
        largest = sizes.index(max(sizes))
        sizes[largest] += 1 if sum(sizes) < width else -1
    return "".join(letter * size for (letter, _), size in zip(parts, sizes, strict=True))


def _headed(lines: Sequence[str], *, is_table: bool) -> list[tuple[str, bool]]:
    return [(line, is_table and position == 0) for position, line in enumerate(lines)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(_columns(row[column]) for row in (headings, *rows)) for column in range(len(headings))]

    def cell(heading: str, value: str, width: int) -> str:
        blanks = " " * (width - _columns(value))
        return blanks + value if heading in _RIGHT else value + blanks

    return ["  ".join(map(cell, headings, row, widths)).rstrip() for row in (headings, *rows)]


def _printable(line: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in line)


def _cut(line: str, width: int) -> str:
    """The beginning of a line that fits into `width` columns."""
    used = 0
    for position, each in enumerate(line):
        used += _columns(each)
        if used > width:
            return line[:position]
    return line


def _columns(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.category(each) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f} %"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return (
        f"{seconds:.3g} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _watch(look: Callable[[int], tuple[Any, Any]], data: Any, requests: Any, stdin: TextIO, stdout: TextIO) -> None:
    """Draws a frame each second until `q` or Ctrl-C. A gateway that answers anything else is asked again."""
    trouble = ""
    emphasis = ("", "") if os.environ.get("NO_COLOR") else (BOLD, PLAIN)
    with _screen(stdin, stdout) as has_keys:
        while True:
            width, height = shutil.get_terminal_size()
            lines = frame(data, requests, width=width, height=height, emphasis=emphasis, trouble=trouble)
            stdout.write(HOME + (END_OF_LINE + "\r\n").join(lines) + END_OF_LINE + END_OF_SCREEN)
            stdout.flush()
            if _is_ended(stdin, time.monotonic() + EVERY_S, has_keys=has_keys):
                return
            try:
                data, requests = look(height)
                trouble = ""
            except (ApiUnreachable, ApiRefused) as error:
                trouble = error.message


def _is_ended(stdin: TextIO, until_s: float, *, has_keys: bool) -> bool:
    """Waits, and says whether `q` was pressed meanwhile."""
    if not has_keys:
        time.sleep(max(0.0, until_s - time.monotonic()))
        return False
    while (left_s := until_s - time.monotonic()) > 0:
        if select.select([stdin], [], [], left_s)[0] and os.read(stdin.fileno(), 1) in (b"q", b"Q", b""):
            return True
    return False


@contextlib.contextmanager
def _screen(stdin: TextIO, stdout: TextIO) -> Iterator[bool]:
    """A screen of our own, given back at the end; and whether keys can be read one at a time."""
    has_keys = stdin.isatty()
    before = termios.tcgetattr(stdin) if has_keys else None
    try:
        if before is not None:
            tty.setcbreak(stdin)
        stdout.write(OPEN_SCREEN)
        yield has_keys
    except KeyboardInterrupt:
        pass  # the other way to end it
    finally:
        if before is not None:
            termios.tcsetattr(stdin, termios.TCSADRAIN, before)
        stdout.write(CLOSE_SCREEN)
        stdout.flush()
