"""What the gateway knows of workers, for Prometheus: one look at all of them for each scrape.

Counts nothing itself but the work that workers took.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.topology.counts import CountsCollector
from gateway.topology.member import ROLES, Member
from gateway.topology.presence import Presence
from gateway.topology.troubles import Kind, Troubles
from services.runtime.breaker import CircuitState
from services.runtime.worker_state import WorkerState
from services.scheduling.gpu_judgement import GpuState

_PAGE_STATES = ("free", "cached", "reserved", "used")
_TAKEN_PAGE_STATES = ("reserved", "used")


class WorkerFigures(Collector):
    """To be registered. Shows `members` as `show` was given them last; a worker that has left is in no figure."""

    def __init__(self) -> None:
        self.circuit: Callable[[str], CircuitState] = lambda worker_id: "closed"
        """Returns the state of a worker's circuit."""
        self.presence = Presence()
        self.trouble_counts: Callable[[], Mapping[Kind, int]] = Troubles().counts
        self._members: Sequence[Member] = ()
        self._sent: Counter[tuple[str, str]] = Counter()
        """Attempts that a worker took, by role and id."""
        self._counts = CountsCollector()

    def note_sent(self, role: str, worker_id: str) -> None:
        """Notes that a worker took an attempt."""
        self._sent[role, worker_id] += 1

    def show(self, members: Sequence[Member]) -> None:
        """Shows these workers from now on, and forgets others: some come back with a new name each time."""
        self._members = members
        whose = {(member.record.role, member.record.id): member for member in members}
        self._counts.shown = {
            key: member.session.counts for key, member in whose.items() if member.session.counts is not None
        }
        for gone in self._sent.keys() - whose.keys():
            del self._sent[gone]

    def kv_use(self, models: Iterable[str]) -> dict[str, float]:
        """Returns by model the share of its decode workers' KV pages that is taken; 1 where no page exists."""
        taken, total = Counter[str](), Counter[str]()
        for member in self._members:
            if member.record.role == "decode":
                taken[member.record.model] += _pages(member, _TAKEN_PAGE_STATES)
                total[member.record.model] += _pages(member, _PAGE_STATES)
        return {model: taken[model] / total[model] if total[model] else 1.0 for model in models}

    def collect(self) -> Iterable[Metric]:
        """Returns what a scrape gets."""
        yield from self._all_workers()
        yield from self._each_worker()
        yield from self._gpus()
        yield from self._counts.collect()

    def _all_workers(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily(
            "tandem_workers",
            "Workers by role and state; gone: vanished without a word in the last 10 minutes.",
            labels=("role", "state"),
        )
        expected = GaugeMetricFamily(
            "tandem_expected_workers", "Workers of a role that --expect names.", labels=("role",)
        )
        vanished = CounterMetricFamily(
            "tandem_vanished_workers",
            "Workers that vanished without having said that they leave, by role.",
            labels=("role",),
        )
        troubles = GaugeMetricFamily(
            "tandem_troubles", "Troubles of this moment by kind; /cluster has their causes.", labels=("kind",)
        )
        numbers = Counter((member.record.role, member.state) for member in self._members)
        for role in ROLES:
            for state in WorkerState:
                workers.add_metric((role, state.value), numbers[role, state])
            workers.add_metric((role, "gone"), sum(gone.worker.role == role for gone in self.presence.gone))
            vanished.add_metric((role,), self.presence.num_vanished[role])
        for expected_role, number in self.presence.expected.items():
            expected.add_metric((expected_role,), number)
        for kind, number in self.trouble_counts().items():
            troubles.add_metric((kind,), number)
        return workers, expected, vanished, troubles

    def _each_worker(self) -> Iterable[Metric]:
        whose = ("role", "worker")
        info = GaugeMetricFamily(
            "tandem_worker_info",
            "1 for each worker: its model, version, host and region, and its layout, which must be that of its peers.",
            labels=(*whose, "model", "version", "host", "region", "layout"),
        )
        devices = GaugeMetricFamily(
            "tandem_worker_devices", "Devices, or processes on a CPU, that share a worker's model.", labels=whose
        )
        pages = GaugeMetricFamily("tandem_kv_pages", "KV pages by worker and state.", labels=(*whose, "state"))
        sequences = GaugeMetricFamily(
            "tandem_worker_sequences", "Sequences of a worker by state: running, waiting.", labels=(*whose, "state")
        )
        circuits = GaugeMetricFamily(
            "tandem_worker_circuit",
            "1 for the state of a worker's circuit: closed, open (kept from work), half_open (kept from work and "
            "tried), suspected (it should get no work, and does, since no more of its role can be spared).",
            labels=(*whose, "state"),
        )
        sent = CounterMetricFamily(
            "tandem_sent_attempts", "Attempts that a worker took, by role and worker.", labels=whose
        )
        for member in self._members:
            record, load = member.record, member.load
            key = (record.role, record.id)
            facts = (record.model, record.version, record.host, record.region, record.layout_fingerprint)
            info.add_metric((*key, *facts), 1)
            devices.add_metric(key, max(1, record.tensor_parallel) * max(1, record.pipeline_parallel))
            for page_state in _PAGE_STATES:
                pages.add_metric((*key, page_state), _pages(member, (page_state,)))
            sequences.add_metric((*key, "running"), load.running)
            sequences.add_metric((*key, "waiting"), load.waiting)
            circuit = self.circuit(record.id)
            for circuit_state in get_args(CircuitState):
                circuits.add_metric((*key, circuit_state), circuit_state == circuit)
        for sent_to, number in self._sent.items():
            sent.add_metric(sent_to, number)
        return info, devices, pages, sequences, circuits, sent

    def _gpus(self) -> Iterable[Metric]:
        whose = ("role", "worker")
        states = GaugeMetricFamily(
            "tandem_worker_gpu",
            "1 for the state that a worker's GPU is in: ok, degraded, out. Only of workers that can ask theirs.",
            labels=(*whose, "state"),
        )
        temperatures = GaugeMetricFamily(
            "tandem_worker_gpu_temperature_celsius", "Temperature of a worker's GPU.", labels=whose
        )
        memory = GaugeMetricFamily(
            "tandem_worker_gpu_memory_bytes", "Memory of a worker's GPU: free, total.", labels=(*whose, "state")
        )
        errors = GaugeMetricFamily(
            "tandem_worker_gpu_uncorrected_errors",
            "Memory errors of a worker's GPU that were not corrected, since its driver was loaded.",
            labels=whose,
        )
        for member in self._members:
            facts, key = member.gpu_facts, (member.record.role, member.record.id)
            if facts is None:
                continue
            for state in GpuState:
                states.add_metric((*key, state.value), state is member.gpu.state)
            if facts.temperature_c is not None:
                temperatures.add_metric(key, facts.temperature_c)
            if facts.num_uncorrected is not None:
                errors.add_metric(key, facts.num_uncorrected)
            for name, num_bytes in (("free", facts.free_bytes), ("total", facts.total_bytes)):
                if num_bytes is not None:
                    memory.add_metric((*key, name), num_bytes)
        return states, temperatures, memory, errors


def _pages(member: Member, states: Iterable[str]) -> int:
    load = member.load
    return sum(getattr(load, f"pages_{state}") for state in states)
