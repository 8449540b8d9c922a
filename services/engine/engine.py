"""Loads a model with its page pool, and runs it in a single process: the reference for the disaggregated system.

`Engine` is a complete continuous-batching loop. The workers must produce the same tokens, and their speed is compared
with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from services.engine.cache.host_tier import HostTier
from services.engine.cache.lease import PageLease
from services.engine.cache.memory import num_pool_pages, num_tier_bytes
from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool, num_pages_for
from services.engine.cache.swap import SwapSpace
from services.engine.model import ENGINE, EngineWeights, Model, TimedStep, load_model
from services.engine.parallel.group import RankGroup
from services.engine.reference.decoder import TorchDecoder
from services.engine.runner import ModelRunner
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import FinishReason, Grammar, Sampling, Sequence
from services.engine.steps.step import (
    PROMPT_ROWS,
    NonFiniteLogits,
    PooledState,
    SampledToken,
    StepItem,
    StepPlan,
    StepResult,
    with_whole_prompt,
)
from services.engine.weights.config import ModelConfig, load_config
from services.engine.weights.shard import SINGLE, Parallelism
from services.runtime.errors import ConfigError, InvalidRequest, TandemError
from services.runtime.identity import AnswerIdentity

logger = logging.getLogger(__name__)

DEFAULT_PAGE_SIZE = 16
DEFAULT_CHUNK_TOKENS = 512
DEFAULT_MAX_BATCH = 64
WARM_UP_TOKENS = 64
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model and its resources. The engine thread owns `pool`, `allocator`, and `runner`."""

    model_config: ModelConfig
    model: Model
    pool: PagePool
    allocator: PageAllocator
    runner: ModelRunner
    fingerprint: str
    """See `Model.fingerprint`. Two workers exchange pages only if their fingerprints are equal."""
    tier: HostTier | None = None
    """Second cache tier for named pages that the pool evicts. Also owned by the engine thread."""
    parallelism: Parallelism = SINGLE
    ranks: RankGroup | None = None
    """The other processes that compute this model, if any. `close` stops them."""
    first_steps: tuple[TimedStep, ...] = ()
    """Steps that were timed during warm-up, before the first request."""

    embeds: bool = True
    """Whether the engine returns hidden states of prompts, as embedding requests need them."""

    @property
    def gpu_uuid(self) -> str | None:
        """NVML's UUID of the model's GPU, independent of CUDA_VISIBLE_DEVICES. None on a CPU."""
        if self.model.device.type != "cuda":
            return None
        return f"GPU-{str(torch.cuda.get_device_properties(self.model.device).uuid).removeprefix('GPU-')}"

    @property
    def kernels_error(self) -> str:
        """Implements LoadedModel."""
        return self.model.kernels_error

    @property
    def adapters(self) -> frozenset[str]:
        """Implements LoadedModel. This engine supports no adapters."""
        return frozenset()

    @property
    def weights(self) -> EngineWeights | None:
        """Weights that can stay in host memory. None if they are on a GPU or in other processes."""
        if self.ranks is not None or self.model.device.type != "cpu":
            return None
        return EngineWeights(self.model, self.first_steps)

    @property
    def loss(self) -> TandemError | None:
        """Error that made the idle engine unusable, such as the loss of a rank. None if the engine is usable."""
        return None if self.ranks is None else self.ranks.loss

    def close(self) -> None:
        """Stops the other ranks and stops sharing the weights. Idempotent."""
        if self.ranks is not None:
            self.ranks.close()
        else:
            self.model.close()

    @property
    def is_exact(self) -> bool:
        """Whether a token is bitwise identical for every batch and every split of its sequence into steps."""
        return self.model.exact

    @property
    def limits(self) -> SequenceLimits:
        """Maximum size of a sequence."""
        config, layout = self.model_config, self.pool.layout
        return SequenceLimits(config.context_length_tokens, config.vocab_size, self.pool.num_pages, layout.page_size)

    def check(self, sampling: Sampling) -> None:
        """Implements LoadedModel. Accepts all sampling parameters."""

    def identity(self, *, vocabulary: str, grammars: str) -> AnswerIdentity:
        """Returns everything that determines the generated tokens, except the vocabulary and the grammars."""
        return AnswerIdentity(
            engine=ENGINE,
            weights=self.fingerprint,
            config=_config_digest(self.model_config),
            dtype=str(self.model.dtype).removeprefix("torch."),
            arithmetic=self.model.arithmetic,
            vocabulary=vocabulary,
            grammars=grammars,
        )


def load_engine(
    model_dir: str | Path | Model,
    *,
    dtype: str = "auto",
    device: str = "auto",
    page_size: int = DEFAULT_PAGE_SIZE,
    num_pages: int | None = None,
    kv_memory_bytes: int | None = None,
    gpu_memory_share: float = 1.0,
    host_tier_bytes: int | None = None,
    threads: int | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    shares_weights: bool = False,
    captures_graphs: bool = True,
) -> EngineParts:
    """Loads a checkpoint folder, or accepts a loaded model of one rank, and allocates its KV pages.

    `services.engine.cache.memory` computes the sizes of the pool and of the host tier. `threads` is process-wide, and
    is divided among the ranks. Ranks live until the parts are closed. With `shares_weights`, engines of one rank on
    this host load the weights once. Without `captures_graphs`, steps on a GPU use no CUDA graphs.

    Raises ModelError if the folder cannot be served, ConfigError for a wrong setting or a pool that does not fit into
    memory, and WorkerLost if another rank has ended.
    """
    if page_size < 1:
        raise ConfigError(f"page_size is {page_size}, it must be at least 1")
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}, it must be at least 1")
        torch.set_num_threads(threads)
    make_parts = partial(
        _with_pool,
        page_size=page_size,
        num_pages=num_pages,
        kv_memory_bytes=kv_memory_bytes,
        gpu_memory_share=gpu_memory_share,
        host_tier_bytes=host_tier_bytes,
        captures_graphs=captures_graphs,
    )
    parallelism = Parallelism(tensor_parallel, pipeline_parallel)
    if parallelism.num_ranks == 1:
        model = load_model(model_dir, dtype=dtype, device=device, shares_weights=shares_weights)
        try:
            return make_parts(model)
        except BaseException:
            model.close()
            raise
    assert not isinstance(model_dir, Model), "the weights of several ranks are not kept"
    parallelism.check(load_config(model_dir))
    ranks = RankGroup(parallelism)
    try:
        return make_parts(ranks.load(model_dir, dtype=dtype, device=device, threads=threads), ranks)
    except BaseException:
        ranks.close()
        raise


def _config_digest(config: ModelConfig) -> str:
    """Returns a digest (16 hex digits) of all values read from config.json: rotations are not in the weights."""
    values = dataclasses.asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids)}
    return hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()[:16]


def _with_pool(
    model: Model,
    ranks: RankGroup | None = None,
    *,
    page_size: int,
    num_pages: int | None,
    kv_memory_bytes: int | None,
    gpu_memory_share: float,
    host_tier_bytes: int | None,
    captures_graphs: bool,
) -> EngineParts:
    config = model.config
    layout = PageLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=model.dtype,
    )
    pool_size = num_pool_pages(
        layout,
        model.device,
        weight_bytes=config.num_weights * model.dtype.itemsize,
        num_pages=num_pages,
        kv_memory_bytes=kv_memory_bytes,
        gpu_memory_share=gpu_memory_share,
    )
    if ranks is None:
        pool = PagePool(layout, pool_size, device=model.device)
    else:
        pool = ranks.make_pool(layout, pool_size)
    tier_bytes = num_tier_bytes(layout, model.device, num_pages=pool_size, asked=host_tier_bytes)
    tier = HostTier(SwapSpace(pool, tier_bytes)) if tier_bytes else None
    return EngineParts(
        model_config=config,
        model=model,
        pool=pool,
        allocator=PageAllocator(pool.num_pages, store=tier),
        runner=_make_runner(model, pool, captures_graphs=captures_graphs),
        fingerprint=model.fingerprint,
        tier=tier,
        parallelism=SINGLE if ranks is None else ranks.parallelism,
        ranks=ranks,
    )


def _make_runner(model: Model, pool: PagePool, *, captures_graphs: bool) -> ModelRunner:
    if captures_graphs and model.device.type == "cuda" and not isinstance(model.decoder, TorchDecoder):
        from services.engine.gpu_runner import GpuRunner  # Triton may be missing

        return GpuRunner(model, pool)
    return ModelRunner(model, pool)


def load_warm_engine(model_dir: str | Path, **settings: Any) -> EngineParts:
    """Loads an engine and generates a short response, so that no request waits for the first run of the kernels.

    Raises as `load_engine` does.
    """
    parts = load_engine(model_dir, **settings)
    num_tokens = min(WARM_UP_TOKENS, parts.limits.max_sequence_tokens - WARM_UP_STEPS)
    if num_tokens > 0:
        sampling = Sampling(max_tokens=WARM_UP_STEPS)
        try:
            Engine(parts).generate([[0] * num_tokens] * 2, sampling)
        except NonFiniteLogits:
            logger.warning("the model's answer to a prompt of tokens 0 is not finite")
        except BaseException:
            parts.close()
            raise
    return parts


class EngineOutput(NamedTuple):
    """Result of a step for one sequence: a token, or the failure. `finish_reason` is set with the last token."""

    sequence: Sequence
    outcome: SampledToken | NonFiniteLogits
    finish_reason: FinishReason | None


class Engine:
    """Runs chunked prefill and continuous batching in the caller's thread.

    Each step decodes every running sequence and spends `chunk_tokens` on prompts, oldest first. A sequence is admitted
    once all pages that it may need are promised to it, so it is never preempted.
    """

    def __init__(
        self,
        parts: EngineParts,
        *,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> None:
        if chunk_tokens < 1 or max_batch < 1:
            raise ValueError(f"chunk_tokens ({chunk_tokens}) and max_batch ({max_batch}) must be at least 1")
        self._parts = parts
        self._page_size = parts.pool.layout.page_size
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, PageLease] = {}
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def add(
        self,
        prompt_token_ids: SequenceOf[int],
        sampling: Sampling,
        *,
        emitted_token_ids: SequenceOf[int] = (),
        grammar: Grammar | None = None,
    ) -> Sequence:
        """Queues a request. `emitted_token_ids` are tokens of its response that an earlier attempt emitted.

        Raises InvalidRequest if the request is empty or too long, or contains an unknown token ID.
        """
        limits = self._parts.limits
        limits.check_fits(len(prompt_token_ids), sampling.max_tokens)
        limits.check_token_ids(prompt_token_ids)
        limits.check_token_ids(emitted_token_ids, field="emitted_token_ids")
        limits.check_token_ids(sampling.logit_bias, field="logit_bias")
        sequence = Sequence(
            self._num_added,
            prompt_token_ids,
            sampling=sampling,
            emitted_token_ids=emitted_token_ids,
            grammar=grammar,
        )
        if sequence.finish_reason() is not None:
            raise InvalidRequest("the emitted tokens already end the answer", field="emitted_token_ids")
        self._num_added += 1
        self._waiting.append(sequence)
        return sequence

    def step(self) -> list[EngineOutput]:
        """Plans and runs one step, and returns its tokens. Returns an empty list if the engine has no work."""
        self._admit()
        plan = self._plan()
        return self._apply(plan, self._parts.runner.run(plan))

    def cancel(self, sequence: Sequence) -> None:
        """Removes a waiting or running sequence. Ignores a finished sequence."""
        lease = self._running.pop(sequence, None)
        if lease is not None:
            lease.close()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)

    def generate(
        self, prompts: SequenceOf[SequenceOf[int]], sampling: Sampling | SequenceOf[Sampling]
    ) -> list[list[int]]:
        """Runs the prompts as one batch to completion. Returns the generated token IDs in the order of the prompts.

        `sampling` applies to all prompts, or contains one element per prompt. Outputs of other requests that run at the
        same time are discarded.

        Raises:
            InvalidRequest: A prompt cannot be served. No prompt runs.
            NonFiniteLogits: A prompt failed.
        """
        samplings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        sequences: list[Sequence] = []
        try:
            for prompt, its_sampling in zip(prompts, samplings, strict=True):
                sequences.append(self.add(prompt, its_sampling))
            while any(sequence.finish_reason() is None for sequence in sequences):
                for output in self.step():
                    if isinstance(output.outcome, NonFiniteLogits):
                        raise output.outcome
        finally:
            for sequence in sequences:
                self.cancel(sequence)
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]

    def close(self) -> None:
        """Cancels all sequences and frees all pages."""
        for sequence in [*self._running, *self._waiting]:
            self.cancel(sequence)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_batch:
            num_pages = num_pages_for(self._waiting[0].max_num_tokens, self._page_size)
            if not self._parts.allocator.can_promise(num_pages):
                return
            sequence = self._waiting.popleft()
            lease = PageLease(self._parts.allocator, num_promised_pages=num_pages)
            sequence.page_table = lease.page_ids
            self._running[sequence] = lease

    def _plan(self) -> StepPlan:
        plan = StepPlan()
        budget_tokens, num_reportable = self._chunk_tokens, PROMPT_ROWS
        for sequence in self._running:
            num_prompt_left = sequence.num_prompt_tokens - sequence.num_computed_tokens
            # After the prompt, compute one token per step, emitted tokens included, so that their KV is computed in the
            # same way as in the first attempt.
            num_tokens = min(num_prompt_left, budget_tokens) if num_prompt_left > 0 else 1
            if sequence.reports_prompt:
                num_tokens = min(num_tokens, num_reportable)
                num_reportable -= num_tokens
            if num_tokens > 0:
                plan.items.append(StepItem(sequence, num_tokens))
                budget_tokens -= num_tokens if num_prompt_left > 0 else 0
                num_wanted_tokens = sequence.num_computed_tokens + num_tokens + self._parts.runner.lookahead_tokens
                self._grow(sequence, min(num_wanted_tokens, sequence.max_num_tokens))
        return plan

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        self._running[sequence].grow_to(num_pages_for(num_tokens, self._page_size), state="used")

    def _apply(self, plan: StepPlan, result: StepResult) -> list[EngineOutput]:
        outputs = []
        for item, outcome in zip(plan.items, result.outcomes, strict=True):
            sequence = item.sequence
            outcome = with_whole_prompt(sequence, sequence.num_computed_tokens, outcome)
            sequence.num_computed_tokens += item.num_scheduled_tokens
            if outcome is None:
                continue
            assert not isinstance(outcome, PooledState), "nothing is embedded here"
            if isinstance(outcome, SampledToken):
                sequence.append_token(outcome.token_id)
            outputs.append(EngineOutput(sequence, outcome, sequence.finish_reason()))
            if isinstance(outcome, NonFiniteLogits) or sequence.finish_reason() is not None:
                self.cancel(sequence)
        return outputs
