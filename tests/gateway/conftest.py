"""A model folder, a real Redis, scripted workers on real sockets, and a gateway in this process."""

import asyncio
import contextlib
import copy
import itertools
import json
import math
import os
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gateway.assembly import Gateway
from gateway.config import GatewayConfig
from protos import cluster_pb2, inference_pb2, worker_pb2, worker_pb2_grpc
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.registry import WorkerLease, WorkerRecord, new_incarnation
from services.runtime import rpc
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.errors import StoreUnavailable, WorkerUnavailable
from services.runtime.model_facts import ModelFacts
from services.scheduling import health
from tests.waiting import HANG_LIMIT_S
from worker.sessions import Reports, Session, SessionServer, StepTokens, failed, refused

STOP = inference_pb2.FINISH_REASON_STOP
LENGTH = inference_pb2.FINISH_REASON_LENGTH

TRAINING_TEXT = [
    "The quick brown fox jumps over the lazy dog. hello world, hello there! def main(): return 1\n",
    "naïve café — 日本語のテキスト 🙂🙃 emoji and ünïcödé; some numbers 0123456789 and <tags>.\n",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'not in this template' %}{{ raise_exception('refused') }}{% endif %}"
    "<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CONTEXT_TOKENS = 512
HUNG_S = HANG_LIMIT_S
"""What takes longer than this never ends, however busy the machine is."""
VECTOR_SIZE = 4


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with special tokens and a chat template; no weights, which a gateway never reads."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    specials = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT * 20, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT_TOKENS,
        "hidden_size": VECTOR_SIZE,
        "eos_token_id": 1,
        "bos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    eos_token = {"__type": "AddedToken", "content": "<|end|>", "special": True}
    tokenizer_config = {"bos_token": "<|bos|>", "eos_token": eos_token, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    """The tokenizers library's own view of the model's tokenizer."""
    return Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def cluster_name() -> str:
    return f"test-{next(_CLUSTERS)}-{os.getpid()}"


_CLUSTERS = itertools.count()


@dataclass
class Attempt:
    """An attempt as a scripted worker sees it."""

    session: Session
    spec: worker_pb2.SequenceSpec
    request: Any
    worker: "ScriptedWorker"
    pause_asked: bool = False
    has_begun: bool = False
    """What the worker answers to a gateway that cancels the attempt and asks whether it began."""
    unpaused: asyncio.Event = field(default_factory=asyncio.Event)
    hand_overs: list[worker_pb2.HandOver] = field(default_factory=list)

    async def between_steps(self, num_tokens: int) -> None:
        """Stops here if the gateway has asked for it."""
        if self.pause_asked:
            self.emit(worker_pb2.Paused(num_tokens=num_tokens))
            await self.unpaused.wait()
            self.unpaused.clear()
            self.pause_asked = False

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.id.request_id, self.spec.id.attempt

    @property
    def handle(self) -> int:
        """The handle under which single tokens are sent; 0: the worker is of a version before handles."""
        return self.request.handle if self.worker.role == "decode" and self.worker.knows_handles else 0

    def emit(self, payload: Any) -> None:
        self.worker.sessions.emit(self.session, *self.key, payload)

    def tokens(self, first_index: int, token_ids: Sequence[int]) -> None:
        logprobs = []
        if self.spec.sampling.HasField("logprobs"):
            top = [inference_pb2.TopLogprob(token_id=7, logprob=-1.5)] * min(1, self.spec.sampling.logprobs)
            logprobs = [inference_pb2.TokenLogprobs(logprob=-0.5, top=top) for _ in token_ids]
        message = worker_pb2.Tokens(first_index=first_index, token_ids=token_ids, logprobs=logprobs)
        if first_index == 0 and self.spec.sampling.HasField("prompt_logprobs"):
            top = [inference_pb2.TopLogprob(token_id=7, logprob=-1.5)] * min(1, self.spec.sampling.prompt_logprobs)
            for position in range(1, len(self.spec.prompt_token_ids)):
                message.prompt_logprobs.logprobs.append(-float(position))
                message.prompt_logprobs.top_token_ids.extend(one.token_id for one in top)
                message.prompt_logprobs.top_logprobs.extend(one.logprob for one in top)
        if self.handle and len(token_ids) == 1 and not message.logprobs and not message.HasField("prompt_logprobs"):
            step = StepTokens([self.handle], [first_index], list(token_ids))
            self.worker.sessions.emit_step(self.session, step)
            return
        self.emit(message)

    def finish(self, reason: Any = LENGTH) -> None:
        self.emit(worker_pb2.Finished(reason=reason))

    def fail(self, error: Exception) -> None:
        self.emit(failed(error))

    def refuse(self, error: Exception) -> None:
        self.emit(refused(error))


Script = Callable[[Attempt], Awaitable[None]]


def vector_of(token_ids: Sequence[int]) -> list[float]:
    """The vector that scripted workers give a text."""
    return [float(sum(token_ids)), float(len(token_ids)), float(token_ids[-1]), 1.0]


async def give_vector(attempt: Attempt) -> None:
    """Computes a text at once, of which one token was cached."""
    attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0, num_cached_tokens=1))
    vector = vector_of(attempt.spec.prompt_token_ids)[: attempt.request.dimensions]
    attempt.emit(worker_pb2.Embedded(vector=struct.pack(f"<{len(vector)}f", *vector)))


async def no_hand_over(attempt: Attempt) -> None:
    """Never answers."""


@dataclass
class ScriptedWorker:
    """A worker that does what its `script` says for each attempt, on a real socket and with a real lease."""

    role: Any
    worker_id: str
    script: Script
    on_hand_over: Script = no_hand_over
    on_embed: Script = give_vector
    gives_word: bool = True
    """Whether it answers what became of an attempt. False: it hangs, is about to die, or is of an older version."""
    word_delay_s: float = 0.0
    incarnation: str = field(default_factory=new_incarnation)
    attempts: list[Attempt] = field(default_factory=list)
    cancelled: list[tuple[str, int]] = field(default_factory=list)
    load: worker_pb2.WorkerLoad = field(
        default_factory=lambda: worker_pb2.WorkerLoad(
            pages=cluster_pb2.PageCounts(total=100, free=100), state=cluster_pb2.WORKER_STATE_READY
        )
    )
    gpu: worker_pb2.GpuFacts | None = None
    counts: worker_pb2.WorkerCounts = field(default_factory=worker_pb2.WorkerCounts)
    knows_handles: bool = True
    sessions: Any = None
    is_drained: bool = False
    max_sequence_tokens: int = CONTEXT_TOKENS
    fingerprint: str = "same"
    model: str = "tiny"
    arithmetic: str = ""
    identity: str | None = None
    """Identity of the worker; None: one that follows from `fingerprint` and `arithmetic`."""
    facts: ModelFacts | None = None
    tenants: tuple[str, ...] = ()
    pool: str = ""
    group: str = ""
    region: str = ""
    pulls: bool = False
    embeds: bool = True
    kv_bytes_per_token: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, redis_url: str, cluster: str) -> None:
        name = "PrefillWorker" if self.role == "prefill" else "DecodeWorker"
        self.sessions = SessionServer(
            incarnation=self.incarnation,
            handlers={
                "admit" if self.role == "decode" else "prefill": self._take,
                "embed": self._embed,
                "cancel": self._cancel,
                "drain": self._drain,
                "pause": self._pause,
                "unpause": self._unpause,
                "hand_over": self._hand_over,
            },
            reports=Reports(load=lambda: self.load, gpu=lambda: self.gpu, counts=lambda: copy.deepcopy(self.counts)),
            on_session_closed=lambda session: None,
        )
        self.server = rpc.make_server((f"tandem.v1.{name}",))
        add = getattr(worker_pb2_grpc, f"add_{name}Servicer_to_server")
        add(self, self.server.server)
        port = await self.server.start("127.0.0.1", 0)
        record = WorkerRecord(
            id=self.worker_id,
            role=self.role,
            pid=os.getpid(),
            host="localhost",
            address=f"127.0.0.1:{port}",
            incarnation=self.incarnation,
            started_unix_ns=SYSTEM_CLOCK.unix_ns(),
            state="ready",
            model=self.model,
            exact=True,
            page_size=16,
            arithmetic=self.arithmetic,
            identity=f"weights={self.fingerprint} arithmetic={self.arithmetic}"
            if self.identity is None
            else self.identity,
            facts=self.facts,
            tenants=self.tenants,
            pool=self.pool,
            group=self.group,
            region=self.region,
            pulls=self.pulls,
            embeds=self.embeds and self.role == "prefill",
            kv_bytes_per_token=self.kv_bytes_per_token,
            layout_fingerprint=self.fingerprint,
            max_sequence_tokens=self.max_sequence_tokens,
            pages_total=100,
            pages_free=100,
        )
        self.lease = WorkerLease(redis_url, cluster=cluster, record=record)
        self.lease.start()

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepEvents]:
        async for events in self.sessions.serve(request_iterator):
            yield events

    async def die(self) -> None:
        """Breaks every stream at once; the registry still lists the worker."""
        await self.server.stop(0)

    async def stop(self) -> None:
        self.sessions.close()
        await self.server.stop(0)
        await asyncio.to_thread(self.lease.release)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, session: Session, request: Any) -> None:
        self._begin(session, request, self.script)

    async def _embed(self, session: Session, request: Any) -> None:
        self._begin(session, request, self.on_embed)

    def _begin(self, session: Session, request: Any, script: Script) -> None:
        attempt = Attempt(session, request.sequence, request, self)
        self.attempts.append(attempt)
        self._tasks.add(asyncio.ensure_future(script(attempt)))

    async def _cancel(self, session: Session, cancel: worker_pb2.Cancel) -> None:
        key = (cancel.id.request_id, cancel.id.attempt)
        self.cancelled.append(key)
        if cancel.wants_word and self.gives_word:
            await asyncio.sleep(self.word_delay_s)
            has_begun = any(attempt.has_begun for attempt in self.attempts if attempt.key == key)
            self.sessions.emit(session, *key, worker_pb2.Cancelled(has_begun=has_begun))

    def attempt(self, message: Any) -> Attempt:
        """The attempt that a command names."""
        key = (message.id.request_id, message.id.attempt)
        return next(attempt for attempt in self.attempts if attempt.key == key)

    def drain(self) -> None:
        """Begins to leave, as after SIGTERM."""
        self.load.state = cluster_pb2.WORKER_STATE_DRAINING
        self.sessions.load_changed()

    async def _pause(self, session: Session, pause: worker_pb2.Pause) -> None:
        self.attempt(pause).pause_asked = True

    async def _unpause(self, session: Session, unpause: worker_pb2.Unpause) -> None:
        self.attempt(unpause).unpaused.set()

    async def _hand_over(self, session: Session, hand_over: worker_pb2.HandOver) -> None:
        attempt = self.attempt(hand_over)
        attempt.hand_overs.append(hand_over)
        self._tasks.add(asyncio.ensure_future(self.on_hand_over(attempt)))

    async def _drain(self, session: Session, drain: worker_pb2.DrainWorker) -> None:
        self.is_drained = True
        self.drain()


class Pair:
    """What a prefill and a decode script share: the answer, and the moment of the handoff."""

    def __init__(self, answer: Sequence[int], *, reason: Any = STOP, group: int = 1, step_s: float = 0.001) -> None:
        self.answer = list(answer)
        self.reason = reason
        self.group = group
        self.step_s = step_s
        self.handed_off: dict[tuple[str, int], asyncio.Event] = {}

    def step_s_of(self, attempt: Attempt) -> float:
        """Seconds that the worker takes for a step."""
        return self.step_s

    def event(self, attempt: Attempt) -> asyncio.Event:
        return self.handed_off.setdefault(attempt.key, asyncio.Event())

    def num_answer(self, attempt: Attempt) -> int:
        return min(len(self.answer), attempt.spec.sampling.max_tokens)

    def last_reason(self, attempt: Attempt) -> Any:
        return self.reason if self.num_answer(attempt) == len(self.answer) else LENGTH

    async def prefill(self, attempt: Attempt) -> None:
        attempt.emit(worker_pb2.PrefillStarted(queue_s=0.0))
        if not attempt.spec.emitted_token_ids:
            attempt.tokens(0, self.answer[:1])
            if self.num_answer(attempt) == 1:
                attempt.finish(self.last_reason(attempt))
                return
        attempt.emit(worker_pb2.HandedOff(num_pages=1, num_bytes=64, exposed_s=0.001, transport="none"))
        self.event(attempt).set()

    async def hand_over(self, attempt: Attempt) -> None:
        attempt.emit(worker_pb2.HandedOff(num_pages=1, num_bytes=64, exposed_s=0.001, transport="none"))
        key = (attempt.key[0], attempt.hand_overs[-1].next_attempt)
        self.handed_off.setdefault(key, asyncio.Event()).set()

    async def decode(self, attempt: Attempt) -> None:
        attempt.emit(worker_pb2.Admitted())
        first = len(attempt.spec.emitted_token_ids)
        if not attempt.request.local_prefill:
            await self.event(attempt).wait()
            first = max(first, 1)
        attempt.emit(worker_pb2.DecodeStarted())
        await self.generate(attempt, first)

    async def generate(self, attempt: Attempt, first: int, last: int | None = None) -> None:
        last = self.num_answer(attempt) if last is None else last
        for index in range(first, last, self.group):
            await attempt.between_steps(index)
            attempt.tokens(index, self.answer[index : min(index + self.group, last)])
            await asyncio.sleep(self.step_s_of(attempt))
        if last == self.num_answer(attempt):
            attempt.finish(self.last_reason(attempt))


@dataclass
class System:
    """A gateway with its workers."""

    gateway: Gateway
    http: httpx.AsyncClient
    redis_url: str
    cluster: str
    workers: dict[str, ScriptedWorker] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http_port}"

    async def add(self, worker: ScriptedWorker) -> ScriptedWorker:
        await worker.start(self.redis_url, self.cluster)
        self.workers[worker.worker_id] = worker
        await self.until(
            lambda: any(
                m.session.peer.incarnation == worker.incarnation and m.session.is_up
                for m in self.gateway.topology.members()
            )
        )
        return worker

    async def add_pair(self, pair: Pair, *, prefill: int = 1, decode: int = 1) -> None:
        for number in range(prefill):
            await self.add(ScriptedWorker("prefill", f"prefill-{number}", pair.prefill))
        for number in range(decode):
            await self.add(ScriptedWorker("decode", f"decode-{number}", pair.decode, on_hand_over=pair.hand_over))

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": [5, 6, 7], **body})

    async def chat(self, content: Any = "hello", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return await self.http.post("/v1/chat/completions", json={"messages": messages, **body})

    async def flush_journals(self) -> None:
        """Waits until Redis, which may be too busy at first, has all that another gateway needs."""
        async with asyncio.timeout(HUNG_S):
            while True:
                try:
                    return await self.gateway._journals._writer.flush()
                except StoreUnavailable:
                    await asyncio.sleep(0.05)

    def total(self, name: str) -> float:
        """Returns the sum of the metrics whose name and labels begin with `name`."""
        lines = self.gateway.metrics.render([]).decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def until(self, holds: Callable[[], bool], timeout_s: float = HUNG_S) -> None:
        """Waits for a condition that other tasks bring about."""
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - the condition is other tasks' state
                await asyncio.sleep(0.005)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker is kept from work for being silent or slow: scripted ones are, and on a busy machine others too.

    Tests of that judgement have a fixture of this name that does nothing.
    """
    monkeypatch.setattr(health, "MIN_SILENCE_S", HUNG_S)
    monkeypatch.setattr(health, "SLOW_RATIO", math.inf)


@pytest.fixture
async def make_system(
    model_folder: Path, redis_url: str, cluster_name: str, patience: None
) -> AsyncIterator[Callable[..., Awaitable[System]]]:
    """Makes a running gateway; keyword arguments are settings."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings: Any) -> System:
            defaults = {"http_port": 0, "grpc_port": 0, "drain_s": 0.2, "seed": 1, "failover_wait_s": HANG_LIMIT_S}
            defaults["linger_s"] = 0.0  # nobody asks whether it is ready
            defaults["local_prefill_tokens"] = 0  # scripted workers have their parts
            # On a busy machine, streams would have comments, and statuses that errors do not change.
            defaults |= {"stream_head_s": HUNG_S, "stream_comment_s": HUNG_S}
            defaults["redis"] = redis_url
            if "models" not in settings:
                defaults["model"] = model_folder
            config = GatewayConfig(cluster=cluster_name, **{**defaults, **settings})
            gateway = Gateway(config)
            await gateway.start()
            gateway.topology.settled_at_s = -math.inf  # tests of the first seconds set it themselves
            stack.push_async_callback(gateway.stop)
            http = await stack.enter_async_context(
                # Certificates, which nobody shows here, take longer to load than the gateway to start.
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}", timeout=HUNG_S, verify=False)
            )
            system = System(gateway, http, config.redis, cluster_name)

            async def stop_workers() -> None:
                await asyncio.gather(*(worker.stop() for worker in system.workers.values()))

            stack.push_async_callback(stop_workers)
            return system

        yield make


@pytest.fixture
def pair_type() -> type[Pair]:
    return Pair


@pytest.fixture
def embeds() -> Any:
    """What a scripted worker gives for a text (`vector_of`), and the script that does (`give_vector`)."""
    return SimpleNamespace(vector_of=vector_of, give_vector=give_vector)


@pytest.fixture
def worker_type() -> type[ScriptedWorker]:
    return ScriptedWorker


@pytest.fixture
def worker_gone() -> WorkerUnavailable:
    return WorkerUnavailable("gone")


def sse(text: str) -> list[Any]:
    """The data of each event; [DONE] as a text."""
    lines = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def read_sse() -> Callable[[str], list[Any]]:
    return sse
