"""`tandem profile`: measures the workers of a running, idle cluster, and writes the step times that they have.

It asks like a client, so that it measures workers of any engine: prompts of several lengths alone, and batches of
answers of several sizes and lengths together. `tandem replay` and `tandem plan` take the file as --measured.
"""

import asyncio
import contextlib
import json
import random
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from httpx2 import AsyncClient

from cli.bench import first_model
from cli.bench_load import Ask, Endpoint, Load, Reply, Unusable, measured_words
from cli.commands import CommandParser
from planning.simulator.measured import LOCAL, REMOTE, Measured, PromptTime, StepTime
from services.runtime.api_client import ApiRefused, GatewaySettings, get_json
from services.runtime.config import option
from services.runtime.errors import ConfigError
from services.runtime.kinds import argument, comma_separated, integer, number, path, text

NUM_AFTER_FIRST = 4
"""Tokens of an answer whose prompt is measured."""
NUM_BESIDE = 1000
"""Tokens of an answer beside which prompts are measured."""
MAX_PAUSE_S = 0.1
"""Requests come at moments that have nothing to do with steps, nor find what the last one has left in caches."""
PREFILL_HEADER = "X-Tandem-Prefill"
"""By it a request says which of Tandem's workers computes its prompt."""


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(GatewaySettings):
    """Measures an idle cluster and writes its step times to FILE. Nothing else should ask it meanwhile."""

    file: Path = option(argument(path()), help="The file that is written.")
    model_name: str | None = option(text(), default=None, help="The model; the first one of /v1/models if not given.")
    prompts: tuple[int, ...] = option(
        comma_separated(integer(1)), default=(32, 64, 128, 256, 512, 1024), help="Tokens of the prompts that are alone."
    )
    batches: tuple[int, ...] = option(
        comma_separated(integer(1)), default=(1, 2, 4, 8, 16), help="Answers that are computed together."
    )
    contexts: tuple[int, ...] = option(
        comma_separated(integer(1)), default=(32, 512), help="Tokens of the prompts of these answers."
    )
    new_tokens: int = option(integer(16), default=128, help="Tokens of each of these answers.")
    beside: int = option(
        integer(0), default=1, help="Answers that run while the prompts of prefill workers are measured."
    )
    repeats: int = option(integer(1), default=20, help="Times that each is measured; the mean counts.")
    timeout: float = option(number(0.1, 86_400), default=600.0, help="Longest silence of an answer, in seconds.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ProfileSettings, lambda settings: run(settings, sys.stdout))


def run(settings: ProfileSettings, stdout: TextIO) -> int:
    """Measures, writes, and prints how well the law fits. Raises ConfigError, ApiUnreachable or Unusable."""
    name = settings.model_name or first_model(settings, timeout_s=settings.timeout)
    workers = _workers(settings, name)
    facts = next((one for one in workers if one["role"] == "decode"), {})
    has_prefill = any(one["role"] == "prefill" for one in workers)
    ways = ((LOCAL, REMOTE) if has_prefill else (LOCAL,)) if facts else ("",)
    prompts, steps = asyncio.run(_measure(settings, name, ways=ways))
    measured = Measured(
        name=name,
        prompts=prompts,
        steps=steps,
        kv_bytes_per_token=facts.get("kv_bytes_per_token", 0),
        kv_tokens=facts.get("pages", {}).get("total", 0) * facts.get("page_tokens", 0),
        max_batch=facts.get("max_running", 0),
    )
    try:
        settings.file.write_text(json.dumps(measured.document(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{settings.file} cannot be written ({error.strerror})") from None
    for fit in measured.profile.errors:
        print(f"{name}: {fit}", file=stdout)
    return 0


def _workers(settings: ProfileSettings, model: str) -> Sequence[Mapping[str, Any]]:
    """Returns what the cluster says of a model's workers; nothing of an endpoint that is not Tandem's."""
    try:
        workers = _get(settings, "/cluster")["workers"]
    except ApiRefused:
        return []
    return [one for one in workers if one["model"] == model]


def _get(settings: ProfileSettings, place: str) -> Any:
    return get_json(settings.url, place, timeout_s=settings.timeout, api_key=settings.api_key, tls=settings.tls())


async def _measure(
    settings: ProfileSettings, model: str, *, ways: Sequence[str]
) -> tuple[list[PromptTime], list[StepTime]]:
    endpoint = Endpoint(
        url=settings.url,
        model=model,
        is_chat=False,
        api_key=settings.api_key,
        fields={"ignore_eos": True, "temperature": 0},
        timeout_s=settings.timeout,
    )
    async with endpoint.client(settings.tls()) as client:
        measure = _Measure(endpoint, client, tokens_per_word=await measured_words(endpoint, client))
        prompts = []
        for way in ways:
            # A decode worker's prompts share its steps with its answers, which the law adds up; at a prefill worker
            # nothing shares a step with them, but what decodes on the same machine has its part of cores and memory.
            async with measure.running(settings.beside if way == REMOTE else 0, min(settings.contexts)):
                await measure.prompt(max(settings.prompts), way=way, repeats=2)  # the first ones are slower
                prompts += [await measure.prompt(one, way=way, repeats=settings.repeats) for one in settings.prompts]
        steps = [
            await measure.step(sequences, tokens, new_tokens=settings.new_tokens, repeats=settings.repeats)
            for sequences in settings.batches
            for tokens in settings.contexts
        ]
    return prompts, steps


class _Measure:
    """Measures by asking. No two prompts are the same, so that no prefix is cached.

    Nor are those of two runs, or of `tandem bench`: the second run would measure what the first one left in caches.
    """

    def __init__(self, endpoint: Endpoint, client: AsyncClient, *, tokens_per_word: float) -> None:
        self._endpoint = endpoint
        self._client = client
        self._tokens_per_word = tokens_per_word
        self._num_asked = secrets.randbits(62)

    @contextlib.asynccontextmanager
    async def running(self, number: int, tokens: int) -> AsyncIterator[None]:
        """Keeps this many answers running meanwhile."""

        async def keep_running() -> None:
            while True:
                await self._ask(1, tokens, new_tokens=NUM_BESIDE)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_running()) for _ in range(number)]
            yield
            for task in tasks:
                task.cancel()

    async def prompt(self, tokens: int, *, way: str, repeats: int) -> PromptTime:
        """Returns the mean time of a prompt of this length that comes alone."""
        replies = []
        for _ in range(repeats):
            await _pause()
            replies += await self._ask(1, tokens, new_tokens=1 + NUM_AFTER_FIRST, way=way)
        return PromptTime(
            replies[0].num_prompt_tokens or tokens,
            statistics.mean(one.ttft_s for one in replies),
            # The first event may hold the second token already.
            statistics.mean((one.gaps_s or [0.0])[0] for one in replies),
            way,
        )

    async def step(self, sequences: int, tokens: int, *, new_tokens: int, repeats: int) -> StepTime:
        """Returns the mean time of a step of this many answers."""
        found, context = [], 0.0
        for _ in range(repeats):
            await _pause()
            replies = await self._ask(sequences, tokens, new_tokens=new_tokens)
            found.append(_step_s(replies))
            context = sum((one.num_prompt_tokens or tokens) + one.num_tokens / 2 for one in replies)
        return StepTime(sequences, context, statistics.mean(found))

    async def _ask(self, number: int, tokens: int, *, new_tokens: int, way: str = "") -> list[Reply]:
        asks = [Ask(0.0, ((self._num_asked + each, tokens),), new_tokens) for each in range(1, number + 1)]
        self._num_asked += number
        endpoint = replace(self._endpoint, headers={PREFILL_HEADER: way} if way else {})
        replies: list[Reply] = []
        await Load(endpoint, self._client, tokens_per_word=self._tokens_per_word).open_loop(asks, replies.append)
        failed = [one.error for one in replies if one.error]
        if failed:
            raise Unusable(f"an answer of {number} failed: {failed[0]}")
        return replies


async def _pause() -> None:
    await asyncio.sleep(random.uniform(0, MAX_PAUSE_S))  # noqa: S311 - no secret


def _step_s(replies: Sequence[Reply]) -> float:
    """Returns the time of a step while all answers run: from when all have begun to when the first one ends.

    Events in that time tell how many tokens each answer got, as all events of an answer are about equally large.
    """
    since_s = max(one.at_s[0] for one in replies)
    until_s = min(one.at_s[-1] for one in replies)
    times = []
    for one in replies:
        within = [at_s for at_s in one.at_s if since_s <= at_s <= until_s]
        if len(within) > 2:
            tokens_per_event = (one.num_tokens - 1) / max(1, len(one.at_s) - 1)
            times.append((within[-1] - within[0]) / ((len(within) - 1) * tokens_per_event))
    if times:
        return statistics.median(times)
    # So short that no time is left in which all of them run: their means.
    means = [one.tpot_s for one in replies if one.tpot_s is not None]
    if not means:
        raise Unusable("answers come in one piece, so that steps cannot be told apart; give more --new-tokens")
    return statistics.median(means)
