import math
import random

import pytest
import torch

from services.engine.noise import gumbel_noise
from tests.services.engine.noise import MASK64, reference_noise


def test_noise_equals_the_reference_for_any_integers() -> None:
    chance = random.Random(0)
    seeds = [0, 1, -1, -(2**63), 2**63, 2**64 - 1] + [chance.randrange(-(2**63), 2**63) for _ in range(6)]
    positions = [chance.randrange(1, 10**6) for _ in seeds]
    tokens = torch.tensor([[0, 1, 2, 511, 151_935, 2**31]])
    noise = gumbel_noise(seeds, positions, tokens)
    assert noise.dtype == torch.float64
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column, token in enumerate(tokens[0].tolist()):
            expected = reference_noise(seed, position, token)
            assert noise[row, column].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_noise_has_known_values() -> None:
    # A changed noise would make answers differ between versions of workers in one cluster: change it knowingly.
    noise = gumbel_noise([0, 42], [1, 100], torch.tensor([[0, 7]]))
    known = [[1.053059059283411, 1.969361972077131], [0.1975758038691082, -0.22995196008825503]]
    assert torch.allclose(noise, torch.tensor(known, dtype=torch.float64), rtol=1e-12, atol=0)


def test_noise_is_standard_gumbel_and_always_finite() -> None:
    noise = gumbel_noise(list(range(50)), [9] * 50, torch.arange(4000)[None]).flatten()
    assert torch.isfinite(noise).all()
    # Kolmogorov-Smirnov distance from the distribution function exp(-exp(-x)); 1.95 / sqrt(n) is p = 0.001.
    cdf = torch.exp(-torch.exp(-noise.sort().values))
    steps = torch.arange(1, len(cdf) + 1, dtype=torch.float64) / len(cdf)
    assert (cdf - steps).abs().max().item() < 1.95 / math.sqrt(len(cdf))


@pytest.mark.parametrize("neighbour", ["seed", "position", "token"])
def test_neighbours_are_uncorrelated(neighbour: str) -> None:
    tokens = torch.arange(20_000)[None]
    here = gumbel_noise([5], [10], tokens)[0]
    there = {
        "seed": gumbel_noise([6], [10], tokens)[0],
        "position": gumbel_noise([5], [11], tokens)[0],
        "token": here.roll(1),
    }[neighbour]
    correlation = torch.corrcoef(torch.stack([here, there]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(20_000)


def test_seed_and_position_are_not_interchangeable() -> None:
    tokens = torch.arange(100)[None]
    assert not torch.equal(gumbel_noise([3], [4], tokens), gumbel_noise([4], [3], tokens))
    assert torch.equal(gumbel_noise([-1], [4], tokens), gumbel_noise([MASK64], [4], tokens))
