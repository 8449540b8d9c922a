"""Runs plans on a CUDA device: uses graphs for prompts and decode rows, and launches the next step early.

Each plan is split. Prompt tokens are computed as in `ModelRunner`, with the prompt kernel, even if a chunk has a single
token. Short chunks use a graph. Each token after a prompt is a row of a decode step. As a result, the same kernel
computes a token however it was scheduled. A plan with both kinds takes two passes over the weights. Draft tokens, and
generated tokens that are recomputed, are rows of the same sequence at its next positions. Each layer writes the keys of
all rows before any row reads them. The choice after a draft token, and the KV of a token in its page, therefore use the
same kernels as a separate step.

Launching ahead: if all rows of step n choose their tokens on the device, step n + 1 of the same rows is launched
immediately after step n. It reads the tokens of step n from device memory. Only then does the host wait for the tokens
of step n. If the next plan contains only these rows, in the expected state, its result is ready or in progress. If not
(because a row joined, was preempted, or received a different token), the result is dropped and the plan is computed.
Launching ahead is safe for these reasons:

- It writes only the next keys and values of its rows, in pages that the rows owned at launch. A finished row no longer
  needs them. A later owner of such a page writes to it on the same stream, and reads only data written after that. A
  writer on another stream must first wait for this step, for example with an event.
- Rows do not depend on each other, so rows of finished sequences do no harm.

Sequences with penalties, biases, a grammar, top-k, top-p, or log-probabilities are not sampled on the device. Their
logits are computed by the same graph, `services.engine.sampling` chooses their token, and no step is launched ahead of
them. No step is launched ahead of draft tokens either, because the number of accepted draft tokens determines the next
inputs.

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
    """A prepared step. `packed` contains the prompt tokens.

    `parts` contains, for each item of the plan, its prompt part and its generated part.
    """

    parts: tuple["_Parts", ...]
    prompts: PreparedStep


class _Parts(NamedTuple):
    """An item split into its prompt part and the generated part that follows."""

    prompt: StepItem | None
    answer: StepItem | None


class GpuRunner(ModelRunner):
    """Runs plans on one model and one pool of a device, for one thread and one CUDA stream at a time."""

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
        """Captures graphs for up to `max_rows` decode rows and up to `max_prompt_tokens` prompt tokens."""
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
        """Steps that were launched before they were requested."""
        self.num_ahead_used = 0
        """Steps launched ahead whose result the next plan used."""

    @property
    def replays_in_chunks(self) -> bool:
        """Implements ModelRunner. Generated tokens are rows of decode steps, however many are computed at a time."""
        return True

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> GpuStep:
        """Runs the part of `run` that needs the interpreter. Compute the step before you prepare the next step.

        Raises InvariantViolated in the same cases as `run`.
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
        """Runs the rest of `run`, and launches the next step if its inputs are known."""
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
        """Launches decode rows on the device.

        Returns a function that waits for their tokens. The caller computes prompt chunks before it calls the function.
        """
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
        """Computes items that have several rows, or more rows than a graph supports, in as many launches as needed."""
        rows = [row for item in items for row in _rows(item)]
        ends = [*itertools.accumulate(item.num_rows for item in items)]
        is_on_host = [item.is_sampled and not _chooses_on_device(item) for item in items]
        # The first row of each item that chooses a token. Earlier rows only write their KV to the pages.
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
        """Launches the next step on the device if everything except its tokens is known. Otherwise, returns None."""
        rows, expected = [], []
        for item, row in zip(items, row_of, strict=True):
            sequence = item.sequence
            if not item.is_sampled:
                return None
            if sequence.num_tokens + 1 >= min(sequence.max_num_tokens, self._context_tokens):
                continue  # this step samples its last token
            if sequence.num_tokens >= len(sequence.page_table) * self._page_size:
                return None  # no page to write to
            rows.append(_row(sequence, sequence.num_tokens, feed_row=row))
            expected.append(sequence)
        if not rows:
            return None
        self.num_launched_ahead += 1
        return _Ahead(self._graphs.launch(rows), expected)

    def _on_device(self) -> AbstractContextManager[None]:
        """Selects the model's device. Kernels run on the thread's current device, which defaults to the first GPU."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()


class _Ahead:
    """A step launched ahead, and the state of its sequences in which its result can be used."""

    def __init__(self, launched: Launched, sequences: SequenceOf[Sequence]) -> None:
        self.launched = launched
        self._rows = {id(sequence): row for row, sequence in enumerate(sequences)}
        self._expected = [(one, one.page_table, one.num_tokens) for one in sequences]
        self._tokens: dict[int, int] = {}

    def expect(self, tokens: SequenceOf[int], items: SequenceOf[StepItem]) -> None:
        """Records the token that the previous step chose for each item."""
        self._tokens = {id(item.sequence): token for item, token in zip(items, tokens, strict=True)}

    def rows_of(self, items: SequenceOf[StepItem]) -> list[int] | None:
        """Returns the row of each item in this step, or None if an item is missing or not in the expected state."""
        rows = []
        for item in items:
            row = self._rows.get(id(item.sequence))
            if row is None:
                return None
            sequence, page_table, position = self._expected[row]
            # A different page table means that the sequence was preempted, and that this step wrote to pages it no
            # longer owns.
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
    answered = copy.copy(sequence)  # this copy differs only in `num_computed_tokens`
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
    """Returns the tokens of the item's rows: its uncomputed tokens and its draft tokens."""
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
