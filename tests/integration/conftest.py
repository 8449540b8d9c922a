"""Workers without a gateway: a tiny model, worker processes, and a scripted gateway that talks to them over gRPC."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import inference_pb2, membership_pb2, membership_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.redis_store import Store
from services.cluster.registry import WorkerRecord, list_workers
from services.runtime.membership import Member, Proof
from services.runtime.rpc import PUBLIC, make_channel
from tests.waiting import HANG_LIMIT_S

SECRET = "0123456789abcdef" * 4
"""The secret of the workers of these tests."""
VOCAB_SIZE = 331
START_TIMEOUT_S = HANG_LIMIT_S
ANSWER_TIMEOUT_S = HANG_LIMIT_S


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers as a checkpoint folder; context length 2048."""
    import torch
    from safetensors.torch import save_file

    hidden, heads, kv_heads, head_dim, inner = 64, 4, 2, 16, 96
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    tensors = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden) * 8, "model.norm.weight": torch.ones(hidden)}
    tensors["lm_head.weight"] = matrix(VOCAB_SIZE, hidden)
    for index in range(2):
        layer = f"model.layers.{index}."
        tensors[layer + "input_layernorm.weight"] = torch.ones(hidden)
        tensors[layer + "post_attention_layernorm.weight"] = torch.ones(hidden)
        tensors[layer + "self_attn.q_proj.weight"] = matrix(heads * head_dim, hidden) * 2
        tensors[layer + "self_attn.k_proj.weight"] = matrix(kv_heads * head_dim, hidden) * 2
        tensors[layer + "self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        tensors[layer + "self_attn.o_proj.weight"] = matrix(hidden, heads * head_dim)
        tensors[layer + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[layer + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[layer + "mlp.down_proj.weight"] = matrix(hidden, inner)
    folder = tmp_path_factory.mktemp("tiny-model")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A real Redis of the test session."""
    with EmbeddedRedis() as server:
        yield server.url


@dataclass
class WorkerProcess:
    """A worker as a process of its own, registered in `cluster`."""

    worker_id: str
    process: subprocess.Popen[bytes]
    log: Path
    store: Callable[[], Store]
    cluster: str
    record: WorkerRecord | None = None

    @property
    def address(self) -> str:
        assert self.record is not None
        return self.record.address

    @property
    def incarnation(self) -> str:
        assert self.record is not None
        return self.record.incarnation

    async def find(self) -> WorkerRecord | None:
        """Its record in Redis as of now."""
        store = self.store()
        try:
            return (await list_workers(store))[1].get(self.worker_id)
        finally:
            await store.close()

    async def until_state(self, state: str | None) -> None:
        """Waits until the record says so; None: until it is gone."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            record = await self.find()
            if (record.state if record else None) == state:
                self.record = record or self.record
                return
            if state is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.worker_id} ended with {self.process.returncode}:\n{self.log.read_text()}")
            assert time.monotonic() < deadline, f"{self.worker_id} is {record}, not {state}"
            await asyncio.sleep(0.05)

    async def until_free(self) -> None:
        """Waits until the record says that every page is free and nothing runs."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            record = await self.find()
            assert record is not None, self.log.read_text()
            held = (record.pages_reserved, record.pages_used, record.running, record.waiting)
            if held == (0, 0, 0, 0) and record.pages_free + record.pages_cached == record.pages_total:
                return
            assert time.monotonic() < deadline, f"{self.worker_id} still holds something: {record}"
            await asyncio.sleep(0.05)

    async def ended(self, *, timeout_s: float = HANG_LIMIT_S) -> int:
        """Its exit code, as soon as it has ended."""
        return await asyncio.to_thread(self.process.wait, timeout_s)


@pytest.fixture(scope="module")
def start_worker(
    tiny_model: Path, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., WorkerProcess]]:
    """`start_worker("decode", worker_id, kv_pages=64, …)` starts a process; flags as in its settings.

    `before` is a piece of Python that the process runs before it begins.
    """
    started: list[WorkerProcess] = []
    # Not that of an earlier call: a killed worker's record stays for as long as its lease, and its address with it.
    cluster = f"workers-{uuid.uuid4().hex}"

    def store() -> Store:
        return Store(redis_url, cluster=cluster, timeout_s=5.0)

    def start(
        role: str, worker_id: str, *, before: str | None = None, stdin: int | None = None, **flags: Any
    ) -> WorkerProcess:
        flags = {"model": tiny_model, "redis": redis_url, "cluster": cluster, "threads": 1, "kv_pages": 256} | flags
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
        log = tmp_path_factory.mktemp(worker_id) / "log"
        environment = dict(os.environ, TANDEM_DIE_WITH_PARENT=str(os.getpid()), TANDEM_CLUSTER_SECRET=SECRET)
        program = ["-m", f"{role}_worker"]
        if before is not None:
            program = ["-c", f"{before}\nfrom {role}_worker.__main__ import main, process\nprocess.run(main)"]
        command = [sys.executable, *program, f"--id={worker_id}", *arguments]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=stdin, stdout=output, stderr=output, env=environment)
        started.append(WorkerProcess(worker_id, process, log, store, cluster))
        return started[-1]

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGKILL)
        worker.process.wait(HANG_LIMIT_S)
        if worker.process.stdin is not None:
            worker.process.stdin.close()


@dataclass
class Answer:
    """What came back for one attempt."""

    request_id: str
    attempt: int
    events: list[str] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, Any] = field(default_factory=dict)
    spec: worker_pb2.SequenceSpec | None = None
    decode: int = 0
    """Which of the gateway's decode workers it was admitted at."""
    started: worker_pb2.PrefillStarted | None = None
    num_cached_tokens: int = 0
    """From its PrefillStarted."""
    num_paused_tokens: int | None = None
    """From its Paused, while it is paused."""
    is_at_prefill: bool = False
    """A prefill worker has its prompt, and may still say something of it."""
    error: worker_pb2.Failed | worker_pb2.Refused | None = None
    """What was said last; by each worker: `errors`, by role."""
    errors: dict[str, worker_pb2.Failed | worker_pb2.Refused] = field(default_factory=dict)
    handed_off: worker_pb2.HandedOff | None = None
    reason: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(min(self.tokens, default=0), max(self.tokens, default=-1) + 1))
        return [self.tokens[index] for index in sorted(self.tokens)]

    async def until(self, *kinds: str) -> None:
        """Waits until an event of one of the kinds has come. Raises TimeoutError.

        The decode worker's "paused" and "finished" count once the prefill worker's part is over: the first token is in
        it, and may come later than the others.
        """

        def is_there() -> bool:
            seen = set(kinds) & set(self.events)
            return bool(seen - {"paused", "finished"}) or (bool(seen) and not self.is_at_prefill)

        await self._until(is_there)

    async def until_error_of(self, role: str) -> None:
        """Waits until that worker has said that the attempt failed. Raises TimeoutError."""
        await self._until(lambda: role in self.errors)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            while not holds():
                self.changed.clear()
                await self.changed.wait()

    def take(self, event: worker_pb2.WorkerEvent, role: str) -> None:
        """Notes an event; a HandedOff of a decode worker is called `moved`."""
        kind = event.WhichOneof("event") or ""
        kind = "moved" if (kind, role) == ("handed_off", "decode") else kind
        self.events.append(kind)
        if role == "prefill" and kind in ("handed_off", "finished", "failed", "refused"):
            self.is_at_prefill = False
        if kind == "tokens":
            assert role == "prefill" or self.num_paused_tokens is None, "a paused attempt has tokens"
            for offset, token_id in enumerate(event.tokens.token_ids):
                index = event.tokens.first_index + offset
                assert index not in self.tokens, f"token {index} came twice"
                self.tokens[index] = token_id
                if event.tokens.logprobs:
                    entry = event.tokens.logprobs[offset]
                    self.logprobs[index] = (entry.logprob, [(top.token_id, top.logprob) for top in entry.top])
        elif kind == "prefill_started":
            self.started = event.prefill_started
            self.num_cached_tokens = event.prefill_started.num_cached_tokens
        elif kind == "paused":
            self.num_paused_tokens = event.paused.num_tokens
        elif kind in ("failed", "refused"):
            self.error = self.errors[role] = getattr(event, kind)
        elif kind == "handed_off":
            self.handed_off = event.handed_off
        elif kind == "finished":
            self.reason = event.finished.reason
        self.changed.set()


class WorkerSession:
    """One open session of the scripted gateway."""

    def __init__(self, gateway: "ScriptedGateway", role: str, channel: grpc.aio.Channel, proof: Proof) -> None:
        self.role = role
        self._gateway = gateway
        self._channel = channel
        stub: Any = getattr(worker_pb2_grpc, f"{role.capitalize()}WorkerStub")(self._channel)
        self._command_class: Any = getattr(worker_pb2, f"{role.capitalize()}Command")
        self._commands_class: Any = getattr(worker_pb2, f"{role.capitalize()}Commands")
        self._call = stub.Session(metadata=proof.metadata)
        self.load: worker_pb2.WorkerLoad | None = None
        self.gpus: list[worker_pb2.GpuFacts] = []
        """What was said of the worker's GPU."""
        self.arrivals_s: list[float] = []
        """When messages came, of the monotonic clock."""
        self.error: grpc.aio.AioRpcError | None = None
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, gateway: "ScriptedGateway", role: str, address: str, incarnation: str) -> "WorkerSession":
        """As a gateway that holds SECRET."""
        # Patient: no test of these is about how soon a gateway gives a silent connection up.
        channel = make_channel(address, profile=PUBLIC)
        reply = await membership_pb2_grpc.MembershipStub(channel).Challenge(membership_pb2.ChallengeRequest())
        member = Member(lambda: (SECRET.encode(),), "gateway")
        proof = member.proof_for(f"/tandem.v1.{role.capitalize()}Worker/Session", incarnation, reply.nonce)
        return cls(gateway, role, channel, proof)

    async def send(self, **command: Any) -> None:
        # gRPC takes one write of a stream at a time.
        async with self._writing:
            await self._call.write(self._commands_class(commands=[self._command_class(**command)]))

    async def _read(self) -> None:
        try:
            async for message in self._call:
                self.arrivals_s.append(time.monotonic())
                self.load = message.load
                self.gpus += [message.gpu] if message.HasField("gpu") else []
                for event in message.events:
                    self._gateway.take(event, self.role)
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        if self.role == "prefill":
            self._gateway.prefill_is_gone()

    async def drop(self) -> None:
        """Breaks the stream as a gateway that dies does. Raises what reading it found wrong."""
        self._call.cancel()
        await self._reader
        await self._channel.close()


class ScriptedGateway:
    """Sends commands to one prefill and one decode worker, as a test says, and keeps the answers."""

    def __init__(self) -> None:
        self.incarnation = os.urandom(16).hex()
        self.answers: dict[tuple[str, int], Answer] = {}
        self.prefill: WorkerSession | None = None
        self.decode: WorkerSession | None = None
        self.decodes: list[WorkerSession] = []
        """All sessions with decode workers; the first is `decode`."""
        self._decode_peers: list[tuple[str, str]] = []
        self._prefill_address = ""

    async def connect(self, *, prefill: tuple[str, str] | None = None, decode: tuple[str, str] | None = None) -> None:
        """Opens sessions; each peer is (address, incarnation). More decode workers come with more calls."""
        for role, peer in (("prefill", prefill), ("decode", decode)):
            if peer is not None:
                session = await WorkerSession.open(self, role, *peer)
                hello = worker_pb2.SessionHello(gateway_incarnation=self.incarnation, worker_incarnation=peer[1])
                await session.send(hello=hello)
                if role == "prefill":
                    self.prefill, self._prefill_address = session, peer[0]
                if role == "decode":
                    self.decodes.append(session)
                    self._decode_peers.append(peer)
                    self.decode = self.decodes[0]

    async def connected_to(self, prefill: Any, *decodes: Any) -> "ScriptedGateway":
        """This gateway, with a session to each of these workers, which are ready then."""
        for worker in (prefill, *decodes):
            await worker.until_state("ready")
        await self.connect(prefill=(prefill.address, prefill.incarnation))
        for worker in decodes:
            await self.connect(decode=(worker.address, worker.incarnation))
        return self

    def take(self, event: worker_pb2.WorkerEvent, role: str) -> None:
        answer = self.answers.get((event.id.request_id, event.id.attempt))
        if answer is not None:
            answer.take(event, role)

    def prefill_is_gone(self) -> None:
        for answer in self.answers.values():
            answer.is_at_prefill = False
            answer.changed.set()

    async def begin(
        self,
        request_id: str,
        prompt: list[int],
        *,
        local: bool = False,
        decode: int = 0,
        from_decode: bool = False,
        attempt: int = 1,
        emitted: list[int] | None = None,
        deadline_ms: int = 60_000,
        eos: list[int] | None = None,
        traceparent: str = "",
        cache_salt: str = "",
        service_class: int | None = None,
        pull: tuple[WorkerProcess, int] | None = None,
        limit_ms: int = 20_000,
        **sampling: Any,
    ) -> Answer:
        """Admits a request and, once admitted, has it prefilled, unless it comes from a decode worker.

        Returns before it has ended. `pull`: the holder of its beginning, and how many tokens that has.
        """
        answer = self.answers[request_id, attempt] = Answer(request_id, attempt)
        given = {"max_tokens": 16, "temperature": 0.0, "seed": 1} | sampling
        spec = worker_pb2.SequenceSpec(
            id=worker_pb2.AttemptId(request_id=request_id, attempt=attempt),
            prompt_token_ids=prompt,
            emitted_token_ids=emitted or [],
            sampling=inference_pb2.SamplingParams(**given),
            eos_token_ids=eos or [],
            cache_salt=cache_salt,
            service_class=service_class,
            deadline_ms=deadline_ms,
            traceparent=traceparent,
        )
        answer.spec, answer.decode = spec, decode
        admit = worker_pb2.Admit(sequence=spec, local_prefill=local, from_decode=from_decode)
        await self.decodes[decode].send(admit=admit)
        await answer.until("admitted", "refused")
        if answer.error is None and not local and not from_decode:
            assert self.prefill is not None
            address, incarnation = self._decode_peers[decode]
            answer.is_at_prefill = True
            message = worker_pb2.Prefill(sequence=spec, decode_address=address, decode_incarnation=incarnation)
            if pull is not None:
                message.pull.address, message.pull.incarnation = pull[0].address, pull[0].incarnation
                message.pull.own_address, message.pull.num_tokens = self._prefill_address, pull[1]
                message.pull.limit_ms = limit_ms
            await self.prefill.send(prefill=message)
        return answer

    async def generate(self, request_id: str, prompt: list[int], **fields: Any) -> list[int]:
        """A whole answer's token ids. A failure fails the test."""
        answer = await self.begin(request_id, prompt, **fields)
        await answer.until("finished", "failed", "refused")
        assert answer.error is None, answer.error
        return answer.token_ids

    async def pause(self, answer: Answer) -> None:
        """Has the attempt paused; returns when it is, or has ended."""
        attempt_id = worker_pb2.AttemptId(request_id=answer.request_id, attempt=answer.attempt)
        await self.decodes[answer.decode].send(pause=worker_pb2.Pause(id=attempt_id))
        await answer.until("paused", "finished", "failed")

    async def unpause(self, answer: Answer) -> None:
        """Resumes a paused attempt."""
        answer.num_paused_tokens = None
        attempt_id = worker_pb2.AttemptId(request_id=answer.request_id, attempt=answer.attempt)
        await self.decodes[answer.decode].send(unpause=worker_pb2.Unpause(id=attempt_id))

    async def admit_from_decode(self, answer: Answer, emitted: list[int], *, decode: int) -> Answer:
        """Has another decode worker admit a paused answer as the next attempt."""
        moved = self.answers[answer.request_id, answer.attempt + 1] = Answer(answer.request_id, answer.attempt + 1)
        spec = worker_pb2.SequenceSpec()
        assert answer.spec is not None
        spec.CopyFrom(answer.spec)
        spec.id.attempt = moved.attempt
        spec.emitted_token_ids[:] = emitted
        moved.spec, moved.decode = spec, decode
        await self.decodes[decode].send(admit=worker_pb2.Admit(sequence=spec, from_decode=True))
        await moved.until("admitted", "refused")
        return moved

    async def hand_over(self, answer: Answer, moved: Answer) -> None:
        """Tells the first worker to send the pages to the second. Returns at once."""
        address, incarnation = self._decode_peers[moved.decode]
        message = worker_pb2.HandOver(
            id=worker_pb2.AttemptId(request_id=answer.request_id, attempt=answer.attempt),
            next_attempt=moved.attempt,
            decode_address=address,
            decode_incarnation=incarnation,
        )
        await self.decodes[answer.decode].send(hand_over=message)

    async def cancel(self, answer: Answer) -> None:
        """Cancels an attempt at all workers."""
        cancel = worker_pb2.Cancel(id=worker_pb2.AttemptId(request_id=answer.request_id, attempt=answer.attempt))
        for session in (self.prefill, *self.decodes):
            if session is not None:
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await session.send(cancel=cancel)

    async def drop(self) -> None:
        """Breaks all sessions."""
        for session in (self.prefill, *self.decodes):
            if session is not None:
                await session.drop()


@pytest.fixture
async def make_gateway() -> AsyncIterator[Callable[[], ScriptedGateway]]:
    """`make_gateway()` is a gateway without sessions; all are dropped at the end."""
    gateways: list[ScriptedGateway] = []

    def make() -> ScriptedGateway:
        gateways.append(ScriptedGateway())
        return gateways[-1]

    yield make
    for gateway in gateways:
        await gateway.drop()
