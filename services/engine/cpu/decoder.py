"""Runs a decoder step in one call of the CPU kernels. Reference implementation: `services.engine.reference.decoder`.

Legend: T packed tokens, N pages, H KV heads, L layers, S slots of a page, D head_dim, K hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from services.engine.kernels.library import (
    DRAW,
    LIMIT,
    DecoderArgs,
    GuessesArgs,
    HeadsArgs,
    Kernels,
    LayerArgs,
    LinearArgs,
    StepArgs,
    batch_args,
    check_tensor,
    pointer,
)
from services.engine.reference.decoder import DecoderStep
from services.engine.steps.guesses import Draw, Guess, Limit
from services.engine.weights.config import ModelConfig
from services.engine.weights.linear import Linear, PackedLinear
from services.engine.weights.load import LayerWeights, ModelWeights
from services.runtime.errors import InvariantViolated


class KernelDecoder:
    """A model's weights in the kernels' layout, and the workspace of its steps. For one thread at a time."""

    def __init__(self, kernels: Kernels, config: ModelConfig, weights: ModelWeights) -> None:
        self._kernels = kernels
        self._config = config
        self._weights = weights  # the structures below contain addresses in it
        self._dtype = weights.embedding.dtype
        self._layers = (LayerArgs * config.num_layers)(*[_layer_args(layer) for layer in weights.layers])
        self._args = DecoderArgs(
            heads_args(config),
            config.norm_eps,
            config.vocab_size,
            config.hidden_size,
            config.intermediate_size,
            pointer(weights.embedding),
            pointer(weights.final_norm),
            _packed(weights.lm_head),
            self._layers,
        )
        self._workspace = torch.empty(0, dtype=self._dtype)

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Writes keys and values to the pool and returns logits, float32 [rows, V].

        Raises InvariantViolated, before any write, if the step is inconsistent with itself, the pool, or the model.
        """
        args, logits = self.arguments(step)
        self.run(args)
        return logits

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `forward` and also returns the requested states after the last norm, float32 [num_states, K]."""
        args, logits = self.arguments(step)
        states = torch.empty(step.num_states, self._config.hidden_size)
        args.num_states, args.states = step.num_states, pointer(states)
        self.run(args)
        return logits, states

    def run(self, args: StepArgs) -> None:
        """Runs a step with these arguments."""
        args.workspace = self._reserve_workspace(args.num_tokens, args.num_logits)
        self._kernels.forward(self._args, args, self._dtype)

    def run_guesses(self, args: StepArgs, guesses: GuessesArgs) -> None:
        """Runs `Kernels.guess` with these arguments."""
        args.workspace = self._reserve_workspace(args.num_tokens, args.num_logits)
        self._kernels.guess(self._args, args, guesses, self._dtype)

    def repeatable(self, step: DecoderStep) -> KernelStep:
        """Returns a step whose tensors the caller overwrites between runs.

        The properties of the tensors are checked now. Their content is checked in each run.
        """
        return KernelStep(self, step)

    def arguments(self, step: DecoderStep) -> tuple[StepArgs, torch.Tensor]:
        """Returns a step in the kernels' layout, and the tensor of its logits.

        The tensors of `step` must outlive it.
        """
        num_tokens, num_logits = step.token_ids.shape[0], step.logits_indices.shape[0]
        logits = torch.empty(num_logits - step.num_states, self._config.vocab_size)
        self._check_pool(step.pool_data)
        batch = step.batch
        args = StepArgs(
            batch_args(step.pool_data, batch.query_start, batch.context_lens, batch.page_tables),
            check_tensor(step.token_ids, torch.int64, shape=(num_tokens,)),
            check_tensor(step.positions, torch.int64, shape=(num_tokens,)),
            check_tensor(batch.slot_mapping, torch.int64, shape=(num_tokens,)),
            check_tensor(step.logits_indices, torch.int64, shape=(num_logits,)),
            num_tokens,
            num_logits,
            pointer(step.rope),
            step.rope.shape[0],
            pointer(logits),
        )
        return args, logits

    def _check_pool(self, pool_data: torch.Tensor) -> None:
        config = self._config
        num_pages, page_size = pool_data.shape[0], pool_data.shape[4]
        shape = (num_pages, config.num_kv_heads, config.num_layers, 2, page_size, config.head_dim)
        check_tensor(pool_data, self._dtype, shape=shape)

    def _reserve_workspace(self, num_tokens: int, num_logits: int) -> int:
        needed = self._kernels.workspace_elements(self._args, num_tokens=num_tokens, num_logits=num_logits)
        if needed > self._workspace.shape[0]:
            self._workspace = torch.empty(needed, dtype=self._dtype)
        return self._workspace.data_ptr()


class KernelStep:
    """A repeatable step with tensors at fixed addresses. Each run overwrites the logits."""

    def __init__(self, decoder: KernelDecoder, step: DecoderStep) -> None:
        self._decoder = decoder
        self._step = step  # the arguments contain addresses of its tensors
        self._args, self._logits = decoder.arguments(step)
        num = step.batch.context_lens.shape[0]
        self._draws, self._limits = np.zeros(num, DRAW), np.zeros(num, LIMIT)
        self._num_chosen = np.zeros(num, np.int64)
        self._chosen, self._probabilities = np.zeros((num, 0), np.int64), np.zeros((num, 0), np.float32)
        self._guesses = GuessesArgs(
            self._draws.ctypes.data,
            self._limits.ctypes.data,
            pointer(step.token_ids),
            pointer(step.positions),
            pointer(step.batch.slot_mapping),
            pointer(step.batch.context_lens),
            num_chosen=self._num_chosen.ctypes.data,
        )

    def forward(self) -> torch.Tensor:
        """Runs the step. Returns logits, float32 [rows, V]."""
        self._decoder.run(self._args)
        return self._logits

    def guess(self, draws: SequenceOf[Draw], limits: SequenceOf[Limit]) -> list[list[Guess]]:
        """Runs a step of one token per sequence, and returns draft tokens for each sequence up to its limit.

        Advances the step's tensors.
        """
        self._draws[:] = draws
        self._limits[:] = limits
        most = max(limit.most for limit in limits)
        if most > self._chosen.shape[1]:
            self._chosen = np.zeros((len(limits), most), np.int64)
            self._probabilities = np.zeros((len(limits), most), np.float32)
            self._guesses.most = most
            self._guesses.chosen = self._chosen.ctypes.data
            self._guesses.probabilities = self._probabilities.ctypes.data
        self._decoder.run_guesses(self._args, self._guesses)
        found = zip(self._chosen.tolist(), self._probabilities.tolist(), self._num_chosen.tolist(), strict=True)
        return [[*map(Guess, ids[:num], probabilities)] for ids, probabilities, num in found]


def heads_args(config: ModelConfig) -> HeadsArgs:
    """Returns the attention structure of a model."""
    return HeadsArgs(config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers, config.head_dim**-0.5)


def _layer_args(layer: LayerWeights) -> LayerArgs:
    return LayerArgs(
        pointer(layer.input_norm),
        None if layer.query_norm is None else pointer(layer.query_norm),
        None if layer.key_norm is None else pointer(layer.key_norm),
        pointer(layer.post_norm),
        _packed(layer.qkv),
        _packed(layer.output),
        _packed(layer.gate_up),
        _packed(layer.down),
    )


def _packed(linear: Linear) -> LinearArgs:
    if not isinstance(linear, PackedLinear):
        raise InvariantViolated("the CPU kernels were given a linear layer that is not packed")
    return linear.args
