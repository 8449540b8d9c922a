"""A form that many answers share travels to a worker once."""

import json

import pytest

from services.structured.form_places import KeptForms

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_all_answers_of_a_request(make_system, worker_type, pair_type, tokenizer, monkeypatch, num_prefill):
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
