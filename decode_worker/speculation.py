"""Drafts tokens for the sequences of a step, so that one pass of the model can yield several tokens.

Speculation does not change responses. At every position, the model selects the token that it would select without
speculation: the most likely token, or the winner under noise that is a function of (seed, position, token id). A draft
token is accepted only if it equals that token. Rejection sampling (Leviathan et al. 2023, Chen et al. 2023) preserves
the distribution of tokens. This method preserves the tokens themselves, and therefore also the distribution. The draft
model samples with the same noise, so its tokens match nearly as often as rejection sampling would accept them (Gumbel
coupling: Daliri, Musco, Suresh 2025, "Coupling without communication and drafter-invariant speculative decoding"). A
response can therefore continue on any worker, with or without speculation. If the model's arithmetic is not exact, a
position in a longer pass may differ by rounding from a pass with one token. In that case, results vary with the
composition of a step anyway.

There are two sources: text that the sequence already contains (services.engine.speculation.lookup), and a draft model
(services.engine.speculation.draft). For each step and sequence, the better source is used, for as many tokens as
measurements justify (decode_worker.payoff). Nothing is drafted if the batch is so large that an additional batch item
costs as much as it yields, or if the text is unpredictable. The draft model skips a sequence if its page pool is full
or if the sequence exceeds its context length.

Belongs to the engine thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from decode_worker.features import Proposal, StepAhead, StepFeature, StepTaken
from decode_worker.payoff import (
    ANY_LEVEL,
    REQUEST_HALF_LIFE_STEPS,
    SHORTEST_S,
    WORKER_HALF_LIFE_STEPS,
    Balance,
    Kind,
    Price,
    Record,
    Source,
    level_of_match,
    worthwhile,
)
from services.engine.speculation.draft import DraftModel
from services.engine.speculation.lookup import PromptLookup
from services.engine.steps.guesses import LEVELS, Guess, Limit
from services.engine.steps.sequence import Sequence
from services.engine.steps.step import SampledToken
from services.runtime.clock import Clock
from services.runtime.errors import InvariantViolated
from services.scheduling.prediction import (
    DEFAULT_DECODE,
    DEFAULT_PREFILL,
    DecodeMeter,
    DecodeSpeed,
    PrefillMeter,
    PrefillSpeed,
)

DEFAULT_DEPTH = 8
READ_SHARE = 0.25
"""Fraction of a step's time in which a draft model reads a missing part of a prompt. It reads READ_TOKENS at least."""
READ_TOKENS = 32
TRY_AGAIN_STEPS = 512
"""Steps without draft tokens (or without the draft model) after which their measurements are discarded."""
TRIED_STEPS = 4
"""Number of steps that use default speeds before measured ones, because a first measurement is unreliable."""
GUESSES_TO_COME = 3
"""Number of draft tokens assumed when the gain of drafting is estimated in advance."""
STEPS_TO_COME = 64
"""Maximum number of steps that are expected to repay the cost of reading a prompt."""
DEFAULT_GUESS = DEFAULT_DECODE.times(0.1)
"""Speed of a draft model before it has been measured."""
DEFAULT_READ = DEFAULT_PREFILL.times(0.1)


class Candidate(NamedTuple):
    """A sequence of the step that samples its next token, and the number of draft tokens that its pages can hold."""

    sequence: Sequence
    num_free: int


@dataclass(frozen=True, slots=True)
class KnownProposal(Proposal):
    """Draft tokens from one source, with the kind of each token."""

    kinds: tuple[Kind, ...]

    @property
    def source(self) -> Source:
        """Returns the source of the draft tokens."""
        return self.kinds[0].source


@dataclass(eq=False, slots=True)
class _Request:
    lookup: PromptLookup
    record: Record


@dataclass(eq=False, slots=True)
class _Chain:
    """A sequence for the draft model, and the kinds of its draft tokens that are worth verifying."""

    candidate: Candidate
    record: Record
    row_s: float
    kinds: list[Kind] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Tried:
    """In how many steps something was measured, and the last of these steps."""

    num: int = 0
    last_step: int = 0

    @property
    def is_known(self) -> bool:
        return self.num >= TRIED_STEPS

    def note(self, step: int) -> None:
        self.num += 1
        self.last_step = step

    def forget_if_old(self, step: int) -> bool:
        """Resets the count if the last measurement is too old. Returns whether it did."""
        if step - self.last_step <= TRY_AGAIN_STEPS:
            return False
        self.num, self.last_step = 0, step
        return True


class Speculator:
    """Drafts tokens for the sequences of one worker, and learns from their acceptance."""

    def __init__(
        self, *, clock: Clock, uses_ngrams: bool = True, draft: DraftModel | None = None, max_depth: int = DEFAULT_DEPTH
    ) -> None:
        """Drafts at most `max_depth` tokens per sequence and step.

        `clock` measures the engine thread. If other threads compete for its core, CPU time is what makes plain and
        speculative steps comparable.
        """
        assert max_depth > 0, "a worker that proposes nothing needs no speculator"
        self._clock = clock
        self._uses_ngrams = uses_ngrams
        self._draft = draft
        self.max_depth = max_depth
        self._requests: dict[Hashable, _Request] = {}
        self._everybody = Record(WORKER_HALF_LIFE_STEPS)
        self._guesses: dict[int, DecodeMeter] = {}
        """Keyed by the magnitude of the batch size, because one size predicts little about another."""
        self._reads = PrefillMeter(DEFAULT_READ)
        self._proposing = _Tried()
        self._drafting = _Tried()
        self._slowness = 1.0
        """Step time on this machine relative to the default, which describes a large GPU."""
        self._balances: dict[int, Balance] = {}
        self._current: tuple[Balance, int] | None = None
        """State of the current step: its balance and number of decoding sequences. `_is_tried` is set once drafting
        starts."""
        self._is_tried = False
        self._began_s = self._read_s = 0.0
        self._step = 0

    def is_open(self, num_sequences: int) -> bool:
        """Returns whether to draft tokens in the step that starts now with `num_sequences`. Call it once per step."""
        self._began_s = self._clock.monotonic()
        self._step += 1
        balance = self._balances.setdefault(num_sequences.bit_length(), Balance())
        self._current = balance, num_sequences
        return balance.is_open()

    def propose(self, candidates: SequenceOf[Candidate], *, speed: DecodeSpeed | None) -> dict[Hashable, KnownProposal]:
        """Returns draft tokens for the sequences for which they pay off, in a step that is open.

        `speed` is the speed of the worker's steps, measured with any clock. A draft token costs as much as one more
        sequence.
        """
        assert self._current is not None, "the step is open"
        balance, num_sequences = self._current
        assert balance.plain_s is not None, "the step is open"
        self._is_tried = True
        self._proposing.forget_if_old(self._step)
        if speed is None or not self._proposing.is_known:
            speed = DEFAULT_DECODE
        step_s = balance.plain_s * num_sequences
        context_tokens = sum(candidate.sequence.num_tokens for candidate in candidates)
        speed = speed.times(step_s / max(SHORTEST_S, speed.step_s(num_sequences, context_tokens)))
        self._slowness = max(SHORTEST_S, speed.step_s(1, 0)) / DEFAULT_DECODE.step_s(1, 0)
        if self._drafting.forget_if_old(self._step):
            self._guesses, self._reads = {}, PrefillMeter(DEFAULT_READ)
        price = Price(num_tokens=num_sequences, time_s=step_s)
        proposals: dict[Hashable, KnownProposal] = {}
        to_draft: list[_Chain] = []
        for candidate in candidates:
            row_s = speed.s_per_sequence + speed.s_per_context_token * candidate.sequence.num_tokens
            request = self._request(candidate.sequence.sequence_id)
            looked_up, gain = self._look_up(candidate, request, price.of(row_s))
            if self._draft is not None and self._draft_gain(candidate, request, price, row_s, len(candidates)) > gain:
                to_draft.append(_Chain(candidate, request.record, row_s))
            elif looked_up is not None:
                num = len(looked_up.token_ids)
                price.add(num_tokens=gain + num * price.of(row_s), time_s=num * row_s)
                proposals[candidate.sequence.sequence_id] = looked_up
        if to_draft and self._draft is not None:
            for chain, proposal in self._draft_all(self._draft, to_draft, price, step_s):
                proposals[chain.candidate.sequence.sequence_id] = proposal
        if proposals:
            self._proposing.note(self._step)
        return proposals

    def learn(self, key: Hashable, proposal: KnownProposal, tokens: SequenceOf[SampledToken]) -> None:
        """Learns from the tokens sampled for a proposal, up to the first mismatch."""
        record = self._requests[key].record
        for token, token_id, kind in zip(tokens, proposal.token_ids, proposal.kinds, strict=False):
            record.note(kind, self._step, float(token.token_id == token_id))

    def end_step(self, num_accepted: int, *, is_comparable: bool) -> None:
        """Records how many draft tokens were accepted. Set `is_comparable` if the step only decoded."""
        if self._current is not None and is_comparable:
            balance, num_sequences = self._current
            time_s = self._clock.monotonic() - self._began_s
            if self._is_tried:
                balance.note(num_sequences, num_accepted, time_s, read_s=self._read_s)
            else:
                balance.note_plain(num_sequences, time_s)
        self._current, self._is_tried, self._read_s = None, False, 0.0

    def free(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""
        self._requests.pop(key, None)
        if self._draft is not None:
            self._draft.free(key)

    def check_integrity(self) -> None:
        """Raises InvariantViolated if the state of the draft model is inconsistent. Call it while idle."""
        if self._requests:
            raise InvariantViolated("requests are remembered that have ended")
        if self._draft is not None:
            self._draft.check_integrity()

    def _request(self, key: Hashable) -> _Request:
        request = self._requests.get(key)
        if request is None:
            record = Record(REQUEST_HALF_LIFE_STEPS, behind=self._everybody)
            request = self._requests[key] = _Request(PromptLookup(), record)
        return request

    def _depth(self, candidate: Candidate) -> int:
        return min(self.max_depth, candidate.num_free)

    # --- n-gram lookup ---

    def _look_up(self, candidate: Candidate, request: _Request, cost: float) -> tuple[KnownProposal | None, float]:
        """Returns the looked-up tokens that are worth their cost and the expected gain, in tokens."""
        if not self._uses_ngrams:
            return None, 0.0
        sequence = candidate.sequence
        token_ids, num_matched = request.lookup.propose(sequence.token_ids, self._depth(candidate))
        kinds = [
            Kind("ngram", sequence.sampling.is_greedy, level_of_match(num_matched + num_before))
            for num_before in range(len(token_ids))
        ]
        num, gain = worthwhile([request.record.chance(kind, self._step) for kind in kinds], cost)
        return (KnownProposal(tuple(token_ids[:num]), tuple(kinds[:num])), gain) if num else (None, 0.0)

    # --- the draft model ---

    def _draft_gain(self, candidate: Candidate, request: _Request, price: Price, row_s: float, num: int) -> float:
        """Returns the expected gain of drafting for one of `num` sequences, in tokens.

        Returns 0 if reading the missing part of the prompt costs too much.
        """
        assert self._draft is not None
        sequence = candidate.sequence
        chances = [request.record.chance(_any(sequence), self._step)] * min(GUESSES_TO_COME, self._depth(candidate))
        _, gain = worthwhile(chances, price.of(self._guess_s(sequence, num) + row_s))
        if gain and (num_lacking := self._draft.num_lacking(sequence)) > READ_TOKENS:
            num_steps = min(STEPS_TO_COME, sequence.max_num_tokens - sequence.num_tokens)
            read_s = self._read_speed().time_s(num_lacking, sequence.num_tokens - num_lacking)
            return gain if price.of(read_s) < num_steps * gain else 0.0
        return gain

    def _draft_all(
        self, draft: DraftModel, chains: list[_Chain], price: Price, step_s: float
    ) -> list[tuple[_Chain, KnownProposal]]:
        """Drafts tokens for these chains as long as it pays off.

        A chain that lacks many tokens reads some of them instead.
        """
        lacking = [draft.num_lacking(chain.candidate.sequence) for chain in chains]
        num_to_read = self._num_to_read(step_s)
        for chain, num in zip(chains, lacking, strict=True):
            if num > READ_TOKENS and num_to_read > 0:
                num_to_read -= self._read(draft, chain.candidate.sequence, min(num - 1, num_to_read))
        chains = [chain for chain, num in zip(chains, lacking, strict=True) if num <= READ_TOKENS]
        if not chains:
            return []
        sequences = [chain.candidate.sequence for chain in chains]
        began_s = self._clock.monotonic()
        if max(lacking) > 1:
            draft.catch_up(sequences)  # separately, because it is not part of the cost of a draft token
            lacking_since_s, began_s = began_s, self._clock.monotonic()
            price.add(num_tokens=0.0, time_s=began_s - lacking_since_s)
        limits = [self._limit(chain, len(chains), price) for chain in chains]
        guessed = draft.guess(sequences, limits)
        self._observe(sequences, guessed, began_s, price)
        for chain, guesses, limit in zip(chains, guessed, limits, strict=True):
            self._weigh(chain, guesses, limit.chances, price)
        return [
            (chain, KnownProposal(tuple(guess.token_id for guess in guesses[: len(chain.kinds)]), tuple(chain.kinds)))
            for chain, guesses in zip(chains, guessed, strict=True)
            if chain.kinds
        ]

    def _limit(self, chain: _Chain, num_chains: int, price: Price) -> Limit:
        """Returns the limit for a chain. Drafting continues as long as the next token is worth its time.

        That time consists of the token's own time, its share of the round, and the time of its batch item.
        """
        sequence = chain.candidate.sequence
        chances = [chain.record.chance(kind, self._step) for kind in _levels(sequence)]
        next_chance = chain.record.chance(_any(sequence), self._step)
        return Limit(
            self._depth(chain.candidate),
            chances,
            next_chance,
            price.of(self._guess_s(sequence, num_chains) + chain.row_s),
        )

    def _observe(self, sequences: list[Sequence], guessed: list[list[Guess]], began_s: float, price: Price) -> None:
        now_s = self._clock.monotonic()
        num_rounds = max(map(len, guessed))
        if num_rounds:
            self._drafting.note(self._step)
            context_tokens = sum(sequence.num_tokens for sequence in sequences)
            meter = self._guesses.setdefault(len(sequences).bit_length(), DecodeMeter(DEFAULT_GUESS))
            meter.observe(len(sequences), context_tokens, (now_s - began_s) / num_rounds, now_s)
        price.add(num_tokens=0.0, time_s=now_s - began_s)

    def _weigh(self, chain: _Chain, guesses: list[Guess], chances: SequenceOf[float], price: Price) -> None:
        """Selects the draft tokens that are worth verifying, up to the first one that is not.

        `chances` holds the acceptance probability of each level.
        """
        sequence = chain.candidate.sequence
        kinds = _levels(sequence)
        reached = 1.0
        for guess in guesses:
            level = guess.level
            # Records untaken draft tokens too: they set the prior for the next draft token.
            chain.record.note(_any(sequence), self._step, chances[level])
            reached *= chances[level]
            if reached <= price.of(chain.row_s):
                break
            chain.kinds.append(kinds[level])
            price.add(num_tokens=reached, time_s=chain.row_s)

    def _guess_s(self, sequence: Sequence, num_sequences: int) -> float:
        """Returns the time of a draft token for one of `num_sequences` sequences, including its share of the round."""
        meter = self._guesses.get(num_sequences.bit_length())
        is_known = self._drafting.is_known
        speed = meter.speed if meter is not None and is_known else DEFAULT_GUESS.times(self._slowness)
        return speed.s_per_sequence + speed.s_per_context_token * sequence.num_tokens + speed.overhead_s / num_sequences

    def _read_speed(self) -> PrefillSpeed:
        """Returns the draft model's prefill speed, or an estimate for this machine before the first measurement."""
        speed = self._reads.speed
        return speed.times(self._slowness) if speed is DEFAULT_READ else speed

    def _num_to_read(self, step_s: float) -> int:
        speed = self._read_speed()
        left_s = READ_SHARE * step_s - speed.overhead_s
        return max(READ_TOKENS, int(left_s / speed.s_per_token) if speed.s_per_token > 0 else READ_TOKENS)

    def _read(self, draft: DraftModel, sequence: Sequence, num_tokens: int) -> int:
        num_before = sequence.num_tokens - draft.num_lacking(sequence)
        began_s = self._clock.monotonic()
        if not draft.read(sequence, num_tokens):
            return 0
        now_s = self._clock.monotonic()
        self._read_s += now_s - began_s
        self._reads.observe(num_tokens, num_before, now_s - began_s, now_s)
        return num_tokens


class Speculation(StepFeature):
    """Connects a speculator to the decode loop. It drafts for sequences that decode and have emitted a token."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def free(self, key: Hashable) -> None:
        """Removes a sequence. Ignores unknown keys."""
        self._speculator.free(key)

    def propose(self, step: StepAhead) -> Mapping[Hashable, Proposal]:
        """Returns draft tokens where they pay off. Allocates pages for them if no sequence waits for pages."""
        decoding = [work for work in step.work if work.samples and work.num_tokens == 1]
        if not decoding or not self._speculator.is_open(len(decoding)):
            return {}
        candidates = []
        for work in decoding:
            sequence = step.sequences[work.key]
            num_free = step.look_ahead(work.key, self._speculator.max_depth)
            if num_free and sequence.num_generated_tokens:
                candidates.append(Candidate(sequence, num_free))
        return self._speculator.propose(candidates, speed=step.decode) if candidates else {}

    def learn(self, key: Hashable, proposal: Proposal, tokens: SequenceOf[SampledToken]) -> None:
        """Learns which draft tokens were accepted."""
        if isinstance(proposal, KnownProposal):
            self._speculator.learn(key, proposal, tokens)

    def end_step(self, step: StepTaken) -> None:
        """Records the yield of a step if it is comparable with others."""
        is_decoding_only = all(work.samples and work.num_tokens == 1 for work in step.work)
        self._speculator.end_step(step.num_accepted, is_comparable=is_decoding_only and not step.reports_prompts)

    def check_books(self) -> None:
        """Raises InvariantViolated if the speculator holds state of a sequence that has ended."""
        self._speculator.check_integrity()


_DRAFT_KINDS = {
    is_greedy: tuple(Kind("draft", is_greedy, level) for level in (*range(LEVELS), ANY_LEVEL))
    for is_greedy in (False, True)
}


def _levels(sequence: Sequence) -> SequenceOf[Kind]:
    return _DRAFT_KINDS[sequence.sampling.is_greedy][:LEVELS]


def _any(sequence: Sequence) -> Kind:
    return _DRAFT_KINDS[sequence.sampling.is_greedy][LEVELS]
