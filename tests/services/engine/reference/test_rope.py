"""Rotary positions: rotations that depend on the distance of two positions only, and tables that may grow."""

from types import SimpleNamespace

import pytest
import torch

from services.engine.reference.rope import BLOCK_POSITIONS, RopeTable, apply_rope, inverse_frequencies
from services.engine.weights.config import Llama3RopeScaling

CPU = torch.device("cpu")
SCALING = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192)


def config(scaling=None, context_tokens=1000):
    return SimpleNamespace(
        head_dim=64, rope_theta=500_000.0, rope_scaling=scaling, context_length_tokens=context_tokens
    )


def test_a_table_grows_and_its_rows_do_not_depend_on_how_far_it_reaches():
    short, long = RopeTable(config(), device=CPU), RopeTable(config(), device=CPU)
    assert short.data.shape == (BLOCK_POSITIONS, 2, 32)
    grown = long.ensure(900)
    assert grown.shape[0] >= 900
    assert torch.equal(grown[:BLOCK_POSITIONS], short.data)
    assert short.ensure(10).shape[0] == BLOCK_POSITIONS


def test_products_depend_on_the_distance_only_and_lengths_stay():
    table = RopeTable(config(), device=CPU).ensure(500)
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 64), torch.randn(1, 2, 64)

    def product(at, other):
        turned = apply_rope(query, table, torch.tensor([at])), apply_rope(key, table, torch.tensor([other]))
        return (turned[0] * turned[1]).sum(-1)

    assert torch.allclose(product(7, 3), product(404, 400), atol=1e-3)
    assert not torch.allclose(product(7, 3), product(7, 4), atol=1e-3)
    turned = apply_rope(query, table, torch.tensor([333]))
    assert torch.allclose(turned.norm(dim=-1), query.norm(dim=-1), rtol=1e-5)
    assert torch.equal(apply_rope(query, table, torch.tensor([0])), query)


def test_the_type_of_what_is_turned_stays():
    table = RopeTable(config(), device=CPU).data
    assert apply_rope(torch.ones(1, 1, 64, dtype=torch.bfloat16), table, torch.tensor([5])).dtype == torch.bfloat16


def test_scaled_frequencies_are_whole_divided_or_between():
    plain, scaled = inverse_frequencies(config()), inverse_frequencies(config(SCALING))
    wavelengths = 2 * torch.pi / plain
    is_short = wavelengths < SCALING.original_context_tokens / SCALING.high_freq_factor
    is_long = wavelengths > SCALING.original_context_tokens / SCALING.low_freq_factor
    assert is_short.any()
    assert is_long.any()
    assert torch.equal(scaled[is_short], plain[is_short])
    assert torch.equal(scaled[is_long], plain[is_long] / SCALING.factor)
    between = ~is_short & ~is_long
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / SCALING.factor))[between].all()


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_frequencies_are_those_of_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    said = {"rope_type": "default", "rope_theta": 500_000.0}
    if scaling is not None:
        said |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
        }
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=said)
    )
    assert torch.equal(inverse_frequencies(config(scaling)), theirs.inv_freq)
