"""The thread that posts the chunks of one Link on its channel. It hashes, gathers, and posts them frame by frame.

The digest is computed over the pages themselves, not over a copy, so that it reveals an error in any later step. Does
not depend on the protocol's state. Each submitted chunk gets exactly one result: posted, skipped, or stale.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
import xxhash

from kv_transfer.device_pages import DevicePages
from kv_transfer.link_end import LinkSetup
from kv_transfer.page_bytes import PageReader
from kv_transfer.protocol.actions import PostChunk
from kv_transfer.protocol.messages import DIGEST_BYTES, TransferId, chain_digest
from kv_transfer.transports.base import ChannelBroken, DeviceSendChannel, SendChannel
from services.runtime.errors import InvariantViolated, TandemError

_Generations: TypeAlias = tuple[int, ...]
Answer: TypeAlias = bytes | Literal["skipped", "stale"]
"""Result of a chunk.

The digest of its pages if it was posted, "skipped", or "stale" if its pages were reused before they were read.
"""
logger = logging.getLogger(__name__)


class ChunkPoster:
    """Owns the sending channel. The callbacks run on its thread.

    `on_answer` reports the result of a chunk. `on_broken` runs before the results that the failure causes. `on_ended`
    is the last call, after the channel has closed.
    """

    def __init__(
        self,
        channel: SendChannel | DeviceSendChannel,
        setup: LinkSetup,
        *,
        frame_pages: int,
        on_answer: Callable[[PostChunk, Answer], None],
        on_broken: Callable[[TandemError], None],
        on_ended: Callable[[], None],
    ) -> None:
        self._channel = channel
        self._device_pages = DevicePages(setup.pool) if isinstance(channel, DeviceSendChannel) else None
        self._reader = PageReader(setup.pool)
        self._generations = setup.generations
        self._frame_pages = frame_pages
        self._stall_s = setup.timeouts.stall_s
        self._on_answer = on_answer
        self._on_broken = on_broken
        self._on_ended = on_ended
        self._queue: queue.SimpleQueue[tuple[PostChunk, _Generations] | None] = queue.SimpleQueue()
        # The event loop writes this set and the thread reads it. Set membership is atomic under the interpreter's lock.
        self._skipped: set[TransferId] = set()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="tandem-post", daemon=True)
        self._thread.start()

    def submit(self, chunk: PostChunk, generations: _Generations) -> None:
        """Queues a chunk. `generations` are the expected generations of its pages."""
        self._queue.put((chunk, generations))

    def skip(self, transfer_id: TransferId) -> None:
        """Skips all chunks of this transfer that are not posted."""
        self._skipped.add(transfer_id)

    def forget(self, transfer_id: TransferId) -> None:
        """Forgets a transfer that submits no more chunks."""
        self._skipped.discard(transfer_id)

    def stop(self) -> None:
        """Breaks the channel off. Queued chunks complete as skipped. Idempotent, does not block."""
        self._is_broken = True
        self._channel.shutdown()
        self._queue.put(None)

    def _run(self) -> None:
        try:
            while (queued := self._queue.get()) is not None:
                self._answer_for(*queued)
        finally:
            self._channel.shutdown()
            self._channel.close()
            self._on_ended()

    def _answer_for(self, chunk: PostChunk, generations: _Generations) -> None:
        answer: Answer = "skipped"
        try:
            answer = self._post(chunk, generations)
        except ChannelBroken as error:
            self._break(error)
        except Exception:
            logger.exception("posting a chunk failed")
            self._break(ChannelBroken("posting a chunk failed"))
        self._on_answer(chunk, answer)

    def _leave_out(self, chunk: PostChunk) -> None:
        """Posts an empty frame with the chunk's last number. It ends the receiver's wait for the rest of the chunk."""
        last_seq = chunk.first_seq + (len(chunk.page_ids) - 1) // self._frame_pages
        if isinstance(self._channel, DeviceSendChannel):
            self._channel.post(last_seq, 0, lambda _: bytes(DIGEST_BYTES), timeout_s=self._stall_s)
        else:
            self._channel.post(last_seq, bytes(DIGEST_BYTES), [], timeout_s=self._stall_s)

    def _break(self, error: ChannelBroken) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)

    def _post(self, chunk: PostChunk, generations: _Generations) -> Answer:
        """Posts a chunk frame by frame, until its end or until it is skipped or stale. Returns the chunk's result."""
        digests = []
        for offset in range(0, len(chunk.page_ids), self._frame_pages):
            if self._is_broken:
                return "skipped"
            if chunk.id in self._skipped:
                self._leave_out(chunk)
                return "skipped"
            end = offset + self._frame_pages
            page_ids = chunk.page_ids[offset:end]
            digest = self._post_frame(chunk.first_seq + offset // self._frame_pages, page_ids)
            # Check only now, because the pages must not have been reused before their last byte was read.
            if self._generations.generations(page_ids) != generations[offset:end]:
                if end < len(chunk.page_ids):
                    self._leave_out(chunk)
                return "stale"
            digests.append(digest)
        return chain_digest(digests)

    def _post_frame(self, seq: int, page_ids: Sequence[int]) -> bytes:
        """Posts pages as one frame. Returns the digest of the data that was read."""
        if isinstance(self._channel, DeviceSendChannel):
            return self._post_device_frame(self._channel, seq, page_ids)
        pieces = self._reader.pieces(page_ids)
        state = xxhash.xxh3_128()
        for piece in pieces:
            state.update(piece.data)
        digest = state.digest()
        self._channel.post(seq, digest, pieces, timeout_s=self._stall_s)
        return digest

    def _post_device_frame(self, channel: DeviceSendChannel, seq: int, page_ids: Sequence[int]) -> bytes:
        pages, digest = self._device_pages, b""
        if pages is None:
            raise InvariantViolated("a device channel needs device pages")

        def fill(target: torch.Tensor) -> bytes:
            nonlocal digest
            digest = pages.gather(page_ids, target)
            return digest

        channel.post(seq, len(page_ids) * pages.page_bytes, fill, timeout_s=self._stall_s)
        return digest
