"""How vLLM's tokens are chosen: by this project's sampler, in the place of vLLM's.

A request goes to vLLM as a greedy one that carries a `TokenChoice`. A processor of logits, which vLLM calls with the
logits of the whole batch, has `services.engine.sampling` choose, and leaves vLLM one token to find the likeliest. So
everything that a request asks for (noise by seed and position, penalties, `min_tokens`, biases, grammars,
log-probabilities) means what it means with this project's engine, and an answer that is resumed on another worker draws
as it would have drawn; vLLM's own noise is a stream that begins anew there, and its penalties and `min_tokens` count
what was emitted before as prompt.

`OnRunnerV1` and `OnRunnerV2` are for vLLM's two model runners, of which it makes one by itself. Both live where the
model runs, on the engine thread. A choice is an object that both sides share, so the model's first rank runs in this
process. The other ranks, whose choices know nothing, are told what it has chosen.
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
"""As vLLM's setting `logits_processors` takes them, one of the two."""
_KEY = "tandem"
"""Under which a request's extra arguments have its choice."""


class TokenChoice:
    """How the tokens of one request are chosen, shared by the engine, which sets `sequence`, and the processor.

    At a place for which the sequence has a token already (an earlier attempt emitted it, or another worker chose it),
    that token is taken; behind its end, one is sampled. The engine appends each token to the sequence before the next
    step. Without a sequence, nothing may be computed of the request.
    """

    __slots__ = ("outcome", "sequence")

    def __init__(self, sequence: Sequence | None = None) -> None:
        self.sequence = sequence
        self.outcome: SampledToken | NonFiniteLogits | None = None
        """What the last step chose; it has no meaning where vLLM gives no token of the request after that step."""

    def __reduce__(self) -> tuple[type["TokenChoice"], tuple[()]]:
        return TokenChoice, ()  # another rank chooses nothing


def sampling_params(choice: TokenChoice, *, max_tokens: int) -> SamplingParams:
    """Returns what vLLM is asked: `max_tokens` tokens at most, each of them chosen by `choice`.

    vLLM stops nowhere else; `Sequence.finish_reason` tells where the answer ends.
    """
    return SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args={_KEY: choice}
    )


class OnRunnerV1(LogitsProcessor):
    """Chooses in vLLM's first model runner, which is the one for processors."""

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        self._chooser = _Chooser(device)
        self._choices: dict[int, tuple[TokenChoice, int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Says that greedy requests are concerned, too: all of them are."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the requests from row to row."""
        process_dict_updates(self._choices, batch_update, _choice_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leaves the token that is chosen in each row of `logits` [B, V] as the likeliest, in place."""
        rows = ((row, choice, num + len(generated)) for row, (choice, num, generated) in self._choices.items())
        return self._chooser.choose(logits, rows)


def _choice_of(
    params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
) -> tuple[TokenChoice, int, list[int]] | None:
    """Returns a request's choice, the length of its prompt and the list that vLLM appends its tokens to."""
    choice = (params.extra_args or {}).get(_KEY)
    return None if choice is None else (choice, len(prompt_token_ids or ()), output_token_ids)


class OnRunnerV2(LogitsProcessorV2):
    """Chooses in vLLM's second model runner, which is the one for GPUs."""

    def __init__(self, vllm_config: "VllmConfig", req_states: LogitsProcRequestState) -> None:
        self._chooser = _Chooser(req_states.device)
        self._choices: dict[int, TokenChoice] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Notes the choice of the request that has a slot from now on."""
        choice = (sampling_params.extra_args or {}).get(_KEY)
        if choice is None:
            self._choices.pop(req_idx, None)
            return False
        self._choices[req_idx] = choice
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Leaves the token that is chosen in each row of `logits` [B, V] as the likeliest, in place.

        The rows are those of the requests in order, as nothing is guessed.
        """
        positions = ctx.seq_lens_upper_bound_np.tolist()
        slots = enumerate(ctx.idx_mapping_np.tolist())
        rows = ((row, self._choices[slot], positions[row]) for row, slot in slots if slot in self._choices)
        return self._chooser.choose(logits, rows)


class _Chooser:
    """What both processors do with logits."""

    def __init__(self, device: torch.device) -> None:
        self._kernels = _kernels() if device.type == "cpu" else None
        self._ranks: GroupCoordinator = get_tp_group()

    def choose(self, logits: torch.Tensor, rows: Iterable[tuple[int, TokenChoice, int]]) -> torch.Tensor:
        """Decides rows of `logits` [B, V] float32 by their number, choice and position; returns `logits`, changed.

        A row of a prompt of which only a part is computed has the logits of an earlier place. vLLM drops what is chosen
        there, and nothing is changed by it.
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
    """Returns the CPU kernels, which choose the same tokens in less time, where they can be built."""
    try:
        return load_kernels()
    except KernelsUnavailable:
        return None
