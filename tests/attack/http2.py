"""A bare HTTP/2 client for attacks and tests: frames as they are written, windows honoured. Knows no gRPC library."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import Self

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_BYTES = 65_535
_INITIAL_WINDOW_SETTING = 4


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


def literal(name: str, value: str | bytes) -> bytes:
    """A header field that goes into no table (RFC 7541, 6.2.2)."""
    data = value.encode() if isinstance(value, str) else value
    return b"\0" + _length(len(name)) + name.encode() + _length(len(data)) + data


def grpc_headers(method: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """The header block of a call of `method`, such as /tandem.v1.Inference/Tokenize."""
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", method),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *metadata,
    ]
    return b"".join(literal(*each) for each in fields)


def message_prefix(num_bytes: int) -> bytes:
    """What stands before a gRPC message of this length."""
    return struct.pack(">BI", 0, num_bytes)


class Connection:
    """One connection. `ended`: error codes of streams that the server has reset, or 0 where it has ended them."""

    def __init__(self, address: tuple[str, int], *, timeout_s: float = 5.0) -> None:
        self.socket = socket.create_connection(address, timeout=timeout_s)
        self.num_sent_bytes = 0
        self.ended: dict[int, int] = {}
        self.is_open = True
        self._received = b""
        self._window_bytes = INITIAL_WINDOW_BYTES
        self._initial_window_bytes = INITIAL_WINDOW_BYTES
        self._windows: dict[int, int] = {}
        self._next_id = 1
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self.socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def open(self, header_block: bytes, *, ends_stream: bool = False) -> int:
        """A new stream."""
        stream_id, self._next_id = self._next_id, self._next_id + 2
        self._windows[stream_id] = self._initial_window_bytes
        self.send(frame(HEADERS, END_HEADERS | (END_STREAM if ends_stream else 0), stream_id, header_block))
        return stream_id

    def send_data(self, stream_id: int, data: memoryview, *, ends_stream: bool = False) -> int:
        """Sends as much of it as the windows allow, at most a frame, and says how much."""
        num_bytes = max(0, min(len(data), 16_384, self._window_bytes, self._windows[stream_id]))
        if num_bytes and stream_id not in self.ended:
            self._window_bytes -= num_bytes
            self._windows[stream_id] -= num_bytes
            flags = END_STREAM if ends_stream and num_bytes == len(data) else 0
            self.send(frame(DATA, flags, stream_id, bytes(data[:num_bytes])))
            return num_bytes
        return 0

    def send(self, data: bytes, *, timeout_s: float = 5.0) -> None:
        """Sends bytes as they are, and reads meanwhile. `is_open` is false where the server has closed."""
        left = memoryview(data)
        deadline_s = time.monotonic() + timeout_s
        while left and self.is_open and time.monotonic() < deadline_s:
            try:
                num_bytes = self.socket.send(left)
            except BlockingIOError:
                self.read()
                time.sleep(0.0005)
                continue
            except OSError:
                self.is_open = False
                return
            self.num_sent_bytes += num_bytes
            left = left[num_bytes:]

    def read(self) -> None:
        """Takes what the server has sent, and answers its settings and pings."""
        while self.is_open:
            try:
                data = self.socket.recv(1 << 20)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_open = False
            self._received += data
        self._take_frames()

    def wait_until_closed(self, *, timeout_s: float) -> bool:
        """Whether the server closes the connection within that time."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_open and time.monotonic() < deadline_s:
            self.read()
            time.sleep(0.01)
        return not self.is_open

    def wait_until_ended(self, stream_id: int, *, timeout_s: float) -> bool:
        """Whether the server ends a stream, or all of them, within that time."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_open and stream_id not in self.ended and time.monotonic() < deadline_s:
            self.read()
            time.sleep(0.005)
        return not self.is_open or stream_id in self.ended

    def _take_frames(self) -> None:
        answers = b""
        while len(self._received) >= 9:
            num_bytes = int.from_bytes(self._received[:3], "big")
            if len(self._received) < 9 + num_bytes:
                break
            kind, flags = self._received[3], self._received[4]
            stream_id = int.from_bytes(self._received[5:9], "big")
            payload = self._received[9 : 9 + num_bytes]
            self._received = self._received[9 + num_bytes :]
            answers += self._take(kind, flags, stream_id, payload)
        if answers:
            self.send(answers)

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                setting, value = struct.unpack_from(">HI", payload, at)
                if setting == _INITIAL_WINDOW_SETTING:
                    self._windows = {
                        each: window + value - self._initial_window_bytes for each, window in self._windows.items()
                    }
                    self._initial_window_bytes = value
            return frame(SETTINGS, ACK, 0)
        if kind == PING and not flags & ACK:
            return frame(PING, ACK, 0, payload)
        if kind == WINDOW_UPDATE:
            more = int.from_bytes(payload, "big")
            if stream_id:
                self._windows[stream_id] = self._windows.get(stream_id, 0) + more
            else:
                self._window_bytes += more
        elif kind == RST_STREAM:
            self.ended.setdefault(stream_id, int.from_bytes(payload, "big"))
        elif kind in (HEADERS, DATA) and flags & END_STREAM:
            self.ended.setdefault(stream_id, 0)
        return b""


def _length(value: int) -> bytes:
    """A length with a prefix of 7 bits (RFC 7541, 5.1), without Huffman coding."""
    if value < 127:
        return bytes((value,))
    rest, parts = value - 127, [127]
    while rest >= 128:
        parts.append(rest % 128 + 128)
        rest //= 128
    return bytes((*parts, rest))
