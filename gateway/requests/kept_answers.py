"""Complete answers that are the only ones to their requests, kept to be given again when workers cannot answer.

Such a request has temperature 0, and everything that decides its tokens is in the key. Tenants share no answers unless
they share cached pages. The least recently used answers are dropped. Nothing is kept for models that do not ask for it.
"""

from collections import OrderedDict
from collections.abc import Sequence, Set
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from gateway.requests.call import AnswerSpec

MAX_KEPT_TOKENS = 2**20
"""The most tokens of all answers together: some 40 MiB."""
MAX_ANSWER_TOKENS = 2**14


class KeptAnswer(NamedTuple):
    """An answer's tokens, and the `identity_key` of the workers that generated them; empty: unknown."""

    token_ids: tuple[int, ...]
    identity: str


class KeptAnswers:
    """The answers of these models that one gateway keeps."""

    def __init__(self, models: Set[str], *, max_tokens: int = MAX_KEPT_TOKENS) -> None:
        self._models = models
        self._max_tokens = max_tokens
        self._answers: OrderedDict[bytes, KeptAnswer] = OrderedDict()
        self._num_tokens = 0

    def note(self, spec: AnswerSpec, token_ids: Sequence[int], identity: str) -> None:
        """Keeps an answer that is complete, if it is the only one to its request."""
        if spec.model not in self._models or not _is_only_one(spec) or len(token_ids) > MAX_ANSWER_TOKENS:
            return
        key = _key(spec)
        self._drop(key)
        self._answers[key] = KeptAnswer(tuple(token_ids), identity)
        self._num_tokens += len(token_ids)
        while self._num_tokens > self._max_tokens:
            self._drop(next(iter(self._answers)))

    def find(self, spec: AnswerSpec, identities: Set[str]) -> KeptAnswer | None:
        """Returns the kept answer to a request. `identities` are those of its model's workers now, if it has any."""
        if spec.model not in self._models or not _is_only_one(spec):
            return None
        key = _key(spec)
        kept = self._answers.get(key)
        if kept is None or (identities and kept.identity not in identities):
            return None
        self._answers.move_to_end(key)
        return kept

    def _drop(self, key: bytes) -> None:
        dropped = self._answers.pop(key, None)
        if dropped is not None:
            self._num_tokens -= len(dropped.token_ids)


def _is_only_one(spec: AnswerSpec) -> bool:
    """Returns whether the request has one answer, and its tokens are all that is asked for."""
    sampling = spec.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and sampling.prompt_logprobs is None


def _key(spec: AnswerSpec) -> bytes:
    # Without chance the seed decides nothing.
    sampling = msgspec.structs.replace(spec.sampling, seed=0)
    return blake2b(msgspec.msgpack.encode((spec.model, spec.facts.sharers, spec.prompt_token_ids, sampling))).digest()
