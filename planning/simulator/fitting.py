"""Least squares over relative errors, with the errors that are left: what a profile's closed forms are made by."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors, none of them negative, and the relative errors of the rows that they were fitted to or tried on."""

    factors: tuple[float, ...]
    mean_error: float
    p95_error: float
    worst_error: float

    def __str__(self) -> str:
        return f"error mean {self.mean_error:.1%}, p95 {self.p95_error:.1%}, worst {self.worst_error:.1%}"


def fitted(amounts: Sequence[Sequence[float]], times_s: Sequence[float]) -> Fit:
    """Returns the factors by which Σ factor·amount is closest to each row's time, and how close that is.

    Factors that would be negative are 0. There must be a row for each factor, and every time must be positive.
    """
    size = len(amounts[0])
    assert len(amounts) >= size, "factors need rows"
    used = list(range(size))
    factors = [0.0] * size
    while used:
        rows = [[row[place] / time_s for place in used] for row, time_s in zip(amounts, times_s, strict=True)]
        found = _least_squares(rows)
        factors = [0.0] * size
        for place, factor in zip(used, found, strict=True):
            factors[place] = factor
        scale = [max(row[place] for row in amounts) for place in range(size)]
        worst = min(used, key=lambda place: factors[place] * scale[place])
        if factors[worst] >= 0:
            break
        used.remove(worst)
    return tried(factors, amounts, times_s=times_s)


def tried(factors: Sequence[float], amounts: Sequence[Sequence[float]], *, times_s: Sequence[float]) -> Fit:
    """Returns how close given factors are to rows that they may never have seen."""
    errors = sorted(
        abs(sum(factor * amount for factor, amount in zip(factors, row, strict=True)) / time_s - 1)
        for row, time_s in zip(amounts, times_s, strict=True)
    )
    p95 = errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)]
    return Fit(tuple(factors), math.fsum(errors) / len(errors), p95, errors[-1])


def _least_squares(rows: list[list[float]]) -> list[float]:
    """Solves rows · x ≈ 1 by Householder's method, on columns scaled to the same length."""
    size = len(rows[0])
    lengths = [math.sqrt(math.fsum(row[place] ** 2 for row in rows)) or 1.0 for place in range(size)]
    matrix = [[row[place] / lengths[place] for place in range(size)] + [1.0] for row in rows]
    for pivot in range(size):
        norm = math.copysign(math.sqrt(math.fsum(row[pivot] ** 2 for row in matrix[pivot:])), matrix[pivot][pivot])
        vector = [row[pivot] for row in matrix[pivot:]]
        vector[0] += norm
        squared = math.fsum(value * value for value in vector)
        if squared == 0.0:
            continue
        for column in range(pivot, size + 1):
            dot = math.fsum(value * row[column] for value, row in zip(vector, matrix[pivot:], strict=True))
            for value, row in zip(vector, matrix[pivot:], strict=True):
                row[column] -= 2 * dot / squared * value
    found = [0.0] * size
    for place in reversed(range(size)):
        rest = matrix[place][size] - sum(matrix[place][k] * found[k] for k in range(place + 1, size))
        # A column that says nothing new of the rows has no factor.
        found[place] = rest / matrix[place][place] if abs(matrix[place][place]) > 1e-12 else 0.0
    return [value / length for value, length in zip(found, lengths, strict=True)]
