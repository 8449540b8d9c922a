"""Orders and events keep their meaning on the wire, and a worker's nonsense is the worker's fault."""

import pytest

from gateway.limits import AskedSampling, ModelLimits, complete_sampling
from gateway.topology.events import AttemptKey, Emitted, Failed, Finished, HandedOff, SequenceOrder, Unfit
from gateway.topology.wire import EVENT_READERS, sequence_spec
from protos import inference_pb2, worker_pb2
from services.runtime import status
from services.runtime.clock import Deadline
from services.runtime.errors import GrammarExhausted, InvalidRequest, NotOffered, WorkerUnavailable

LIMITS = ModelLimits(vocab_size=10_000, context_length_tokens=10_000)


def read(event):
    kind = event.WhichOneof("event")
    return EVENT_READERS[kind](getattr(event, kind))


def test_every_event_of_the_protocol_has_a_reader():
    names = {field.name for field in worker_pb2.WorkerEvent.DESCRIPTOR.oneofs_by_name["event"].fields}
    assert set(EVENT_READERS) == names - {"step_tokens"}


def test_an_order_is_encoded_once_and_its_deadline_each_time():
    sampling = complete_sampling(AskedSampling(max_tokens=5), LIMITS, num_prompt_tokens=3, seed=7)
    order = SequenceOrder(AttemptKey("r", 2), (1, 2, 3), (9,), sampling, (0,), Deadline.after(60), None, cache_salt="s")
    spec = sequence_spec(order)
    assert (spec.id.request_id, spec.id.attempt, list(spec.prompt_token_ids)) == ("r", 2, [1, 2, 3])
    assert (list(spec.emitted_token_ids), spec.sampling.max_tokens, spec.cache_salt) == ([9], 5, "s")
    assert 0 < spec.deadline_ms <= 60_000
    order.deadline = Deadline.after(0)
    assert sequence_spec(order) is spec
    assert spec.deadline_ms == 1


def test_what_happens_to_an_attempt_arrives():
    tokens = worker_pb2.Tokens(first_index=4, token_ids=[7, 8])
    assert read(worker_pb2.WorkerEvent(tokens=tokens)) == Emitted(4, [7, 8], None)
    chunk = worker_pb2.PromptChunk(began_s=0.5, spent_s=0.25, num_tokens=6)
    handed_off = worker_pb2.HandedOff(num_pages=2, num_bytes=99, exposed_s=0.5, transport="tcp", chunks=[chunk])
    assert read(worker_pb2.WorkerEvent(handed_off=handed_off)) == HandedOff(2, 99, 0.5, "tcp", ((0.5, 0.25, 6),))
    stop = worker_pb2.Finished(reason=inference_pb2.FINISH_REASON_STOP)
    assert read(worker_pb2.WorkerEvent(finished=stop)) == Finished("stop")


def test_an_end_without_a_reason_is_a_failure_of_the_worker():
    failed = read(worker_pb2.WorkerEvent(finished=worker_pb2.Finished()))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, WorkerUnavailable)


def test_log_probabilities_that_do_not_fit_each_other_are_refused():
    columns = worker_pb2.PromptLogprobs(logprobs=[-1.0, -2.0], top_token_ids=[1, 2, 3], top_logprobs=[-1.0])
    with pytest.raises(WorkerUnavailable):
        read(worker_pb2.WorkerEvent(tokens=worker_pb2.Tokens(token_ids=[1], prompt_logprobs=columns)))


@pytest.mark.parametrize(
    ("error", "kind"), [(InvalidRequest, Unfit), (GrammarExhausted, GrammarExhausted), (NotOffered, NotOffered)]
)
def test_a_checked_request_that_a_worker_calls_wrong_is_the_workers_fault(error, kind):
    code, _ = status.to_wire(error("no"))
    failed = worker_pb2.Failed(code=code, message="no")
    assert type(read(worker_pb2.WorkerEvent(failed=failed)).error) is kind
