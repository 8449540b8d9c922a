"""The text of one answer as its tokens arrive: stop texts, stop tokens and what must be held back.

Pure: token ids in, text out. The result does not depend on how the tokens were grouped on their way.
"""

from collections.abc import Sequence

import msgspec

from gateway.models.detokenizers import Detokenizer


class Taken(msgspec.Struct, frozen=True):
    """The result of taking some tokens.

    `num_tokens` of them belong to the answer (fewer than given only when `is_stopped`); `text` became certain.
    """

    num_tokens: int
    text: str
    is_stopped: bool
    is_cut: bool = False
    """Whether a stop text has ended it."""


class AnswerText:
    """Text and end of one answer.

    Ends before the first of `stop_texts` that appears in the text of token number `min_tokens` or later, and at the
    first of `stop_token_ids` from there on, whose own text is not shown.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop_texts: Sequence[str] = (),
        stop_token_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop_texts = tuple(stop_texts)
        self._stop_token_ids = stop_token_ids
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> Taken:
        """Takes the next tokens of the answer."""
        if self._stop_texts:
            return self._push_one_by_one(token_ids)
        if self._stop_token_ids.isdisjoint(token_ids):
            num_shown = len(token_ids)
        else:
            num_shown = self._num_before_stop_token(token_ids)
        self._num_tokens += len(token_ids)
        if num_shown == len(token_ids):
            return Taken(num_shown, self._detokenizer.push(token_ids), False)
        text = self._detokenizer.push(token_ids[:num_shown])
        return Taken(num_shown + 1, text + self._detokenizer.finish(), True)

    def finish(self) -> str:
        """Returns the text that was held back, when the answer ends for another reason than a stop text."""
        text = self._held + self._detokenizer.finish()
        self._held = ""
        cut = self._find_stop(text) if self._num_tokens >= self._min_tokens else -1
        return text if cut < 0 else text[:cut]

    def _push_one_by_one(self, token_ids: Sequence[int]) -> Taken:
        pieces: list[str] = []
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            is_past_minimum = self._num_tokens >= self._min_tokens
            if is_past_minimum and token_id in self._stop_token_ids:
                return Taken(position + 1, "".join(pieces) + self.finish(), True)
            text = self._held + self._detokenizer.push((token_id,))
            cut = self._find_stop(text) if is_past_minimum else -1
            if cut >= 0:
                self._held = ""
                return Taken(position + 1, "".join(pieces) + text[:cut], True, is_cut=True)
            num_certain = self._num_certain(text) if is_past_minimum else len(text)
            pieces.append(text[:num_certain])
            self._held = text[num_certain:]
        return Taken(len(token_ids), "".join(pieces), False)

    def _num_before_stop_token(self, token_ids: Sequence[int]) -> int:
        for position, token_id in enumerate(token_ids):
            if token_id in self._stop_token_ids and self._num_tokens + position + 1 >= self._min_tokens:
                return position
        return len(token_ids)

    def _find_stop(self, text: str) -> int:
        """Returns where the earliest stop text begins, or -1."""
        found = [position for stop in self._stop_texts if (position := text.find(stop)) >= 0]
        return min(found, default=-1)

    def _num_certain(self, text: str) -> int:
        """Returns how much of `text` can no longer be the beginning of a stop text."""
        certain = len(text)
        for stop in self._stop_texts:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= position < certain:
                if stop.startswith(text[position:]):
                    certain = position
                    break
                position = text.find(stop[0], position + 1)
        return certain
