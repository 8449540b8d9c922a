"""Proposes tokens for the sequences of a step, so that one pass of the model may give several of them.

Speculation changes no answer. The model chooses in every place what it would have chosen in a step of its own: the
likeliest token, or the winner by noise that is a function of (seed, position, token id). A proposal counts only if it
is that choice. Rejection sampling (Leviathan et al. 2023, Chen et al. 2023) gives tokens of the same distribution; this
gives the same tokens, and so the same distribution, too. The draft draws with the same noise, which makes its token the
model's nearly as often as rejection sampling would accept one (Gumbel coupling: Daliri, Musco, Suresh 2025, "Coupling
without communication and drafter-invariant speculative decoding"). So an answer continues anywhere, with or without
speculation. Where the model's arithmetic is not exact, a place of a longer pass may differ from a pass of its own by
rounding, as results may there whatever shares their step.

Two sources: what the sequence said before (services.engine.speculation.lookup), and a draft model
(services.engine.speculation.draft). For each step and each sequence the better one is taken, and as many tokens as are
worth their time by what is measured (decode_worker.payoff): at a large batch, where a row costs what it gives, or for a
text that cannot be guessed, nothing is proposed. Failure cases: no room in the draft's pool, or a sequence longer than
its context: then it has no say.

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
"""A draft reads what it lacks of a prompt in parts that take so much of a step's time, at least READ_TOKENS."""
READ_TOKENS = 32
TRY_AGAIN_STEPS = 512
"""Steps without proposals, or without the draft's, after which what was measured of them is forgotten."""
TRIED_STEPS = 4
"""Steps in which they are tried by what they would take elsewhere, since a first measurement may be anything."""
GUESSES_TO_COME = 3
"""As many guesses of a draft are weighed before there is one."""
STEPS_TO_COME = 64
"""Most steps that are expected to make up for reading a prompt."""
DEFAULT_GUESS = DEFAULT_DECODE.times(0.1)
"""Speed of a draft, until it was measured."""
DEFAULT_READ = DEFAULT_PREFILL.times(0.1)


class Candidate(NamedTuple):
    """A sequence of the step that takes its next token, and for how many proposals there is room."""

    sequence: Sequence
    num_free: int


@dataclass(frozen=True, slots=True)
class KnownProposal(Proposal):
    """Tokens that may come next, all of one source, and what is known of the chances of each."""

    kinds: tuple[Kind, ...]

    @property
    def source(self) -> Source:
        """Where they are from."""
        return self.kinds[0].source


@dataclass(eq=False, slots=True)
class _Request:
    lookup: PromptLookup
    record: Record


@dataclass(eq=False, slots=True)
class _Chain:
    """A sequence that the draft is to guess for, and the kinds of those guesses that are worth it."""

    candidate: Candidate
    record: Record
    row_s: float
    kinds: list[Kind] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Tried:
    """In how many steps something was measured, and when last."""

    num: int = 0
    last_step: int = 0

    @property
    def is_known(self) -> bool:
        return self.num >= TRIED_STEPS

    def note(self, step: int) -> None:
        self.num += 1
        self.last_step = step

    def forget_if_old(self, step: int) -> bool:
        """Has it tried as if for the first time, if the last time is long ago; whether it is."""
        if step - self.last_step <= TRY_AGAIN_STEPS:
            return False
        self.num, self.last_step = 0, step
        return True


class Speculator:
    """Proposes for the sequences of one worker, and learns from what became of it."""

    def __init__(
        self, *, clock: Clock, uses_ngrams: bool = True, draft: DraftModel | None = None, max_depth: int = DEFAULT_DEPTH
    ) -> None:
        """At most `max_depth` tokens are proposed for a sequence in a step.

        `clock` is for what the engine's thread does: where others use its core, the time that it has computed is what
        plain steps and others can be compared by.
        """
        assert max_depth > 0, "a worker that proposes nothing needs no speculator"
        self._clock = clock
        self._uses_ngrams = uses_ngrams
        self._draft = draft
        self.max_depth = max_depth
        self._requests: dict[Hashable, _Request] = {}
        self._everybody = Record(WORKER_HALF_LIFE_STEPS)
        self._guesses: dict[int, DecodeMeter] = {}
        """By the size of the batch: at one it says little of another."""
        self._reads = PrefillMeter(DEFAULT_READ)
        self._proposing = _Tried()
        self._drafting = _Tried()
        self._slowness = 1.0
        """A step's time here over the default's, which is a large GPU's."""
        self._balances: dict[int, Balance] = {}
        self._current: tuple[Balance, int] | None = None
        """For the step that is being computed, with its sequences that decode; whether proposals were looked for."""
        self._is_tried = False
        self._began_s = self._read_s = 0.0
        self._step = 0

    def is_open(self, num_sequences: int) -> bool:
        """Whether anything is to be proposed in the step that begins, with these sequences. Once a step."""
        self._began_s = self._clock.monotonic()
        self._step += 1
        balance = self._balances.setdefault(num_sequences.bit_length(), Balance())
        self._current = balance, num_sequences
        return balance.is_open()

    def propose(self, candidates: SequenceOf[Candidate], *, speed: DecodeSpeed | None) -> dict[Hashable, KnownProposal]:
        """Returns tokens for the sequences for which it pays, in a step that is open.

        `speed` is that of the worker's steps, by any clock: a proposal costs what one more sequence would.
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
        """What was chosen behind a proposal, up to the first token that it did not have."""
        record = self._requests[key].record
        for token, token_id, kind in zip(tokens, proposal.token_ids, proposal.kinds, strict=False):
            record.note(kind, self._step, float(token.token_id == token_id))

    def end_step(self, num_accepted: int, *, is_comparable: bool) -> None:
        """Notes how many proposals were right. Not comparable: something else than decoding was in the step."""
        if self._current is not None and is_comparable:
            balance, num_sequences = self._current
            time_s = self._clock.monotonic() - self._began_s
            if self._is_tried:
                balance.note(num_sequences, num_accepted, time_s, read_s=self._read_s)
            else:
                balance.note_plain(num_sequences, time_s)
        self._current, self._is_tried, self._read_s = None, False, 0.0

    def free(self, key: Hashable) -> None:
        """Forgets a sequence. Unknown keys are ignored."""
        self._requests.pop(key, None)
        if self._draft is not None:
            self._draft.free(key)

    def check_integrity(self) -> None:
        """Raises InvariantViolated where the draft's books are wrong. At rest."""
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

    # --- what was said before ---

    def _look_up(self, candidate: Candidate, request: _Request, cost: float) -> tuple[KnownProposal | None, float]:
        """Proposes what is worth its cost; with what is gained by it, in tokens."""
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

    # --- the draft ---

    def _draft_gain(self, candidate: Candidate, request: _Request, price: Price, row_s: float, num: int) -> float:
        """What the draft is expected to give one of `num` sequences, in tokens; 0 where reading it is too much."""
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
        """Guesses for these, as far as it is worth it. A chain that lacks much reads a part instead."""
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
            draft.catch_up(sequences)  # by itself: it is not a part of what a guess takes
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
        """Guess on as long as one more is worth its time: its own, its part of a round's, and that of its row."""
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
        """Takes the guesses that are worth their rows, up to the first that is not; `chances` are those of levels."""
        sequence = chain.candidate.sequence
        kinds = _levels(sequence)
        reached = 1.0
        for guess in guesses:
            level = guess.level
            # Also of those that are not taken: this is what a guess is expected to be worth before it is made.
            chain.record.note(_any(sequence), self._step, chances[level])
            reached *= chances[level]
            if reached <= price.of(chain.row_s):
                break
            chain.kinds.append(kinds[level])
            price.add(num_tokens=reached, time_s=chain.row_s)

    def _guess_s(self, sequence: Sequence, num_sequences: int) -> float:
        """The time of a guess for one of `num_sequences` sequences: its own, and its part of the round's."""
        meter = self._guesses.get(num_sequences.bit_length())
        is_known = self._drafting.is_known
        speed = meter.speed if meter is not None and is_known else DEFAULT_GUESS.times(self._slowness)
        return speed.s_per_sequence + speed.s_per_context_token * sequence.num_tokens + speed.overhead_s / num_sequences

    def _read_speed(self) -> PrefillSpeed:
        """The draft's for prompts, or before it was measured what this machine makes likely."""
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
    """Has a speculator propose for the sequences of a step that have begun their answer and take its next token."""

    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator

    def free(self, key: Hashable) -> None:
        """Forgets a sequence. Unknown keys are ignored."""
        self._speculator.free(key)

    def propose(self, step: StepAhead) -> Mapping[Hashable, Proposal]:
        """Returns proposals for sequences for which it pays, and takes pages for them if nobody waits for these."""
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
        """Notes which proposals were right."""
        if isinstance(proposal, KnownProposal):
            self._speculator.learn(key, proposal, tokens)

    def end_step(self, step: StepTaken) -> None:
        """Notes what a step gave, if it can be compared with others."""
        is_decoding_only = all(work.samples and work.num_tokens == 1 for work in step.work)
        self._speculator.end_step(step.num_accepted, is_comparable=is_decoding_only and not step.reports_prompts)

    def check_books(self) -> None:
        """Raises InvariantViolated where something is remembered of a sequence that has ended."""
        self._speculator.check_integrity()


_DRAFT_KINDS = {
    is_greedy: tuple(Kind("draft", is_greedy, level) for level in (*range(LEVELS), ANY_LEVEL))
    for is_greedy in (False, True)
}


def _levels(sequence: Sequence) -> SequenceOf[Kind]:
    return _DRAFT_KINDS[sequence.sampling.is_greedy][:LEVELS]


def _any(sequence: Sequence) -> Kind:
    return _DRAFT_KINDS[sequence.sampling.is_greedy][LEVELS]
