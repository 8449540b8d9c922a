"""Runs vLLM's EngineCore in this process, on the engine thread, as the `Core` of both engines.

All uses of vLLM beyond its public API are in this module: `EngineCore.scheduler` with its `requests`, its cache
manager's `get_computed_blocks`, `get_block_ids`, watermark, and block pool, and the fields of a waiting `Request` that
`Scheduler._update_request_as_session` modifies too. It also replaces `Scheduler.kv_event_publisher`, and uses the
scheduler's queues and `_preempt_request` in the way that `Scheduler.reset_prefix_cache` does.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventPublisher
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from services.engine.cache.pages import PageCounts
from services.engine.cache.pool import num_pages_for
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import NonFiniteLogits
from services.runtime.errors import InvariantViolated
from worker.vllm.books import Scheduled, TransferBooks
from worker.vllm.connector import TandemConnector
from worker.vllm.core import Computed, OnBlocks, StepDone
from worker.vllm.names import BlockNames
from worker.vllm.sampling import TokenChoice, sampling_params


class _Asked(NamedTuple):
    """Work for vLLM: generate at most `max_tokens` tokens after `token_ids`."""

    token_ids: list[int]
    max_tokens: int
    salt: bytes
    service_class: int
    adapter: str


class RunningCore:
    """An EngineCore with a TandemConnector.

    `claim_thread` is called on each thread before its first step, for example on the engine thread after another thread
    loaded the model. `await_writes` is called after each step, before its blocks are reported, and returns after the
    device's last write. `on_preempted` is called with the blocks that a held request has just lost, before any of them
    is overwritten. `adapters` maps the names in requests to adapters.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        on_preempted: Callable[[tuple[int, ...]], None],
        claim_thread: Callable[[], None],
        await_writes: Callable[[], None],
        adapters: Mapping[str, LoRARequest] = MappingProxyType({}),
    ) -> None:
        scheduler = core.scheduler
        assert isinstance(scheduler, Scheduler), "the settings name no other scheduler"
        connector = scheduler.connector
        assert isinstance(connector, TandemConnector), "the settings name this connector"
        self._core = core
        self._adapters = adapters
        self._claim_thread = claim_thread
        self._await_writes = await_writes
        self._thread_id = 0
        self._scheduler = scheduler
        self._cache = scheduler.kv_cache_manager
        self._pool = scheduler.kv_cache_manager.block_pool
        self._books: TransferBooks = connector.books
        self._books.on_preempted = lambda request_id: on_preempted(self._held_blocks.get(request_id, ()))
        self._names = BlockNames(self.block_size)
        scheduler.kv_event_publisher = _NamesBlocks(self._names)
        self._choices: dict[str, TokenChoice] = {}
        self._held_blocks: dict[str, tuple[int, ...]] = {}
        """The blocks of each held request after the last step that computed any of it."""
        self._touched: dict[str, list[Any]] = {}
        """The cached blocks reserved for a held request until vLLM schedules it."""
        self._awaited_blocks: dict[str, int] = {}
        """Number of blocks of each awaited request whose tokens have not arrived."""
        self._left_out: Request | None = None
        """The best-ranked request that the last step did not schedule for lack of blocks or batch slots."""

    @property
    def block_size(self) -> int:
        """Implements Core."""
        return int(self._scheduler.block_size)

    def add(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> None:
        """Implements Core."""
        asked = _Asked(sequence.token_ids, _num_left(sequence), salt, service_class, sequence.adapter)
        self._add(request_id, asked, TokenChoice(sequence))

    def add_held(self, request_id: str, sequence: Sequence, *, salt: bytes, service_class: int) -> tuple[int, ...]:
        """Implements Core."""
        self._books.hold(request_id)
        asked = _Asked(sequence.prompt_token_ids, 1, salt, service_class, sequence.adapter)
        request = self._add(request_id, asked, TokenChoice(sequence))
        # Cached blocks are sent before the prompt is scheduled, so they must not be evicted until then.
        (cached,) = self._cache.get_computed_blocks(request)[0].blocks
        self._pool.touch(cached)
        self._touched[request_id] = list(cached)
        return tuple(block.block_id for block in cached)

    def add_awaited(
        self,
        request_id: str,
        token_ids: list[int],
        on_blocks: OnBlocks,
        *,
        salt: bytes,
        service_class: int,
        adapter: str = "",
    ) -> None:
        """Implements Core."""

        def note(block_ids: tuple[int, ...], num_cached_tokens: int) -> None:
            self._awaited_blocks[request_id] = len(block_ids) - num_cached_tokens // self.block_size
            on_blocks(block_ids, num_cached_tokens)

        self._books.await_tokens(request_id, len(token_ids), note)
        self._add(request_id, _Asked(token_ids, 1, salt, service_class, adapter), TokenChoice())

    def arrived(self, request_id: str, sequence: Sequence) -> None:
        """Implements Core."""
        request = self._scheduler.requests[request_id]
        prompt_token_ids = request.prompt_token_ids
        assert prompt_token_ids is not None, "requests are made of tokens"
        more = sequence.token_ids[len(prompt_token_ids) :]
        # Makes the request look as if it had been created with the received tokens plus the known tokens of the
        # response. It is still waiting, so no rank has seen it.
        prompt_token_ids.extend(more)
        request._all_token_ids.extend(more)
        request.num_prompt_tokens = len(prompt_token_ids)
        request.update_block_hashes()
        choice = self._choices[request_id]
        choice.sequence = sequence
        request.max_tokens = _num_left(sequence)
        request.sampling_params = sampling_params(choice, max_tokens=request.max_tokens)
        self._books.arrive(request_id)
        self._awaited_blocks.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Implements Core."""
        self._choices.pop(request_id, None)
        self._books.arrive(request_id)
        self._awaited_blocks.pop(request_id, None)
        self._core.abort_requests([request_id])

    def let_go(self, request_id: str) -> None:
        """Implements Core."""
        self._untouch(request_id)
        self._choices.pop(request_id, None)
        self._held_blocks.pop(request_id, None)
        request = self._scheduler.requests[request_id]
        self._books.let_go(request_id, has_ended=request.is_finished())
        self._core.abort_requests([request_id])

    def step(self) -> StepDone:
        """Implements Core."""
        if self._thread_id != threading.get_ident():
            self._thread_id = threading.get_ident()
            self._claim_thread()
        has_news = self._books.has_news
        self._preempt_worse()
        outputs, _ = self._core.step()
        self._await_writes()
        scheduled, preempted = self._books.take_step()
        self._left_out = None if preempted else self._best_left_out(sum(one.num_tokens for one in scheduled))
        by_id = {output.request_id: output for some in outputs.values() for output in some.outputs}
        computed = tuple(self._computed(one, by_id.get(one.request_id)) for one in scheduled)
        has_more = bool(scheduled or has_news)
        return StepDone(computed, tuple(preempted), has_more, self._names.take_changes())

    def counts(self) -> PageCounts:
        """Implements Core."""
        total, free = self._num_blocks, self._pool.get_num_free_blocks()
        reserved = sum(self._awaited_blocks.values())
        return PageCounts(total, free, 0, reserved, total - free - reserved)

    def check_books(self) -> None:
        """Implements Core."""
        num_free = self._pool.get_num_free_blocks()
        if self._scheduler.requests or self._books.num_requests or num_free != self._num_blocks:
            raise InvariantViolated(
                f"vLLM holds {len(self._scheduler.requests)} requests and {self._num_blocks - num_free} blocks, "
                f"transfers {self._books.num_requests}, although nothing is asked for"
            )

    def _best_left_out(self, num_tokens: int) -> Request | None:
        """Returns the best-ranked request that still waits for blocks or a batch slot, after a step of `num_tokens`.

        Returns None if the step used up its token budget, because the request may then have waited for the budget
        instead.
        """
        scheduler = self._scheduler
        if num_tokens >= scheduler.max_num_scheduled_tokens:
            return None
        arrived = (one for one in scheduler.kv_holding_waiting if not self._books.is_awaited(one.request_id))
        return min((*arrived, *scheduler.waiting), default=None)

    def _preempt_worse(self) -> None:
        """Preempts sequences of worse classes if that admits the best waiting request.

        vLLM preempts only in favor of running requests. A waiting request waits, whatever its class.
        """
        scheduler, waiting = self._scheduler, self._left_out
        if waiting is None or waiting.request_id not in scheduler.requests:
            return
        num_missing = 0
        if all(one is not waiting for one in scheduler.kv_holding_waiting):
            num_free = self._pool.get_num_free_blocks() - self._cache.watermark_blocks
            num_missing = num_pages_for(waiting.num_tokens, self.block_size) - num_free
        num_places = scheduler.max_num_active_reqs - len(scheduler.running)
        victims: list[Request] = []
        for one in sorted(scheduler.running, reverse=True):
            if (num_missing <= 0 < num_places) or one.priority <= waiting.priority:
                break
            if not self._books.is_held(one.request_id):  # its blocks are being sent
                victims.append(one)
                num_missing -= len(self._cache.get_block_ids(one.request_id)[0])
                num_places += 1
        if num_missing > 0 or num_places <= 0:
            return
        for one in victims:
            scheduler.running.remove(one)
            scheduler._preempt_request(one, time.monotonic())
            scheduler.prev_step_scheduled_req_ids.discard(one.request_id)

    @property
    def _num_blocks(self) -> int:
        return int(self._pool.num_gpu_blocks) - 1  # vLLM reserves the first block for padding

    def _add(self, request_id: str, asked: "_Asked", choice: TokenChoice) -> Request:
        self._choices[request_id] = choice
        wanted = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(asked.token_ids),
            mm_features=None,
            sampling_params=sampling_params(choice, max_tokens=asked.max_tokens),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters[asked.adapter] if asked.adapter else None,
            cache_salt=asked.salt.hex(),
            data_parallel_rank=None,
            priority=asked.service_class,
        )
        request, wave = self._core.preprocess_add_request(wanted)
        self._core.add_request(request, wave)
        return request

    def _computed(self, one: Scheduled, output: EngineCoreOutput | None) -> Computed:
        self._untouch(one.request_id)
        block_ids: tuple[int, ...] = ()
        if self._books.is_held(one.request_id):
            (held,) = self._cache.get_block_ids(one.request_id)
            block_ids = self._held_blocks[one.request_id] = tuple(held)
        if output is None:
            return Computed(*one, block_ids, None, has_ended=False)
        has_ended = output.finish_reason is not None
        choice = self._choices.pop(one.request_id) if has_ended else self._choices[one.request_id]
        outcome = choice.outcome
        if not output.new_token_ids:
            outcome = NonFiniteLogits(f"vLLM ended the sequence: {output.finish_reason}")
        return Computed(*one, block_ids, outcome, has_ended)

    def _untouch(self, request_id: str) -> None:
        touched = self._touched.pop(request_id, None)
        if touched:
            self._pool.free_blocks(reversed(touched))


class _NamesBlocks(EventPublisher):
    """Forwards vLLM's cache events of each step to BlockNames."""

    def __init__(self, names: BlockNames) -> None:
        super().__init__()
        self._names = names

    def publish(self, events: EventBatch) -> None:
        """Forwards the blocks that a step stored and removed."""
        for event in events.events:
            if isinstance(event, BlockStored):
                # The salt of a request is the last extra key in the hash of its first block.
                first = (event.extra_keys or (None,))[0]
                salt = bytes.fromhex(first[-1]) if event.parent_block_hash is None and first else None
                self._names.stored(event.block_hashes, event.token_ids, parent=event.parent_block_hash, salt=salt)
            elif isinstance(event, BlockRemoved):
                self._names.removed(event.block_hashes)
            else:
                assert not isinstance(event, AllBlocksCleared), "nothing here asks vLLM to forget its blocks"

    def shutdown(self) -> None:
        """Does nothing."""


def _num_left(sequence: Sequence) -> int:
    """Returns the number of tokens that the response may still have."""
    return sequence.sampling.max_tokens - sequence.num_generated_tokens
