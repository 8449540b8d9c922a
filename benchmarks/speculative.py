"""Speculative decoding with the demo models: `python -m benchmarks.speculative`.

A decode worker's loop in this process, once without and once with each source of proposals, on the same prompts in
turn; ratios are of tokens/s after the first token, taken within each pair. What a draft reads of a prompt is in them.
Prompts: the demo's own domain (questions for functions, pieces of the standard library) and random tokens. And: 200
greedy answers with each source, which must be those without.

`--system` asks whole clusters over HTTP, one request at a time, in turn with one that does not speculate: there the
engine shares its core with the worker's event loop, and a token's way to the client is a part of what it takes.

On a machine that others use, `--cpu-time` counts the process's own time of one thread instead of the clock's.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import sysconfig
import time
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.cluster import running_cluster
from benchmarks.report import Ratio, add_arguments, leave
from decode_worker.engine_loop import DecodeLoop
from decode_worker.pages import DecodePages
from decode_worker.scheduler import BatchScheduler
from decode_worker.speculation import Speculation, Speculator
from demo import DEMO_DRAFT, DEMO_MODEL
from services.engine.engine import EngineParts, load_engine
from services.engine.speculation.draft import DraftModel
from services.engine.steps.sequence import Sampling, Sequence
from services.runtime.clock import SYSTEM_CLOCK, Clock
from worker.engine import DecodeReport

MODES = ("off", "ngram", "draft", "auto")
EQUALITY_PROMPTS, EQUALITY_TOKENS, EQUALITY_BATCH = 200, 48, 32
NUM_PAGES = 4000
ROUNDS = 4
MIN_GROUPS = 8
DRAFT_AIM = 1.5
NEVER_BELOW = 0.97
TASKS = (
    "reads a file and returns its lines", "parses a URL", "sorts a list of names", "opens a socket",
    "writes a log message", "returns the maximum of two numbers", "copies a directory tree",
    "computes a hash of a string", "escapes HTML",
    "splits a path", "closes the connection", "encodes bytes in base64", "counts words in a text", "formats a date",
    "checks whether a string is empty", "sends an email", "starts a thread", "joins two paths", "walks a tree of nodes",
    "compiles a regular expression",
)  # fmt: skip


class ProcessClock:
    """The time that this process has computed."""

    def monotonic(self) -> float:
        """Seconds."""
        return time.process_time()

    def unix_ns(self) -> int:
        """Nanoseconds; not since 1970."""
        return time.process_time_ns()


@dataclass(frozen=True)
class Result:
    """What was seen for one kind of prompt at one size of batch; `ratio` is the median of the pairs, to `off`."""

    prompts: str
    temperature: float
    batch: int
    mode: str
    tokens_per_s: float
    ratio: float
    tokens_per_step: float | None


class Bench:
    """One loop with one source of proposals."""

    def __init__(self, mode: str, model: EngineParts, draft: EngineParts, clock: Clock) -> None:
        self._mode = mode
        self._clock = clock
        self._num_runs = 0
        self._reports: list[DecodeReport] = []
        self._num_ended = self._num_tokens = 0
        speculator = Speculator(
            clock=clock,
            uses_ngrams=mode in ("ngram", "auto"),
            draft=DraftModel(draft) if mode in ("draft", "auto") else None,
        )
        self._loop = DecodeLoop(
            runner=model.runner,
            pages=DecodePages(
                model.allocator,
                page_size=model.pool.layout.page_size,
                clock=clock,
                is_exact=model.model.exact,
            ),
            scheduler=BatchScheduler(
                max_batch=64,
                step_tokens=512,
                num_pages=NUM_PAGES,
                page_size=model.pool.layout.page_size,
                replays_in_chunks=model.runner.replays_in_chunks,
            ),
            clock=clock,
            on_report=self._on_report,
            features=() if mode == "off" else (Speculation(speculator),),
        )

    def run(
        self, prompts: SequenceOf[list[int]], *, batch: int, num_tokens: int, temperature: float
    ) -> tuple[list[list[int]], float, float]:
        """Returns the answers, tokens/s while `batch` prompts run at once, and tokens of a sequence's step.

        A prompt that ends makes room for the next one, as for a server that has enough to do: a few slow answers at the
        end would say nothing of that.
        """
        self._num_runs += 1
        self._reports.clear()
        self._num_ended = self._num_tokens = 0
        left = iter(enumerate(prompts))
        for _ in range(batch):
            self._start(*next(left), num_tokens=num_tokens, temperature=temperature)
        num_started = batch
        while self._num_tokens < batch and self._loop.step():
            pass
        num_before = self._num_tokens
        began_s = self._clock.monotonic()
        while num_started - self._num_ended == batch:
            self._loop.step()  # all may end in one step: then nothing more is to do until the next ones start
            while num_started - self._num_ended < batch and num_started < len(prompts):
                self._start(*next(left), num_tokens=num_tokens, temperature=temperature)
                num_started += 1
        took_s, num_counted = self._clock.monotonic() - began_s, self._num_tokens - num_before
        while self._loop.step():
            pass
        self._loop.step()
        answers: list[list[int]] = [[] for _ in prompts]
        num_steps = 0
        for advance in (advance for report in self._reports for advance in report.advances):
            assert isinstance(advance.key, tuple)
            answers[advance.key[1]] += [token.token_id for token in advance.tokens]
            num_steps += bool(advance.tokens)
        return answers, num_counted / took_s, self._num_tokens / num_steps

    def _start(self, place: int, prompt: list[int], *, num_tokens: int, temperature: float) -> None:
        # Lengths differ: answers of one length that began together would begin and end together for ever.
        num_tokens = num_tokens * (9 + 3 * (place + 1) % 7) // 12
        sampling = Sampling(max_tokens=num_tokens, temperature=temperature, seed=place)
        sequence = Sequence((self._num_runs, place), prompt, sampling=sampling)
        self._loop.start(sequence, salt=f"{self._mode} {self._num_runs}".encode())  # all modes share the pages

    def _on_report(self, report: DecodeReport) -> None:
        self._reports.append(report)
        for advance in report.advances:
            self._num_tokens += len(advance.tokens)
            self._num_ended += advance.finish_reason is not None


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each kind at batch 1")
    parser.add_argument("--batches", default="1,8,32", help="sizes of batch")
    parser.add_argument("--temperatures", default="0,0.8", help="temperatures; 0 is greedy")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of an answer, in the mean")
    parser.add_argument("--modes", default=",".join(MODES[1:]), help="sources of proposals")
    parser.add_argument("--threads", type=int, default=1, help="threads of the engine")
    parser.add_argument("--equal", type=int, default=EQUALITY_PROMPTS, help="greedy answers that are compared; 0: none")
    parser.add_argument("--cpu-time", action="store_true", help="count the process's own time; needs one thread")
    parser.add_argument("--system", action="store_true", help="measure whole clusters instead, with questions only")
    add_arguments(parser)
    arguments = parser.parse_args()
    if arguments.system:
        results = measure_systems(arguments.modes.split(","), arguments.temperatures, arguments.tokens)
        leave(arguments, "speculative", {"system": [*map(asdict, results)]}, ratios(results, {}))
        return
    torch.set_num_threads(arguments.threads)
    clock: Clock = ProcessClock() if arguments.cpu_time else SYSTEM_CLOCK
    model, draft = load_engine(DEMO_MODEL, num_pages=NUM_PAGES), load_engine(DEMO_DRAFT, num_pages=NUM_PAGES)
    benches = {mode: Bench(mode, model, draft, clock) for mode in ("off", *arguments.modes.split(","))}
    kinds = make_prompts(max(arguments.prompts, *map(int, arguments.batches.split(","))))
    print(f"exact: {model.model.exact} ({model.model.arithmetic}), {arguments.threads} threads", flush=True)
    num_different = compare(benches, arguments.equal) if arguments.equal else {}
    results = []
    for temperature in map(float, arguments.temperatures.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            for kind, prompts in kinds.items():
                groups = group(prompts, batch, arguments.prompts)
                results += measure(
                    benches, kind, groups, batch=batch, num_tokens=arguments.tokens, temperature=temperature
                )
    figures = {"different_answers": num_different, "results": [*map(asdict, results)]}
    leave(arguments, "speculative", figures, ratios(results, num_different))


def ratios(results: SequenceOf[Result], num_different: Mapping[str, int]) -> dict[str, Ratio]:
    """What travels to other machines, with the aims: those of single greedy requests in the engine."""
    found = {f"{mode}, answers that differ": Ratio(num, 0, lower_is_better=True) for mode, num in num_different.items()}
    for result in results:
        if result.mode == "off":
            continue
        where = "a system" if result.tokens_per_step is None else f"batch {result.batch}"
        aim = None
        if (result.batch, result.temperature) == (1, 0.0) and result.tokens_per_step is not None:
            aim = NEVER_BELOW if result.prompts == "random" else DRAFT_AIM if result.mode == "draft" else None
        name = f"{result.mode} over none, {where}, {result.prompts}, temperature {result.temperature:.1f}"
        found[name] = Ratio(result.ratio, aim)
    return found


def make_prompts(num: int) -> dict[str, list[list[int]]]:
    """Makes `num` prompts of each kind."""
    source = random.Random(1)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    chats = [f"<|bos|><|user|>\nWrite a function that {task}.<|end|>\n<|assistant|>\n" for task in TASKS]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code: list[list[int]] = []
    while len(code) < num:
        token_ids = tokenizer.encode(source.choice(files).read_text(errors="ignore")).ids
        start = source.randrange(max(1, len(token_ids) - 200))
        code.append(token_ids[start : start + source.randrange(40, 160)])
    return {
        "questions": [tokenizer.encode(chats[n % len(chats)], add_special_tokens=False).ids for n in range(num)],
        "code": code,
        "random": [[source.randrange(6, 2048) for _ in range(source.randrange(40, 160))] for _ in range(num)],
    }


def group(prompts: list[list[int]], batch: int, num_prompts: int) -> list[list[list[int]]]:
    """Prompts of a run, at batch 1 one and else ROUNDS times as many as run at once; at least MIN_GROUPS of them."""
    size = 1 if batch == 1 else ROUNDS * batch
    return [
        [prompts[(n * size + place) % len(prompts)] for place in range(size)]
        for n in range(max(MIN_GROUPS, num_prompts // size))
    ]


def compare(benches: dict[str, Bench], num_prompts: int) -> dict[str, int]:
    """Returns how many of `num_prompts` greedy answers differ from those without speculation."""
    kinds = make_prompts(num_prompts)
    prompts = [kinds[[*kinds][n % len(kinds)]][n] for n in range(num_prompts)]
    found: dict[str, list[list[int]]] = {mode: [] for mode in benches}
    for first in range(0, num_prompts, EQUALITY_BATCH):
        for mode, bench in benches.items():
            some = prompts[first : first + EQUALITY_BATCH]
            found[mode] += bench.run(some, batch=len(some), num_tokens=EQUALITY_TOKENS, temperature=0.0)[0]
    num_different = {}
    for mode in [*benches][1:]:
        num_different[mode] = sum(one != other for one, other in zip(found["off"], found[mode], strict=True))
        print(f"{mode:6s} {num_different[mode]} of {num_prompts} greedy answers differ", flush=True)
    return num_different


def measure(
    benches: dict[str, Bench],
    kind: str,
    groups: list[list[list[int]]],
    *,
    batch: int,
    num_tokens: int,
    temperature: float,
) -> list[Result]:
    """One kind of prompt at one size of batch, printed."""
    rates: dict[str, list[float]] = {mode: [] for mode in benches}
    per_step: dict[str, list[float]] = {mode: [] for mode in benches}
    for prompts in (groups[0], *groups):  # the first warms up, and teaches how long steps take
        for mode, bench in benches.items():
            _, rate, tokens_per_step = bench.run(prompts, batch=batch, num_tokens=num_tokens, temperature=temperature)
            rates[mode].append(rate)
            per_step[mode].append(tokens_per_step)
    results = []
    for mode in benches:
        ratio = statistics.median(one / other for one, other in zip(rates[mode][1:], rates["off"][1:], strict=True))
        mean = statistics.mean(per_step[mode][1:])
        rate = statistics.median(rates[mode][1:])
        results.append(Result(kind, temperature, batch, mode, rate, ratio, mean))
        print(
            f"t {temperature:.1f} batch {batch:2d} {kind:9s} {mode:5s} {rate:6.0f} tok/s {ratio:5.2f} of off "
            f"{mean:5.2f} tokens/step",
            flush=True,
        )
    return results


def measure_systems(modes: SequenceOf[str], temperatures: str, num_tokens: int) -> list[Result]:
    """Requests through gateway and workers, for each source of proposals a cluster; the prompts are part of them."""
    results = []
    with contextlib.ExitStack() as stack:
        clusters = {mode: stack.enter_context(running_cluster("--speculative", mode)) for mode in ("off", *modes)}
        name = clusters["off"].get("/v1/models")["data"][0]["id"]
        for temperature in map(float, temperatures.split(",")):
            rates: dict[str, list[float]] = {mode: [] for mode in clusters}
            num_different = dict.fromkeys(clusters, 0)
            for round_number, task in itertools.product(range(1 + ROUNDS), TASKS):
                body = {
                    "model": name,
                    "messages": [{"role": "user", "content": f"Write a function that {task}."}],
                    "max_tokens": num_tokens,
                    "temperature": temperature,
                    "seed": round_number,
                }
                texts = {}
                for mode, cluster in clusters.items():
                    began_s = time.perf_counter()
                    answer = cluster.post("/v1/chat/completions", body)
                    took_s = time.perf_counter() - began_s
                    texts[mode] = answer["choices"][0]["message"]["content"]
                    num_different[mode] += texts[mode] != texts["off"]
                    if round_number:  # the first round warms up
                        rates[mode].append(answer["usage"]["completion_tokens"] / took_s)
            for mode in clusters:
                ratio = statistics.median(one / other for one, other in zip(rates[mode], rates["off"], strict=True))
                rate = statistics.median(rates[mode])
                results.append(Result("questions", temperature, 1, mode, rate, ratio, None))
                print(
                    f"t {temperature:.1f} system   questions {mode:5s} {rate:6.0f} tok/s {ratio:5.2f} of off, "
                    f"{num_different[mode]} answers differ",
                    flush=True,
                )
    return results


if __name__ == "__main__":
    main()
