"""Runs a step plan: packs it into tensors, calls the model, and samples.

Makes no scheduling decision and changes no sequence. Besides the model, this is the only module that uses torch on the
hot path.

Legend: T packed tokens of a step, B sequences in it, S slots of a page, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import numpy as np
import torch

from services.engine.cache.pool import PagePool, num_pages_for
from services.engine.kernels.library import Kernels
from services.engine.model import Model
from services.engine.packed import Packed
from services.engine.reference.attention import AttentionBatch
from services.engine.sampling import report, rows_are_valid, sample
from services.engine.steps.pooling import pooled_rows, pooled_states
from services.engine.steps.sequence import Chooser, Lookahead
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    PooledState,
    PromptReport,
    PromptTokens,
    SampledToken,
    SampledTokens,
    StepItem,
    StepOutcome,
    StepPlan,
    StepResult,
)
from services.runtime.errors import InvariantViolated


class ModelRunner:
    """Runs plans on one model and one pool. Buffers are reused, so calls must not overlap."""

    lookahead_tokens = 0
    """Number of tokens after a step that need pages, so that the next step can start before it is requested."""

    def __init__(self, model: Model, pool: PagePool) -> None:
        self._model = model
        self._pool = pool
        self._device = pool.data.device
        self._buffers: dict[str, np.ndarray] = {}
        self._views: dict[str, tuple[np.ndarray, torch.Tensor]] = {}
        """Views of the buffers, with the most recently used lengths."""

    @property
    def replays_in_chunks(self) -> bool:
        """Whether recomputing generated tokens in chunks writes the same bits to the pages as steps of one token."""
        return self._model.exact

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the plan's tokens, writes their KV to the pool, and samples the tokens that are due.

        Raises:
            InvariantViolated: The plan contradicts its sequences (too many tokens, too few pages, unknown token IDs).
        """
        return self.compute(self.prepare(plan))

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Runs the part of `run` that needs the interpreter. Compute the step before you prepare the next step.

        Raises InvariantViolated in the same cases as `run`.
        """
        check_plan(plan, self._pool.layout.page_size)
        items = plan.items
        if plan.reports_prompts:
            items = [item for item in items if not item.sequence.reports_prompt]
        return PreparedStep(plan, self._pack(items) if items else None)

    @torch.inference_mode()
    def compute(self, step: PreparedStep) -> StepResult:
        """Runs the rest of `run`.

        Returns after every rank and device has completed its writes, because the caller then reports the pages as
        written.
        """
        items = step.plan.items
        outcomes = self._with_reports(step) if step.plan.reports_prompts else self._outcomes(items, step.packed)
        if items and self._device.type == "cuda":
            # For a chunk that yields no token, nothing else waits for the device. Without this wait, schedulers would
            # also count its time in the next step. On a CPU, the decoder returns after the last write.
            torch.cuda.current_stream(self._device).synchronize()
        return StepResult([*outcomes])

    def _with_reports(self, step: PreparedStep) -> list[StepOutcome]:
        # Reported prompts run separately after the other items: such requests are rare and slow.
        items = step.plan.items
        others = iter(self._outcomes([item for item in items if not item.sequence.reports_prompt], step.packed))
        return [self._report(item) if item.sequence.reports_prompt else next(others) for item in items]

    def _outcomes(
        self, items: list[StepItem], packed: Packed | None
    ) -> list[SampledToken | SampledTokens | PooledState | NonFiniteLogits | None]:
        if packed is None:
            return []
        logits, states = packed.run(self._model, self._pool.data) if packed.num_states else (self._logits(packed), None)
        pooled = pooled_states(items, states)
        due = [item for item in items if item.is_sampled]
        if any(item.proposed for item in due):
            chosen = iter(choose(logits, due, kernels=self._model.kernels))
        else:
            chosen = iter(sample(logits, [item.sequence for item in due], kernels=self._model.kernels))
        return [next(chosen) if item.is_sampled else next(pooled) if item.num_pooled else None for item in items]

    def _report(self, item: StepItem) -> SampledToken | PromptTokens | NonFiniteLogits:
        """Computes part of a prompt in pieces, and reports the log-probability of each token's successor."""
        sequence = copy.copy(item.sequence)  # this copy differs only in `num_computed_tokens`
        count = sequence.sampling.prompt_logprobs or 0
        told: PromptReport | None = None
        end = sequence.num_computed_tokens + item.num_scheduled_tokens
        while True:
            start = sequence.num_computed_tokens
            piece = StepItem(sequence, min(PROMPT_ROWS, end - start), item.wants_token)
            logits = self._logits(self._pack([piece], wants_all=True))
            if not bool(rows_are_valid(logits).all()):
                return NonFiniteLogits(f"the model's output for the prompt from position {start} on is not finite")
            following = sequence.token_ids[start + 1 : start + 1 + piece.num_scheduled_tokens]
            more = report(logits[: len(following)], following, count)
            if told is None:
                told = more
            else:
                told.put(len(told), more)
            if piece.is_sampled:
                (outcome,) = sample(logits[-1:], [sequence], kernels=self._model.kernels)
                return replace(outcome, prompt=told) if isinstance(outcome, SampledToken) else outcome
            sequence.num_computed_tokens += piece.num_scheduled_tokens
            if sequence.num_computed_tokens == end:
                return PromptTokens(told)

    def _logits(self, packed: Packed) -> torch.Tensor:
        return self._model.forward(
            packed.token_ids, packed.positions, packed.batch, self._pool.data, packed.logits_indices
        )

    def _pack(self, items: list[StepItem], *, wants_all: bool = False) -> Packed:
        """Packs the inputs of one forward pass.

        If `wants_all` is true, the pass returns logits for all tokens, otherwise only for rows that are sampled.
        """
        if not wants_all and all(item.num_scheduled_tokens == 1 and item.is_sampled for item in items):
            return self._pack_next_tokens(items)
        page_size = self._pool.layout.page_size
        counts = np.array([item.num_rows for item in items])
        ends = np.array([item.sequence.num_computed_tokens for item in items]) + counts
        query_start = self._buffer("query_start", len(items) + 1, np.int32)
        query_start[0] = 0
        np.cumsum(counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        page_tables = self._page_tables(items, num_pages_for(int(ends.max()), page_size))
        token_ids = self._buffer("token_ids", num_tokens, np.int64)
        for item, start, end in zip(items, query_start[:-1], ends, strict=True):
            count = item.num_rows
            token_ids[start : start + count] = (*item.sequence.token_ids[end - count : end], *item.proposed)
        self._check_token_ids(token_ids.min(), token_ids.max())
        rows = np.repeat(np.arange(len(items)), counts)
        positions = self._buffer("positions", num_tokens, np.int64)
        positions[:] = np.arange(num_tokens) + (ends - query_start[1:])[rows]
        slot_mapping = self._buffer("slot_mapping", num_tokens, np.int64)
        slot_mapping[:] = page_tables[rows, positions // page_size]
        slot_mapping *= page_size
        slot_mapping += positions % page_size
        wanted = np.arange(num_tokens) if wants_all else _wanted_rows(items, query_start[1:])
        pooled = pooled_rows(items, query_start[1:])
        return Packed(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            batch=AttentionBatch(
                query_start=self._tensor(query_start),
                context_lens=self._tensor(ends.astype(np.int32)),
                page_tables=self._tensor(page_tables),
                slot_mapping=self._tensor(slot_mapping),
                longest_tokens=int(ends.max()),
            ),
            logits_indices=self._tensor(np.concatenate([wanted, *pooled]) if pooled else wanted),
            num_states=sum(map(len, pooled)),
        )

    def _pack_next_tokens(self, items: list[StepItem]) -> Packed:
        """Packs a step in which each sequence computes its next token, the usual case. Lists beat small arrays here."""
        page_size = self._pool.layout.page_size
        token_ids, positions, slots, ends, query_start = [], [], [], [], [0]
        for item in items:
            sequence, position = item.sequence, item.sequence.num_computed_tokens
            page_ids = sequence.page_table
            for token_id in (sequence.token_ids[position], *item.proposed):
                page, place = divmod(position, page_size)
                token_ids.append(token_id)
                positions.append(position)
                slots.append(page_ids[page] * page_size + place)
                position += 1
            ends.append(position)
            query_start.append(len(token_ids))
        self._check_token_ids(min(token_ids), max(token_ids))
        longest = max(ends)
        return Packed(
            token_ids=self._filled("token_ids", token_ids, np.int64),
            positions=self._filled("positions", positions, np.int64),
            batch=AttentionBatch(
                query_start=self._filled("query_start", query_start, np.int32),
                context_lens=self._filled("context_lens", ends, np.int32),
                page_tables=self._tensor(self._page_tables(items, num_pages_for(longest, page_size))),
                slot_mapping=self._filled("slot_mapping", slots, np.int64),
                longest_tokens=longest,
            ),
            logits_indices=self._filled("logits_indices", range(len(token_ids)), np.int64),
        )

    def _filled(self, name: str, values: SequenceOf[int], dtype: type[np.signedinteger]) -> torch.Tensor:
        """Returns the named buffer, filled with these values."""
        array, tensor = self._views.get(name, (None, None))
        if array is None or tensor is None or len(array) != len(values):
            array = self._buffer(name, len(values), dtype)
            tensor = torch.from_numpy(array)
            self._views[name] = array, tensor
        array[:] = values
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _page_tables(self, items: list[StepItem], num_pages: int) -> np.ndarray:
        """Returns int32 [B, num_pages]. Entries beyond a sequence's page table are 0."""
        tables = self._buffer("page_tables", len(items) * num_pages, np.int32).reshape(len(items), num_pages)
        for row, item in enumerate(items):
            page_ids = item.sequence.page_table[:num_pages]
            tables[row, : len(page_ids)] = page_ids
            tables[row, len(page_ids) :] = 0
        return tables

    def _buffer(self, name: str, size: int, dtype: type[np.signedinteger]) -> np.ndarray:
        """Returns `size` elements of the named buffer, which grows by doubling. Their content is undefined."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[name] = np.empty(max(64, 2 * size), dtype=dtype)
        return buffer[:size]

    def _check_token_ids(self, lowest: int, highest: int) -> None:
        # On a GPU, such a token would not raise an error. It would break the process's CUDA context.
        vocab_size = self._model.config.vocab_size
        if lowest < 0 or highest >= vocab_size:
            raise InvariantViolated(f"a token id lies outside the vocabulary of {vocab_size}")

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step that is ready to compute. `packed` contains all items except reported prompts; None without items."""

    plan: StepPlan
    packed: Packed | None


def choose(
    logits: torch.Tensor, items: list[StepItem], *, kernels: Kernels | None = None
) -> list[SampledToken | SampledTokens | NonFiniteLogits]:
    """Chooses the tokens of sampled items. `logits` contains the rows of each item's last token and its draft tokens.

    The token after a draft token is the token that `sample` would choose in a separate step, with the draft token in
    place. Draft tokens are accepted up to the first mismatch. Acceptance is deterministic, because the noise is a
    function of seed and position.
    """
    starts = [0, *itertools.accumulate(1 + len(item.proposed) for item in items)]
    choosers: list[Chooser] = []
    rows: list[int] = []
    for item, start in zip(items, starts, strict=False):
        # A grammar only moves forward, so a draft token must be accepted before the grammar can advance past it.
        num_ahead = 0 if item.sequence.grammar is not None else len(item.proposed)
        choosers += [item.sequence, *(Lookahead(item.sequence, item.proposed[: n + 1]) for n in range(num_ahead))]
        rows += range(start, start + 1 + num_ahead)
    chosen = iter(sample(logits if len(rows) == starts[-1] else logits[rows], choosers, kernels=kernels))
    outcomes: list[SampledToken | SampledTokens | NonFiniteLogits] = []
    for item, start in zip(items, starts, strict=False):
        if not item.proposed:
            outcomes.append(next(chosen))
        elif item.sequence.grammar is None:
            outcomes.append(accepted(item, [next(chosen) for _ in range(1 + len(item.proposed))]))
        else:
            outcomes.append(accepted(item, _one_by_one(item, next(chosen), logits[start:], kernels)))
    return outcomes


def _one_by_one(
    item: StepItem, outcome: SampledToken | NonFiniteLogits, logits: torch.Tensor, kernels: Kernels | None
) -> Iterator[SampledToken | NonFiniteLogits]:
    """Yields `outcome` and then the choices after the item's draft tokens, each computed on demand."""
    yield outcome
    for num_ahead in range(1, 1 + len(item.proposed)):
        ahead = Lookahead(item.sequence, item.proposed[:num_ahead])
        yield sample(logits[num_ahead : num_ahead + 1], [ahead], kernels=kernels)[0]


def accepted(
    item: StepItem, outcomes: Iterable[SampledToken | NonFiniteLogits]
) -> SampledToken | SampledTokens | NonFiniteLogits:
    """Returns the accepted tokens, given the choices after an item's last token and after each draft token."""
    tokens: list[SampledToken] = []
    for outcome, proposal in zip(outcomes, (*item.proposed, None), strict=False):
        if not isinstance(outcome, SampledToken):
            # After accepted draft tokens, the failure repeats as the first choice of the next step.
            return SampledTokens(tuple(tokens)) if tokens else outcome
        tokens.append(outcome)
        num_generated = item.sequence.num_generated_tokens + len(tokens)
        if outcome.token_id != proposal or item.sequence.sampling.finish_reason(num_generated, outcome.token_id):
            break
    return SampledTokens(tuple(tokens))


def _wanted_rows(items: list[StepItem], ends: np.ndarray) -> np.ndarray:
    """Returns int64 [rows]: for each sampled item, the rows of its last token and its draft tokens."""
    is_sampled = np.array([item.is_sampled for item in items])
    last: np.ndarray = ends[is_sampled].astype(np.int64) - 1
    num_proposed = [len(item.proposed) for item in items if item.is_sampled]
    if not any(num_proposed):
        return last
    own_rows = [np.arange(end - num, end + 1) for end, num in zip(last.tolist(), num_proposed, strict=True)]
    return np.concatenate(own_rows)


def check_plan(plan: StepPlan, page_size: int) -> None:
    """Raises InvariantViolated if a plan contradicts its sequences."""
    if len({id(item.sequence) for item in plan.items}) != len(plan.items):
        raise InvariantViolated("a sequence occurs twice in a step")
    for item in plan.items:
        sequence = item.sequence
        if not 1 <= item.num_scheduled_tokens <= sequence.num_uncomputed_tokens:
            raise InvariantViolated(
                f"sequence {sequence.sequence_id}: {item.num_scheduled_tokens} tokens scheduled, "
                f"{sequence.num_uncomputed_tokens} are not computed"
            )
        if item.proposed and not (item.is_sampled and sequence.num_generated_tokens):
            raise InvariantViolated(f"sequence {sequence.sequence_id}: proposals in the middle of it")
        num_tokens = sequence.num_computed_tokens + item.num_rows
        if num_pages_for(num_tokens, page_size) > len(sequence.page_table):
            raise InvariantViolated(
                f"sequence {sequence.sequence_id}: {len(sequence.page_table)} pages cannot hold {num_tokens} tokens"
            )
