"""Workers that serve another model under the name get no work, and everybody is told."""

import msgspec
import pytest

from gateway.topology.model_match import difference
from services.runtime.model_facts import ModelFacts, read_model_facts

SERVED = ModelFacts(vocab_size=10, context_length_tokens=20, eos_token_ids=(1, 2), tokenizer="t" * 32, weights="w" * 32)
OTHERS = {
    "vocab_size": 11,
    "context_length_tokens": 21,
    "eos_token_ids": (1,),
    "tokenizer": "u" * 32,
    "weights": "x" * 32,
}


class Worker:
    def __init__(self, facts):
        self.facts = facts


@pytest.mark.parametrize("name", OTHERS)
def test_each_fact_that_differs_is_named(name):
    worker = Worker(msgspec.structs.replace(SERVED, **{name: OTHERS[name]}))
    word = {
        "vocab_size": "vocabulary of 11",
        "context_length_tokens": "context of 21",
        "eos_token_ids": "end tokens [1]",
    }
    assert word.get(name, name) in difference(worker, SERVED, allows_other_weights=False)
    assert bool(difference(worker, SERVED, allows_other_weights=True)) == (name != "weights")


def test_what_one_of_the_two_does_not_know_is_not_judged():
    assert not difference(Worker(None), SERVED, allows_other_weights=False)
    assert not difference(Worker(SERVED), None, allows_other_weights=False)
    for name in ("tokenizer", "weights"):
        unknown = msgspec.structs.replace(SERVED, **{name: ""})
        other = msgspec.structs.replace(SERVED, **{name: OTHERS[name]})
        assert not difference(Worker(unknown), other, allows_other_weights=False)
        assert not difference(Worker(other), unknown, allows_other_weights=False)
    assert not difference(
        Worker(msgspec.structs.replace(SERVED, eos_token_ids=(2, 1))), SERVED, allows_other_weights=False
    )


async def test_a_worker_of_another_model_gets_no_work_and_all_are_told(
    make_system, worker_type, pair_type, tokenizer, model_folder, caplog
):
    caplog.set_level("INFO")
    pair = pair_type([*tokenizer.encode("hello world", add_special_tokens=False).ids, 1])
    system = await make_system()
    facts = read_model_facts(model_folder)
    small = msgspec.structs.replace(facts, vocab_size=7)
    right = await system.add(worker_type("decode", "decode-0", pair.decode, facts=facts))
    wrong = await system.add(worker_type("decode", "decode-1", pair.decode, facts=small))
    for _ in range(6):
        assert (await system.complete(max_tokens=20)).status_code == 200
    assert (len(right.attempts), len(wrong.attempts)) == (6, 0)
    listed = (await system.http.get("/cluster")).json()["workers"]
    assert [(worker["id"], worker["state"]) for worker in listed] == [("decode-0", "ready"), ("decode-1", "left_out")]
    assert "vocabulary of 7 tokens" in listed[1]["left_out"]
    shown = (await system.http.get("/dashboard/data?seconds=1")).json()["workers"]
    assert [worker["left_out"] == "" for worker in shown] == [True, False]
    await system.until(lambda: any("no work" in line.message for line in caplog.records))
    await wrong.stop()
    await system.until(lambda: any("was left out has gone" in line.message for line in caplog.records))
    begun = [line for line in caplog.records if line.message.startswith("a worker is left out")]
    assert [(line.worker, line.levelname) for line in begun] == [("decode-1", "WARNING")]
    assert any("that gave this worker no work has gone" in line.message for line in caplog.records)


async def test_a_cluster_with_no_other_worker_says_that_none_is_ready(
    make_system, worker_type, pair_type, model_folder
):
    system = await make_system()
    small = msgspec.structs.replace(read_model_facts(model_folder), vocab_size=7)
    wrong = await system.add(worker_type("decode", "decode-0", pair_type([1]).decode, facts=small))
    assert (await system.complete()).status_code == 503
    assert (await system.http.get("/ready")).status_code == 503
    assert not wrong.attempts


@pytest.mark.parametrize("allow_other_weights", [False, True])
async def test_other_weights_are_used_only_where_the_operator_says_so(
    make_system, worker_type, pair_type, model_folder, allow_other_weights
):
    (model_folder / "model.safetensors").write_bytes(_WEIGHTS)
    facts = read_model_facts(model_folder)
    assert facts.weights
    system = await make_system(allow_other_weights=allow_other_weights)
    other = msgspec.structs.replace(facts, weights="x" * 32)
    worker = await system.add(worker_type("decode", "decode-0", pair_type([40, 1]).decode, facts=other))
    response = await system.complete(max_tokens=2)
    assert (response.status_code == 200) == bool(worker.attempts) == allow_other_weights


_HEADER = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
_WEIGHTS = len(_HEADER).to_bytes(8, "little") + _HEADER + b"\0\0\x80\x3f"
