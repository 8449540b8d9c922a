"""Messages between rank 0 and the other ranks: JSON objects at startup, then plain arrays for each step.

A rank acknowledges each step with one byte. Each child inherits its end of these sockets from its parent, so no other
process can write to them. Messages are not pickled.
"""

import json
import socket
import struct
from typing import Any

import numpy as np
import torch

from services.engine.reference.attention import AttentionBatch
from services.runtime.descriptors import receive_fds
from services.runtime.errors import WorkerLost

_LENGTH = struct.Struct("<Q")
_STEP = struct.Struct("<5Q")  # tokens, sequences, pages per table, logits and states to return, states
_DONE = b"\x01"
MAX_OBJECT_BYTES = 64 << 20


class StepMessage:
    """The inputs of `Model.forward`, except the pool and the rotary table, which each rank already has."""

    __slots__ = ("batch", "logits_indices", "num_states", "positions", "token_ids")

    def __init__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        logits_indices: torch.Tensor,
        num_states: int = 0,
    ) -> None:
        self.token_ids = token_ids
        self.positions = positions
        self.batch = batch
        self.logits_indices = logits_indices
        self.num_states = num_states

    def encode(self) -> bytes:
        """Returns the encoded message. The 8-byte numbers precede the 4-byte numbers, so all arrays arrive aligned."""
        batch = self.batch
        tables = batch.page_tables
        num_wanted = self.logits_indices.shape[0]
        head = _STEP.pack(self.token_ids.shape[0], *tables.shape, num_wanted, self.num_states)
        wide = (self.token_ids, self.positions, batch.slot_mapping, self.logits_indices)
        narrow = (batch.query_start, batch.context_lens, tables)
        return b"".join([head, *(tensor.cpu().numpy().tobytes() for tensor in (*wide, *narrow))])


def send_step(peer: socket.socket, encoded: bytes) -> None:
    """Sends an encoded step. Raises OSError if the peer has ended."""
    peer.sendall(encoded)


def receive_step(peer: socket.socket) -> StepMessage | None:
    """Waits for the next step. Returns None if rank 0 has closed the connection."""
    head = _receive(peer, _STEP.size)
    if head is None:
        return None
    num_tokens, num_sequences, max_pages, num_wanted, num_states = _STEP.unpack(head)
    num_wide = 3 * num_tokens + num_wanted
    num_narrow = 2 * num_sequences + 1 + num_sequences * max_pages
    content = _receive(peer, 8 * num_wide + 4 * num_narrow)
    if content is None:
        return None
    wide = torch.from_numpy(np.frombuffer(content, np.int64, num_wide))
    narrow = torch.from_numpy(np.frombuffer(content, np.int32, num_narrow, 8 * num_wide))
    batch = AttentionBatch(
        query_start=narrow[: num_sequences + 1],
        context_lens=narrow[num_sequences + 1 : 2 * num_sequences + 1],
        page_tables=narrow[2 * num_sequences + 1 :].view(num_sequences, max_pages),
        slot_mapping=wide[2 * num_tokens : 3 * num_tokens],
    )
    positions, wanted = wide[num_tokens : 2 * num_tokens], wide[3 * num_tokens :]
    return StepMessage(wide[:num_tokens], positions, batch, wanted, num_states)


def acknowledge_step(peer: socket.socket) -> None:
    """Reports that this rank has finished its last write of the step. Raises OSError if rank 0 has ended."""
    peer.sendall(_DONE)


def await_acknowledgement(peer: socket.socket) -> None:
    """Waits until a rank has finished its last write of the oldest unacknowledged step.

    Raises WorkerLost if the rank has ended.
    """
    if _receive(peer, len(_DONE)) is None:
        raise WorkerLost("a rank of the worker has ended")


def send_object(peer: socket.socket, value: Any, *, fds: tuple[int, ...] = ()) -> None:
    """Sends a JSON value, optionally with file descriptors. Raises OSError if the peer has ended."""
    text = json.dumps(value).encode()
    if fds:
        socket.send_fds(peer, [_LENGTH.pack(len(text))], fds)
    else:
        peer.sendall(_LENGTH.pack(len(text)))
    peer.sendall(text)


def receive_object(peer: socket.socket, *, max_fds: int = 0) -> tuple[Any, list[int]]:
    """Waits for a JSON value and up to `max_fds` file descriptors. Raises WorkerLost if the peer has ended."""
    head, fds = receive_fds(peer, _LENGTH.size, max_fds)
    rest = _receive(peer, _LENGTH.size - len(head)) if head else None
    if rest is None:
        raise WorkerLost("a rank of the worker has ended")
    (length,) = _LENGTH.unpack(bytes(head) + bytes(rest))
    text = _receive(peer, length) if length <= MAX_OBJECT_BYTES else None
    if text is None:
        raise WorkerLost("a rank of the worker has ended")
    return json.loads(bytes(text)), fds


def _receive(peer: socket.socket, num_bytes: int) -> bytearray | None:
    """Receives exactly `num_bytes` bytes. Returns None if the peer has ended."""
    content = bytearray(num_bytes)
    view = memoryview(content)
    while view:
        try:
            count = peer.recv_into(view)
        except ConnectionResetError:
            return None
        if not count:
            return None
        view = view[count:]
    return content
