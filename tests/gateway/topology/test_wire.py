"""Orders and events keep their meaning on the wire, and a worker's nonsense is the worker's fault."""

import json

import pytest

from gateway.limits import AskedSampling, ModelLimits, complete_sampling
from gateway.topology.events import AttemptKey, Emitted, Failed, Finished, HandedOff, SequenceOrder, Unfit
from gateway.topology.wire import EVENT_READERS, sequence_spec
from protos import inference_pb2, worker_pb2
from services.runtime import status
from services.runtime.clock import Deadline
from services.runtime.errors import GrammarExhausted, InvalidRequest, NotOffered, WorkerUnavailable
from services.structured.form_places import KeptForms

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
    order.adapter = "sql"
    spec = sequence_spec(order)
    assert (spec.id.request_id, spec.id.attempt, list(spec.prompt_token_ids)) == ("r", 2, [1, 2, 3])
    assert (list(spec.emitted_token_ids), spec.sampling.max_tokens, spec.cache_salt) == ([9], 5, "s")
    assert spec.adapter == "sql"
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


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_a_form_that_many_answers_share_travels_to_a_worker_once(
    make_system, worker_type, pair_type, tokenizer, monkeypatch, num_prefill
):
    told, restore = [], KeptForms.restore

    def restored(forms, message):
        told.append(bool(message.json_schema))
        restore(forms, message)

    monkeypatch.setattr(KeptForms, "restore", restored)
    system = await make_system()
    pair = pair_type([*tokenizer.encode('{"a":1}', add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    if num_prefill:
        await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    for _ in range(2):
        response = await system.complete(prompt=[5, 6], n=3, response_format=FORM, max_tokens=100)
        assert response.status_code == 200, response.text
    orders = [attempt.spec for worker in system.workers.values() for attempt in worker.attempts]
    assert [json.loads(order.json_schema)["properties"] for order in orders] == [SCHEMA["properties"]] * len(orders)
    assert len(told) == len(orders) == 6 * (1 + num_prefill)
    assert told.count(True) == 1 + num_prefill
