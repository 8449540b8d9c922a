"""A form travels once for each session and place, and what arrives is what was sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import worker_pb2
from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm, CalledFunction, Reasoning, ToolCalls, ToolFormat, read_form
from services.structured.form_places import NUM_PLACES, KeptForms, SentForms

CALLS = ToolCalls(ToolFormat.HERMES, (CalledFunction("f", "{}"),))
FORMS = [
    None,
    AnswerForm(tool_calls=CALLS),
    *(AnswerForm(f'{{"const":{number}}}', reasoning=Reasoning.MAY_COME) for number in range(4)),
]


def sent(forms: SentForms, form: AnswerForm | None) -> worker_pb2.SequenceSpec:
    message = worker_pb2.SequenceSpec()
    forms.write(form, message)
    forms.note_sent(form, message)
    return worker_pb2.SequenceSpec.FromString(message.SerializeToString())


@given(st.integers(0, 3), st.lists(st.tuples(st.sampled_from(FORMS), st.booleans()), max_size=40))
def test_each_order_arrives_with_its_form(num_places: int, orders: list[tuple[AnswerForm | None, bool]]) -> None:
    """Also where some are written and refused before they are sent."""
    gateway, worker = SentForms(), KeptForms()
    gateway.num_places = num_places
    for form, is_sent in orders:
        message = worker_pb2.SequenceSpec()
        gateway.write(form, message)
        if not is_sent:
            continue
        gateway.note_sent(form, message)
        arrived = worker_pb2.SequenceSpec.FromString(message.SerializeToString())
        worker.restore(arrived)
        assert read_form(arrived) == form
        assert arrived.form_place <= num_places


def test_a_form_travels_once() -> None:
    forms = SentForms()
    forms.num_places = 2
    a, b, c = FORMS[2:5]
    assert [bool(sent(forms, form).json_schema) for form in (a, a, b, a, c, a, b)] == [
        *(True, False, True, False),
        # c takes the place of b, which was named longest ago.
        *(True, False, True),
    ]


def test_workers_that_know_no_places_are_told_each_time() -> None:
    forms = SentForms()
    messages = [sent(forms, FORMS[2]) for _ in range(2)]
    assert [(message.json_schema, message.form_place) for message in messages] == [('{"const":0}', 0)] * 2


@pytest.mark.parametrize("fields", [{"form_place": 1}, {"form_place": NUM_PLACES + 1, "json_schema": "{}"}])
def test_places_that_hold_nothing_or_do_not_exist_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        KeptForms().restore(worker_pb2.SequenceSpec(**fields))  # type: ignore[arg-type]
