"""Where a text may be computed: the prefill workers that have room for it, and the place that it books at one of them.

Changes nothing but what is booked. Knows no queue, and not what becomes of a text.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Set

from gateway.requests.call import AnswerSpec
from gateway.requests.dispatch import audience_of
from gateway.requests.lifecycle import Requests
from gateway.requests.placing import held_to
from gateway.topology.members import Topology
from gateway.topology.session import PrefillSession
from services.cluster.registry import WorkerRecord
from services.runtime.errors import InvalidRequest, NotOffered, TandemError, WorkerUnavailable
from services.scheduling.entry import QueueEntry, ServiceClass

MAX_AHEAD_TOKENS = 4096
"""Tokens that a worker is given by this gateway's embeddings before it has computed any of them: some steps."""
LEAST_COST_TOKENS = 64
"""What a text costs at least, of these."""
NO_WORKER_RETRY_S = 2.0


class Place:
    """What one text has booked at a worker, until the block is left."""

    def __init__(
        self, session: PrefillSession, prompt: tuple[int, int], *, ahead: Counter[str], on_leave: Callable[[], None]
    ) -> None:
        self.session = session
        self._prompt = prompt
        self._ahead = ahead
        self._on_leave = on_leave
        session.books.add_prompt(prompt)
        ahead[session.peer.incarnation] += _cost(prompt[1])

    def leave(self) -> None:
        """Gives the place back."""
        incarnation = self.session.peer.incarnation
        self.session.books.remove_prompt(self._prompt)
        self._ahead[incarnation] -= _cost(self._prompt[1])
        if not self._ahead[incarnation]:
            del self._ahead[incarnation]
        self._on_leave()

    def __enter__(self) -> "Place":
        return self

    def __exit__(self, *raised: object) -> None:
        self.leave()


class Choice:
    """The workers that one text may go to. `tried` have failed it; `ahead` is what each was given.

    `far_s` gives the seconds to a region.
    """

    def __init__(
        self,
        spec: AnswerSpec,
        requests: Requests,
        *,
        topology: Topology,
        tried: Set[str],
        ahead: Counter[str],
        far_s: Callable[[str], float],
    ) -> None:
        facts = spec.facts
        self._topology = topology
        self._requests = requests
        self._spec = spec
        self._tried = tried
        self._ahead = ahead
        self._num_tokens = len(spec.prompt_token_ids)
        self._class = ServiceClass.from_name(facts.service_class)
        pool = topology.pools.of(facts.service_class, self._num_tokens)
        assert pool is not None, "the length of the prompt is known"
        self._audience = audience_of(facts, pool)
        self._far_s = far_s
        self.lane = topology.lane_of(spec.model, self._audience)
        self.prompt = (int(self._class), self._num_tokens)

    def entry(self) -> QueueEntry:
        """Returns what the queue knows of the text."""
        spec = self._spec
        prompt_s = self._topology.usual_speeds(spec.model).prefill.time_s(self._num_tokens)
        return QueueEntry(
            key=spec.request_id,
            service_class=self._class,
            tenant=spec.facts.tenant,
            cost_tokens=self._num_tokens,
            arrived_s=spec.arrived_s,
            deadline_s=spec.deadline.at_s,
            service_s=prompt_s,
            level=spec.facts.priority,
            prompt_s=prompt_s,
        )

    def candidates(self) -> set[str]:
        """Returns the ids of the workers that can compute it, with or without room."""
        return self._able() & self._topology.open_ids("prefill", self._spec.model, self._audience)

    def best(self, kept: Set[str]) -> PrefillSession | None:
        """Returns the worker that would have computed it first, of those with room and not `kept`; None: none has."""
        ids = self.candidates()
        out = {worker_id for worker_id, circuit in self._requests.circuits().items() if circuit.state == "open"}
        ids = (ids - out or ids) - kept
        topology, model = self._topology, self._spec.model
        usual = topology.usual_speeds(model)
        views = topology.workers(model).prefill.views(usual, usual.prefill, self.prompt, topology.now_s()).only(ids)
        with_room = [view for view in views if self._has_room(view.incarnation)]
        if not with_room:
            return None
        view = min(
            with_room,
            key=lambda view: (
                view.incarnation in self._tried,
                self._far_s(view.region) + view.prefill_speed.time_s(view.waiting_tokens + self._num_tokens),
            ),
        )
        with contextlib.suppress(WorkerUnavailable):
            return topology.prefill_session(view.worker_id)
        return None  # It has just gone.

    @property
    def may_come(self) -> bool:
        """Whether a worker with room may come: one computes such texts now, is away for a moment, or is to wake."""
        model = self._spec.model
        return (
            bool(self.candidates())
            or self._topology.is_away("prefill", model, audience=self._audience)
            or (self._requests.turns.takes_turns(model) and (bool(self._able()) or not self._records()))
        )

    def why_none(self) -> TandemError:
        """Returns the error of a text that no worker will compute."""
        records = self._records()
        embedding = [record for record in records if record.embeds]
        if embedding and all(record.max_sequence_tokens < self._num_tokens for record in embedding):
            return InvalidRequest(
                "a text is longer than any worker can compute", field="input", code="context_length_exceeded"
            )
        if records and not embedding:
            return NotOffered("the engine of the model's prefill workers gives no embeddings", field="model")
        what = f"no prefill worker is ready{held_to(self._spec)}"
        return WorkerUnavailable(what, retry_after_s=NO_WORKER_RETRY_S)

    def _records(self) -> list[WorkerRecord]:
        return [member.record for member in self._topology.workers(self._spec.model).prefill.members]

    def _able(self) -> set[str]:
        """Returns the ids of the workers that could compute it if they had work."""
        return {one.id for one in self._records() if one.embeds and one.max_sequence_tokens >= self._num_tokens}

    def _has_room(self, incarnation: str) -> bool:
        ahead = self._ahead.get(incarnation, 0)
        return not ahead or ahead + _cost(self._num_tokens) <= MAX_AHEAD_TOKENS


def _cost(num_tokens: int) -> int:
    return max(LEAST_COST_TOKENS, num_tokens)
