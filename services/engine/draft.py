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
from services.engine.model import Model
from services.engine.pages import PageLease, PagePool, num_pages_for
from services.engine.sampling import guess
from services.engine.sequence import Sequence
from services.runtime.errors import ConfigError, InvariantViolated

MIN_LANE_PAGES = 8
MAX_LANES = 16


@dataclass(eq=False, slots=True)
class _Memory:
    """What the draft has computed of one sequence: its first `num_tokens` tokens, and then those of `guesses`."""

    lease: PageLease
    num_tokens: int = 0
    guesses: list[int] = field(default_factory=list)


class _Lane:
    """One token of each of B sequences through the model, again and again, in tensors that stay: a short step.

    The next token's place and number are written into them; what does not change is prepared once.
    """

    def __init__(self, model: Model, pool: PagePool, num_sequences: int, num_pages: int) -> None:
        self.token_ids = np.zeros(num_sequences, np.int64)
        self.positions = np.zeros(num_sequences, np.int64)
        self.page_tables = np.zeros((num_sequences, num_pages), np.int32)
        self._page_size = pool.layout.page_size
        self._rows = np.arange(num_sequences)
        self._slots = np.zeros(num_sequences, np.int64)
        self._context_lens = np.zeros(num_sequences, np.int32)
        query_start = np.arange(num_sequences + 1, dtype=np.int32)
        arrays = (self.token_ids, self.positions, query_start, self._context_lens, self.page_tables, self._slots)
        host = [torch.from_numpy(array) for array in arrays]
        tokens, places, starts, lens, tables, mapping = there = [tensor.to(pool.data.device) for tensor in host]
        # On a CPU these are the same memory.
        self._copies = [] if pool.data.device.type == "cpu" else [*zip(there, host, strict=True)]
        self._forward = model.repeatable(
            tokens,
            places,
            AttentionBatch(starts, lens, tables, mapping),
            pool.data,
            torch.from_numpy(self._rows).to(pool.data.device),
            longest_context=min(num_pages * self._page_size, model.config.context_length_tokens),
        )

    def fill(self, row: int, page_ids: SequenceOf[int]) -> None:
        """Whose pages the row's are."""
        self.page_tables[row, : len(page_ids)] = page_ids

    def compute(self) -> torch.Tensor:
        """Compute the tokens at their positions; the next ones' logits, float32 [B, V], until the next call."""
        positions, size = self.positions, self._page_size
        np.add(positions, 1, out=self._context_lens, casting="unsafe")
        pages = positions // size
        np.multiply(self.page_tables[self._rows, pages], size, out=self._slots)
        self._slots += positions - pages * size
        for tensor, source in self._copies:
            tensor.copy_(source)
        return self._forward()


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
        self._device = parts.pool.data.device
        self._memories: dict[Hashable, _Memory] = {}  # who was used longest ago first
        self._lanes: dict[tuple[int, int], _Lane] = {}

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
        self._forward(sequence, start, start + num_tokens)
        self._memories[sequence.sequence_id].num_tokens = start + num_tokens
        return True

    def begin(self, sequences: SequenceOf[Sequence], max_guesses: SequenceOf[int]) -> Guessing:
        """Compute what is lacking and guess the next token of each sequence for which there is room."""
        wanted = [(each, each.num_tokens + most - 1) for each, most in zip(sequences, max_guesses, strict=True)]
        places = self._reserve(wanted)
        held = [sequences[place] for place in places]
        guessing = Guessing(self, held, places)
        if held:
            for sequence in held:
                self._catch_up(sequence)
            guessing.compute(range(len(held)))
            for sequence in held:
                self._memories[sequence.sequence_id].num_tokens = sequence.num_tokens
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

    def _catch_up(self, sequence: Sequence) -> None:
        """Compute what is lacking but the last token."""
        start, end = self._settle(sequence), sequence.num_tokens - 1
        if end - start == 1:
            lane = self.lane([sequence])
            lane.token_ids[0], lane.positions[0] = sequence.token_ids[start], start
            lane.compute()
        elif end > start:
            self._forward(sequence, start, end)

    def _forward(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute a part of a sequence, of which nothing is to be known."""
        positions = np.arange(start, end)
        page_ids = np.array(self._memories[sequence.sequence_id].lease.page_ids, np.int32)
        slots = page_ids[positions // self._page_size].astype(np.int64) * self._page_size
        slots += positions % self._page_size
        arrays = (
            np.array(sequence.token_ids[start:end], np.int64),
            positions,
            np.array([0, end - start], np.int32),
            np.array([end], np.int32),
            page_ids[None],
            slots,
            np.empty(0, np.int64),
        )
        tokens, places, starts, lens, tables, mapping, none = (torch.from_numpy(a).to(self._device) for a in arrays)
        self._model.forward(tokens, places, AttentionBatch(starts, lens, tables, mapping), self._pool.data, none)

    def lane(self, sequences: SequenceOf[Sequence]) -> _Lane:
        """A lane with the pages of these sequences."""
        page_ids = [self._memories[sequence.sequence_id].lease.page_ids for sequence in sequences]
        num_pages = max(MIN_LANE_PAGES, 1 << (max(map(len, page_ids)) - 1).bit_length())
        key = len(sequences), num_pages
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) == MAX_LANES:
                del self._lanes[next(iter(self._lanes))]
            lane = self._lanes[key] = _Lane(self._model, self._pool, *key)
        for row, ids in enumerate(page_ids):
            lane.fill(row, ids)
        return lane

    def note_guess(self, key: Hashable, token_id: int) -> None:
        """The draft computes a guess of its own, behind the sequence's tokens."""
        self._memories[key].guesses.append(token_id)


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

    def go_on(self, rows: SequenceOf[int]) -> None:
        """Guess one more token of the sequences at these places; `begin` was told that they may have as many."""
        for row in rows:
            self._draft.note_guess(self._sequences[row].sequence_id, self.guesses[row][-1][0])
        self.compute(rows)

    def compute(self, rows: SequenceOf[int]) -> None:
        """Compute the last token or guess of these, and take what the model says of the next one."""
        sequences = [self._sequences[row] for row in rows]
        lane = self._draft.lane(sequences)
        positions = []
        for place, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
            guesses = self.guesses[row]
            lane.token_ids[place] = guesses[-1][0] if guesses else sequence.token_ids[-1]
            positions.append(sequence.num_tokens + len(guesses))
        lane.positions[:] = positions
        lane.positions -= 1
        logits = lane.compute()
        samplings = [sequence.sampling for sequence in sequences]
        for row, guessed in zip(rows, guess(logits, samplings, positions), strict=True):
            self.guesses[row].append(guessed)
