"""Answers under JSON schemas at temperature 1 while decode workers are killed: is each of them a value of its schema?

`python -m benchmarks.structured_failover [--answers 1000] [--kills 10] [--json FILE]` starts a cluster with two decode
workers, asks with many streams at once, and kills -9 a decode worker each time a share of the answers has come; its
supervisor starts it anew. Every answer that ends with `stop` is checked against its schema by code that does not know
the grammar library; one that `max_tokens` cut off must be the beginning of a value. Then what grammars cost per token
is measured. Exits with 1 if an answer is not valid.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster, request, running_cluster, stream
from benchmarks.structured import Bench, measure_steps
from demo import DEMO_MODEL
from protos import inference_pb2, inference_pb2_grpc
from services.engine.weights.config import load_config
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars
from tests.json_schema import keeps_to
from tests.schemas import COLOURS, PERSON

NUM_STREAMS = 24
MAX_TOKENS = 1600
POLL_S = 0.1
ANSWER_TIMEOUT_S = 300.0

PEOPLE: dict[str, Any] = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "colours": COLOURS,
        "place": {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "properties": {"x": {"type": "number", "minimum": -99, "maximum": 99}},
                    "required": ["x"],
                    "additionalProperties": False,
                },
            ]
        },
        "lines": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 1, "maxItems": 4},
    },
    "required": ["title", "colours", "place", "lines"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (PEOPLE, NOTE)
"""Every answer under them ends by itself: nothing in them can continue without a bound."""


@dataclass
class Answer:
    """One answer as its client saw it."""

    request_id: str
    schema: dict[str, Any]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    was_open_at_a_kill: bool = False
    """It had begun and had not ended."""
    num_attempts: int = 0

    @property
    def was_hit(self) -> bool:
        """A worker's death ended an attempt in the middle of it, and another one continued."""
        return self.was_open_at_a_kill and self.num_attempts > 1


@dataclass(frozen=True)
class Report:
    """What came of all answers."""

    answers: list[Answer]
    num_kills: int
    wall_s: float
    invalid: list[str]
    """Ids of answers that are no values of their schemas, nor beginnings of one where they were cut off."""

    def figures(self) -> dict[str, Any]:
        """Counts, and seconds."""
        stopped = [one for one in self.answers if one.finish_reason == inference_pb2.FINISH_REASON_STOP]
        return {
            "answers": len(self.answers),
            "ended_by_themselves": len(stopped),
            "invalid": len(self.invalid),
            "kills": self.num_kills,
            "hit_by_a_failover": sum(one.was_hit for one in self.answers),
            "tokens": sum(len(one.token_ids) for one in self.answers),
            "wall_s": self.wall_s,
        }


def main() -> None:
    """Ask, check, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=1000, help="how many answers to ask for")
    parser.add_argument("--kills", type=int, default=10, help="how many times a decode worker is killed")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    report = run(arguments.answers, arguments.kills)
    figures = report.figures()
    print(
        f"{figures['answers'] - figures['invalid']} of {figures['answers']} answers are valid; "
        f"{figures['ended_by_themselves']} ended by themselves; {figures['hit_by_a_failover']} were hit by a failover "
        f"in the middle ({figures['kills']} kills); {figures['tokens']} tokens in {figures['wall_s']:.0f} s"
    )
    figures |= measure_steps(Bench(DEMO_MODEL))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    for request_id in report.invalid:
        print(f"not valid: {request_id}")
    sys.exit(1 if report.invalid else 0)


def run(num_answers: int, num_kills: int) -> Report:
    """Start a cluster, ask it, and check the answers."""
    with tempfile.TemporaryDirectory(prefix="tandem-structured-") as folder:
        log_dir = Path(folder)
        with running_cluster("--threads", "1", "--log-dir", folder, prefill=1, decode=2) as cluster:
            start_s = time.monotonic()
            asked = _Run(cluster, num_answers, num_kills)
            answers = asyncio.run(asked.run())
            wall_s = time.monotonic() - start_s
        # The line of a request is written after its end was sent, so it is read when the gateway has ended.
        attempts = _attempts_by_id(log_dir)
    for answer in answers:
        answer.num_attempts = attempts.get(answer.request_id, 0)
    config = load_config(DEMO_MODEL)
    grammars = Grammars(DEMO_MODEL / "tokenizer.json", vocab_size=config.vocab_size)
    invalid = [answer.request_id for answer in answers if not _is_valid(answer, grammars, config.eos_token_ids)]
    return Report(answers, asked.num_kills, wall_s, invalid)


class _Run:
    """All requests of one run, and the killing meanwhile."""

    def __init__(self, cluster: Cluster, num_answers: int, num_kills: int) -> None:
        self._cluster = cluster
        self._answers = [Answer(f"structured-{n}", SCHEMAS[n % len(SCHEMAS)]) for n in range(num_answers)]
        self._kills_after = [(n + 1) * num_answers // (num_kills + 1) for n in range(num_kills)]
        self._room = asyncio.Semaphore(NUM_STREAMS)
        self.num_kills = 0
        self._num_ended = 0
        self._has_ended = asyncio.Condition()

    async def run(self) -> list[Answer]:
        async with self._cluster.inference() as stub:
            killing = asyncio.create_task(self._kill())
            try:
                await asyncio.gather(*(self._ask(stub, answer, seed) for seed, answer in enumerate(self._answers)))
            finally:
                killing.cancel()  # Where workers start slowly, all answers may be there before the last kill.
            with contextlib.suppress(asyncio.CancelledError):
                await killing
        return self._answers

    async def _ask(self, stub: "inference_pb2_grpc.InferenceAsyncStub", answer: Answer, seed: int) -> None:
        message = request(f"answer_{seed} = ", answer.request_id, max_tokens=MAX_TOKENS, temperature=1.0, seed=seed)
        message.response_format.json_schema = json.dumps(answer.schema)
        message.service_class = "batch"  # Waits for room as long as it takes, also while a worker is being started.
        async with self._room:
            async for response in stream(stub, message, timeout_s=ANSWER_TIMEOUT_S):
                assert not response.token_ids or response.first_index == len(answer.token_ids)
                answer.token_ids += response.token_ids
                answer.text += response.text
                answer.finish_reason = response.finish_reason
        async with self._has_ended:
            self._num_ended += 1
            self._has_ended.notify_all()

    async def _kill(self) -> None:
        for num_answers in self._kills_after:
            async with self._has_ended:
                while self._num_ended < num_answers:
                    await self._has_ended.wait()
            pid = await self._busy_decode_pid()
            for answer in self._answers:
                answer.was_open_at_a_kill |= bool(answer.token_ids) and not answer.finish_reason
            os.kill(pid, signal.SIGKILL)
            self.num_kills += 1

    async def _busy_decode_pid(self) -> int:
        """The decode worker with the most answers, once there are two again."""
        while True:
            workers = (await asyncio.to_thread(self._cluster.get, "/cluster"))["workers"]
            decode = [worker for worker in workers if worker["role"] == "decode" and worker["state"] == "ready"]
            busiest = max(decode, key=lambda worker: worker["running"], default=None)
            if len(decode) == 2 and busiest is not None and busiest["running"]:
                return int(busiest["pid"])
            await asyncio.sleep(POLL_S)


def _is_valid(answer: Answer, grammars: Grammars, eos_token_ids: Collection[int]) -> bool:
    if answer.finish_reason == inference_pb2.FINISH_REASON_STOP:
        try:
            return keeps_to(json.loads(answer.text), answer.schema)
        except ValueError:
            return False
    if answer.finish_reason != inference_pb2.FINISH_REASON_LENGTH:
        return False
    form = AnswerForm(json.dumps(answer.schema))
    return any(grammars.begin(form, eos_token_ids=sorted(eos_token_ids), token_ids=answer.token_ids).allowed())


def _attempts_by_id(log_dir: Path) -> dict[str, int]:
    """How many attempts each request took, as the gateway wrote it."""
    lines = (line for path in log_dir.glob("gateway*") for line in path.read_text().splitlines())
    requests = (json.loads(line) for line in lines if '"request"' in line and line.startswith("{"))
    return {fields["request_id"]: fields["attempts"] for fields in requests if "attempts" in fields}


if __name__ == "__main__":
    main()
