"""What this gateway's own requests say about the health of workers: answers in time, late, never, or wrong.

A *stage* is something that a worker has been asked for and the time at which it should come: the word that a request is
admitted, the first token of a prompt, the next tokens of an answer. Expectations are those of the worker's role, not
its own: what a worker measures of itself follows its fault. Short times are not compared to the millisecond, since they
consist mostly of this process and the network. For that reason, an admission counts for silence only.

A handoff is no stage of a worker. The time of a prompt is that of the prefill worker's own steps, without the waits for
its peer, and the decode worker's time begins when it has the pages. What a handoff takes is held against the pair.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.topology.pacing import Pace
from services.runtime.breaker import CircuitState
from services.runtime.clock import Clock
from services.scheduling.gpu_judgement import GpuJudgement, GpuState
from services.scheduling.handoff_times import HandoffTimes, SlowPair
from services.scheduling.health import Circuit, WorkerHealth

FLOOR_S = 0.01
"""What is added to the expected time and to the real one before the two are compared."""
PROBE_FLOOR_S = 0.05
"""The floor for a probe, which is small and decides alone: a busy machine must not keep out a recovered worker."""
LEAST_WEIGHT = 0.1
"""The weight of a GPU that is out, but used since too many are: it gets what others cannot take soon."""
TOKENS_PER_STAGE = 16
"""How many tokens of an answer make one stage: single gaps say little."""
ONE_PEER_S = 1.5
"""Least expected time of a worker whose stages all depend on one peer. Its patience is a multiple: until then the
worker has reported an error about the peer, if that is what it waits for."""

logger = logging.getLogger(__name__)


class Stage(msgspec.Struct, eq=False):
    """Something that is expected of a worker. `probe`: the number of the probe that it decides, or 0.

    `peer_id` is the worker whose part, or the path to which, the stage may be waiting for. Otherwise it is empty.
    """

    worker_id: str
    began_s: float
    expected_s: float
    probe: int = 0
    peer_id: str = ""


class WorkerWatch:
    """The stages under way at all workers, and the judgement that follows.

    `pace` says how long tokens wait in this process, which is not their workers' fault.
    """

    def __init__(self, clock: Clock, pace: Pace | None = None) -> None:
        self._clock = clock
        self._pace = pace or Pace()
        self._health = WorkerHealth(before_judging=self._note_loads)
        self._open: dict[str, set[Stage]] = {}
        """What is expected of each worker now."""
        self._handoffs = HandoffTimes()
        self.num_openings: Counter[str] = Counter()
        """How often workers were kept from work, by the kind of cause."""

    @property
    def num_ejected(self) -> int:
        """The number of workers that should get no work, or are tried with one request."""
        return self._health.num_ejected

    def circuit(self, worker_id: str) -> CircuitState:
        """Whether the worker gets new work."""
        return self._health.circuit(worker_id)

    def circuits(self) -> "list[CircuitReport]":
        """Returns all workers whose circuit is not closed, with the cause, its figures and its age."""
        now_s = self._clock.monotonic()
        return [CircuitReport.of(circuit, now_s) for circuit in self._health.circuits()]

    def note_gpu(self, worker_id: str, judgement: GpuJudgement) -> None:
        """Takes the judgement of the worker's GPU, which holds from now on."""
        self._health.note_gpu(worker_id, judgement, self._clock.monotonic())

    def note_gone(self, worker_id: str) -> None:
        """Notes that the worker is no longer registered or connected."""
        self._handoffs.forget(worker_id)
        self._health.note_gone(worker_id, self._clock.monotonic())

    @property
    def has_weak_gpus(self) -> bool:
        """Whether the GPU of any worker is degraded or out."""
        return bool(self._health.weak_gpus)

    def gpu_weights(self, group: Sequence[str]) -> Mapping[str, float]:
        """Returns, for each worker whose GPU slows it, its share of the best worker's speed.

        Where all GPUs are in equal trouble there is nothing better to use, and no worker counts as slower.
        """
        weak = self._health.weak_gpus
        weights = {one: max(LEAST_WEIGHT, weak[one].weight) for one in group if one in weak}
        best = 1.0 if len(weights) < len(group) else max(weights.values(), default=1.0)
        return {one: weight / best for one, weight in weights.items() if weight < best}

    def usable(self, group: Sequence[str]) -> Sequence[str]:
        """Returns the workers of a role that get new work: at least half of them, and at least one."""
        health = self._health
        out = health.out_of_rotation(group, self._clock.monotonic())
        if health.has_changes:
            for change in health.take_changes():
                self._tell(change)
        return [worker_id for worker_id in group if worker_id not in out] if out else group

    def last_resort(self, group: Sequence[str]) -> Sequence[str]:
        """Returns the workers of a role that a request's last attempt may use: slow and failing ones, too.

        A worker whose GPU is out may compute wrong tokens, so it stays excluded.
        """
        usable, weak_gpus = set(self.usable(group)), self._health.weak_gpus
        return [one for one in group if one in usable or one not in weak_gpus or weak_gpus[one].state != GpuState.OUT]

    def handed_off(self, pair: tuple[str, str], took_s: float, *, expected_s: float) -> None:
        """Records how long a handoff between two workers took."""
        self._handoffs.note(pair, took_s, expected_s=expected_s, now_s=self._clock.monotonic())

    def slow_pairs(self) -> list[SlowPair]:
        """Returns the pairs whose handoffs are far slower than expected, without those of workers in trouble."""
        slow = self._handoffs.slow(self._clock.monotonic())
        return [one for one in slow if all(self.circuit(worker_id) == "closed" for worker_id in one.pair)]

    def due_for_probe(self, group: Sequence[str]) -> list[str]:
        """Returns the workers that should each be tried now, to see which have recovered."""
        return self._health.due_for_probe(group, self._clock.monotonic())

    def begin_probe(self, worker_id: str, expected_s: float) -> int:
        """Notes that a request goes to a worker. Returns 0, or the number of the probe that it is."""
        return self._health.begin(worker_id, self._clock.monotonic(), expected_s=expected_s)

    def begin(self, worker_id: str, expected_s: float, *, probe: int = 0) -> Stage:
        """Begins a stage: something was asked for. One of the three calls below must end it."""
        stage = Stage(worker_id, self._clock.monotonic(), expected_s, probe)
        stages = self._open.get(worker_id)
        if stages is None:
            self._open[worker_id] = {stage}
            self._note_loads((worker_id,))
        else:
            stages.add(stage)
        return stage

    def came(self, stage: Stage) -> None:
        """Ends a stage: what was expected has arrived."""
        self.took(stage, self._clock.monotonic() - stage.began_s)

    def took(self, stage: Stage, took_s: float) -> None:
        """Ends a stage of which the worker's own part took `took_s`."""
        floor_s = PROBE_FLOOR_S if stage.probe else FLOOR_S
        ratio = (took_s + floor_s) / (stage.expected_s + self._pace.hold_s + floor_s)
        self._end(stage)
        self._health.note_success(stage.worker_id, ratio, self._clock.monotonic(), probe=stage.probe)

    def failed(self, worker_id: str, stages: Sequence[Stage]) -> None:
        """Notes one error: the worker has made a mistake or has died, whatever was expected of it."""
        mine = [stage for stage in stages if stage.worker_id == worker_id]
        for stage in mine:
            self._end(stage)
        probe = max((stage.probe for stage in mine), default=0)
        self._health.note_error(worker_id, self._clock.monotonic(), probe=probe)

    def now_s(self) -> float:
        """Returns the time by which stages are measured."""
        return self._clock.monotonic()

    def heard(self, stage: Stage, *, is_done: bool) -> None:
        """Records a sign of life of a stage's worker. If `is_done`, nothing more is outstanding, and `took` follows."""
        self._health.note_heard(stage.worker_id, self._clock.monotonic())
        if is_done:
            self._end(stage)

    def dropped(self, stage: Stage) -> None:
        """Ends a stage that is no longer waited for, through no fault of the worker's."""
        self._end(stage)
        if stage.probe:
            self.abandon_probe(stage.worker_id, stage.probe)

    def abandon_probe(self, worker_id: str, probe: int) -> None:
        """Notes that a probe has ended without saying anything about the worker."""
        self._health.note_abandoned(worker_id, probe)

    def _tell(self, change: Circuit) -> None:
        """Logs a line for each circuit that opens or closes: which worker, why, and the figures that say so."""
        cause, for_s = change.cause, round(self._clock.monotonic() - change.since_s, 1)
        which = {"worker": change.worker_id, "circuit": change.state, "cause": cause.kind}
        facts = {**which, "found": cause.words, **_rounded(cause.figures)}
        if change.state == "closed":
            logger.info("a worker is well again", extra={**facts, "after_s": for_s})
            return
        what = "a worker is kept from work"
        if change.state == "open":
            self.num_openings[cause.kind] += 1
        else:
            what = "a worker should get no work, and does: no more of its role can be spared"
        logger.warning(what, extra={**facts, "times": change.num_openings})

    def _end(self, stage: Stage) -> None:
        stages = self._open.get(stage.worker_id)
        if stages is not None and stage in stages:
            stages.remove(stage)
            if not stages:
                del self._open[stage.worker_id]
                self._note_loads((stage.worker_id,))

    def _note_loads(self, worker_ids: Sequence[str]) -> None:
        """Notes how much is expected of these workers, and within which time something of it.

        Between judgements only a worker's first and last stage matter: its silence counts from the first one.
        """
        now_s, least_s = self._clock.monotonic(), FLOOR_S + self._pace.hold_s
        for worker_id in worker_ids:
            stages = self._open.get(worker_id, ())
            soonest_s = min((stage.expected_s for stage in stages), default=0.0)
            peers = {stage.peer_id for stage in stages}
            if len(peers) == 1 and peers != {""}:
                soonest_s = max(soonest_s, ONE_PEER_S)
            self._health.note_load(worker_id, len(stages), least_s + soonest_s, now_s)


@dataclass(frozen=True, slots=True)
class CircuitReport:
    """What operators are told of a worker whose circuit is not closed.

    `cause` is one word, `words` a sentence with the `figures` in it. `for_s`: how long this has lasted. `num_openings`:
    how often it happened lately.
    """

    worker_id: str
    state: CircuitState
    cause: str
    words: str
    figures: Mapping[str, float]
    for_s: float
    num_openings: int

    @classmethod
    def of(cls, circuit: Circuit, now_s: float) -> "CircuitReport":
        """The report of a circuit as of now."""
        cause, for_s = circuit.cause, round(now_s - circuit.since_s, 1)
        figures = _rounded(cause.figures)
        return cls(circuit.worker_id, circuit.state, cause.kind, cause.words, figures, for_s, circuit.num_openings)

    def said(self) -> str:
        """Returns the report in one line, for people; the command line says the same of `/cluster`."""
        times = f", {self.num_openings} times lately" if self.num_openings > 1 else ""
        return f"{self.cause}: {self.words} (since {self.for_s:.0f} s{times})"

    def as_json(self) -> dict[str, Any]:
        """Returns the report as `/cluster` shows it beside its worker."""
        return {
            "state": self.state,
            "cause": self.cause,
            "words": self.words,
            "figures": dict(self.figures),
            "for_s": self.for_s,
            "num_openings": self.num_openings,
        }


@dataclass(frozen=True, slots=True)
class CutPairReport:
    """Two workers between which pages have not passed for `for_s` seconds. `words` is the last error."""

    prefill_id: str
    decode_id: str
    state: CircuitState
    words: str
    for_s: float


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{figure:.3g}") for name, figure in figures.items()}


class AttemptWatch:
    """The stages of one attempt: admitted, prompt computed, and the answer, some tokens at a time.

    Its probes, if it is any, are decided by what takes longest: the prompt at a prefill worker, and the first tokens of
    the answer at the decode worker. `handoff_s` and `token_s` are the expected times of the handoff and of a token.
    """

    def __init__(self, watch: WorkerWatch, decode_id: str, *, token_s: float, handoff_s: float = 0.0) -> None:
        self._watch = watch
        self._decode_id = decode_id
        self._token_s = token_s
        self._handoff_s = handoff_s
        self._stages: list[Stage] = []
        self._prompt: Stage | None = None
        self._sent_s = self._started_s = self._done_s = 0.0
        """When the prompt was sent, when its worker began with it, and when the first token came; 0 if not yet."""
        self._waits_first = False
        self._answer: Stage | None = None
        self._num_tokens = 0
        self._probes: dict[str, int] = {}

    def sent(self, worker_id: str, expected_s: float) -> None:
        """Notes that the attempt goes to a worker, which should have done its part after `expected_s`."""
        probe = self._watch.begin_probe(worker_id, expected_s)
        if probe:
            self._probes[worker_id] = probe

    def asked(self) -> Stage:
        """Starts the stage of an admission: the decode worker must reply. `answered` or `end` follows."""
        return self._begin(self._decode_id, 0.0)

    def answered(self, stage: Stage) -> None:
        """Ends the stage of an admission. Does not judge its duration, which mostly measures the network."""
        self._stages.remove(stage)
        self._watch.heard(stage, is_done=True)

    def prompt_sent(self, worker_id: str, expected_s: float, *, awaits: str = "") -> None:
        """Records that a worker computes the prompt.

        `awaits` is the worker from which it pulls a prefix before it begins.
        """
        # A probe of a decode worker is decided by the answer, which comes after the prompt.
        probe = 0 if worker_id == self._decode_id else self._probes.pop(worker_id, 0)
        self._prompt = self._begin(worker_id, expected_s, probe)
        self._sent_s, self._waits_first = self._prompt.began_s, bool(awaits)
        self._started_s = self._done_s = 0.0
        self._prompt.peer_id = awaits

    def note_opening_link(self) -> None:
        """Records that a prefill worker opens a Link before it begins with the prompt."""
        if self._prompt is not None and not self._started_s:
            self._prompt.peer_id, self._waits_first = self._decode_id, True
            self._watch.heard(self._prompt, is_done=False)

    def note_prompt_started(self) -> None:
        """Records that a prefill worker has begun with the prompt. It may wait for its peer's reservation now."""
        if self._prompt is not None and not self._started_s:
            self._started_s = self._watch.now_s()
            self._prompt.peer_id = self._decode_id
            self._watch.heard(self._prompt, is_done=False)

    def prompt_refused(self, next_id: str, *, awaits: str = "") -> None:
        """Notes that the worker did not take the prompt: nothing is expected of it, and `next_id` computes it."""
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            self._stages.remove(prompt)
            self._watch.dropped(prompt)
            self.sent(next_id, prompt.expected_s)
            self.prompt_sent(next_id, prompt.expected_s, awaits=awaits)

    def note_prompt_done(self, *, is_finished: bool = False) -> None:
        """Records that the prompt is computed. A remote one is judged at its handoff, which tells its worker's part.

        If `is_finished`, the answer ends with its first token, and no handoff follows.
        """
        prompt = self._prompt
        if prompt is None or self._done_s:
            return
        self._done_s = self._watch.now_s()
        if prompt.worker_id == self._decode_id:
            self._end_prompt(self._done_s - self._sent_s)
            self._begin_answer()
        elif is_finished:
            began_s = self._started_s if self._waits_first and self._started_s else self._sent_s
            self._end_prompt(self._done_s - began_s)
        else:
            self._watch.heard(prompt, is_done=True)

    def note_handed_off(self, chunks: Sequence[tuple[float, float, int]] = ()) -> None:
        """Records that the decode worker has the pages.

        `chunks` are the prefill worker's own steps, if it reports them: (start, duration, tokens), in seconds since the
        worker began with the prompt.
        """
        prompt = self._prompt
        if prompt is None or prompt.worker_id == self._decode_id:
            return
        self.note_prompt_done()
        now_s, done_s = self._watch.now_s(), self._done_s
        started_s = self._started_s or self._sent_s
        computing_s = max((began_s + spent_s for began_s, spent_s, _ in chunks), default=done_s - started_s)
        waited_s = 0.0 if self._waits_first else started_s - self._sent_s
        self._end_prompt(min(done_s - self._sent_s, waited_s + computing_s))
        took_s = now_s - started_s - min(computing_s, done_s - started_s)
        self._watch.handed_off((prompt.worker_id, self._decode_id), took_s, expected_s=self._handoff_s)
        if self._answer is None:
            self._begin_answer()

    def _end_prompt(self, took_s: float) -> None:
        prompt, self._prompt = self._prompt, None
        if prompt is not None:
            self._stages.remove(prompt)
            self._watch.took(prompt, took_s)

    def note_answer(self, num_tokens: int, *, is_finished: bool) -> None:
        """Notes that the decode worker generates, and how many tokens it has sent since the last call.

        The last tokens of an answer say nothing if they are fewer than a stage's, except that they end a probe.
        """
        if self._answer is None:
            self._begin_answer()
            return
        self._num_tokens += num_tokens
        is_whole = self._num_tokens >= TOKENS_PER_STAGE
        if is_whole or (is_finished and self._num_tokens and self._answer.probe):
            answer, self._answer = self._answer, None
            answer.expected_s += self._token_s * (self._num_tokens - TOKENS_PER_STAGE)
            self._stages.remove(answer)
            self._watch.came(answer)
            if not is_finished:
                self._begin_answer()

    def failed(self, worker_id: str) -> None:
        """Notes that the attempt ended through a worker's own fault; `end` follows."""
        self._watch.failed(worker_id, self._stages)
        self._stages = [stage for stage in self._stages if stage.worker_id != worker_id]

    def end(self) -> None:
        """Notes that the attempt is over: what is still expected is not waited for. May be called twice."""
        for stage in self._stages:
            self._watch.dropped(stage)
        for worker_id, probe in self._probes.items():
            self._watch.abandon_probe(worker_id, probe)
        self._stages.clear()
        self._probes.clear()
        self._prompt = self._answer = None

    def _begin_answer(self) -> None:
        self._num_tokens = 0
        probe = self._probes.pop(self._decode_id, 0)
        self._answer = self._begin(self._decode_id, self._token_s * TOKENS_PER_STAGE, probe)

    def _begin(self, worker_id: str, expected_s: float, probe: int = 0) -> Stage:
        stage = self._watch.begin(worker_id, expected_s, probe=probe)
        self._stages.append(stage)
        return stage
