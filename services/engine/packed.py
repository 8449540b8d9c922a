"""The inputs of one forward pass, as packed by a runner."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from services.engine.model import Model
from services.engine.reference.attention import AttentionBatch


@dataclass(frozen=True, slots=True)
class Packed:
    """Arguments of one forward pass.

    `token_ids` and `positions` are int64 [T]. `logits_indices` (int64) selects the output rows. For the last
    `num_states` of these rows, the pass returns hidden states instead of logits.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch
    logits_indices: torch.Tensor
    num_states: int = 0

    def run(self, model: Model, pool_data: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Returns the logits [rows, V] and the hidden states after the last norm [num_states, hidden], both float32."""
        step = model.step(
            self.token_ids,
            self.positions,
            batch=self.batch,
            pool_data=pool_data,
            logits_indices=self.logits_indices,
        )
        logits, states = model.decoder.forward_with_states(replace(step, num_states=self.num_states))
        return logits, states.cpu().numpy()
