"""vLLM's blocks as the pages of a handoff: where they lie, and which use of each it is.

A block of all layers is a page; layer by layer it is one piece, or all layers together where the layout has blocks
outermost. Each rank has its heads of every block in memory of its own. What is inside is the attention backend's own,
and travels as it is: only workers that agree on it exchange pages (`worker.vllm.loading`).

Shape legend: P pieces of a page, N blocks, B bytes of a piece.
"""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import torch

from services.engine.cache.pool import PageLayout
from services.runtime.errors import ConfigError, InvariantViolated


class BlockMemory:
    """The memory of all blocks: the PageMemory of a worker that computes with vLLM."""

    def __init__(
        self, ranks: SequenceOf[Mapping[str, torch.Tensor]], *, block_size: int, num_kv_heads: int = 0
    ) -> None:
        """`ranks` are, of each rank in order, tensors [N, H, ...] by the layers' names, in the order of the pieces.

        `num_kv_heads` are the model's, of which several ranks may have the same one; 0: each rank has others.
        Raises ConfigError where a block is not made of ranges of memory, or layers differ in shape.
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
        # A slot has a key and a value; a latent vector travels in two halves.
        self.layout = PageLayout(len(ranks[0]), num_heads_in_all, slot_elements // 2, block_size, first.dtype)
        self.parts = [_pieces(list(layers.values())).view(torch.uint8) for layers in ranks]
        piece_elements = self.parts[0].shape[2] // first.element_size()
        self.is_cut_by_heads = num_heads * first.stride(1) == piece_elements
        """Whether the heads of all ranks, piece by piece, are the page that a single rank has."""


class BlockGenerations:
    """Which use of each block it is, as far as transfers must know: another one begins when a sender loses blocks.

    Otherwise the blocks of a transfer stay what they are until it lets them go.
    """

    def __init__(self, num_blocks: int) -> None:
        self._generations = [0] * num_blocks

    def generations(self, page_ids: SequenceOf[int]) -> tuple[int, ...]:
        """Implements PageGenerations."""
        if not all(0 <= page_id < len(self._generations) for page_id in page_ids):
            raise InvariantViolated(f"one of the blocks {page_ids} does not exist")
        return tuple(self._generations[page_id] for page_id in page_ids)

    def end_use(self, page_ids: Iterable[int]) -> None:
        """Makes transfers that read these blocks notice that they have lost them."""
        for page_id in page_ids:
            self._generations[page_id] += 1


def _pieces(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One view [P, N, elements of a piece] over all layers, which vLLM has in one allocation at equal distances.

    Raises ConfigError where it has not.
    """
    first = tensors[0]
    num_layers, num_blocks, num_elements = len(tensors), first.shape[0], first[0].numel()
    offsets = [one.storage_offset() for one in tensors]
    distances = {after - before for before, after in itertools.pairwise(offsets)}
    if len(distances) > 1 or len({one.untyped_storage().data_ptr() for one in tensors}) > 1:
        raise ConfigError("vLLM's layers are not in one piece of memory at equal distances")
    memory = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage())
    if first.stride(0) == num_layers * num_elements:  # blocks outermost, whatever is inside
        return memory.as_strided((1, num_blocks, num_layers * num_elements), (0, first.stride(0), 1), offsets[0])
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape[1:], first.stride()[1:], strict=True))
    if span != num_elements:
        raise ConfigError("vLLM's KV cache does not have a layer's block in one piece: set VLLM_KV_CACHE_LAYOUT")
    distance = distances.pop() if distances else 0
    return memory.as_strided((num_layers, num_blocks, num_elements), (distance, first.stride(0), 1), offsets[0])
