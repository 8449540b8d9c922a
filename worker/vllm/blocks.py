"""vLLM's blocks as the pages of a handoff: their location in memory, and their generations.

A block of all layers is a page. It consists of one piece per layer, or of a single piece for all layers if the layout
has blocks outermost. Each rank stores its heads of every block in separate memory. The content is specific to the
attention backend and is transferred unchanged. Only workers with the same content format exchange pages
(`worker.vllm.loading`).

Shape legend: P pieces of a page, N blocks, B bytes of a piece.
"""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import torch

from services.engine.cache.pool import PageLayout
from services.runtime.errors import ConfigError, InvariantViolated


class BlockMemory:
    """The memory of all blocks. Implements PageMemory for a worker that computes with vLLM."""

    def __init__(
        self, ranks: SequenceOf[Mapping[str, torch.Tensor]], *, block_size: int, num_kv_heads: int = 0
    ) -> None:
        """`ranks` contains, for each rank in order, tensors [N, H, ...] by layer name, in the order of the pieces.

        `num_kv_heads` is the model's number of KV heads, which several ranks may share. If it is 0, each rank has
        distinct heads. Raises ConfigError if a block does not consist of contiguous ranges, or if layers differ in
        shape.
        """
        tensors = [tensor for layers in ranks for tensor in layers.values()]
        first = tensors[0]
        if any((one.shape, one.stride(), one.dtype) != (first.shape, first.stride(), first.dtype) for one in tensors):
            raise ConfigError("--engine vllm takes models whose layers have equal KV caches; this one's differ")
        num_heads, num_elements = first.shape[1], first[0].numel()
        slot_elements = num_elements // (num_heads * block_size)
        if slot_elements * num_heads * block_size != num_elements or slot_elements % 2:
            raise ConfigError(f"a KV block of {num_elements} elements is not one of {block_size} tokens")
        self.copies = num_heads * len(ranks) // (num_kv_heads or num_heads * len(ranks))
        num_heads_in_all = num_heads * len(ranks) // self.copies
        # A slot stores a key and a value. A latent vector is transferred in two halves.
        self.layout = PageLayout(len(ranks[0]), num_heads_in_all, slot_elements // 2, block_size, first.dtype)
        self.parts = [_pieces(list(layers.values())).view(torch.uint8) for layers in ranks]
        piece_elements = self.parts[0].shape[2] // first.element_size()
        self.is_cut_by_heads = num_heads * first.stride(1) == piece_elements
        """Whether the heads of all ranks, piece by piece, form the same page as on a single rank."""


class BlockGenerations:
    """Generations of blocks, as far as transfers need them. A new generation starts when a sender loses blocks.

    Otherwise the blocks of a transfer do not change until it releases them.
    """

    def __init__(self, num_blocks: int) -> None:
        self._generations = [0] * num_blocks

    def generations(self, page_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Implements PageGenerations."""
        if not all(0 <= page_id < len(self._generations) for page_id in page_ids):
            raise InvariantViolated(f"one of the blocks {page_ids} does not exist")
        return tuple(self._generations[page_id] for page_id in page_ids)

    def end_use(self, page_ids: Iterable[int]) -> None:
        """Starts a new generation, so that transfers that read these blocks detect the loss."""
        for page_id in page_ids:
            self._generations[page_id] += 1


def _pieces(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns one view [P, N, elements of a piece] over all layers, which vLLM allocates at equal distances.

    Raises ConfigError if vLLM's memory has another layout.
    """
    first = tensors[0]
    num_layers, num_blocks, num_elements = len(tensors), first.shape[0], first[0].numel()
    offsets = [one.storage_offset() for one in tensors]
    distances = {after - before for before, after in itertools.pairwise(offsets)}
    if len(distances) > 1 or len({one.untyped_storage().data_ptr() for one in tensors}) > 1:
        raise ConfigError("vLLM's layers are not in one piece of memory at equal distances")
    memory = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    if first.stride(0) == num_layers * num_elements:  # blocks outermost, regardless of the inner layout
        return memory.as_strided((1, num_blocks, num_layers * num_elements), (0, first.stride(0), 1), offsets[0])
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape[1:], first.stride()[1:], strict=True))
    if span != num_elements:
        raise ConfigError("vLLM's KV cache does not have a layer's block in one piece: set VLLM_KV_CACHE_LAYOUT")
    distance = distances.pop() if distances else 0
    return memory.as_strided((num_layers, num_blocks, num_elements), (distance, first.stride(0), 1), offsets[0])
