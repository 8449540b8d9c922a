"""Samples vLLM's tokens with this project's sampler instead of vLLM's.

A request is sent to vLLM as a greedy request that carries a `TokenChoice`. A logits processor, which vLLM calls with
the logits of the whole batch, samples with `services.engine.sampling` and makes the sampled token the most likely one.
Therefore all options of a request (noise by seed and position, penalties, `min_tokens`, biases, grammars,
log-probabilities) have the same meaning as with the native engine, and a response that is resumed on another worker
continues with the same random draws. vLLM's own noise is a stream that would restart on the other worker, and its
penalties and `min_tokens` would count emitted tokens as part of the prompt.

`OnRunnerV1` and `OnRunnerV2` are for vLLM's two model runners, which create one of them. Both run where the model runs,
on the engine thread. A choice is an object shared by both sides, so the first rank of the model must run in this
process. The other ranks have empty choices and receive the sampled tokens.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_tp_group
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from services.engine.kernels.build import KernelsUnavailable
from services.engine.kernels.library import Kernels, load_kernels
from services.engine.sampling import sample
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken

if TYPE_CHECKING:
    from vllm.config import VllmConfig

RUNNER_V1 = "worker.vllm.sampling:OnRunnerV1"
RUNNER_V2 = "worker.vllm.sampling:OnRunnerV2"
"""Values for vLLM's setting `logits_processors`. One of the two applies."""
_KEY = "tandem"
"""Key of the choice in the extra arguments of a request."""


class TokenChoice:
    """Selects the tokens of one request. Shared by the engine, which sets `sequence`, and the processor.

    If the sequence already has a token at a position (an earlier attempt emitted it, or another worker sampled it), the
    choice returns that token. After the end of the sequence, it samples one. The engine appends each token to the
    sequence before the next step. Without a sequence, vLLM must not compute the request.
    """

    __slots__ = ("outcome", "sequence")

    def __init__(self, sequence: Sequence | None = None) -> None:
        self.sequence = sequence
        self.outcome: SampledToken | NonFiniteLogits | None = None
        """Outcome of the last step. Undefined if vLLM returned no token for the request in that step."""

    def __reduce__(self) -> tuple[type["TokenChoice"], tuple[()]]:
        return TokenChoice, ()  # another rank samples nothing


def sampling_params(choice: TokenChoice, *, max_tokens: int) -> SamplingParams:
    """Returns vLLM's sampling parameters: at most `max_tokens` tokens, each selected by `choice`.

    vLLM has no other stop condition, because `Sequence.finish_reason` decides where the response ends.
    """
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args={_KEY: choice}
    )


class OnRunnerV1(LogitsProcessor):
    """Samples in vLLM's first model runner, which supports processors of this type."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._chooser = _Chooser(device)
        self._choices: dict[int, tuple[TokenChoice, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Returns False, because the processor changes the result of greedy requests, and all requests are greedy."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tracks the batch index of each request."""
        process_dict_updates(self._choices, batch_update, _choice_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Makes the selected token of each row of `logits` [B, V] the most likely one, in place."""
        rows = ((row, choice, num + len(generated)) for row, (choice, num, generated) in self._choices.items())
        return self._chooser.choose(logits, rows)


def _choice_of(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> tuple[TokenChoice, int, list[int]] | None:
    """Returns a request's choice, the length of its prompt, and the list to which vLLM appends its tokens."""
    choice = (params.extra_args or {}).get(_KEY)
    return None if choice is None else (choice, len(prompt_token_ids or ()), output_token_ids)


class OnRunnerV2(LogitsProcessorV2):
    """Samples in vLLM's second model runner, which vLLM uses on GPUs."""

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState) -> None:
        self._chooser = _Chooser(req_states.device)
        self._choices: dict[int, TokenChoice] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Records the choice of the request that was assigned to a slot."""
        choice = (sampling_params.extra_args or {}).get(_KEY)
        if choice is None:
            self._choices.pop(req_idx, None)
            return False
        self._choices[req_idx] = choice
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Makes the selected token of each row of `logits` [B, V] the most likely one, in place.

        Without draft tokens, each request has exactly one row, in order.
        """
        positions = ctx.seq_lens_upper_bound_np.tolist()
        slots = enumerate(ctx.idx_mapping_np.tolist())
        rows = ((row, self._choices[slot], positions[row]) for row, slot in slots if slot in self._choices)
        return self._chooser.choose(logits, rows)


class _Chooser:
    """The shared sampling logic of both processors."""

    def __init__(self, device: torch.device) -> None:
        self._kernels = _kernels() if device.type == "cpu" else None
        self._ranks: GroupCoordinator = get_tp_group()

    def choose(self, logits: torch.Tensor, rows: Iterable[tuple[int, TokenChoice, int]]) -> torch.Tensor:
        """Selects tokens for rows of `logits` [B, V] float32, given as (row, choice, position).

        Returns `logits`, modified.

        If a step computes only part of a prompt, its row has the logits of an earlier position. vLLM drops the token
        selected there, and selecting it changes no state.
        """
        chosen = self._chosen(logits, rows) if self._ranks.is_first_rank else {}
        if self._ranks.world_size > 1:
            tokens = torch.full((len(logits),), -1, dtype=torch.int64)
            for row, token_id in chosen.items():
                tokens[row] = token_id
            tokens = self._ranks.broadcast(tokens.to(logits.device)).cpu()
            chosen = {row: token_id for row, token_id in enumerate(tokens.tolist()) if token_id >= 0}
        if chosen:
            logits[_index(chosen, logits), _index(chosen.values(), logits)] = math.inf
        return logits

    def _chosen(self, logits: torch.Tensor, rows: Iterable[tuple[int, TokenChoice, int]]) -> dict[int, int]:
        """Returns the token of each row."""
        chosen: dict[int, int] = {}
        open_rows: list[int] = []
        sequences: list[Sequence] = []
        choices: list[TokenChoice] = []
        for row, choice, position in rows:
            sequence = choice.sequence
            assert sequence is not None, "vLLM computes nothing of a request without a sequence"
            assert position <= sequence.num_tokens, "vLLM has a token that the sequence does not have"
            if position < sequence.num_tokens:
                chosen[row] = sequence.token_ids[position]
                choice.outcome = SampledToken(chosen[row])
            else:
                open_rows.append(row)
                sequences.append(sequence)
                choices.append(choice)
        if open_rows:
            open_logits = logits if open_rows == [*range(len(logits))] else logits[_index(open_rows, logits)]
            outcomes = sample(open_logits, sequences, kernels=self._kernels)
            for row, choice, outcome in zip(open_rows, choices, outcomes, strict=True):
                choice.outcome = outcome
                chosen[row] = outcome.token_id if isinstance(outcome, SampledToken) else 0
        return chosen


def _index(values: Iterable[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=logits.device)


def _kernels() -> Kernels | None:
    """Returns the CPU kernels, which sample the same tokens faster, or None if they cannot be built."""
    try:
        return load_kernels()
    except KernelsUnavailable:
        return None
