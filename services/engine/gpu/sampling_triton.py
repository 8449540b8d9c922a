"""Chooses next tokens on the device for rows that are greedy or only use temperature, min_p, and noise.

The noise has exactly the bits of `services.engine.noise`: SplitMix64 in 64-bit integers. All later arithmetic is
float64 in the same order of operations. A choice can therefore differ only if two scores are as close as the logarithms
of two math libraries. Does not support penalties, biases, grammars, top-k, or top-p.

Legend: B rows, V vocabulary, C blocks of a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_TOKENS = 1024
NOTHING_CHOSEN = -1
"""Result for a row that contains NaN or plus infinity, or in which all tokens are excluded."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Sampling parameters of B rows, on the device.

    `keys` int64 [B]: keys mixed from seed and position (`services.engine.noise.noise_key`).
    `temperatures` float64 [B]: 0 selects the likeliest token.
    `min_p_margins` float64 [B]: the logarithm of min_p, or minus infinity if it is not set.
    """

    keys: torch.Tensor
    temperatures: torch.Tensor
    min_p_margins: torch.Tensor


def choose(logits: torch.Tensor, choices: Choices, out: torch.Tensor) -> None:
    """Writes the chosen token of each row of `logits` [B, V] float32 to `out` int32 [B], or NOTHING_CHOSEN."""
    num_rows, vocab_size = logits.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_TOKENS)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    highest = logits.amax(dim=-1)
    _choose_in_block[(num_rows, num_blocks)](
        logits,
        highest,
        choices.keys,
        choices.temperatures,
        choices.min_p_margins,
        best,
        tokens,
        vocab_size,
        num_blocks,
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
    )
    _choose_among_blocks[(num_rows,)](best, tokens, out, num_blocks, BLOCK=triton.next_power_of_2(num_blocks))


@triton.jit
def _choose_in_block(
    logits, highest, keys, temperatures, min_p_margins, best, tokens, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    raw = tl.load(logits + row * vocab_size + token, mask=is_token, other=0.0)
    score = raw.to(tl.float64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        score = score / temperature
        bound = tl.load(highest + row).to(tl.float64) / temperature + tl.load(min_p_margins + row)
        state = tl.load(keys + row).to(tl.uint64) + token.to(tl.uint64) * 0x9E3779B97F4A7C15
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB
        state = state ^ (state >> 31)
        uniform = ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        noisy = score - tl.log(-tl.log(uniform))
        score = tl.where(score < bound, -float("inf"), noisy)
    score = tl.where(is_token, score, -float("inf"))
    winner = tl.argmax(score, 0)
    is_broken = tl.max(tl.where(raw < float("inf"), 0, 1), 0) > 0  # NaN is not less than infinity
    place = row * num_blocks + block
    tl.store(best + place, tl.where(is_broken, float("nan"), tl.max(score, 0)))
    tl.store(tokens + place, block * BLOCK + winner)


@triton.jit
def _choose_among_blocks(best, tokens, out, num_blocks, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    is_block = block < num_blocks
    score = tl.load(best + row * num_blocks + block, mask=is_block, other=-float("inf"))
    has_nan = tl.max(tl.where(score == score, 0, 1), 0) > 0
    score = tl.where(score == score, score, -float("inf"))
    is_open = (tl.max(score, 0) > -float("inf")) & (has_nan == 0)
    token = tl.load(tokens + row * num_blocks + tl.argmax(score, 0))
    tl.store(out + row, tl.where(is_open, token, -1))
