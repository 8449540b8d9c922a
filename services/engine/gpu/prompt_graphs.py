"""Computes prompt chunks with CUDA graphs: copies inputs to fixed memory, padded to a bucket of tokens, and replays.

For chunks of up to about a thousand tokens, launching the kernels one by one costs the host more time than the device
needs to compute them. On an H100, 16 tokens of a model with 0.6B parameters took 27 ms with single launches and 1.3 ms
with a graph (docs/gpu.md). Chunks with more tokens than the largest bucket, or with too many sequences, use single
launches.

Padding belongs to no sequence and writes nothing, and rows are independent, so a token's result is the same in any
bucket. The graphs exclude the logits, because their number varies, and because the host launches them long before the
device has completed the rest.

Legend: T packed tokens, B sequences, K hidden size, V vocabulary, P pages of a whole context.
"""

import functools
from collections.abc import Callable

import torch

from services.engine.cache.pool import PagePool, num_pages_for
from services.engine.gpu.decoder import TritonDecoder
from services.engine.gpu.graphs import Capture
from services.engine.reference.attention import AttentionBatch
from services.engine.reference.decoder import DecoderStep

MAX_TOKENS = 2048
MAX_SEQUENCES = 64

_SMALLEST = 16
_PER_OCTAVE = 4


def token_buckets(max_tokens: int) -> list[int]:
    """Returns the token counts that have a graph: 16, 32, 48, 64, then four per octave, and `max_tokens`.

    From 64 tokens, at most a fifth of a bucket is padding.
    """
    sizes = list(range(_SMALLEST, _SMALLEST * _PER_OCTAVE, _SMALLEST))
    octave = _SMALLEST * _PER_OCTAVE
    while octave < max_tokens:
        sizes += range(octave, 2 * octave, octave // _PER_OCTAVE)
        octave *= 2
    return sorted({*(size for size in sizes if size < max_tokens), max_tokens})


class PromptGraphs:
    """The prompt steps of one model on one pool, for one thread and one CUDA stream at a time."""

    def __init__(
        self, decoder: TritonDecoder, pool: PagePool, rope: torch.Tensor, *, capture: Capture, max_tokens: int
    ) -> None:
        """Expects the rotary table of the model's full context in `rope`. Its address must not change."""
        config, device = decoder.config, pool.data.device
        max_pages = min(num_pages_for(config.context_length_tokens, pool.layout.page_size), pool.num_pages)
        self._decoder = decoder
        self._pool = pool
        self._rope = rope
        self._token_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self._slots = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self._query_start = torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(MAX_SEQUENCES, dtype=torch.int32, device=device)
        self._page_tables = torch.zeros(MAX_SEQUENCES, max_pages, dtype=torch.int32, device=device)
        # The outputs are outside the memory that the graphs share.
        size = (max_tokens, config.hidden_size)
        self._x = torch.zeros(size, dtype=pool.layout.dtype, device=device)
        self._residual = torch.zeros(size, dtype=pool.layout.dtype, device=device)
        self._replays: dict[int, Callable[[], None]] = {}
        with torch.inference_mode():
            sizes = token_buckets(max_tokens)
            largest_first = {size: capture(functools.partial(self._compute, size)) for size in sizes[::-1]}
            self._replays = {size: largest_first[size] for size in sizes}

    @torch.inference_mode()
    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Computes the same result as `TritonDecoder.forward`: the requested logits, float32 [rows, V]."""
        num_tokens, (num_sequences, num_pages) = len(step.token_ids), step.batch.page_tables.shape
        bucket = next((size for size in self._replays if size >= num_tokens), None)
        if bucket is None or num_sequences > MAX_SEQUENCES:
            return self._decoder.forward(step)
        batch = step.batch
        self._token_ids[:num_tokens].copy_(step.token_ids)
        self._positions[:num_tokens].copy_(step.positions)
        self._slots[:num_tokens].copy_(batch.slot_mapping)
        self._slots[num_tokens:bucket].fill_(-1)
        self._query_start[: num_sequences + 1].copy_(batch.query_start)
        self._query_start[num_sequences + 1 :].fill_(num_tokens)
        self._context_lens[:num_sequences].copy_(batch.context_lens)
        self._page_tables[:num_sequences, :num_pages].copy_(batch.page_tables)
        self._replays[bucket]()
        return self._decoder.logits(self._x, self._residual, step.logits_indices)

    def _compute(self, bucket: int) -> None:
        """Reads the input buffers and writes the hidden states. This is the captured function."""
        batch = AttentionBatch(
            query_start=self._query_start,
            context_lens=self._context_lens,
            page_tables=self._page_tables,
            slot_mapping=self._slots[:bucket],
        )
        token_ids, positions = self._token_ids[:bucket], self._positions[:bucket]
        nothing = self._query_start[:0]
        step = DecoderStep(token_ids, positions, batch, self._pool.data, nothing, self._rope)
        x, residual = self._decoder.hidden(step)
        self._x[:bucket].copy_(x)
        self._residual[:bucket].copy_(residual)
