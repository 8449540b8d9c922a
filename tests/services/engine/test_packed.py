"""A pass that gives logits of some rows and hidden states of others."""

from typing import Any

import pytest
import torch

from services.engine.model import load_model
from services.engine.packed import Packed
from services.engine.reference.attention import AttentionBatch


@pytest.mark.parametrize("use_kernels", [True, False])
def test_each_row_gives_what_is_wanted_of_it(checkpoint: Any, random_ids: Any, use_kernels: bool) -> None:
    model = load_model(checkpoint("llama-mha"), device="cpu", use_kernels=use_kernels)
    config, ids = model.config, torch.tensor(random_ids(6))
    pool = torch.zeros(2, config.num_kv_heads, config.num_layers, 2, 8, config.head_dim)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 6], dtype=torch.int32),
        context_lens=torch.tensor([6], dtype=torch.int32),
        page_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.arange(8, 14),
    )
    places = torch.arange(6)
    everything = model.forward(ids, places, batch, pool, places)
    logits, states = Packed(ids, places, batch, torch.tensor([5, 2, 2, 4]), num_states=2).run(model, pool)
    assert logits.shape == (2, config.vocab_size)
    torch.testing.assert_close(logits, everything[[5, 2]])
    assert states.shape == (2, config.hidden_size)
    # The head of the state is what the logits are.
    _, ends = Packed(ids, places, batch, torch.tensor([2, 4]), num_states=2).run(model, pool)
    assert (ends == states).all()
    assert (states[0] != states[1]).any()
