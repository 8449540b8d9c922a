"""Workers in rotation as a router sees them: measured speeds where they differ from the usual, and what is booked."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.topology.member import Member
from gateway.topology.session import WorkerSession
from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_LINK,
    DEFAULT_PREFILL,
    DecodeSpeed,
    LinkSpeed,
    PrefillSpeed,
)
from services.scheduling.routing.views import Views, WorkerView

ALIKE = 1.5
"""Speeds of workers that differ by less than this factor differ by chance."""
SHORT_WAY_S = 0.02
"""The time of a MiB above which a link has a figure of its own, however little that differs from the usual one."""
USUAL_S = 0.25
"""How long the usual speeds are cached."""
FRESH_S = 3.0
"""A worker that has had nothing to do for longer may have become another one."""
S = TypeVar("S", PrefillSpeed, DecodeSpeed, LinkSpeed)


@dataclass(frozen=True, slots=True)
class UsualSpeeds:
    """Speeds of the median worker. Those of a worker that are not far from them count as the same.

    One of two workers that are alike always measures a little less, and would get everything. A worker that has
    measured nothing yet, or nothing for a while, is taken for a usual one, or it would never be asked. `local` is the
    speed of decode workers that compute prompts. `decodes` are the different speeds among decode workers.
    """

    prefill: PrefillSpeed
    local: PrefillSpeed
    decode: DecodeSpeed
    link: LinkSpeed
    decodes: frozenset[DecodeSpeed] = frozenset()


NOTHING_MEASURED = UsualSpeeds(DEFAULT_PREFILL, DEFAULT_PREFILL, DEFAULT_DECODE, DEFAULT_LINK)


class Rotation:
    """The workers in rotation, and what holds for all of them together."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        records = [member.record for member in members]
        self.ids = [record.id for record in records]
        self.max_sequence_tokens = max((record.max_sequence_tokens for record in records), default=None)
        self.kv_bytes_per_token = max((record.kv_bytes_per_token for record in records), default=0)
        self.layouts = {(record.layout_fingerprint, record.page_size) for record in records}
        self.identities = {record.identity_key for record in records}
        self.regions = {record.region for record in records}

    def near_ids(self, region: str) -> set[str]:
        """Returns the workers that are in a region or in none."""
        return {member.record.id for member in self.members if member.record.region in (region, "")}

    def views(self, usual: UsualSpeeds, prefill: PrefillSpeed, prompt: tuple[int, int], now_s: float) -> Views:
        """Returns the workers as a router sees them; `prefill` is the usual speed of the role with prompts."""
        return Views(self.ids, functools.partial(_view, self.members, (usual, prefill, prompt, now_s - FRESH_S)))


class ModelWorkers:
    """The workers of one model in rotation, and what holds for both roles together, until a worker comes or goes."""

    def __init__(self, prefill: Rotation, decode: Rotation) -> None:
        self.prefill, self.decode = prefill, decode
        self.layouts = prefill.layouts | decode.layouts
        self.identities = prefill.identities | decode.identities
        self.regions = prefill.regions | decode.regions
        self._fitting: dict[str, list[Member]] = {}
        """The prefill workers whose pages fit decode workers, by the `identity_key` of these, once it was asked."""
        self.usual = NOTHING_MEASURED
        self.usual_at_s = -math.inf
        """When the usual speeds were found."""

    def fitting(self, bound_to: str, may_go_on: Callable[[str, str], bool]) -> list[Member]:
        """Returns the prefill workers whose pages fit decode workers with this `identity_key`."""
        fitting = self._fitting.get(bound_to)
        if fitting is None:
            members = self.prefill.members
            fitting = [member for member in members if may_go_on(member.record.identity_key, bound_to)]
            self._fitting[bound_to] = fitting
        return fitting

    def held_to(self, regions: frozenset[str]) -> frozenset[str] | None:
        """Returns the regions among these that some worker is in; None where none is in another one.

        Clients may name any: those that no worker has would make lanes without end.
        """
        return None if self.regions <= regions else regions & self.regions

    def is_spread(self, region: str) -> bool:
        """Returns whether some worker is in another region than this one."""
        return bool(region) and not self.regions <= {region, ""}


def find_usual(prefillers: Sequence[Member], decoders: Sequence[Member], now_s: float) -> UsualSpeeds:
    """Returns the usual speeds among workers of one model."""
    prefills, decodes = [member.load for member in prefillers], [member.load for member in decoders]
    prefill = _usual((load.prefill_speed for load in prefills), _prefill_s)
    local = _usual((load.prefill_speed for load in decodes), _prefill_s)
    decode = _usual((load.decode_speed for load in decodes), _step_s) or DEFAULT_DECODE
    return UsualSpeeds(
        prefill=prefill or local or DEFAULT_PREFILL,
        local=local or prefill or DEFAULT_PREFILL,
        decode=decode,
        decodes=frozenset(_decode_speed(member, decode, now_s - FRESH_S) for member in decoders),
        link=_usual((load.link_speed for load in itertools.chain(prefills, decodes)), _transfer_s) or DEFAULT_LINK,
    )


def _prefill_s(speed: PrefillSpeed) -> float:
    return speed.time_s(512)


def _step_s(speed: DecodeSpeed) -> float:
    return speed.step_s(1)


def _transfer_s(speed: LinkSpeed) -> float:
    return speed.time_s(1 << 20)


def _usual(speeds: Iterable[S | None], time_s: Callable[[S], float]) -> S | None:
    measured = sorted((speed for speed in speeds if speed is not None), key=time_s)
    return measured[(len(measured) - 1) // 2] if measured else None


def _own(speed: S | None, usual: S, time_s: Callable[[S], float]) -> S:
    """Returns a worker's own speed where it is not a usual one, else the usual speed."""
    if speed is None or time_s(usual) / ALIKE < time_s(speed) < time_s(usual) * ALIKE:
        return usual
    return speed


def _decode_speed(member: Member, usual: DecodeSpeed, fresh_since_s: float) -> DecodeSpeed:
    is_fresh = member.session.has_worked_since(fresh_since_s)
    return _own(member.load.decode_speed, usual, _step_s) if is_fresh else usual


def _view(
    members: Sequence[Member], seen_by: tuple[UsualSpeeds, PrefillSpeed, tuple[int, int], float], index: int
) -> WorkerView:
    member, (usual, prefill, prompt, fresh_since_s) = members[index], seen_by
    load, session = member.load, member.session
    books, is_fresh = session.books, session.has_worked_since(fresh_since_s)
    if books.is_empty:
        # This holds for nearly all of many workers at any moment. Such a worker looks alike to every request.
        steps_left, links = session.steps_left(), session.links
        state = (load, usual, prefill, is_fresh, session.num_open_attempts, member.record, links, steps_left)
        if member.seen is None or member.seen[0] != state:
            member.seen = state, _new_view(member, usual, prefill, prompt, is_fresh=is_fresh)
        return member.seen[1]
    return _new_view(member, usual, prefill, prompt, is_fresh=is_fresh)


def _new_view(
    member: Member, usual: UsualSpeeds, prefill: PrefillSpeed, prompt: tuple[int, int], *, is_fresh: bool
) -> WorkerView:
    load, record, session = member.load, member.record, member.session
    books = session.books
    tokens_ahead, num_less_urgent = books.around(prompt, load.waiting_tokens)
    return WorkerView(
        worker_id=record.id,
        incarnation=record.incarnation,
        pages_total=load.pages_total,
        pages_available=load.pages_free + load.pages_cached - load.pages_promised - books.pages,
        num_requests=max(load.running + load.waiting, session.num_open_attempts + books.requests),
        num_less_urgent=num_less_urgent,
        waiting_tokens=tokens_ahead,
        max_sequence_tokens=record.max_sequence_tokens,
        num_running=load.running,
        steps_left=session.steps_left(),
        context_tokens=load.context_tokens,
        region=record.region,
        can_pull=record.pulls,
        tenants=frozenset(record.tenants),
        pool=record.pool,
        page_size=record.page_size,
        prefill_speed=_own(load.prefill_speed, prefill, _prefill_s) if is_fresh else prefill,
        decode_speed=_own(load.decode_speed, usual.decode, _step_s) if is_fresh else usual.decode,
        link_speed=_own(load.link_speed, usual.link, _transfer_s) if is_fresh else usual.link,
        links=_links(session, usual.link) if session.links or books.sending else session.links,
        measured=load.prefill_speed if is_fresh else None,
    )


def _links(session: WorkerSession, usual: LinkSpeed) -> PeerLinks:
    """Returns the links as their worker has measured them, with the bytes under way and ours that soon will be."""
    links = {worker_id: _own_link(link, usual) for worker_id, link in session.links.items()}
    for worker_id, num_bytes in session.books.sending.items():
        link = links.get(worker_id) or PeerLink(usual.latency_s, usual.bytes_per_s)
        links[worker_id] = PeerLink(link.latency_s, link.bytes_per_s, link.underway_bytes + num_bytes)
    return PeerLinks(links)


def _own_link(link: PeerLink, usual: LinkSpeed) -> PeerLink:
    own_s = _transfer_s(LinkSpeed(link.latency_s, link.bytes_per_s))
    if own_s > SHORT_WAY_S or not _transfer_s(usual) / ALIKE < own_s < _transfer_s(usual) * ALIKE:
        return link
    return PeerLink(usual.latency_s, usual.bytes_per_s, link.underway_bytes)
