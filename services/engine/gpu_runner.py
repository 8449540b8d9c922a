"""Runs plans on a CUDA device: prompts and decode rows by graphs, the next step ahead of being asked.

A plan is taken apart. Whatever belongs to a prompt is computed as `ModelRunner` does it, with the kernel of prompts,
also where a chunk has one token, but by a graph where it is short; each token after a prompt is a row of a decode step.
So a token comes from the same kernel however it was scheduled. A plan with both takes two passes over the weights.
Proposals, and tokens of an answer that are computed again, are rows of the same sequence at its next positions: each
layer writes all rows' keys before any row reads them, so that what is chosen behind a proposal, and what a page holds
of a token, comes from the same kernels as in a step of its own.

Launching ahead. When the device has been given step n and all of its rows choose on the device, step n + 1 of the same
rows is launched at once: it takes their tokens from the device's memory. Only then does the host wait for the tokens of
step n. If the next plan is of these rows as they were expected to be, its result has come already or is on its way; if
not (one joined, was preempted or was given another token), it is dropped and the plan is computed. That is safe:

- It writes only where its rows' next keys and values belong, in pages that they had when it was launched. A row that
  has ended has no use for them; a later holder of such a page writes to it on the same stream, and reads nothing that
  was not written since. A writer on another stream must wait for this one first (an event will do).
- Rows do not depend on each other, so that some may have left.

Not for here: what a step of a sequence with penalties, biases, a grammar, top-k, top-p or reports chooses. Its logits
come from the same graph, its token from `services.engine.sampling`, and nothing is launched ahead of it. Nor is
anything launched ahead of proposals: how many of them are right decides what comes next.

Legend: B rows, S slots of a page.
"""

import copy
import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from services.engine.cache.pool import PagePool
from services.engine.gpu.decoder import TritonDecoder
from services.engine.gpu.graphs import (
    MAX_ROWS,
    NO_FEED,
    Capture,
    DecodeGraphs,
    GraphCapture,
    Launched,
    Row,
    call_again,
)
from services.engine.gpu.prompt_graphs import MAX_TOKENS, PromptGraphs
from services.engine.gpu.sampling_triton import NOTHING_CHOSEN
from services.engine.model import Model
from services.engine.noise import noise_key
from services.engine.packed import Packed
from services.engine.runner import ModelRunner, PreparedStep, accepted, check_plan, choose
from services.engine.sampling import is_plain, sample
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import (
    NonFiniteLogits,
    PromptTokens,
    SampledToken,
    StepItem,
    StepOutcome,
    StepPlan,
    StepResult,
)
from services.runtime.errors import InvariantViolated


@dataclass(frozen=True, slots=True)
class GpuStep(PreparedStep):
    """A prepared step: `packed` has what belongs to prompts.

    `parts` has for each item of the plan what of it belongs to a prompt, and what to an answer.
    """

    parts: tuple["_Parts", ...]
    prompts: PreparedStep


class _Parts(NamedTuple):
    """An item in two: what belongs to its sequence's prompt, and what to the answer, which comes after that."""

    prompt: StepItem | None
    answer: StepItem | None


class GpuRunner(ModelRunner):
    """Runs plans on one model and one pool of a device. For one thread, and one CUDA stream, at a time."""

    lookahead_tokens = 1

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        max_rows: int = MAX_ROWS,
        max_prompt_tokens: int = MAX_TOKENS,
        capture: Capture | None = None,
    ) -> None:
        """Steps have graphs up to `max_rows` decode rows and `max_prompt_tokens` of prompts."""
        super().__init__(model, pool)
        if not isinstance(model.decoder, TritonDecoder):
            raise InvariantViolated("graphs need the decoder of a CUDA device")
        self._page_size = pool.layout.page_size
        self._context_tokens = model.config.context_length_tokens
        if capture is None:
            capture = GraphCapture(self._device) if self._device.type == "cuda" else call_again
        decoder, rope = model.decoder, model.whole_rope()
        with self._on_device():
            self._prompts = PromptGraphs(decoder, pool, rope, capture=capture, max_tokens=max_prompt_tokens)
            self._graphs = DecodeGraphs(decoder, pool, rope, max_rows=max_rows, capture=capture)
        self._ahead: _Ahead | None = None
        self.num_launched_ahead = 0
        """Steps that were launched before anybody asked for them."""
        self.num_ahead_used = 0
        """How many of these were what the next plan wanted."""

    @property
    def replays_in_chunks(self) -> bool:
        """See ModelRunner: tokens of an answer are rows of decode steps, however many are computed at a time."""
        return True

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> GpuStep:
        """Does the part of `run` that needs the interpreter. The step must be computed before the next is prepared.

        Raises InvariantViolated as `run` does.
        """
        check_plan(plan, self._page_size)
        parts = tuple(_parts(item) for item in plan.items)
        token_ids = [token_id for part in parts if part.answer is not None for token_id in _token_ids(part.answer)]
        if token_ids:
            self._check_token_ids(min(token_ids), max(token_ids))
        prompts = super().prepare(StepPlan([part.prompt for part in parts if part.prompt is not None]))
        return GpuStep(plan, prompts.packed, parts, prompts)

    @torch.inference_mode()
    def compute(self, step: PreparedStep) -> StepResult:
        """Does the rest of `run`, and launches the next step where it is known what that will be."""
        assert isinstance(step, GpuStep), "the runner that prepared a step computes it"
        alone = [part.answer for part in step.parts if part.answer is not None and part.prompt is None]
        following = [part.answer for part in step.parts if part.answer is not None and part.prompt is not None]
        with self._on_device():
            read_alone = self._launch(alone, is_alone=not step.prompts.plan.items)
            of_prompts = iter(super().compute(step.prompts).outcomes)
            of_following = iter(self._decode_many_rows(following) if following else ())
            of_alone = iter(read_alone())
        outcomes: list[StepOutcome] = []
        for part in step.parts:
            outcome = None if part.prompt is None else next(of_prompts)
            if part.answer is not None:
                outcome = _joined(outcome, next(of_alone if part.prompt is None else of_following))
            outcomes.append(outcome)
        return StepResult(outcomes)

    def _logits(self, packed: Packed) -> torch.Tensor:
        step = self._model.step(
            packed.token_ids,
            packed.positions,
            batch=packed.batch,
            pool_data=self._pool.data,
            logits_indices=packed.logits_indices,
        )
        return self._prompts.forward(step)

    def _launch(self, items: SequenceOf[StepItem], *, is_alone: bool) -> Callable[[], list[StepOutcome]]:
        """Has the device compute decode rows. A call of what it returns waits for their tokens; a chunk goes before."""
        ahead, self._ahead = self._ahead, None
        if not items:
            return list
        if sum(item.num_rows for item in items) > min(len(items), self._graphs.max_rows):
            outcomes = self._decode_many_rows(items)
            return lambda: outcomes
        row_of = ahead.rows_of(items) if ahead is not None else None
        if ahead is not None and row_of is not None:
            self.num_ahead_used += 1
            launched = ahead.launched
        else:
            row_of = [*range(len(items))]
            launched = self._graphs.launch([row for item in items for row in _rows(item)])
        on_host = [index for index, item in enumerate(items) if item.is_sampled and not _chooses_on_device(item)]
        by_host: dict[int, SampledToken | NonFiniteLogits] = {}
        if on_host:
            logits = self._graphs.logits[torch.tensor([row_of[index] for index in on_host], device=self._device)]
            chosen = sample(logits, [items[index].sequence for index in on_host])
            by_host = dict(zip(on_host, chosen, strict=True))
        elif is_alone:
            self._ahead = self._launch_ahead(items, row_of)

        def read() -> list[StepOutcome]:
            tokens = launched.tokens()
            if self._ahead is not None:
                self._ahead.expect([tokens[row] for row in row_of], items)
            return [
                by_host.get(index, _outcome(item, tokens[row])) if item.is_sampled else None
                for index, (item, row) in enumerate(zip(items, row_of, strict=True))
            ]

        return read

    def _decode_many_rows(self, items: SequenceOf[StepItem]) -> list[StepOutcome]:
        """Computes decode rows of items with several, or more rows than a graph has, which take several launches."""
        rows = [row for item in items for row in _rows(item)]
        ends = [*itertools.accumulate(item.num_rows for item in items)]
        is_on_host = [item.is_sampled and not _chooses_on_device(item) for item in items]
        # The row of each item that chooses; those before it only leave their keys in the pages.
        firsts = [end - 1 - len(item.proposed) for item, end in zip(items, ends, strict=True)]
        for_host = {
            row
            for first, end, is_chosen_there in zip(firsts, ends, is_on_host, strict=True)
            if is_chosen_there
            for row in range(first, end)
        }
        size = self._graphs.max_rows
        tokens: list[int] = []
        logits: list[torch.Tensor] = []
        for start in range(0, len(rows), size):
            launched = self._graphs.launch(rows[start : start + size])
            wanted = [row for row in range(min(size, len(rows) - start)) if start + row in for_host]
            if wanted:
                logits.append(self._graphs.logits[torch.tensor(wanted, device=self._device)])
            tokens += launched.tokens()
        on_host = [*itertools.compress(items, is_on_host)]
        by_host = iter(choose(torch.cat(logits), on_host) if on_host else ())
        outcomes: list[StepOutcome] = []
        for item, first, end, is_chosen_there in zip(items, firsts, ends, is_on_host, strict=True):
            chosen = [_outcome(item, token_id) for token_id in tokens[first:end]]
            if not item.is_sampled:
                outcomes.append(None)
            elif is_chosen_there:
                outcomes.append(next(by_host))
            else:
                outcomes.append(accepted(item, chosen) if item.proposed else chosen[0])
        return outcomes

    def _launch_ahead(self, items: SequenceOf[StepItem], row_of: SequenceOf[int]) -> "_Ahead | None":
        """Has the device compute the step after the one it was just given, if all of it is known but the tokens."""
        rows, expected = [], []
        for item, row in zip(items, row_of, strict=True):
            sequence = item.sequence
            if not item.is_sampled:
                return None
            if sequence.num_tokens + 1 >= min(sequence.max_num_tokens, self._context_tokens):
                continue  # its last token is being chosen
            if sequence.num_tokens >= len(sequence.page_table) * self._page_size:
                return None  # nowhere to write
            rows.append(_row(sequence, sequence.num_tokens, feed_row=row))
            expected.append(sequence)
        if not rows:
            return None
        self.num_launched_ahead += 1
        return _Ahead(self._graphs.launch(rows), expected)

    def _on_device(self) -> AbstractContextManager[None]:
        """Kernels go to the thread's current device, which is the first one wherever nothing else was said."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


class _Ahead:
    """A step that was launched before it was asked for, and what its rows must be like for it to be of use."""

    def __init__(self, launched: Launched, sequences: SequenceOf[Sequence]) -> None:
        self.launched = launched
        self._rows = {id(sequence): row for row, sequence in enumerate(sequences)}
        self._expected = [(one, one.page_table, one.num_tokens) for one in sequences]
        self._tokens: dict[int, int] = {}

    def expect(self, tokens: SequenceOf[int], items: SequenceOf[StepItem]) -> None:
        """Says which token each of the items is given by the step before."""
        self._tokens = {id(item.sequence): token for item, token in zip(items, tokens, strict=True)}

    def rows_of(self, items: SequenceOf[StepItem]) -> list[int] | None:
        """Returns the rows that these items have in it; None where one is missing or not what it was expected to be."""
        rows = []
        for item in items:
            row = self._rows.get(id(item.sequence))
            if row is None:
                return None
            sequence, page_table, position = self._expected[row]
            # Another list of pages: it was preempted in between, and what was written went to pages it has no more.
            is_expected = (
                sequence.page_table is page_table
                and sequence.num_computed_tokens == position
                and sequence.num_tokens == position + 1
                and sequence.token_ids[-1] == self._tokens[id(sequence)]
            )
            if not is_expected:
                return None
            rows.append(row)
        return rows


def _parts(item: StepItem) -> _Parts:
    sequence = item.sequence
    num_prompt_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
    if num_prompt_left <= 0:
        return _Parts(None, item)
    if item.num_scheduled_tokens <= num_prompt_left:
        return _Parts(item, None)
    answered = copy.copy(sequence)  # of which only how far it has come is another
    answered.num_computed_tokens = sequence.num_prompt_tokens
    rest = replace(item, sequence=answered, num_scheduled_tokens=item.num_scheduled_tokens - num_prompt_left)
    return _Parts(StepItem(sequence, num_prompt_left, wants_token=False), rest)


def _joined(of_prompt: StepOutcome, of_answer: StepOutcome) -> StepOutcome:
    """Returns the outcome of an item that was computed in two parts."""
    if isinstance(of_prompt, PromptTokens) and isinstance(of_answer, SampledToken):
        return replace(of_answer, prompt=of_prompt.prompt)
    return of_answer if of_prompt is None else of_prompt


def _chooses_on_device(item: StepItem) -> bool:
    return item.sequence.grammar is None and is_plain(item.sequence)


def _token_ids(item: StepItem) -> tuple[int, ...]:
    """Returns the tokens of its rows: those that are not computed, and the proposals."""
    start = item.sequence.num_computed_tokens
    return *item.sequence.token_ids[start : start + item.num_scheduled_tokens], *item.proposed


def _rows(item: StepItem) -> list[Row]:
    start = item.sequence.num_computed_tokens
    return [_row(item.sequence, start + place, token_id=token_id) for place, token_id in enumerate(_token_ids(item))]


def _row(sequence: Sequence, position: int, *, token_id: int = 0, feed_row: int = NO_FEED) -> Row:
    sampling = sequence.sampling
    return Row(
        token_id=token_id,
        position=position,
        page_ids=sequence.page_table,
        noise_key=noise_key(sampling.seed, position + 1),
        temperature=0.0 if sampling.is_greedy else sampling.temperature,
        min_p_margin=math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        feed_row=feed_row,
    )


def _outcome(item: StepItem, token_id: int) -> SampledToken | NonFiniteLogits:
    if token_id == NOTHING_CHOSEN:
        return NonFiniteLogits(
            f"no token can be chosen at position {item.sequence.num_tokens}: the model's output is not finite"
        )
    return SampledToken(token_id)
