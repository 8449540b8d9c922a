"""Chooses the next tokens of a batch: Gumbel-max with noise that is a function of (seed, position, token ID).

There is no random generator and no state. A request samples the same tokens in any batch, on any worker, and after a
resume. Does not depend on pages or models. CPU and CUDA run the same operations.

A row is bitwise independent of its neighbors for three reasons. The noise bits are integers. All later arithmetic is
float64. Every operation handles each row separately: softmax, sort, cumsum, and argmax. A plain sum over a row is
excluded, because torch splits it among threads if the batch has a single row.

Shape legend: B rows (sequences), V vocabulary, R rows of one group, C candidates of a row, E scattered elements.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from services.engine.kernels.library import NOT_FINITE, Kernels
from services.engine.noise import MASK64, gumbel_noise
from services.engine.steps.guesses import Draw, Guess
from services.engine.steps.sequence import Chooser, Sampling
from services.engine.steps.step import NonFiniteLogits, NothingAllowed, PromptReport, SampledToken

# Rows with top-k or top-p first consider this many of the likeliest tokens, which is enough if the remaining tokens
# provably change nothing. Otherwise, the row is retried with more candidates, and finally with all tokens.
_FEW_CANDIDATES = 64
_MORE_CANDIDATES_FACTOR = 16

# Candidates per draft token: few enough to keep the noise cheap, and enough to nearly always include the winner.
_GUESS_CANDIDATES = 32

# Number of logits to process at a time.
_BLOCK_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 24}


def sample(
    logits: torch.Tensor, sequences: SequenceOf[Chooser], *, kernels: Kernels | None = None
) -> list[SampledToken | NonFiniteLogits]:
    """Chooses one token per row. Row i belongs to `sequences[i]`, at the position after its last token.

    `logits` [B, V] float32 is not modified. Minus infinity excludes a token. The result for a row is NonFiniteLogits if
    the row contains NaN or plus infinity, or if all of its tokens are excluded. `kernels` speed up rows on a CPU that
    only use a temperature and min-p. Rows with a grammar are copied, so that they do not slow down the other rows.
    """
    if not sequences:
        return []
    # On a GPU, this runs while the logits are still being computed, so the grammars cost no extra time.
    allowed = _allowed_tokens(sequences)
    plain = [row for row, sequence in enumerate(sequences) if row not in allowed and is_plain(sequence)]
    if kernels is None or not plain:
        return _sample(logits, sequences, allowed)
    outcomes: dict[int, SampledToken | NonFiniteLogits] = {}
    draws = [draw_of(sequences[row].sampling, sequences[row].num_tokens) for row in plain]
    chosen = kernels.choose(logits.contiguous(), plain, draws)
    if len(plain) == len(sequences) and min(chosen) >= 0:
        return [*map(SampledToken, chosen)]
    for row, token_id in zip(plain, chosen, strict=True):
        if token_id >= 0:
            outcomes[row] = SampledToken(token_id)
        elif token_id == NOT_FINITE:
            outcomes[row] = _failure(sequences[row], None)
    others = [row for row in range(len(sequences)) if row not in outcomes]
    if others:
        places = {row: place for place, row in enumerate(others)}
        bound = {places[row]: bits for row, bits in allowed.items()}
        rows = logits[_index(others, logits.device)]
        outcomes |= zip(others, _sample(rows, [sequences[row] for row in others], bound), strict=True)
    return [outcomes[row] for row in range(len(sequences))]


def is_plain(sequence: Chooser) -> bool:
    """Returns whether only logits, temperature, min_p, noise and a grammar decide the sequence's next token."""
    sampling = sequence.sampling
    may_stop = sequence.num_generated_tokens >= sampling.min_tokens or not sampling.stop_token_ids
    is_changed = sampling.logit_bias or sampling.has_penalties or (_is_cut(sampling) and not sampling.is_greedy)
    return may_stop and not is_changed and sampling.logprobs is None


def _sample(
    logits: torch.Tensor, sequences: SequenceOf[Chooser], allowed: dict[int, bytes]
) -> list[SampledToken | NonFiniteLogits]:
    """Implements `sample` in torch. `allowed` maps each row with a grammar to the bits of `Grammar.allowed`."""
    is_valid = rows_are_valid(logits)
    adjusted = _adjust(logits, sequences)
    token_ids = _argmax(adjusted)
    if adjusted is not logits:
        is_valid &= torch.isfinite(adjusted.gather(1, token_ids[:, None])[:, 0])
    narrowed = adjusted[:0]
    if allowed:
        rows = _index(list(allowed), logits.device)
        is_ruled_out = _is_ruled_out(list(allowed.values()), logits.shape[1], logits.device)
        narrowed = adjusted[rows].masked_fill_(is_ruled_out, -math.inf)
        token_ids[rows] = _argmax(narrowed)
        is_valid[rows] &= torch.isfinite(narrowed.gather(1, token_ids[rows][:, None])[:, 0])
    can_choose: list[bool] = is_valid.tolist()
    by_chance = [row for row, sequence in enumerate(sequences) if can_choose[row] and not sequence.sampling.is_greedy]
    places = {row: place for place, row in enumerate(allowed)}
    free = [row for row in by_chance if row not in places]
    bound = [row for row in by_chance if row in places]
    _draw_rows(token_ids, free, scores=adjusted, places=free, sequences=sequences)
    _draw_rows(token_ids, bound, scores=narrowed, places=[places[row] for row in bound], sequences=sequences)
    chosen: list[int] = token_ids.tolist()
    reports = _logprob_reports(logits, sequences, chosen)
    return [
        reports.get(row, SampledToken(token_id)) if can_choose[row] else _failure(sequences[row], allowed.get(row))
        for row, token_id in enumerate(chosen)
    ]


def report(logits: torch.Tensor, token_ids: SequenceOf[int], count: int) -> PromptReport:
    """Returns the log-probability of token i in row i of `logits` [R, V] float32, and the `count` likeliest tokens."""
    own, top_ids, top_logprobs = _logprobs(logits, token_ids, count)
    return PromptReport(
        top_ids.shape[1],
        array("d", own.numpy(force=True).tobytes()),
        array("I", top_ids.numpy(force=True).astype(np.uint32).tobytes()),
        array("d", top_logprobs.numpy(force=True).tobytes()),
    )


def guess(logits: torch.Tensor, draws: SequenceOf[Draw]) -> list[Guess]:
    """Returns an approximation of the token that `sample` would choose per row of `logits` [R, V], and its probability.

    `logits` is float32. With top-k or top-p, only the likeliest candidates compete, and cutoffs ignore all other
    tokens. The noise depends only on seed, position, and token, so similar logits yield the same token (Gumbel
    coupling). The CPU kernels have a separate implementation, `kernels/guess.h`.
    """
    values = logits.numpy(force=True)
    token_ids = values.argmax(axis=-1)
    by_chance = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    scales = np.array([draw.temperature or 1.0 for draw in draws], np.float32)
    if by_chance:
        values = values / scales[:, None]
        count = min(_GUESS_CANDIDATES, values.shape[1])
        candidate_ids = np.argpartition(values[by_chance], -count, axis=-1)[:, -count:]
        seeds, positions = [draws[row].seed for row in by_chance], [draws[row].position for row in by_chance]
        noise = gumbel_noise(seeds, positions, torch.from_numpy(candidate_ids)).numpy()
        for place, row in enumerate(by_chance):
            scores = values[row, candidate_ids[place]]
            noise[place] += np.where(_is_likely(scores, draws[row]), scores, -np.inf)
            token_ids[row] = candidate_ids[place, noise[place].argmax()]
    rows = np.arange(len(token_ids))
    chosen = values[rows, token_ids]
    highest = values.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # for NaN in the draft's logits, the probability is 0
        probabilities = np.exp(chosen - highest[:, 0]) / np.exp(values - highest).sum(axis=-1)
    return [*map(Guess, token_ids.tolist(), np.nan_to_num(probabilities).tolist())]


def _is_likely(scores: np.ndarray, draw: Draw) -> np.ndarray:
    """Returns which of the candidate scores [C] pass top-k, top-p, and min-p, as if no other tokens existed."""
    order = np.argsort(-scores)
    weights = np.exp(scores[order] - scores[order[0]])
    shares = weights.cumsum() / weights.sum()
    is_kept = (shares - weights / weights.sum() < draw.top_p) & (weights >= draw.min_p)
    is_kept[draw.top_k or len(order) :] = False
    is_likely = np.empty(len(order), bool)
    is_likely[order] = is_kept
    return is_likely


def rows_are_valid(logits: torch.Tensor) -> torch.Tensor:
    """Returns bool [B]: whether the highest logit of each row of `logits` [B, V] is finite. NaN ranks above all values.

    A row is invalid if it contains NaN or plus infinity, or consists of minus infinity. Otherwise, minus infinity only
    excludes a token. Models mask the padding of the vocabulary in this way.
    """
    if logits.device.type == "cpu":  # numpy releases the GIL less often, and so waits for it less
        return torch.from_numpy(np.isfinite(logits.numpy().max(axis=-1)))
    return torch.isfinite(logits.amax(dim=-1))


def _failure(sequence: Chooser, allowed: bytes | None) -> NonFiniteLogits:
    if allowed is not None and not any(allowed):
        return NothingAllowed("the schema is too complex for this answer to continue", field="response_format")
    return NonFiniteLogits(
        f"no token can be chosen at position {sequence.num_tokens}: "
        "the model's output is not finite, or every token is ruled out"
    )


def _argmax(values: torch.Tensor) -> torch.Tensor:
    """Returns the index [R] of each row's maximum in `values` [R, C].

    Ties go to the lowest index, NaN ranks highest.
    """
    if values.device.type == "cpu":
        return torch.from_numpy(values.numpy().argmax(axis=-1))  # 20 times as fast as torch's
    return values.argmax(dim=-1)


# -- Adjustments: changes to single logits -----------------------------------------------------------------------------


class _Elements:
    """Single logits to change, gathered on the host: E (row, token) pairs with two parameters each."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: list[np.ndarray] = []
        self._token_ids: list[np.ndarray] = []
        self._first: list[np.ndarray] = []
        self._second: list[np.ndarray] = []

    def add(self, row: int, token_ids: Iterable[int], first: np.ndarray | float, second: float = 0.0) -> None:
        """Adds elements of one row. Ignores tokens outside the model's vocabulary."""
        ids = np.fromiter(token_ids, dtype=np.int64)
        is_known = (ids >= 0) & (ids < self._vocab_size)
        self._token_ids.append(ids[is_known])
        count = len(self._token_ids[-1])
        self._rows.append(np.full(count, row, dtype=np.int64))
        values = np.broadcast_to(np.asarray(first, dtype=np.float32), ids.shape)
        self._first.append(values[is_known])
        self._second.append(np.full(count, second, dtype=np.float32))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Returns rows, token IDs, first parameter, and second parameter, each [E]."""
        return tuple(
            torch.from_numpy(np.concatenate(parts)).to(device)
            for parts in (self._rows, self._token_ids, self._first, self._second)
        )


def _adjust(logits: torch.Tensor, sequences: SequenceOf[Chooser]) -> torch.Tensor:
    """Applies min_tokens, logit_bias, and penalties. Returns `logits` itself if no row uses them."""
    vocab_size = logits.shape[1]
    banned, biased, repeated, counted = (_Elements(vocab_size) for _ in range(4))
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sequence.num_generated_tokens < sampling.min_tokens and sampling.stop_token_ids:
            banned.add(row, sampling.stop_token_ids, -math.inf)
        if sampling.logit_bias:
            biases = np.fromiter(sampling.logit_bias.values(), dtype=np.float32)
            biased.add(row, sampling.logit_bias.keys(), biases)
        if sampling.has_penalties:
            _collect_penalties(row, sequence, repeated, counted)
    if not (banned or biased or repeated or counted):
        return logits
    adjusted = logits.clone()
    device = logits.device
    if biased:
        rows, token_ids, bias, _ = biased.tensors(device)
        adjusted[rows, token_ids] += bias
    if banned:
        rows, token_ids, minus_infinity, _ = banned.tensors(device)
        adjusted[rows, token_ids] = minus_infinity
    if repeated:
        rows, token_ids, penalty, _ = repeated.tensors(device)
        values = adjusted[rows, token_ids]
        penalised = torch.where(values > 0, values / penalty, values * penalty)
        # A penalty close to 0 would make the logit infinite, and no token could be chosen.
        adjusted[rows, token_ids] = penalised.clamp(max=torch.finfo(adjusted.dtype).max)
    if counted:
        rows, token_ids, frequency, presence = counted.tensors(device)
        adjusted[rows, token_ids] = adjusted[rows, token_ids] - frequency - presence
    return adjusted


def _collect_penalties(row: int, sequence: Chooser, repeated: _Elements, counted: _Elements) -> None:
    sampling = sequence.sampling
    counts = sequence.generated_counts()
    if sampling.repetition_penalty != 1.0:
        repeated.add(row, sequence.prompt_token_set() | counts.keys(), sampling.repetition_penalty)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        by_count = np.fromiter(counts.values(), dtype=np.float32) * np.float32(sampling.frequency_penalty)
        counted.add(row, counts.keys(), by_count, sampling.presence_penalty)


# -- Grammars: which tokens a row may choose from ----------------------------------------------------------------------


def _allowed_tokens(sequences: SequenceOf[Chooser]) -> dict[int, bytes]:
    """Returns the bits of `Grammar.allowed` for each row with a grammar."""
    return {row: bits for row, sequence in enumerate(sequences) if (bits := sequence.allowed_tokens()) is not None}


def _is_ruled_out(allowed: SequenceOf[bytes], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Returns bool [R, V] from the bits of R rows. The tokenizer may have fewer or more tokens than the model."""
    num_bytes = (vocab_size + 7) // 8
    packed = np.zeros((len(allowed), num_bytes), dtype=np.uint8)
    for row, bits in enumerate(allowed):
        known = np.frombuffer(bits, dtype=np.uint8, count=min(len(bits), num_bytes))
        packed[row, : len(known)] = known
    np.invert(packed, out=packed)
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_))
    # Transfer the packed bits, which are an eighth of the size, and unpack them on the device.
    bits_of = torch.arange(8, dtype=torch.uint8, device=device)
    unpacked = (torch.from_numpy(packed).to(device)[:, :, None] >> bits_of).bitwise_and_(1)
    return unpacked.flatten(1)[:, :vocab_size].bool()


# -- Random sampling ---------------------------------------------------------------------------------------------------


def _draw_rows(
    token_ids: torch.Tensor,
    rows: SequenceOf[int],
    *,
    scores: torch.Tensor,
    places: SequenceOf[int],
    sequences: SequenceOf[Chooser],
) -> None:
    """Writes a sampled token to each of `rows` of `token_ids` [B].

    `places` contains the row of `scores` for each row.
    """
    # Process in blocks: on a CPU, float64 temporaries that fit into the cache are several times faster.
    block_rows = max(1, _BLOCK_ELEMENTS.get(scores.device.type, 1 << 20) // scores.shape[1])
    for start in range(0, len(rows), block_rows):
        block = rows[start : start + block_rows]
        block_scores = scores[_index(places[start : start + block_rows], scores.device)].to(torch.float64)
        token_ids[_index(block, scores.device)] = _draw(block_scores, [sequences[row] for row in block])


def draw_of(sampling: Sampling, position: int) -> Draw:
    """Returns the sampling parameters for one position, in the kernels' format."""
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    return Draw(sampling.seed & MASK64, position, temperature, sampling.min_p, sampling.top_p, sampling.top_k)


def _is_cut(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1


def _draw(scores: torch.Tensor, sequences: SequenceOf[Chooser]) -> torch.Tensor:
    """Samples a token for each row of `scores` [R, V] float64. May modify `scores`. Returns IDs [R]."""
    samplings = [sequence.sampling for sequence in sequences]
    if any(sampling.temperature != 1 for sampling in samplings):
        scores.div_(_column([sampling.temperature for sampling in samplings], scores.device))
    if any(sampling.min_p > 0 for sampling in samplings):
        _apply_min_p(scores, [sampling.min_p for sampling in samplings])
    is_cut = [_is_cut(sampling) for sampling in samplings]
    if not any(is_cut):
        return _draw_whole(scores, sequences)
    token_ids = torch.empty(len(sequences), dtype=torch.int64, device=scores.device)
    for wanted, draw in ((True, _draw_cut), (False, _draw_whole)):
        block = [row for row, cut in enumerate(is_cut) if cut == wanted]
        if block:
            rows = _index(block, scores.device)
            token_ids[rows] = draw(scores[rows], [sequences[row] for row in block])
    return token_ids


def _apply_min_p(scores: torch.Tensor, min_ps: SequenceOf[float]) -> None:
    """Excludes, in place, tokens less likely than min_p times the likeliest token. Compares scores, so needs no sum."""
    margins = [math.log(min_p) if min_p > 0 else -math.inf for min_p in min_ps]
    bounds = scores.amax(dim=-1, keepdim=True) + _column(margins, scores.device)
    scores.masked_fill_(scores < bounds, -math.inf)


def _draw_whole(scores: torch.Tensor, sequences: SequenceOf[Chooser]) -> torch.Tensor:
    """Samples among all tokens."""
    return _race(scores, torch.arange(scores.shape[1], device=scores.device)[None], sequences)


def _race(scores: torch.Tensor, token_ids: torch.Tensor, sequences: SequenceOf[Chooser]) -> torch.Tensor:
    """Returns the token ID with the highest score plus noise per row of `scores` [R, C]. `token_ids` is [R or 1, C]."""
    seeds = [sequence.sampling.seed for sequence in sequences]
    positions = [sequence.num_tokens for sequence in sequences]
    winners = _argmax(gumbel_noise(seeds, positions, token_ids).add_(scores))
    return token_ids.expand(scores.shape).gather(1, winners[:, None])[:, 0]


def _draw_cut(
    scores: torch.Tensor, sequences: SequenceOf[Chooser], num_candidates: int = _FEW_CANDIDATES
) -> torch.Tensor:
    """Samples with top-k and top-p among the `num_candidates` likeliest tokens. Retries inconclusive rows with more."""
    device = scores.device
    num_candidates = min(num_candidates, scores.shape[1])
    candidate_ids = _likeliest(scores, num_candidates)
    candidates = scores.gather(1, candidate_ids)
    num_kept = _num_kept(scores.softmax(dim=-1).gather(1, candidate_ids), sequences)
    ranks = torch.arange(num_candidates, device=device)[None]
    token_ids = _race(candidates.masked_fill(ranks >= num_kept, -math.inf), candidate_ids, sequences)
    if num_candidates < scores.shape[1]:
        # Tokens beyond the last candidate may be equally likely, so a cutoff is certain only above the last candidate's
        # score. Top-p is certain only if all tokens that pass top-k are candidates, because it is relative to their
        # sum.
        is_open = candidates.gather(1, num_kept - 1) <= candidates[:, -1:]
        lacks_top_k = [sequence.sampling.top_k > num_candidates for sequence in sequences]
        is_open |= torch.tensor(lacks_top_k, device=device)[:, None]
        # If the last candidate is excluded, the candidates include every token that can be chosen.
        is_open &= candidates[:, -1:] > -math.inf
        still_open: list[int] = is_open[:, 0].nonzero()[:, 0].tolist()
        if still_open:
            rows = _index(still_open, device)
            open_sequences = [sequences[row] for row in still_open]
            more = num_candidates * _MORE_CANDIDATES_FACTOR
            token_ids[rows] = _draw_cut(scores[rows], open_sequences, more)
    return token_ids


def _likeliest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Returns IDs [R, count] of the highest scores in descending order. Ties are ordered by ascending ID."""
    if count == scores.shape[1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices
    ids = scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _num_kept(probabilities: torch.Tensor, sequences: SequenceOf[Chooser]) -> torch.Tensor:
    """Returns the number of leading candidates [R, 1] that pass top-k and then top-p.

    `probabilities` [R, C] is in descending order. Top-p keeps the fewest tokens that together have at least top_p of
    the probability that passes top-k.
    """
    device = probabilities.device
    num_candidates = probabilities.shape[1]
    cumulated = probabilities.cumsum(dim=-1)
    top_ks = [min(sequence.sampling.top_k or num_candidates, num_candidates) for sequence in sequences]
    num_by_k = _index(top_ks, device)[:, None]
    has_top_k = torch.tensor([sequence.sampling.top_k > 0 for sequence in sequences], device=device)[:, None]
    total = torch.where(has_top_k, cumulated.gather(1, num_by_k - 1), 1.0)
    # A top_p of 1 disables the cutoff: rounding in the running sum must not drop the unlikeliest tokens.
    shares = [sequence.sampling.top_p if sequence.sampling.top_p < 1 else math.inf for sequence in sequences]
    num_by_p = 1 + (cumulated < _column(shares, device) * total).sum(dim=-1, keepdim=True)
    return torch.minimum(num_by_p, num_by_k)


# -- Reports -----------------------------------------------------------------------------------------------------------


def _logprob_reports(
    logits: torch.Tensor, sequences: SequenceOf[Chooser], chosen: SequenceOf[int]
) -> dict[int, SampledToken]:
    """Returns, by row, tokens with log-probabilities for the rows that request them."""
    asking = [row for row, sequence in enumerate(sequences) if sequence.sampling.logprobs is not None]
    if not asking:
        return {}
    counts = [sequences[row].sampling.logprobs or 0 for row in asking]
    token_ids = [chosen[row] for row in asking]
    columns = _logprobs(logits[_index(asking, logits.device)], token_ids, max(counts))
    told = zip(asking, counts, token_ids, *(column.tolist() for column in columns), strict=True)
    return {
        row: SampledToken(token_id, own, tuple(zip(top_ids[:count], top_logprobs[:count], strict=True)))
        for row, count, token_id, own, top_ids, top_logprobs in told
    }


def _logprobs(logits: torch.Tensor, token_ids: SequenceOf[int], count: int) -> tuple[torch.Tensor, ...]:
    """Returns the log-probability of token i in row i, float64 [R], and the `count` likeliest tokens per row.

    The likeliest tokens are IDs and float64 log-probabilities, each [R, count], in descending order. Ties are ordered
    by ascending ID. `count` is capped at the row length.
    """
    logprobs = logits.to(torch.float64).log_softmax(dim=-1)
    own = logprobs.gather(1, _index(token_ids, logits.device)[:, None])[:, 0]
    num_tokens = logprobs.shape[1]
    count = min(count, num_tokens)
    # Avoid copying whole rows: [R, V] is large, and usually on a GPU.
    values, ids = logprobs.topk(min(count + 1, num_tokens))
    if 0 < count < num_tokens:
        # topk does not define which of several equal values it selects.
        open_rows: list[int] = (values[:, count] == values[:, count - 1]).nonzero()[:, 0].tolist()
        for row in open_rows:
            reaching = (logprobs[row] >= values[row, count]).nonzero()[:, 0]
            order = logprobs[row, reaching].sort(descending=True, stable=True).indices[:count]
            ids[row, :count] = reaching[order]
    ids = ids[:, :count].sort(dim=-1).values
    values = logprobs.gather(1, ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return own, ids.gather(1, order), values.gather(1, order)


def _index(values: SequenceOf[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _column(values: SequenceOf[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
