"""Which workers an attempt is offered to, best first: routing, circuit breakers, and what the request has been through.

Knows no request's life; the policies themselves are in `services.scheduling`.
"""

from gateway.attempts import Attempt
from gateway.running import RunningRequest
from gateway.sessions import DecodeSession, Peer, PrefillSession, WorkerSession
from gateway.topology import Topology
from services.runtime.clock import Clock
from services.runtime.errors import InternalError, LayoutMismatch, TransferFailed, WorkerLost
from services.scheduling.breakers import Breakers
from services.scheduling.routing import Policy, WorkerView


class Candidates:
    """The choice of workers of one gateway. Breakers are kept by worker id: a crash loop makes many processes."""

    def __init__(self, topology: Topology, *, route: Policy, clock: Clock) -> None:
        self._topology = topology
        self._route = route
        self._clock = clock
        self._breakers = Breakers()
        self._last_lost: dict[str, str] = {}
        """Incarnation of each worker that was lost last: a death is one error, whatever it took with it."""
        self._num_decisions = 0

    @property
    def num_open_breakers(self) -> int:
        """Workers and pairs that are left alone now, or tried with one request."""
        return self._breakers.num_open

    def decode_workers(self, request: RunningRequest) -> list[WorkerView]:
        """Decode workers that can hold the whole sequence; those that have failed it come last."""
        generation = request.generation
        num_tokens = len(generation.prompt_token_ids) + generation.sampling.max_tokens
        fitting = [
            view for view in self._topology.decode_views(generation.model) if view.max_sequence_tokens >= num_tokens
        ]
        self._num_decisions += 1
        ordered = self._route(self._usable(fitting), self._num_decisions)
        paired = {decode for _, decode in request.avoided_pairs}
        if request.avoided or paired:
            ordered.sort(key=lambda view: (view.incarnation in request.avoided, view.incarnation in paired))
        if self._breakers.num_open:
            ordered.sort(key=lambda view: self._has_no_way_to(generation.model, view))
        return ordered

    def prefill_workers(self, request: RunningRequest, decode: Peer) -> list[PrefillSession]:
        """Prefill workers for an attempt there: first the one that may still have the prompt's pages."""
        fitting = self._topology.prefill_views(request.generation.model, decode=decode)
        views = self._with_way(self._usable(fitting), decode.worker_id)
        ordered = self._route(views, self._num_decisions)
        sessions = [self._topology.prefill_session(view.worker_id) for view in ordered]
        sessions.sort(key=lambda session: _reluctance(request, session.peer, decode))
        return sessions

    def takers(self, request: RunningRequest, giver: DecodeSession) -> list[WorkerView]:
        """Decode workers that an answer may move to with its pages."""
        views = self.decode_workers(request)
        return [view for view in views if self._topology.can_take_over(view.worker_id, giver.peer)]

    def begin(self, attempt: Attempt, prefills: list[PrefillSession]) -> None:
        """The attempt is sent there; it may be the probe of a breaker."""
        keys: list[str | tuple[str, str]] = [attempt.decode.peer.worker_id]
        if prefills:
            prefill_id = prefills[0].peer.worker_id
            keys += [prefill_id, (prefill_id, attempt.decode.peer.worker_id)]
        now_s = self._clock.monotonic()
        attempt.probes.update(key for key in keys if self._breakers.begin(key, now_s))

    def note_success(self, attempt: Attempt) -> None:
        """The decode worker generates: everybody did their part."""
        decode_id = attempt.decode.peer.worker_id
        self._breakers.succeeded(decode_id)
        if attempt.prefill is not None:
            self._breakers.succeeded(attempt.prefill.peer.worker_id)
            self._breakers.succeeded((attempt.prefill.peer.worker_id, decode_id))
        self.release(attempt)

    def note_failure(self, attempt: Attempt) -> None:
        """An attempt ended with a fault: whose breaker that concerns."""
        fault = attempt.fault
        if fault is None:
            return
        if isinstance(fault.error, TransferFailed) and attempt.prefill is not None:
            self._failed(attempt, (attempt.prefill.peer.worker_id, attempt.decode.peer.worker_id))
        elif isinstance(fault.error, LayoutMismatch) and attempt.prefill is not None:
            self._topology.exclude_pair(attempt.prefill.peer, attempt.decode.peer)
        elif isinstance(fault.error, InternalError) and fault.worker is not None:
            self._failed(attempt, fault.worker.peer.worker_id)
        elif isinstance(fault.error, WorkerLost) and fault.worker is not None:
            self._note_lost(attempt, fault.worker)
        self.release(attempt)

    def release(self, attempt: Attempt) -> None:
        """What the attempt was the probe of and has said nothing about waits for another probe."""
        for key in attempt.probes:
            self._breakers.abandoned(key)
        attempt.probes.clear()

    def _failed(self, attempt: Attempt, key: str | tuple[str, str]) -> None:
        self._breakers.failed(key, self._clock.monotonic(), is_probe=key in attempt.probes)
        attempt.probes.discard(key)

    def _note_lost(self, attempt: Attempt, worker: WorkerSession) -> None:
        peer = worker.peer
        if self._last_lost.get(peer.worker_id) != peer.incarnation:
            self._last_lost[peer.worker_id] = peer.incarnation
            self._failed(attempt, peer.worker_id)

    def _usable(self, views: list[WorkerView]) -> list[WorkerView]:
        if not self._breakers.num_open:
            return views
        usable = set(self._breakers.usable([view.worker_id for view in views], self._clock.monotonic()))
        return [view for view in views if view.worker_id in usable]

    def _with_way(self, views: list[WorkerView], decode_id: str) -> list[WorkerView]:
        """Prefill workers whose way to a decode worker is not cut; where too many are, of the others too."""
        if not self._breakers.num_open:
            return views
        pairs = [(view.worker_id, decode_id) for view in views]
        usable = {prefill_id for prefill_id, _ in self._breakers.usable(pairs, self._clock.monotonic())}
        return [view for view in views if view.worker_id in usable]

    def _has_no_way_to(self, model: str, decode: WorkerView) -> bool:
        """Whether every prefill worker's way there is cut."""
        peer = self._topology.decode_session(decode.worker_id).peer
        pairs = [(view.worker_id, decode.worker_id) for view in self._topology.prefill_views(model, decode=peer)]
        return bool(pairs) and all(self._breakers.is_open(pair) for pair in pairs)


def _reluctance(request: RunningRequest, prefill: Peer, decode: Peer) -> tuple[bool, bool]:
    has_failed = prefill.incarnation in request.avoided
    was_cut = (prefill.incarnation, decode.incarnation) in request.avoided_pairs
    return has_failed or was_cut, not request.has_kept_prompt(prefill)
