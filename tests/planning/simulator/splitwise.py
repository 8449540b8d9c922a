"""What splitwise-sim simulates: BLOOM-176B on two kinds of machines, as workers of ours, and its requests."""

from planning.simulator.cluster import ClusterSpec
from planning.simulator.jobs import WHOLE, WorkerSpec
from planning.simulator.laws import StepLaw
from planning.simulator.profiles import PROFILES_FOLDER, profile
from planning.simulator.traces import Trace, read_trace
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.prediction import LinkSpeed
from services.scheduling.routing.price import RoutingSettings

FOLDER = PROFILES_FOLDER / "splitwise"
DESIGNS = {
    "Baseline-A100": ("a100", 0, 70),
    "Baseline-H100": ("h100", 0, 40),
    "Splitwise-HH(25P,15T)": ("h100", 25, 15),
}
"""The kind of machine, and how many there are for prompts and for answers; without any for prompts, all do both."""


def law(chip: str) -> StepLaw:
    return profile(f"splitwise-{chip}-bloom-176b-tp8").law


def requests(rate: int) -> Trace:
    return read_trace(FOLDER / f"conv_{rate}.csv.gz")


def machines(design: str) -> ClusterSpec:
    """Returns a design without a limit of memory, whose links take no time."""
    chip, num_prefill, num_decode = DESIGNS[design]
    worker = WorkerSpec(
        num_pages=10**6,
        page_size=16,
        law=law(chip),
        link=LinkSpeed(0.0, 1e13),
        kv_bytes_per_token=1,
        chunk_tokens=2048,
        max_batch=512,
        chunking=WHOLE,
    )
    return separate(worker, num_prefill, num_decode)


def separate(worker: WorkerSpec, num_prefill: int, num_decode: int) -> ClusterSpec:
    """Returns a cluster in which no decode worker computes a prompt where there are prefill workers."""
    return ClusterSpec(
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill=worker,
        decode=worker,
        max_sequence_tokens=10**6,
        max_waiting=10**6,
        routing=RoutingSettings(disaggregation=DisaggregationSettings(local_prefill_tokens=0)),
    )
