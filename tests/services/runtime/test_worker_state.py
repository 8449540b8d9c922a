from protos import cluster_pb2
from services.runtime.worker_state import SAID_BY_WORKERS, WorkerState


def test_messages_have_the_same_states():
    names = {name.removeprefix("WORKER_STATE_") for name, _ in cluster_pb2.WorkerState.items()}
    assert names == {"UNSPECIFIED", *WorkerState.__members__}


def test_workers_say_what_they_do_and_gateways_what_they_miss():
    assert set(WorkerState) - set(SAID_BY_WORKERS) == {WorkerState.LOST, WorkerState.LEFT_OUT}
