"""What happens to the machines, as data: links from the start on, and what is done when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tests.machines.bed import CLIENTS, REDIS
from tests.machines.link import Conditions

GATEWAYS = ("gateway-0", "gateway-1")
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")
WORKERS = (*PREFILL, *DECODE)
ALL = (*GATEWAYS, *WORKERS, REDIS, CLIENTS)
MBIT = 125_000.0
"""Bytes per second."""


@dataclass(frozen=True)
class Change:
    """Links between all of `sources` and all of `targets` become like this; `way_back`: in both directions."""

    sources: Sequence[str]
    targets: Sequence[str]
    conditions: Conditions
    way_back: bool = True


@dataclass(frozen=True)
class Kill:
    """kill -9 of what runs on a machine, and its start after `for_s`."""

    machine: str
    for_s: float = 3.0


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of what runs on a machine, SIGCONT after `for_s`."""

    machine: str
    for_s: float


@dataclass(frozen=True)
class Replace:
    """SIGTERM of what runs on a machine, its start when it has ended, and the next step when it serves."""

    machine: str


@dataclass(frozen=True)
class Forget:
    """Redis loses everything."""


@dataclass(frozen=True)
class Refuse:
    """Redis has another password for a while, and nobody was told."""

    for_s: float


Action = Change | Kill | Stop | Replace | Forget | Refuse


@dataclass(frozen=True)
class Scenario:
    """`start`: links before any program starts, which stay. `steps`: (seconds after the streams began, action).

    `detection_s`: what of the longest gap is the time until silence is noticed, or the disturbance itself.
    """

    name: str
    start: Sequence[Change] = ()
    steps: Sequence[tuple[float, Action]] = ()
    run_s: float = 8.0
    detection_s: float = 3.0
    longest_gap_s: float = 8.0
    quiet_s: float = 0.0
    """Before the streams begin nothing is sent for as long."""
    short: bool = False
    """Part of the selection that runs in CI."""
    flags: dict[str, Sequence[str]] = field(default_factory=dict)
    has_tls: bool = False
    clocks: dict[str, float] = field(default_factory=dict)
    """By how many seconds the wall clocks of programs are ahead."""

    @property
    def needs_own_cluster(self) -> bool:
        return bool(self.start or self.flags or self.clocks)


def _silent(machine: str, seconds: float, conditions: Conditions, **ways: bool) -> list[tuple[float, Action]]:
    """All links of a machine are like this for a while."""
    others = [other for other in ALL if other not in (machine, CLIENTS)]
    inwards, outwards = ways.get("inwards", True), ways.get("outwards", True)
    steps: list[tuple[float, Action]] = []
    for at_s, now in ((1.0, conditions), (1.0 + seconds, Conditions())):
        if outwards:
            steps.append((at_s, Change([machine], others, now, way_back=False)))
        if inwards:
            steps.append((at_s, Change(others, [machine], now, way_back=False)))
    return steps


def _far_redis(name: str, ms: float, *, at_start: bool) -> Scenario:
    change = Change(GATEWAYS, [REDIS], Conditions(delay_s=ms / 2000))
    if at_start:
        return Scenario(name, start=[change])
    return Scenario(name, steps=[(0.5, change)])


def _all_links(name: str, conditions: Conditions, **more: float) -> Scenario:
    return Scenario(
        name, steps=[(0.5, Change((*GATEWAYS, *WORKERS), (*GATEWAYS, *WORKERS, REDIS), conditions))], **more
    )  # type: ignore[arg-type]


def _made() -> list[Scenario]:
    made = [Scenario("undisturbed")]
    for ms in (1, 10, 24, 40, 80, 200):
        made.append(_far_redis(f"redis {ms} ms from the gateways, from the start", ms, at_start=True))
    for ms in (40, 200):
        made.append(_far_redis(f"redis becomes {ms} ms far", ms, at_start=False))
    for ms in (5, 20, 50, 100):
        made.append(_all_links(f"{ms} ms between all", Conditions(delay_s=ms / 2000), longest_gap_s=10.0))
    for mbit in (20, 100, 1000):
        name = f"{mbit} Mbit/s to the decode workers"
        slow = Change(PREFILL, DECODE, Conditions(bytes_per_s=mbit * MBIT, delay_s=0.001))
        made.append(Scenario(name, start=[slow], longest_gap_s=15.0 if mbit < 50 else 8.0))
    for percent in (0.5, 2, 5):
        made.append(_all_links(f"{percent} % loss", Conditions(loss=percent / 100, delay_s=0.001), longest_gap_s=12.0))
    made.append(_all_links("5 % reordered", Conditions(reordered=0.05, delay_s=0.005)))
    for machine in ("gateway-0", "prefill-0", "decode-0", REDIS):
        for seconds in (2.0, 6.0):
            silent = _silent(machine, seconds, Conditions(is_frozen=True))
            made.append(Scenario(f"{machine} frozen {seconds:g} s", steps=silent, run_s=seconds + 6))
        for seconds in (2.0, 20.0):
            cut = _silent(machine, seconds, Conditions(is_cut=True))
            is_short = machine == "decode-0" and seconds == 2.0
            # A gateway that reaches no worker keeps its clients for as long as answers wait for workers.
            gap_s = seconds + 4.0 if machine in GATEWAYS else 0.0
            name, allowed_s = f"{machine} cut {seconds:g} s", max(gap_s, Scenario.longest_gap_s)
            made.append(Scenario(name, steps=cut, run_s=seconds + 6, short=is_short, longest_gap_s=allowed_s))
        made.append(
            Scenario(
                f"{machine} hears nothing 6 s",
                steps=_silent(machine, 6.0, Conditions(is_cut=True), outwards=False),
                run_s=12,
            )
        )
        made.append(
            Scenario(
                f"{machine} is not heard 6 s",
                steps=_silent(machine, 6.0, Conditions(is_cut=True), inwards=False),
                run_s=12,
            )
        )
    for machine in (*GATEWAYS, *WORKERS, REDIS):
        made.append(Scenario(f"kill {machine}", steps=[(1.0, Kill(machine))], run_s=10))
        made.append(Scenario(f"stop {machine} 4 s", steps=[(1.0, Stop(machine, 4.0))], run_s=12))
    for machine in ("decode-0", REDIS):
        silent = _silent(machine, 60.0, Conditions(is_cut=True))
        made.append(Scenario(f"{machine} cut 60 s", steps=silent, run_s=66))
    alone = [(at_s, Change(["gateway-0"], [REDIS], Conditions(is_cut=at_s < 60))) for at_s in (1.0, 61.0)]
    made.append(Scenario("redis cut 60 s from gateway-0 alone", steps=alone, run_s=66))
    made.append(Scenario("redis emptied", steps=[(1.0 + n, Forget()) for n in range(6)], run_s=12))
    made.append(Scenario("redis refuses the password 6 s", steps=[(1.0, Refuse(6.0))], run_s=14))
    for seconds in (30.0, 3600.0):
        ahead = {machine: seconds * (-1) ** n for n, machine in enumerate((*GATEWAYS, *WORKERS))}
        made.append(Scenario(f"clocks {seconds:g} s ahead and behind", clocks=ahead))
    made.append(Scenario("clocks 3600 s apart, kill decode-0", clocks=ahead, steps=[(1.0, Kill("decode-0"))], run_s=10))
    made.append(
        Scenario(
            "a firewall that forgets after 2 s",
            start=[Change(ALL, ALL, Conditions(forgets_after_s=2.0))],
            quiet_s=8.0,
            longest_gap_s=2.0,
        )
    )
    made.append(
        Scenario(
            "large packets vanish between workers",
            start=[Change(PREFILL, DECODE, Conditions(max_packet_bytes=1300))],
            longest_gap_s=8.0,
        )
    )
    rolling = [(1.0 + 4.0 * n, Replace(machine)) for n, machine in enumerate((*WORKERS, *GATEWAYS))]
    made.append(Scenario("rolling replacement", steps=rolling, run_s=30))
    made += _with_tls({scenario.name: scenario for scenario in made})
    return made


def _with_tls(plain: dict[str, Scenario]) -> list[Scenario]:
    """Some again, with mutual TLS between all machines and certificates for their names."""
    again = (
        "undisturbed",
        "20 ms between all",
        "2 % loss",
        "decode-0 cut 2 s",
        "prefill-0 cut 20 s",
        "decode-0 frozen 6 s",
        "kill decode-0",
        "kill prefill-0",
        "kill gateway-0",
        "kill redis",
        "rolling replacement",
    )
    made = [replace(plain[name], name=f"TLS: {name}", has_tls=True, short=False) for name in again]
    far = Change((*GATEWAYS, *WORKERS), [REDIS], Conditions(delay_s=0.04))
    kill = Scenario("TLS: redis 80 ms far, kill decode-0", start=[far], steps=[(1.0, Kill("decode-0"))], run_s=10)
    made.append(replace(kill, has_tls=True, short=True))
    ahead = {"gateway-0": 3600.0, "prefill-0": -3600.0, "decode-1": 3600.0}
    return [*made, Scenario("TLS: clocks 3600 s ahead and behind", clocks=ahead, has_tls=True)]


SCENARIOS = {scenario.name: scenario for scenario in _made()}
