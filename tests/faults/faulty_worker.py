"""Faults from within a real program: what a bad network card, a bug or a poisoned prompt would do.

`observe` adds nothing but a way to count asyncio tasks. `install` takes a plan:

`{"corrupt": [kinds], "probability": p, "seed": n}` makes the sending side of a handoff lie between two SIGUSR2, at
most once per transfer and only in first attempts; `{"hello": kind}` does so in the first hello to each peer;
`{"poison": token id}` ends the process by SIGSEGV when it is given a prompt that begins with that token;
`{"slow_step_s": seconds}` makes each step between two SIGUSR2 last that much longer;
`{"watch": true}` tells what was counted and committed. What happens is told in lines of the log that
begin with "faults: ".
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import signal
import threading
import time
from typing import Any

from kv_transfer import link_dialling, prefixes, receiving
from kv_transfer import send_thread as posting
from kv_transfer import wire as link
from kv_transfer.link_end import LinkSetup
from kv_transfer.protocol.actions import PostChunk
from kv_transfer.protocol.counters import Counters, Reason
from kv_transfer.protocol.messages import ChunkHeader, Hello, Message, Seal, TransferId
from prefill_worker.pulls import Pulls
from services.engine import runner
from services.engine.cache import pages
from services.engine.steps.step import StepPlan
from worker.vllm import blocks, loading

FRAME_KINDS = ("payload_bit", "digest_bit", "short_frame", "long_frame", "skipped_seq", "replayed_frame", "lost_frame")
MESSAGE_KINDS = ("outside_reservation", "wrong_bytes", "seal_digest", "seal_counts")
TRANSFER_KINDS = (*FRAME_KINDS, *MESSAGE_KINDS, "stale_generation")
HELLO_KINDS = ("fingerprint", "stale_peer")

DETECTED_AS: dict[str, frozenset[str]] = {
    "payload_bit": frozenset({Reason.CHECKSUM_MISMATCH}),
    "digest_bit": frozenset({Reason.CHECKSUM_MISMATCH}),
    "short_frame": frozenset({Reason.WRONG_SIZE}),
    "long_frame": frozenset({Reason.WRONG_SIZE}),
    "skipped_seq": frozenset({Reason.LOST_FRAME, Reason.CHANNEL_BROKEN}),
    "replayed_frame": frozenset({Reason.REPLAYED_FRAME}),
    "lost_frame": frozenset({Reason.LOST_FRAME, Reason.CHANNEL_BROKEN}),
    "outside_reservation": frozenset({Reason.OUTSIDE_RESERVATION}),
    "wrong_bytes": frozenset({Reason.WRONG_SIZE}),
    "seal_digest": frozenset({Reason.SEAL_MISMATCH}),
    "seal_counts": frozenset({Reason.SEAL_MISMATCH}),
    "fingerprint": frozenset({Reason.LAYOUT_MISMATCH}),
    "stale_peer": frozenset({Reason.STALE_INCARNATION}),
    "stale_generation": frozenset({"stale_generation"}),
}
HAS_GENERATIONS = hasattr(pages.PageAllocator, "generation")
HARMLESS = frozenset({"replayed_frame"})
"""Kinds after which the transfer may still commit: the frame is dropped and nothing else is lost."""

LINK_ENDS = frozenset({str(Reason.LINK_LOST), str(Reason.CHANNEL_BROKEN), str(Reason.LATE_FRAME)})
"""The Link was given up for another injection before this one was looked at."""


PULL, HANDOFF = "pull", "handoff"
"""What a transfer is: both have the attempt's id, and where a pull failed the handoff that follows may commit."""

_allocators: list[pages.PageAllocator | blocks.BlockGenerations] = []


def observe() -> None:
    """Answers SIGUSR1 with the number of asyncio tasks."""

    def tell(number: int, frame: Any) -> None:
        tasks = asyncio.all_tasks()
        say("tasks", len(tasks), ",".join(sorted(_name_of(task) for task in tasks)))

    signal.signal(signal.SIGUSR1, tell)


def install(plan: dict[str, Any]) -> None:
    """Puts the plan's faults into this process."""
    if plan.get("watch") or plan.get("corrupt"):
        _watch()
    if plan.get("corrupt"):
        Corruption(plan["corrupt"], plan.get("probability", 1.0), plan.get("seed", 0)).install()
    if "hello" in plan:
        _wrap_hello(plan["hello"])
    if "poison" in plan:
        _install_poison(int(plan["poison"]))
    if "slow_step_s" in plan:
        _slow_down(float(plan["slow_step_s"]))


def say(*words: object) -> None:
    """One line of the log, whole even between threads."""
    os.write(2, (" ".join(("faults:", *map(str, words))) + "\n").encode())


class Corruption:
    """Decides which transfer is hurt and how, and hurts it."""

    def __init__(self, kinds: list[str], probability: float, seed: int) -> None:
        self._kinds = list(kinds)
        self._probability = probability
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._chosen: dict[TransferId, str] = {}
        self._given: set[TransferId] = set()
        self._is_armed = False

    def install(self) -> None:
        """Wraps the seams: the frames of ChunkPoster, the messages of a Link, and the prefixes that are given."""
        signal.signal(signal.SIGUSR2, self._arm)
        self._wrap_giver()
        self._wrap_poster()
        self._wrap_messages()
        _remember_allocators()

    def _arm(self, number: int, frame: Any) -> None:
        self._is_armed = not self._is_armed

    def _choose(self, transfer_id: TransferId) -> str:
        """The kind of fault that is planned for a transfer; empty: none, or it was done."""
        with self._lock:
            if transfer_id not in self._chosen:
                is_wanted = self._is_armed and transfer_id.attempt == 1 and self._chance.random() < self._probability
                self._chosen[transfer_id] = self._chance.choice(self._kinds) if is_wanted else ""
            return self._chosen[transfer_id]

    def _done(self, transfer_id: TransferId, kind: str) -> None:
        with self._lock:
            self._chosen[transfer_id] = ""
        say("injected", kind, transfer_id, PULL if transfer_id in self._given else HANDOFF)

    def _wrap_giver(self) -> None:
        give = prefixes.PrefixGiver._give
        given = self._given

        async def give_noted(self: prefixes.PrefixGiver, asked: Any) -> Any:
            given.add(TransferId(asked.id.request_id, asked.id.attempt))
            return await give(self, asked)

        prefixes.PrefixGiver._give = give_noted  # type: ignore[method-assign]

    def _wrap_poster(self) -> None:
        post_chunk = posting.ChunkPoster._post
        corruption = self

        def _post(self: posting.ChunkPoster, chunk: PostChunk, *more: Any) -> Any:
            kind = corruption._choose(chunk.id)
            if kind == "stale_generation":
                corruption._done(chunk.id, kind)
                _bump_generation(chunk)
            if kind not in FRAME_KINDS:
                return post_chunk(self, chunk, *more)
            channel = self._channel
            self._channel = _HurtfulChannel(channel, corruption, chunk.id, kind)  # type: ignore[assignment]
            try:
                return post_chunk(self, chunk, *more)
            finally:
                self._channel = channel

        posting.ChunkPoster._post = _post  # type: ignore[method-assign]

    def _wrap_messages(self) -> None:
        put = link.Outbox.put
        corruption = self

        def put_hurt(self: link.Outbox, message: Message) -> None:
            put(self, corruption._hurt(message))

        link.Outbox.put = put_hurt  # type: ignore[method-assign]

    def _hurt(self, message: Message) -> Message:
        if not isinstance(message, ChunkHeader | Seal):
            return message
        kind = self._choose(message.id)
        hurt: Message | None = None
        match message, kind:
            case ChunkHeader(), "outside_reservation":
                hurt = dataclasses.replace(message, first_page=message.first_page + 100_000)
            case ChunkHeader(), "wrong_bytes":
                hurt = dataclasses.replace(message, num_bytes=message.num_bytes - 1)
            case Seal(), "seal_digest":
                hurt = dataclasses.replace(message, digest=_flipped(message.digest, self._chance))
            case Seal(), "seal_counts":
                hurt = dataclasses.replace(message, num_pages=message.num_pages + 1)
        if hurt is None:
            return message
        self._done(message.id, kind)
        return hurt


def _wrap_hello(kind: str) -> None:
    greet = link_dialling._greet
    hurt_peers: set[str] = set()

    async def greet_hurt(call: Any, hello: Hello) -> Any:
        if hello.peer_incarnation not in hurt_peers:
            hurt_peers.add(hello.peer_incarnation)
            say("injected", kind, hello.peer_incarnation, "hello")
            if kind == "fingerprint":
                layout = dataclasses.replace(hello.layout, fingerprint=hello.layout.fingerprint[::-1] + "x")
                hello = dataclasses.replace(hello, layout=layout)
            else:
                hello = dataclasses.replace(hello, peer_incarnation="0" * 32)
        return await greet(call, hello)

    link_dialling._greet = greet_hurt


class _HurtfulChannel:
    """A sending channel that hurts one frame of a chunk and passes on all others."""

    def __init__(self, channel: Any, corruption: Corruption, transfer_id: TransferId, kind: str) -> None:
        self._channel = channel
        self._corruption = corruption
        self._id = transfer_id
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def post(self, seq: int, digest: bytes, buffers: Any, *, timeout_s: float) -> None:
        kind, self._kind = self._kind, ""
        chance = self._corruption._chance

        def send(seq: int = seq, digest: bytes = digest, buffers: Any = buffers) -> None:
            self._channel.post(seq, digest, buffers, timeout_s=timeout_s)

        if kind:
            self._corruption._done(self._id, kind)
        match kind:
            case "payload_bit":
                send(buffers=_with_a_flipped_bit(buffers, chance))
            case "digest_bit":
                send(digest=_flipped(digest, chance))
            case "short_frame":
                whole = _joined(buffers)
                send(buffers=[whole[: -chance.randrange(1, whole.size)]])
            case "long_frame":
                whole = _joined(buffers)
                send(buffers=[_joined([whole, whole[:1]])])
            case "skipped_seq":
                # Far enough to hit no other chunk's claim: with the same prompt it would bring the same pages, and one
                # of that chunk's frames, hurt or not, would be dropped as a repetition, rightly and without a trace.
                send(seq=seq + chance.randrange(1000, 2000))
            case "replayed_frame":
                send()
                send()
            case "lost_frame":
                pass
            case _:
                send()


def _joined(buffers: Any) -> Any:
    import numpy as np

    return np.concatenate([np.asarray(buffer).reshape(-1) for buffer in buffers])


def _with_a_flipped_bit(buffers: Any, chance: random.Random) -> Any:
    whole = _joined(buffers)
    whole[chance.randrange(whole.size)] ^= 1 << chance.randrange(8)
    return [whole]


def _flipped(data: bytes, chance: random.Random) -> bytes:
    hurt = bytearray(data)
    hurt[chance.randrange(len(hurt))] ^= 1 << chance.randrange(8)
    return bytes(hurt)


def _bump_generation(chunk: PostChunk) -> None:
    """As if a page of the chunk had been given to somebody else meanwhile."""
    for allocator in _allocators:
        allocator._generations[chunk.page_ids[0]] += 1


def _remember_allocators() -> None:
    """Notes the allocator of either engine when it is made."""
    _remember_instances(pages.PageAllocator)
    _remember_instances(blocks.BlockGenerations)


def _remember_instances(allocator: type[pages.PageAllocator] | type[blocks.BlockGenerations]) -> None:
    begin = allocator.__init__

    def init(self: Any, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        _allocators.append(self)

    allocator.__init__ = init  # type: ignore[assignment, method-assign]


def _watch() -> None:
    count = Counters.count

    def count_and_tell(self: Counters, reason: Reason) -> None:
        count(self, reason)
        say("counted", reason)

    Counters.count = count_and_tell  # type: ignore[method-assign]
    begin = receiving.LinkReceiver.__init__

    def init(self: receiving.LinkReceiver, setup: LinkSetup, target: Any, **more: Any) -> None:
        begin(self, setup, _ToldTarget(target), **more)

    receiving.LinkReceiver.__init__ = init  # type: ignore[method-assign]


class _ToldTarget:
    """A receiving worker whose commits are told."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    async def commit(self, transfer_id: TransferId, **arguments: Any) -> None:
        await self._target.commit(transfer_id, **arguments)
        say("committed", transfer_id, PULL if isinstance(self._target, Pulls) else HANDOFF)


def _install_poison(token_id: int) -> None:
    """Dies as a kernel with a bug would, when a prompt that begins with this token is computed, by either engine."""
    prepare = runner.ModelRunner.prepare
    begin = loading.VllmModel.__init__

    def prepare_or_die(self: runner.ModelRunner, plan: StepPlan) -> runner.PreparedStep:
        if any(item.sequence.token_ids[0] == token_id for item in plan.items):
            _die_poisoned()
        return prepare(self, plan)

    def init(self: loading.VllmModel, settings: loading.VllmSettings, core: Any) -> None:
        begin(self, settings, core)
        execute = core.model_executor.execute_model

        def execute_or_die(scheduled: Any, **more: Any) -> Any:
            if any(request.prompt_token_ids[0] == token_id for request in scheduled.scheduled_new_reqs):
                _die_poisoned()
            return execute(scheduled, **more)

        core.model_executor.execute_model = execute_or_die

    runner.ModelRunner.prepare = prepare_or_die  # type: ignore[method-assign]
    loading.VllmModel.__init__ = init  # type: ignore[method-assign]


def _die_poisoned() -> None:
    say("poisoned")
    os.kill(os.getpid(), signal.SIGSEGV)


def _slow_down(step_s: float) -> None:
    """Delays each step by `step_s` after an odd number of SIGUSR2."""
    prepare = runner.ModelRunner.prepare
    is_slow = False

    def toggle(number: int, frame: Any) -> None:
        nonlocal is_slow
        is_slow = not is_slow
        say("slow" if is_slow else "fast")

    def prepare_late(self: runner.ModelRunner, plan: StepPlan) -> runner.PreparedStep:
        if is_slow:
            time.sleep(step_s)
        return prepare(self, plan)

    signal.signal(signal.SIGUSR2, toggle)
    runner.ModelRunner.prepare = prepare_late  # type: ignore[method-assign]


def _name_of(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "?")
