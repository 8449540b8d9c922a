"""What a JSON schema costs per token: the grammar alone, sampling with it against the same without, and its share of
whole steps of the model.

`python -m benchmarks.structured [--json FILE]`. For sampling, rows of random logits stand for a model, so that nothing
else is measured; each row's grammar advances by the token that was chosen for it, and begins again at its end. Both
kinds are measured in turn, and medians are printed.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL
from services.engine.engine import Engine, EngineParts, load_engine
from services.engine.sampling import sample
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import SampledToken
from services.engine.weights.config import load_config
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars, GrammarState

BATCHES = (1, 8, 32)
NUM_STEPS = 40
NUM_PAGES = 256
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}},
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="checkpoint folder (default: the demo model)")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of each pair; medians are printed")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.model)
    figures: dict[str, Any] = {"vocab_size": bench.vocab_size, **bench.measure_making()}
    print(f"vocabulary of {bench.vocab_size}")
    print(f"tokenizer and first schema {figures['first_ms']:.1f} ms, another schema {figures['another_ms']:.2f} ms,")
    print(f"one that is known {figures['known_ms']:.3f} ms, replay {figures['replay_us']:.1f} us per token")
    for batch in BATCHES:
        row = figures[f"batch_{batch}"] = bench.measure_sampling(batch, arguments.rounds)
        print(
            f"batch {batch:2d}: sampling {row['free_us']:7.1f} us per token, with a schema {row['schema_us']:7.1f} us, "
            f"of which the grammar {row['grammar_us']:6.1f} us"
        )
    figures |= measure_steps(bench)
    ratios = {}
    for batch in BATCHES:
        row = figures[f"batch_{batch}"]
        name = f"sampling with a schema over free, batch {batch}"
        ratios[name] = Ratio(row["schema_us"] / row["free_us"], lower_is_better=True)
    leave(arguments, "structured", figures, ratios)


def measure_steps(bench: "Bench") -> dict[str, dict[str, float]]:
    """Measure and print the grammars' share of steps of the model, for each size of a batch."""
    parts = load_engine(bench.model, device="cpu", num_pages=NUM_PAGES, threads=1)
    figures = {}
    for batch in BATCHES:
        row = figures[f"steps_{batch}"] = bench.measure_steps(parts, batch)
        print(
            f"batch {batch:2d}: a step of the model {row['step_us']:7.1f} us, of which its grammars "
            f"{row['grammars_us'] / batch:5.1f} us per token, {row['grammars_us'] / row['step_us']:.1%}"
        )
    return figures


class Bench:
    """One tokenizer and its grammars."""

    def __init__(self, model: Path) -> None:
        config = load_config(model)
        self.model = model
        self.vocab_size = config.vocab_size
        self._grammars = Grammars(model / "tokenizer.json", vocab_size=config.vocab_size)
        self._eos_token_ids = tuple(sorted(config.eos_token_ids))
        self._schema = json.dumps(SCHEMA)
        self._grammar_s = 0.0

    def measure_making(self) -> dict[str, float]:
        """Returns the milliseconds until an answer's grammar is ready, and microseconds per token that is replayed."""
        first_s = self._begin_s(self._schema)
        another_s = statistics.median(self._begin_s(json.dumps({**SCHEMA, "title": f"{n}"})) for n in range(9))
        known_s = statistics.median(self._begin_s(self._schema) for _ in range(9))
        answer = self._answer(400)
        start_s = time.perf_counter()
        self._grammars.begin(AnswerForm(self._schema), eos_token_ids=self._eos_token_ids, token_ids=answer)
        replay_s = time.perf_counter() - start_s - known_s
        return {
            "first_ms": first_s * 1e3,
            "another_ms": another_s * 1e3,
            "known_ms": known_s * 1e3,
            "replay_us": replay_s / len(answer) * 1e6,
        }

    def measure_sampling(self, batch: int, rounds: int) -> dict[str, float]:
        """Microseconds per token of `sample`, for rows without and with a schema, and of the grammars alone."""
        free, bound, grammar = [], [], []
        for n in range(rounds + 1):
            free.append(self._sampling_s(batch, has_schema=False, seed=n)[0])
            total_s, grammar_s = self._sampling_s(batch, has_schema=True, seed=n)
            bound.append(total_s)
            grammar.append(grammar_s)
        names = {"free_us": free, "schema_us": bound, "grammar_us": grammar}
        return {name: statistics.median(values[1:]) * 1e6 for name, values in names.items()}

    def measure_steps(self, parts: EngineParts, batch: int) -> dict[str, float]:
        """Microseconds of a decode step in which every sequence has a grammar, and of all its grammars; medians."""
        engine = Engine(parts)
        unending = AnswerForm(json.dumps({"type": "array", "items": SCHEMA, "minItems": NUM_STEPS}))
        sampling = Sampling(max_tokens=NUM_STEPS + 1, stop_token_ids=frozenset(self._eos_token_ids))
        for _ in range(batch):
            engine.add([0], sampling, grammar=_Timed(self, unending))
        engine.step()  # The prompts.
        steps, grammars = [], []
        while engine.has_work:
            self._grammar_s = 0.0
            start_s = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start_s)
            grammars.append(self._grammar_s)
        return {"step_us": statistics.median(steps) * 1e6, "grammars_us": statistics.median(grammars) * 1e6}

    def _sampling_s(self, batch: int, *, has_schema: bool, seed: int) -> tuple[float, float]:
        """Seconds per token of sampling with the grammars' part, and of that part."""
        sequences = [self._sequence(row, has_schema=has_schema) for row in range(batch)]
        generator = torch.Generator().manual_seed(seed)
        total_s = 0.0
        self._grammar_s = 0.0
        for _ in range(NUM_STEPS):
            logits = torch.randn((batch, self.vocab_size), generator=generator) * 3
            start_s = time.perf_counter()
            tokens = sample(logits, sequences)
            total_s += time.perf_counter() - start_s
            for row, token in enumerate(tokens):
                assert isinstance(token, SampledToken)
                sequences[row].append_token(token.token_id)
                if token.token_id in self._eos_token_ids:
                    sequences[row] = self._sequence(row, has_schema=has_schema)
        num_tokens = NUM_STEPS * batch
        return total_s / num_tokens, self._grammar_s / num_tokens

    def _sequence(self, row: int, *, has_schema: bool) -> Sequence:
        grammar = _Timed(self, AnswerForm(self._schema)) if has_schema else None
        return Sequence(row, [0], sampling=Sampling(max_tokens=1 << 20, seed=row), grammar=grammar)

    def begin(self, form: AnswerForm) -> GrammarState:
        """A new answer's grammar."""
        return self._grammars.begin(form, eos_token_ids=self._eos_token_ids)

    def add_grammar_time(self, duration_s: float) -> None:
        """Counts what a grammar took."""
        self._grammar_s += duration_s

    def _begin_s(self, schema: str) -> float:
        start_s = time.perf_counter()
        self._grammars.begin(AnswerForm(schema), eos_token_ids=self._eos_token_ids)
        return time.perf_counter() - start_s

    def _answer(self, num_tokens: int) -> list[int]:
        """The beginning of an answer."""
        sequence = self._sequence(1, has_schema=True)
        generator = torch.Generator().manual_seed(1)
        for _ in range(num_tokens):
            (token,) = sample(torch.randn((1, self.vocab_size), generator=generator), [sequence])
            assert isinstance(token, SampledToken)
            if token.token_id in self._eos_token_ids:
                break
            sequence.append_token(token.token_id)
        return sequence.token_ids[1:]


class _Timed:
    """A grammar that tells how long it took."""

    def __init__(self, bench: Bench, form: AnswerForm) -> None:
        self._bench = bench
        self._state = bench.begin(form)

    @property
    def num_tokens(self) -> int:
        return self._state.num_tokens

    def advance(self, token_ids: SequenceOf[int]) -> None:
        start_s = time.perf_counter()
        self._state.advance(token_ids)
        self._bench.add_grammar_time(time.perf_counter() - start_s)

    def allowed(self) -> bytes:
        start_s = time.perf_counter()
        bits = self._state.allowed()
        self._bench.add_grammar_time(time.perf_counter() - start_s)
        return bits


if __name__ == "__main__":
    main()
