"""The connector that vLLM loads by its path. It reports which blocks are filled or read by a transfer, and until when.

vLLM creates it twice: in the scheduler, where `RunningCore` finds it and the state is tracked, and in each rank's
process, where it forwards the metadata of a step. It copies nothing: `kv_transfer` reads and writes the blocks in
place, and a step does not touch blocks that a transfer uses. `worker.vllm.books` tracks the state.
"""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from worker.vllm.books import News, Scheduled, TransferBooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class StepNews(KVConnectorMetadata):
    """The updates that every rank receives with a step."""

    def __init__(self, news: News) -> None:
        self.news = news


class TandemConnector(KVConnectorBase_V1):
    """Both sides of the connector. vLLM selects the side with `role`."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.books = TransferBooks()
        self.kv_caches: dict[str, torch.Tensor] = {}
        """On a rank: the blocks of each layer."""

    # --- scheduler side ---

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        """Returns how many tokens the transfer delivers in addition to the locally cached tokens."""
        num_tokens = self.books.num_to_arrive(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Records the blocks allocated for a request."""
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self.books.note_blocks(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepNews:
        """Records the work of a step, and returns the updates for the ranks."""
        starts = {one.req_id: one.num_computed_tokens for one in scheduler_output.scheduled_new_reqs}
        cached = scheduler_output.scheduled_cached_reqs
        starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            self.books.note_scheduled(Scheduled(request_id, starts[request_id], num_tokens))
        self.books.note_preempted(scheduler_output.preempted_req_ids or ())
        return StepNews(self.books.take_news())

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the blocks of a finished request are retained until a transfer releases them."""
        return self.books.is_held(request.request_id), None

    # --- rank side ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Records the location of the layers' blocks."""
        self.kv_caches = kv_caches

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Forwards the updates to the scheduler."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepNews), "vLLM returns what this class has built"
        return set(metadata.news.let_go), set(metadata.news.arrived)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: a transfer writes into blocks that no step reads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing, because nothing is loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: a transfer reads blocks after the step that filled them."""

    def wait_for_save(self) -> None:
        """Does nothing, because nothing is saved."""
