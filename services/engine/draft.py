"""A small model that guesses what the large one will choose: its own pages, its own prefill, one short step per guess.

Speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023). The guesses are as good as the draft
is; whether they are right is for the large model to say. So nothing here has to be exact, and nothing that goes wrong
here can make an answer wrong: what the draft holds of a sequence is compared with its tokens each time it is used.

Belongs to the engine thread. Knows nothing of what becomes of its guesses, and no clock.

Legend: B sequences, P pages of the longest of them, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.engine.attention import AttentionBatch
from services.engine.config import load_config
from services.engine.engine import EngineParts, load_engine
from services.engine.pages import PageLease, num_pages_for
from services.engine.sampling import guess
from services.engine.sequence import Sequence
from services.runtime.errors import ConfigError, InvariantViolated


@dataclass(eq=False, slots=True)
class _Memory:
    """What the draft has computed of one sequence: its first `num_tokens` tokens, and then those of `guesses`."""

    lease: PageLease
    num_tokens: int = 0
    guesses: list[int] = field(default_factory=list)


class DraftModel:
    """A loaded draft model and its KV cache, of which it never takes more than its pool has.

    The cache is a cache: whoever was used longest ago gives way to who needs pages, and is read again if it comes back.
    """

    def __init__(self, parts: EngineParts) -> None:
        """The model, pool and allocator of `parts` are this object's from here on."""
        self._model = parts.model
        self._pool = parts.pool
        self._allocator = parts.allocator
        self._page_size = parts.pool.layout.page_size
        self._memories: dict[Hashable, _Memory] = {}  # who was used longest ago first

    @property
    def num_used_pages(self) -> int:
        """Pages that hold something."""
        return self._allocator.num_used_pages

    @property
    def num_pages(self) -> int:
        """All pages."""
        return self._allocator.num_pages

    def num_lacking(self, sequence: Sequence) -> int:
        """Tokens of the sequence that must be computed before the next can be guessed; at least one."""
        return sequence.num_tokens - self._settle(sequence)

    def read(self, sequence: Sequence, num_tokens: int) -> bool:
        """Compute some of the tokens that are lacking, not the last one. False: there is no room."""
        start = self._settle(sequence)
        if not self._reserve([(sequence, start + num_tokens)]):
            return False
        self._forward([sequence], [start], [start + num_tokens], wants_logits=False)
        self._memories[sequence.sequence_id].num_tokens = start + num_tokens
        return True

    def begin(self, sequences: SequenceOf[Sequence], max_guesses: SequenceOf[int]) -> Guessing:
        """Compute what is lacking and guess the next token of each sequence for which there is room."""
        wanted = [(each, each.num_tokens + most - 1) for each, most in zip(sequences, max_guesses, strict=True)]
        places = self._reserve(wanted)
        held = [sequences[place] for place in places]
        guessing = Guessing(self, held, places)
        if held:
            starts = [self._settle(sequence) for sequence in held]
            logits = self._forward(held, starts, [each.num_tokens for each in held], wants_logits=True)
            for sequence in held:
                self._memories[sequence.sequence_id].num_tokens = sequence.num_tokens
            guessing.take(range(len(held)), logits)
        return guessing

    def free(self, key: Hashable) -> None:
        """Forget a sequence. Unknown keys are ignored."""
        memory = self._memories.pop(key, None)
        if memory is not None:
            memory.lease.close()

    def check_integrity(self) -> None:
        """Compare the books with the pages. Raises InvariantViolated where they contradict each other."""
        self._allocator.check_integrity()
        if not self._memories and self._allocator.num_free_pages != self._allocator.num_pages:
            raise InvariantViolated("pages of the draft model are held by nobody")

    def _settle(self, sequence: Sequence) -> int:
        """Keep what is computed of the sequence's tokens as they are now, and say how many; never the last one."""
        memory = self._memories.get(sequence.sequence_id)
        if memory is None:
            return 0
        token_ids = sequence.token_ids
        for guessed in memory.guesses:
            if memory.num_tokens >= len(token_ids) or token_ids[memory.num_tokens] != guessed:
                break
            memory.num_tokens += 1
        memory.guesses.clear()
        memory.num_tokens = min(memory.num_tokens, len(token_ids) - 1)
        return memory.num_tokens

    def _reserve(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[int]:
        """Give these pages for so many tokens, in this order; return the places of those that have them."""
        for sequence, _ in wanted:
            memory = self._memories.pop(sequence.sequence_id, None) or _Memory(PageLease(self._allocator))
            self._memories[sequence.sequence_id] = memory
        others = [*self._memories][: -len(wanted)]
        places = []
        for place, (sequence, num_tokens) in enumerate(wanted):
            lease = self._memories[sequence.sequence_id].lease
            num_missing = max(0, num_pages_for(num_tokens, self._page_size) - len(lease.page_ids))
            while others and num_missing > self._allocator.num_available_pages:
                self.free(others.pop(0))
            is_too_long = num_tokens > self._model.config.context_length_tokens
            if not is_too_long and num_missing <= self._allocator.num_available_pages:
                lease.grow(num_missing, state="used")
                places.append(place)
        return places

    def _forward(
        self, sequences: SequenceOf[Sequence], starts: list[int], ends: list[int], *, wants_logits: bool
    ) -> torch.Tensor:
        counts = np.subtract(ends, starts)
        query_start = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_ids = np.empty(query_start[-1], np.int64)
        positions = np.empty_like(token_ids)
        for sequence, row, start, end in zip(sequences, query_start, starts, ends, strict=False):
            token_ids[row : row + end - start] = sequence.token_ids[start:end]
            positions[row : row + end - start] = np.arange(start, end)
        rows = np.repeat(np.arange(len(sequences)), counts)
        wanted = query_start[1:].astype(np.int64) - 1 if wants_logits else np.empty(0, np.int64)
        tables = self.page_tables(sequences)
        return self.compute(token_ids, positions, rows, query_start, np.asarray(ends, np.int32), tables, wanted)

    def page_tables(self, sequences: SequenceOf[Sequence]) -> np.ndarray:
        """Return int32 [B, P]; entries beyond a sequence's own pages are 0."""
        page_ids = [self._memories[sequence.sequence_id].lease.page_ids for sequence in sequences]
        tables = np.zeros((len(page_ids), max(map(len, page_ids), default=0)), np.int32)
        for table, ids in zip(tables, page_ids, strict=True):
            table[: len(ids)] = ids
        return tables

    def note_guess(self, key: Hashable, token_id: int) -> None:
        """The draft computes a guess of its own, behind the sequence's tokens."""
        self._memories[key].guesses.append(token_id)

    def compute(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        rows: np.ndarray,
        query_start: np.ndarray,
        context_lens: np.ndarray,
        page_tables: np.ndarray,
        wanted: np.ndarray,
    ) -> torch.Tensor:
        """One pass of the model over T tokens, `rows` [T] of which say whose they are; float32 [wanted, V]."""
        slots = page_tables[rows, positions // self._page_size].astype(np.int64)
        slots *= self._page_size
        slots += positions % self._page_size
        device = self._pool.data.device
        arrays = (token_ids, positions, query_start, context_lens, page_tables, slots, wanted)
        tokens, places, starts, lens, tables, mapping, indices = (torch.from_numpy(a).to(device) for a in arrays)
        batch = AttentionBatch(starts, lens, tables, mapping)
        return self._model.forward(tokens, places, batch, self._pool.data, indices)


def load_draft(model_dir: str | Path, parts: EngineParts, *, page_size: int, memory_bytes: int) -> DraftModel:
    """Load the draft of the model in `parts`, on the same device, with at most `memory_bytes` of KV pages.

    Raises:
        ModelError: the folder cannot be served.
        ConfigError: it has another vocabulary, or not a page fits into the memory.
    """
    config = load_config(model_dir)
    if config.vocab_size != parts.model_config.vocab_size:
        raise ConfigError(
            f"draft_model {model_dir} has a vocabulary of {config.vocab_size} tokens, "
            f"the model has {parts.model_config.vocab_size}"
        )
    device = parts.model.device
    draft = load_engine(model_dir, device=str(device), page_size=page_size, kv_memory_bytes=memory_bytes)
    return DraftModel(draft)


class Guessing:
    """Guesses for some sequences, token by token, until nobody wants more. The next use of the model ends it.

    `guesses` has for each sequence its tokens so far and how likely the draft found them; `places` says which it is.
    """

    def __init__(self, draft: DraftModel, sequences: SequenceOf[Sequence], places: list[int]) -> None:
        """`places` are those of the sequences among all for which guesses were wanted."""
        self.places = places
        self.guesses: list[list[tuple[int, float]]] = [[] for _ in sequences]
        self._draft = draft
        self._sequences = sequences
        self._num_tokens = np.array([sequence.num_tokens for sequence in sequences])
        self._page_tables = draft.page_tables(sequences)

    def go_on(self, rows: SequenceOf[int]) -> None:
        """Guess one more token of the sequences at these places; `begin` was told that they may have as many."""
        last = [self.guesses[row][-1][0] for row in rows]
        for row, token_id in zip(rows, last, strict=True):
            self._draft.note_guess(self._sequences[row].sequence_id, token_id)
        num_ahead = np.array([len(self.guesses[row]) for row in rows])
        positions = self._num_tokens[list(rows)] + num_ahead - 1
        whole = np.arange(len(rows) + 1)
        logits = self._draft.compute(
            np.array(last),
            positions,
            whole[:-1],
            whole.astype(np.int32),
            (positions + 1).astype(np.int32),
            self._page_tables if len(rows) == len(self._sequences) else self._page_tables[list(rows)],
            whole[:-1],
        )
        self.take(rows, logits)

    def take(self, rows: SequenceOf[int], logits: torch.Tensor) -> None:
        """What the model says of the next token of these."""
        samplings = [self._sequences[row].sampling for row in rows]
        positions = [self._sequences[row].num_tokens + len(self.guesses[row]) for row in rows]
        for row, guessed in zip(rows, guess(logits, samplings, positions), strict=True):
            self.guesses[row].append(guessed)
