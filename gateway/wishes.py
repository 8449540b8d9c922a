"""When a client needs its answer, and where its data may be computed: what headers and metadata say of it.

Nothing here changes an answer's tokens. Knows neither HTTP nor gRPC: both give a function that finds a value by name.
"""

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from services.runtime.errors import InvalidRequest
from services.scheduling.disaggregation import PREFILL_CHOICES, PrefillChoice
from services.scheduling.overload import NO_TARGETS, Targets
from services.scheduling.regions import MAX_REGIONS, REGION, Residency, residency_of

TIMEOUT = "X-Request-Timeout-Ms"
TTFT, TPOT = "X-Slo-Ttft-Ms", "X-Slo-Tpot-Ms"
"""Targets for the first token and for each later one, by the names that llm-d uses."""
PREFILL = "X-Tandem-Prefill"
RESIDENCY = "X-Tandem-Residency"
RESIDENCY_PATTERN = rf"^{REGION}( *, *{REGION})*$"
HINTS = ("X-Stainless-Read-Timeout", "X-Stainless-Timeout")
"""How long OpenAI's clients wait for the next byte, in seconds; they send it unasked."""
WISHES = (TTFT, TPOT, PREFILL, RESIDENCY, *HINTS)
"""The names of all headers and metadata that say a wish."""
MIN_MS = 0.001
MAX_MS = 24 * 3600 * 1000

_REGIONS = re.compile(RESIDENCY_PATTERN, re.ASCII)
_MILLISECONDS = re.compile(r"[0-9]{1,8}(\.[0-9]{1,6})?", re.ASCII)

Find = Callable[[str], str | None]
"""The value of the header or metadata with this name, in lower case; None: it is absent."""


class Wishes(msgspec.Struct, frozen=True):
    """What a client said besides its request. Seconds.

    `patience_s` is how long it is believed to wait without a token; None: unknown. `prefill` says which worker
    computes the prompt; empty: the operator decides. `residency` names the only regions in which its data may be.
    """

    patience_s: float | None = None
    targets: Targets = NO_TARGETS
    prefill: PrefillChoice | Literal[""] = ""
    residency: Residency = ()


NO_WISHES = Wishes()


def read_wishes(find: Find) -> Wishes:
    """What a client said. Raises InvalidRequest that names the header and its rule."""
    ttft_s, tpot_s = read_ms(find, TTFT), read_ms(find, TPOT)
    patience_s, prefill, residency = _hint_s(find), _prefill(find), read_residency(find)
    if ttft_s is None and tpot_s is None and patience_s is None and not prefill and not residency:
        return NO_WISHES
    return Wishes(patience_s, Targets(ttft_s, tpot_s), prefill, residency)


def read_residency(find: Find) -> Residency:
    """Returns the only regions in which a request's data may be; empty: nothing was said. Raises InvalidRequest."""
    said = find(RESIDENCY.lower())
    if said is None:
        return ()
    regions = said.strip().replace(" ", "").split(",")
    if _REGIONS.fullmatch(said.strip()) is None or len(regions) > MAX_REGIONS:
        raise InvalidRequest(
            f"{RESIDENCY} must be 1 to {MAX_REGIONS} names of regions with commas between them",
            field=RESIDENCY,
            code="invalid_value",
        )
    return residency_of(regions)


def read_ms(find: Find, name: str) -> float | None:
    """A time in milliseconds as seconds; None: it is absent. Raises InvalidRequest."""
    said = find(name.lower())
    if said is None:
        return None
    if _MILLISECONDS.fullmatch(said) is None or not MIN_MS <= float(said) <= MAX_MS:
        raise InvalidRequest(
            f"{name} must be a number of milliseconds in [{MIN_MS}, {MAX_MS}]",
            field=name,
            code="invalid_value",
        )
    return float(said) / 1000


def _hint_s(find: Find) -> float | None:
    """The time limit of a client's own; one that cannot be read says nothing: nobody has asked for it."""
    for name in HINTS:
        said = find(name.lower())
        if said is not None and _MILLISECONDS.fullmatch(said) is not None and float(said) > 0:
            return float(said)
    return None


def _prefill(find: Find) -> PrefillChoice | Literal[""]:
    said = find(PREFILL.lower())
    for choice in PREFILL_CHOICES:
        if said == choice:
            return choice
    if said is None:
        return ""
    raise InvalidRequest(f"{PREFILL} must be one of {', '.join(PREFILL_CHOICES)}", field=PREFILL, code="invalid_value")
