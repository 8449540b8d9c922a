"""Chunks by graphs give what launching them gives, bit by bit on a device, and padding leaves no trace."""

import pytest
import torch

from services.engine.cache.pool import PageLayout, PagePool
from services.engine.gpu import prompt_graphs
from services.engine.gpu.graphs import GraphCapture, call_again
from services.engine.gpu.prompt_graphs import PromptGraphs, token_buckets
from services.engine.reference.attention import AttentionBatch
from services.engine.reference.decoder import DecoderStep
from tests.services.engine.gpu.test_gpu_runner import triton_model

PAGE_SIZE = 16
NUM_PAGES = 24
CHUNKS = {"the rest of a prompt": [(20, 3)], "several prompts": [(0, 5), (33, 4), (0, 1), (17, 2)]}
"""For each sequence: the tokens that it had before, and the new ones."""


@pytest.fixture
def model(checkpoint, device):
    # On a CPU bfloat16 would be interpreted, slowly; its products of rows are another matter than a device's anyway.
    return triton_model(
        checkpoint("llama3-gqa-tied"), device, torch.float32 if device.type == "cpu" else torch.bfloat16
    )


def same(given, expected):
    """Bit by bit on a device; torch's products on a CPU depend on the number of rows."""
    if given.device.type == "cuda":
        return torch.equal(given, expected)
    return torch.allclose(given, expected, rtol=1e-5, atol=1e-5)


def pool_of(model):
    config = model.config
    layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, model.dtype)
    pool = PagePool(layout, NUM_PAGES, device=model.device)
    pool.data.copy_(torch.randn(pool.data.shape, generator=torch.Generator().manual_seed(1)))
    return pool


def graphs_of(model, pool, max_tokens=16):
    capture = GraphCapture(model.device) if model.device.type == "cuda" else call_again
    return PromptGraphs(model.decoder, pool, model.whole_rope(), capture=capture, max_tokens=max_tokens)


def step_of(model, pool, chunks, first_page=0):
    """A step with these chunks, each with its own pages; the logits of each one's last token are wanted."""
    starts, positions, slots, ends, tables = [0], [], [], [], []
    for before, count in chunks:
        table = [first_page + (len(tables) * 4 + page) % NUM_PAGES for page in range(4)]
        tables.append(table)
        places = range(before, before + count)
        positions += places
        slots += [table[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in places]
        starts.append(starts[-1] + count)
        ends.append(before + count)

    def tensor(values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype, device=model.device)

    batch = AttentionBatch(tensor(starts), tensor(ends), tensor(tables), tensor(slots, torch.int64), max(ends))
    ids = tensor([7 + 3 * at % 200 for at in range(starts[-1])], torch.int64)
    wanted = tensor(starts[1:], torch.int64) - 1
    return DecoderStep(ids, tensor(positions, torch.int64), batch, pool.data, wanted, model.whole_rope())


def test_padding_is_at_most_a_fifth_of_a_bucket_from_64_tokens_on():
    sizes = token_buckets(2048)
    assert sizes[:9] == [16, 32, 48, 64, 80, 96, 112, 128, 160]
    assert sizes[-1] == 2048
    for num_tokens in range(65, 2049):
        bucket = next(size for size in sizes if size >= num_tokens)
        assert (bucket - num_tokens) * 5 <= bucket, num_tokens
    assert token_buckets(40) == [16, 32, 40]
    assert token_buckets(16) == [16]
    assert token_buckets(5) == [5]


@pytest.mark.parametrize("name", CHUNKS)
def test_a_graph_gives_what_launches_give(model, name):
    launched, replayed = pool_of(model), pool_of(model)
    expected = model.decoder.forward(step_of(model, launched, CHUNKS[name]))
    graphs = graphs_of(model, replayed)
    # A longer step first: what it leaves behind is the padding's.
    scratch = pool_of(model).data
    graphs.forward(step_of(model, replayed, [(0, 16)], first_page=20))
    replayed.data.copy_(scratch)
    given = graphs.forward(step_of(model, replayed, CHUNKS[name]))
    assert same(given, expected)
    assert same(replayed.data, launched.data)


def test_capturing_writes_to_no_page(model):
    pool = pool_of(model)
    before = pool.data.clone()
    graphs_of(model, pool)
    assert torch.equal(pool.data, before)


@pytest.mark.parametrize("chunks", [[(0, 17)], [(0, 1)] * 3])
def test_what_is_too_long_or_has_too_many_sequences_is_launched_as_it_comes(model, monkeypatch, chunks):
    monkeypatch.setattr(prompt_graphs, "MAX_SEQUENCES", 2)
    pool = pool_of(model)
    graphs = graphs_of(model, pool)
    steps = []
    forward = model.decoder.forward
    monkeypatch.setattr(model.decoder, "forward", lambda step: steps.append(step) or forward(step))
    step = step_of(model, pool, chunks)
    assert torch.isfinite(graphs.forward(step)).all()
    assert steps == [step]
