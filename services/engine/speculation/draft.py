"""A small model that drafts tokens for the large model, with separate pages and a separate prefill.

Implements speculative decoding with a draft model (Leviathan et al. 2023, Chen et al. 2023). One short step computes
each draft token, and the large model verifies it. The draft therefore need not be exact, and an error here cannot make
a response wrong: the cached tokens of a sequence are compared with its actual tokens before each use.

Owned by the engine thread. The caller verifies the draft tokens. Uses no clock.

Legend: B sequences, P pages of the longest of them, T tokens of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from services.engine.cache.lease import PageLease
from services.engine.cache.pool import PagePool, num_pages_for
from services.engine.cpu.decoder import KernelStep
from services.engine.engine import EngineParts, load_engine
from services.engine.model import Model
from services.engine.reference.attention import AttentionBatch
from services.engine.sampling import draw_of, guess
from services.engine.steps.guesses import LEVELS, Chain, Draw, Guess, Limit
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.weights.config import load_config
from services.runtime.errors import ConfigError, InvariantViolated

MIN_LANE_PAGES = 8
MAX_LANES = 16
REHEARSED_TOKENS = 8
REHEARSAL = object()


@dataclass(eq=False, slots=True)
class _Memory:
    """Cached tokens of one sequence: its first `num_tokens` tokens, followed by `guesses`."""

    lease: PageLease
    num_tokens: int = 0
    guesses: list[int] = field(default_factory=list)


class _Lane:
    """A repeatable short step of one token for each of B sequences, with tensors at fixed addresses.

    Each step only writes the next token and its position. Everything else is prepared once.
    """

    def __init__(self, model: Model, pool: PagePool, num_sequences: int, num_pages: int) -> None:
        self._token_ids = np.zeros(num_sequences, np.int64)
        self._positions = np.zeros(num_sequences, np.int64)
        self._page_tables = np.zeros((num_sequences, num_pages), np.int32)
        self._page_size = pool.layout.page_size
        self._slots = np.zeros(num_sequences, np.int64)
        self._context_lens = np.zeros(num_sequences, np.int32)
        query_start = np.arange(num_sequences + 1, dtype=np.int32)
        arrays = (self._token_ids, self._positions, query_start, self._context_lens, self._page_tables, self._slots)
        host = [torch.from_numpy(array) for array in arrays]
        tokens, places, starts, lens, tables, mapping = there = [tensor.to(pool.data.device) for tensor in host]
        # On a CPU, both lists contain the same memory.
        self._copies = [] if pool.data.device.type == "cpu" else [*zip(there, host, strict=True)]
        self._step = model.repeatable(
            tokens,
            places,
            AttentionBatch(starts, lens, tables, mapping),
            pool.data,
            torch.arange(num_sequences).to(pool.data.device),
            longest_context=min(num_pages * self._page_size, model.config.context_length_tokens),
        )

    def place(self, row: int, page_ids: SequenceOf[int], token_id: int, position: int) -> None:
        """Assigns a token of a sequence to a row."""
        self._page_tables[row, : len(page_ids)] = page_ids
        self._move(row, token_id, position)

    def compute(self) -> torch.Tensor:
        """Runs the step. Returns the logits of the next tokens, float32 [B, V], valid until the next call."""
        for tensor, source in self._copies:
            tensor.copy_(source)
        return self._step.forward()

    def guess(self, draws: SequenceOf[Draw], limits: SequenceOf[Limit]) -> list[list[Guess]]:
        """Runs the step repeatedly, and returns draft tokens for each row up to its limit."""
        if isinstance(self._step, KernelStep):
            return self._step.guess(draws, limits)
        chains = [Chain(limit) for limit in limits]
        open_rows = [*range(len(chains))]
        while open_rows:
            at = [
                draw._replace(position=draw.position + len(chain.guesses))
                for draw, chain in zip(draws, chains, strict=True)
            ]
            guessed = guess(self.compute(), at)
            open_rows = [row for row in open_rows if chains[row].add(guessed[row])]
            # The finished rows are recomputed, which writes the same values again.
            for row in open_rows:
                self._move(row, guessed[row].token_id, int(self._positions[row]) + 1)
        return [chain.guesses for chain in chains]

    def _move(self, row: int, token_id: int, position: int) -> None:
        page, place = divmod(position, self._page_size)
        self._token_ids[row] = token_id
        self._positions[row] = position
        self._context_lens[row] = position + 1
        self._slots[row] = int(self._page_tables[row, page]) * self._page_size + place


class DraftModel:
    """A loaded draft model and its KV cache, which never exceeds its pool.

    If a sequence needs pages, the least recently used sequence is evicted. An evicted sequence is recomputed when it is
    used again.
    """

    def __init__(self, parts: EngineParts) -> None:
        """Takes ownership of the model, pool, and allocator of `parts`."""
        self._model = parts.model
        self._pool = parts.pool
        self._allocator = parts.allocator
        self._page_size = parts.pool.layout.page_size
        self._device = parts.pool.data.device
        self._memories: dict[Hashable, _Memory] = {}  # least recently used first
        self._lanes: dict[tuple[int, int], _Lane] = {}

    @property
    def num_used_pages(self) -> int:
        """Pages in use."""
        return self._allocator.num_used_pages

    @property
    def num_pages(self) -> int:
        """Total number of pages."""
        return self._allocator.num_pages

    def num_lacking(self, sequence: Sequence) -> int:
        """Returns the number of tokens to compute before the next token can be drafted. At least 1."""
        return sequence.num_tokens - self._settle(sequence)

    def read(self, sequence: Sequence, num_tokens: int) -> bool:
        """Computes the next `num_tokens` missing tokens, which must exclude the last token of the sequence.

        Returns False if no pages are free.
        """
        start = self._settle(sequence)
        if not self._reserve([(sequence, start + num_tokens)]):
            return False
        self._forward(sequence, start, start + num_tokens)
        self._memories[sequence.sequence_id].num_tokens = start + num_tokens
        return True

    def catch_up(self, sequences: SequenceOf[Sequence]) -> None:
        """Computes all missing tokens except the last of each sequence that receives pages."""
        for place in self._reserve([(sequence, sequence.num_tokens) for sequence in sequences]):
            self._catch_up(sequences[place])

    def guess(self, sequences: SequenceOf[Sequence], limits: SequenceOf[Limit]) -> list[list[Guess]]:
        """Computes missing tokens and drafts tokens for each sequence. Sequences without pages get no draft tokens."""
        wanted = [(each, each.num_tokens + limit.most - 1) for each, limit in zip(sequences, limits, strict=True)]
        places = self._reserve(wanted)
        found: list[list[Guess]] = [[] for _ in sequences]
        if not places:
            return found
        held = [sequences[place] for place in places]
        for sequence in held:
            self._catch_up(sequence)
        draws = [draw_of(sequence.sampling, sequence.num_tokens) for sequence in held]
        guessed = self._lane(held, [sequence.num_tokens - 1 for sequence in held]).guess(
            draws, [limits[place] for place in places]
        )
        for place, sequence, guesses in zip(places, held, guessed, strict=True):
            found[place] = guesses
            memory = self._memories[sequence.sequence_id]
            memory.num_tokens = sequence.num_tokens
            memory.guesses = [token_id for token_id, _ in guesses[:-1]]
        return found

    def rehearse(self) -> None:
        """Runs one prefill and draft without a request, because the first run takes several times as long."""
        num_tokens = min(REHEARSED_TOKENS, self._allocator.num_pages * self._page_size // 2)
        sequence = Sequence(REHEARSAL, [0] * num_tokens, sampling=Sampling(max_tokens=num_tokens))
        self.guess([sequence], [Limit(num_tokens, [1.0] * LEVELS, 1.0, 0.0)])
        self.free(REHEARSAL)

    def free(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""
        memory = self._memories.pop(key, None)
        if memory is not None:
            memory.lease.close()

    def check_integrity(self) -> None:
        """Checks the bookkeeping against the pages. Raises InvariantViolated if they are inconsistent."""
        self._allocator.check_integrity()
        if not self._memories and self._allocator.num_free_pages != self._allocator.num_pages:
            raise InvariantViolated("pages of the draft model are held by nobody")

    def _settle(self, sequence: Sequence) -> int:
        """Keeps cached tokens that match the sequence, except its last token. Returns their number."""
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
        """Allocates pages for the sequences, in order. Returns the indices of the sequences that received pages."""
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
                if num_missing:
                    lease.grow(num_missing, state="used")
                places.append(place)
        return places

    def _catch_up(self, sequence: Sequence) -> None:
        start, end = self._settle(sequence), sequence.num_tokens - 1
        if end - start == 1:
            self._lane([sequence], [start]).compute()
        elif end > start:
            self._forward(sequence, start, end)
        self._memories[sequence.sequence_id].num_tokens = end

    def _forward(self, sequence: Sequence, start: int, end: int) -> None:
        """Computes part of a sequence without logits."""
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

    def _lane(self, sequences: SequenceOf[Sequence], positions: SequenceOf[int]) -> _Lane:
        """Returns a lane with one token of each of these sequences."""
        page_ids = [self._memories[sequence.sequence_id].lease.page_ids for sequence in sequences]
        num_pages = max(MIN_LANE_PAGES, 1 << (max(map(len, page_ids)) - 1).bit_length())
        key = len(sequences), num_pages
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) == MAX_LANES:
                del self._lanes[next(iter(self._lanes))]
            lane = self._lanes[key] = _Lane(self._model, self._pool, *key)
        for row, (sequence, ids, position) in enumerate(zip(sequences, page_ids, positions, strict=True)):
            lane.place(row, ids, sequence.token_ids[position], position)
        return lane


def load_draft(model_dir: str | Path, parts: EngineParts, *, page_size: int, memory_bytes: int) -> DraftModel:
    """Loads the draft of the model in `parts`, on the same device, with at most `memory_bytes` of KV pages.

    Raises:
        ModelError: The directory cannot be served.
        ConfigError: The vocabularies differ, or the memory is smaller than one page.
    """
    config = load_config(model_dir)
    if config.vocab_size != parts.model_config.vocab_size:
        raise ConfigError(
            f"draft_model {model_dir} has a vocabulary of {config.vocab_size} tokens, "
            f"the model has {parts.model_config.vocab_size}"
        )
    device = parts.model.device
    draft = load_engine(
        model_dir,
        device=str(device),
        page_size=page_size,
        kv_memory_bytes=memory_bytes,
        host_tier_bytes=0,
        captures_graphs=False,
    )
    model = DraftModel(draft)
    model.rehearse()
    return model
