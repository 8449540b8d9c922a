"""A form that many answers share travels to a worker once: it is kept there, in a place that the next ones name.

128 answers in a schema of 64 KB would otherwise be 8 MB for each of two workers, and everybody's orders wait behind
them. Both ends belong to one session, whose messages arrive in the order in which they were sent.
"""

from collections import OrderedDict

from protos import worker_pb2
from services.runtime.errors import InvalidRequest
from services.structured.form import AnswerForm, write_form

NUM_PLACES = 16
"""The forms that a worker keeps for each session."""


class SentForms:
    """The gateway's end: which form the worker has in which place. The one that was named longest ago is replaced."""

    def __init__(self) -> None:
        self.num_places = 0
        """The worker's places; 0: it has none, or has not told them yet."""
        self._places: OrderedDict[AnswerForm, int] = OrderedDict()

    def write(self, form: AnswerForm | None, message: worker_pb2.SequenceSpec) -> None:
        """Puts a form into a message that `note_sent` is told of if it is sent, as the next one of the session."""
        if form is None:
            return
        known = self._places.get(form)
        if known is not None:
            message.form_place = known
            return
        if self.num_places:
            is_full = len(self._places) >= self.num_places
            message.form_place = next(iter(self._places.values())) if is_full else len(self._places) + 1
        write_form(form, message)

    def note_sent(self, form: AnswerForm | None, message: worker_pb2.SequenceSpec) -> None:
        """Notes that a message, as `write` has left it, will arrive."""
        if form is None or not message.form_place:
            return
        if form not in self._places and len(self._places) >= self.num_places:
            self._places.popitem(last=False)
        self._places[form] = message.form_place
        self._places.move_to_end(form)


class KeptForms:
    """The worker's end."""

    def __init__(self) -> None:
        self._kept: dict[int, worker_pb2.SequenceSpec] = {}

    def restore(self, message: worker_pb2.SequenceSpec) -> None:
        """Puts the form into a message that names its place, or keeps the form that is to have that place.

        Raises InvalidRequest for a place that does not exist or that holds none.
        """
        place = message.form_place
        if not place:
            return
        if message.json_schema or message.HasField("tool_calls"):
            if place > NUM_PLACES:
                raise InvalidRequest(f"forms have the places 1 to {NUM_PLACES}", field="form_place")
            kept = self._kept[place] = worker_pb2.SequenceSpec(
                json_schema=message.json_schema, reasoning=message.reasoning
            )
            if message.HasField("tool_calls"):
                kept.tool_calls.CopyFrom(message.tool_calls)
        elif place in self._kept:
            message.MergeFrom(self._kept[place])
        else:
            raise InvalidRequest(f"place {place} holds no form", field="form_place")
