"""vLLM's blocks as pages, for the layouts that its backends have."""

import pytest
import torch

from kv_transfer.page_bytes import Destination, PageReader, PageWriter, wire_layout
from services.runtime.errors import ConfigError, InvariantViolated
from worker.vllm.blocks import BlockGenerations, BlockMemory

LAYERS, BLOCKS, HEADS, SLOTS, WIDTH = 3, 8, 2, 4, 10


def layers_of(layout: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Each layer's [N, H, S, 2D], as vLLM gives it, over memory in the order that the layout's letters say."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": SLOTS, "C": WIDTH}
    memory = torch.randn([sizes[axis] for axis in layout], generator=torch.Generator().manual_seed(seed))
    logical = memory.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layers.{layer}": logical[layer] for layer in range(LAYERS)}


@pytest.mark.parametrize(("layout", "num_pieces"), [("LBHNC", LAYERS), ("LBNHC", LAYERS), ("BLHNC", 1), ("BHLNC", 1)])
def test_a_block_of_all_layers_is_a_page(layout: str, num_pieces: int) -> None:
    layers, other = layers_of(layout), layers_of(layout, seed=1)
    source, target = BlockMemory([layers], block_size=SLOTS), BlockMemory([other], block_size=SLOTS)
    (part,) = source.parts
    assert part.shape == (num_pieces, BLOCKS, source.layout.page_bytes // num_pieces)
    assert source.layout.page_bytes == LAYERS * HEADS * SLOTS * WIDTH * 4
    before = {name: tensor.clone() for name, tensor in other.items()}
    frame = torch.cat([torch.from_numpy(piece) for piece in PageReader(source).pieces([5, 1, 2])])
    writer = PageWriter(target, wire_layout(source.layout, fingerprint="f", exact=False))
    writer.write(frame.numpy(), 0, Destination((3, 4, 6), SLOTS, 3 * SLOTS))
    for name, tensor in other.items():
        expected = before[name]
        expected[4], expected[6] = layers[name][1], layers[name][2]  # the first page was cached, and stays
        assert torch.equal(tensor, expected)


def ranks_of(heads: torch.Tensor, num_ranks: int) -> list[dict[str, torch.Tensor]]:
    """The memory of each rank that has its share of all heads [L, B, H, N, C], or one head that others have, too."""
    num_heads = heads.shape[2]
    each = max(1, num_heads // num_ranks)
    shares = [heads[:, :, rank * num_heads // num_ranks :][:, :, :each].clone() for rank in range(num_ranks)]
    return [{f"layers.{layer}": share[layer] for layer in range(LAYERS)} for share in shares]


@pytest.mark.parametrize(("num_ranks", "other_num_ranks"), [(1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 4), (8, 2)])
def test_workers_of_any_number_of_ranks_exchange_pages(num_ranks: int, other_num_ranks: int) -> None:
    num_heads = 4
    shape = (LAYERS, BLOCKS, num_heads, SLOTS, WIDTH)
    sent, kept = torch.randn(shape), torch.randn(shape)
    expected = kept.clone()
    expected[:, [4, 6]] = sent[:, [1, 2]]
    source, target = (
        BlockMemory(ranks_of(heads, number), block_size=SLOTS, num_kv_heads=num_heads)
        for heads, number in ((sent, num_ranks), (kept, other_num_ranks))
    )
    assert source.is_cut_by_heads
    assert source.layout == target.layout
    frame = torch.cat([torch.from_numpy(piece) for piece in PageReader(source).pieces([1, 2])])
    assert len(frame) == 2 * source.layout.page_bytes
    writer = PageWriter(target, wire_layout(source.layout, fingerprint="f", exact=False))
    writer.write(frame.numpy(), 0, Destination((4, 6), 0, 2 * SLOTS))
    for part, ranks in zip(target.parts, ranks_of(expected, other_num_ranks), strict=True):
        assert torch.equal(part.view(torch.float32), torch.stack([*ranks.values()]).flatten(2))


@pytest.mark.parametrize(("layout", "is_cut"), [("LBHNC", True), ("LBNHC", False), ("BLHNC", False), ("BHLNC", True)])
def test_ranges_of_heads_are_ranges_of_pieces_in_some_layouts(layout: str, is_cut: bool) -> None:
    assert BlockMemory([layers_of(layout)], block_size=SLOTS).is_cut_by_heads is is_cut


def test_a_block_in_pieces_of_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT"):
        BlockMemory([layers_of("LHBNC")], block_size=SLOTS)


def test_layers_that_differ_are_refused() -> None:
    layers = layers_of("LBHNC") | {"more": torch.zeros(BLOCKS, HEADS, SLOTS, 2 * WIDTH)}
    with pytest.raises(ConfigError, match="differ"):
        BlockMemory([layers], block_size=SLOTS)


def test_layers_in_memory_of_their_own_are_refused() -> None:
    layers = {name: tensor.clone() for name, tensor in layers_of("LBHNC").items()}
    with pytest.raises(ConfigError, match="one piece of memory"):
        BlockMemory([layers], block_size=SLOTS)


def test_a_lost_block_is_in_another_use() -> None:
    generations = BlockGenerations(4)
    before = generations.generations([1, 2, 3])
    generations.end_use([2])
    after = generations.generations([1, 2, 3])
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("page_id", [-1, 4])
def test_a_block_that_does_not_exist_has_no_use(page_id: int) -> None:
    with pytest.raises(InvariantViolated):
        BlockGenerations(4).generations([page_id])
