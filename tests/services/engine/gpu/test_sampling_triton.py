"""The device's choices against those of `services.engine.sampling`."""

import math

import pytest
import torch

from services.engine.gpu.sampling_triton import BLOCK_TOKENS, NOTHING_CHOSEN, Choices, choose
from services.engine.noise import noise_key
from services.engine.sampling import sample
from services.engine.steps.sequence import Sampling, Sequence


def chosen_on_device(logits, sequences):
    samplings = [sequence.sampling for sequence in sequences]
    keys = [noise_key(one.sampling.seed, one.num_tokens) for one in sequences]
    temperatures = [0.0 if one.is_greedy else one.temperature for one in samplings]
    margins = [math.log(one.min_p) if one.min_p > 0 else -math.inf for one in samplings]
    device = logits.device
    choices = Choices(
        torch.tensor(keys, device=device),
        torch.tensor(temperatures, dtype=torch.float64, device=device),
        torch.tensor(margins, dtype=torch.float64, device=device),
    )
    out = torch.full((len(sequences),), 7777777, dtype=torch.int32, device=device)
    choose(logits, choices, out)
    return out.tolist()


SAMPLINGS = [
    Sampling(max_tokens=9, temperature=0.0),
    Sampling(max_tokens=9, temperature=1.0, seed=0),
    Sampling(max_tokens=9, temperature=0.7, seed=-1),
    Sampling(max_tokens=9, temperature=1.3, seed=-(2**63)),
    Sampling(max_tokens=9, temperature=2.0, seed=5, min_p=0.1),
    Sampling(max_tokens=9, temperature=1e-4, seed=6),
    Sampling(max_tokens=9, temperature=1.0, seed=7, min_p=1.0),
]


@pytest.mark.parametrize("vocab_size", [331, 2 * BLOCK_TOKENS + 1])
def test_choices_equal_those_of_the_host(device, vocab_size):
    sequences = [
        Sequence(index, [1] * length, sampling=sampling)
        for length in (1, 2, 300)
        for index, sampling in enumerate(SAMPLINGS)
    ]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(sequences), vocab_size, generator=generator).mul(2)
    expected = [one.token_id for one in sample(logits, sequences)]
    assert len(set(expected)) > 5
    assert chosen_on_device(logits.to(device), sequences) == expected


def test_of_equal_logits_the_first_is_chosen(device):
    logits = torch.zeros(1, 2 * BLOCK_TOKENS)
    logits[0, [40, 41, BLOCK_TOKENS + 3]] = 2.0
    assert chosen_on_device(logits.to(device), [Sequence(0, [1], sampling=SAMPLINGS[0])]) == [40]


def test_noise_alone_decides_where_logits_are_equal(device):
    """All bits of the noise count: a shift or a sign that is wrong would choose other tokens."""
    logits = torch.zeros(len(SAMPLINGS) * 4, 700)
    sequences = [
        Sequence(0, [1] * length, sampling=Sampling(max_tokens=9, seed=seed))
        for length in (1, 2, 17, 4096)
        for seed in (0, 1, -1, 2**40, -(2**63), 12345678901234567, 3)
    ]
    assert chosen_on_device(logits.to(device), sequences) == [one.token_id for one in sample(logits, sequences)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, BLOCK_TOKENS + 2])
def test_a_row_that_is_not_finite_chooses_nothing(device, value, place):
    logits = torch.zeros(3, BLOCK_TOKENS + 9)
    logits[1, place] = value
    sequences = [Sequence(0, [1], sampling=SAMPLINGS[index % 2]) for index in range(3)]
    chosen = chosen_on_device(logits.to(device), sequences)
    assert chosen[1] == NOTHING_CHOSEN
    assert min(chosen[0], chosen[2]) >= 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_minus_infinity_rules_tokens_out_and_a_row_of_it_chooses_nothing(device):
    generator = torch.Generator().manual_seed(1)
    sequences = [Sequence(0, [1], sampling=sampling) for sampling in SAMPLINGS]
    logits = torch.randn(len(sequences), 2 * BLOCK_TOKENS, generator=generator)
    logits[:, 3] = -math.inf
    logits[:, BLOCK_TOKENS - 5 :] = -math.inf  # a block has no other tokens
    expected = [one.token_id for one in sample(logits, sequences)]
    assert chosen_on_device(logits.to(device), sequences) == expected
    logits[1:3] = -math.inf
    chosen = chosen_on_device(logits.to(device), sequences)
    assert chosen == [expected[0], NOTHING_CHOSEN, NOTHING_CHOSEN, *expected[3:]]
