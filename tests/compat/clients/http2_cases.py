"""What RFC 9113 asks of a server, by its sections, against gRPC's port; and curl and h2load where they are installed.

h2spec is in no package that can be installed here; these are the cases of its kind. Each sends frames and then a PING:
either the server ends the stream or the connection, as the section asks, or the PING is answered.
"""

import importlib.metadata
import shutil
import socket
import struct
import subprocess

import hpack
from checks import GRPC, KEY, URL, check, finish

WAIT_S, QUIET_S = 5.0, 1.5
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PROBE = b"\0probe\0\0"
PATH = "/tandem.v1.Inference/ListModels"
PSEUDO = [(":method", "POST"), (":scheme", "http"), (":path", PATH), (":authority", "localhost")]
FIELDS = [("te", "trailers"), ("content-type", "application/grpc"), ("authorization", f"Bearer {KEY}")]
MESSAGE = struct.pack(">BI", 0, 0)
CONNECTION, STREAM, NOTHING = "ends the connection", "ends the stream", "continues"
ANSWERS, REFUSES = "answers", "answers with an error"
ENOUGH = {STREAM: (STREAM, CONNECTION, REFUSES)}
"""What is as good as what a section asks."""


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def block(fields=None):
    return hpack.Encoder().encode(PSEUDO + FIELDS if fields is None else fields, huffman=False)


def headers(stream=1, flags=END_HEADERS, fields=None):
    return frame(HEADERS, flags, stream, block(fields))


def request(stream=1, fields=None):
    return headers(stream, END_HEADERS, fields) + frame(DATA, END_STREAM, stream, MESSAGE)


def setting(number, value):
    return frame(SETTINGS, 0, 0, struct.pack(">HI", number, value))


def window(stream, more):
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def frames(stream):
    """Yields (kind, flags, payload) until the server closes."""
    received = b""
    while True:
        while len(received) >= 9 + int.from_bytes(received[:3], "big"):
            end = 9 + int.from_bytes(received[:3], "big")
            yield received[3], received[4], received[9:end]
            received = received[end:]
        try:
            data = stream.recv(65536)
        except ConnectionError:
            return
        if not data:
            return
        received += data


def outcome(sent, preface=PREFACE):
    """What the server does: to the connection, else to the stream, else as an answer."""
    host, _, port = GRPC.rpartition(":")
    found, told, decoder = "does nothing, not even answer a PING", {}, hpack.Decoder()
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as server:
        try:
            server.sendall(preface + frame(SETTINGS, 0, 0) + sent + frame(PING, 0, 0, PROBE))
            for kind, flags, payload in frames(server):
                if kind == GOAWAY and int.from_bytes(payload[4:8], "big"):
                    return CONNECTION
                if kind == SETTINGS and not flags & ACK:
                    server.sendall(frame(SETTINGS, ACK, 0))
                if kind == HEADERS:
                    told.update(decoder.decode(payload))
                if kind == RST_STREAM and int.from_bytes(payload, "big"):
                    found = STREAM
                elif found != STREAM and kind in (DATA, HEADERS) and flags & END_STREAM:
                    is_good = told.get(":status") == "200" and told.get("grpc-status", "0") == "0"
                    found = ANSWERS if is_good else REFUSES
                elif kind == PING and flags & ACK and payload == PROBE:
                    found = NOTHING if found not in (STREAM, ANSWERS, REFUSES) else found
                    server.settimeout(QUIET_S)
        except ConnectionError:
            return CONNECTION
        except TimeoutError:
            return found
    return CONNECTION


RAW = b"\x82\x86\x84"
CASES = [
    ("3.4 an invalid preface", CONNECTION, b"", b"INVALID * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    ("4.1 an unknown frame type is ignored", NOTHING, frame(22, 255, 0, b"12345678")),
    ("4.1 reserved flags are ignored", NOTHING, frame(PING, 0x16, 0, b"87654321")),
    ("4.2 DATA beyond the frame size", STREAM, headers() + frame(DATA, 0, 1, b"\0" * 16385)),
    ("4.2 HEADERS beyond the frame size", CONNECTION, frame(HEADERS, 5, 1, b"\0" * 16385)),
    (
        "4.3 a block that cannot be decoded",
        CONNECTION,
        frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\xff\xff\xff"),
    ),
    ("5.1 DATA on an idle stream", CONNECTION, frame(DATA, END_STREAM, 1, b"a")),
    ("5.1 RST_STREAM on an idle stream", CONNECTION, frame(RST_STREAM, 0, 1, b"\0\0\0\x08")),
    ("5.1 WINDOW_UPDATE on an idle stream", CONNECTION, window(1, 100)),
    ("5.1 CONTINUATION without HEADERS", CONNECTION, frame(CONTINUATION, END_HEADERS, 1, RAW)),
    ("5.1 DATA after the end of the stream", STREAM, request() + frame(DATA, END_STREAM, 1, b"a")),
    ("5.1 HEADERS after the end of the stream", STREAM, request() + headers(1, 5)),
    ("5.1.1 a stream with an even number", CONNECTION, headers(2, 5)),
    ("5.1.1 a stream with a lower number", CONNECTION, headers(5) + headers(3)),
    ("5.5 an unknown frame in a block", CONNECTION, headers(1, 0) + frame(22, 0, 1, b"a")),
    ("6.1 DATA on stream 0", CONNECTION, frame(DATA, END_STREAM, 0, b"a")),
    ("6.1 DATA with too long a padding", CONNECTION, headers() + frame(DATA, PADDED | 1, 1, b"\x09a")),
    ("6.2 HEADERS on stream 0", CONNECTION, frame(HEADERS, 5, 0, block())),
    ("6.2 HEADERS with too long a padding", CONNECTION, frame(HEADERS, PADDED | 5, 1, b"\xff" + block())),
    (
        "6.2 a block that another frame divides",
        CONNECTION,
        headers(1, 0) + frame(PRIORITY, 0, 1, b"\0\0\0\0\x10"),
    ),
    ("6.3 PRIORITY on stream 0", CONNECTION, frame(PRIORITY, 0, 0, b"\0\0\0\0\x10")),
    ("6.3 PRIORITY of 4 bytes", STREAM, headers() + frame(PRIORITY, 0, 1, b"\0\0\0\0")),
    ("6.4 RST_STREAM on stream 0", CONNECTION, frame(RST_STREAM, 0, 0, b"\0\0\0\x08")),
    ("6.4 RST_STREAM of 3 bytes", CONNECTION, headers() + frame(RST_STREAM, 0, 1, b"\0\0\0")),
    ("6.5 an acknowledgement with settings", CONNECTION, frame(SETTINGS, ACK, 0, b"\0" * 6)),
    ("6.5 SETTINGS on a stream", CONNECTION, frame(SETTINGS, 0, 1, b"\0\x03\0\0\0\x64")),
    ("6.5 SETTINGS of 3 bytes", CONNECTION, frame(SETTINGS, 0, 0, b"\0\0\0")),
    ("6.5.2 an ENABLE_PUSH of 2", CONNECTION, setting(2, 2)),
    ("6.5.2 a window beyond 2^31-1", CONNECTION, setting(4, 2**31)),
    ("6.5.2 a frame size below 2^14", CONNECTION, setting(5, 2**14 - 1)),
    ("6.5.2 a frame size beyond 2^24-1", CONNECTION, setting(5, 2**24)),
    ("6.5.2 an unknown setting is ignored", NOTHING, setting(0xFF, 1)),
    ("6.7 PING with ACK", NOTHING, frame(PING, ACK, 0, b"12345678")),
    ("6.7 PING on a stream", CONNECTION, frame(PING, 0, 1, b"12345678")),
    ("6.7 PING of 6 bytes", CONNECTION, frame(PING, 0, 0, b"123456")),
    ("6.8 GOAWAY on a stream", CONNECTION, frame(GOAWAY, 0, 1, b"\0" * 8)),
    ("6.9 a window that grows by 0", CONNECTION, window(0, 0)),
    ("6.9 a stream's window that grows by 0", STREAM, headers() + window(1, 0)),
    ("6.9 WINDOW_UPDATE of 3 bytes", CONNECTION, frame(WINDOW_UPDATE, 0, 0, b"\0\0\x01")),
    ("6.9.1 a window beyond 2^31-1", CONNECTION, window(0, 2**31 - 1) * 2),
    ("6.9.1 a stream's window beyond 2^31-1", STREAM, headers() + window(1, 2**31 - 1) * 2),
    (
        "6.10 CONTINUATION after the end of a block",
        CONNECTION,
        headers() + frame(CONTINUATION, END_HEADERS, 1, RAW),
    ),
    ("6.10 CONTINUATION on stream 0", CONNECTION, headers(1, 0) + frame(CONTINUATION, END_HEADERS, 0, RAW)),
    ("8.1 a second HEADERS that is no end", STREAM, headers() + headers()),
    ("8.1.1 a length that does not fit", STREAM, request(fields=[*PSEUDO, *FIELDS, ("content-length", "1")])),
    ("8.2.1 a name in capitals", STREAM, request(fields=[*PSEUDO, *FIELDS, ("X-Test", "a")])),
    ("8.2.2 a field of connections", STREAM, request(fields=[*PSEUDO, *FIELDS, ("connection", "close")])),
    ("8.2.2 a te that is not trailers", STREAM, request(fields=[*PSEUDO, *FIELDS[1:], ("te", "gzip")])),
    ("8.3 an unknown pseudo-field", STREAM, request(fields=[*PSEUDO, (":test", "a"), *FIELDS])),
    ("8.3 a pseudo-field of answers", STREAM, request(fields=[*PSEUDO, (":status", "200"), *FIELDS])),
    ("8.3 a pseudo-field after the others", STREAM, request(fields=[*PSEUDO[1:], *FIELDS, PSEUDO[0]])),
    ("8.3.1 an empty path", STREAM, request(fields=[*PSEUDO[:2], (":path", ""), PSEUDO[3], *FIELDS])),
    *((f"8.3.1 no {PSEUDO[n][0]}", STREAM, request(fields=[*PSEUDO[:n], *PSEUDO[n + 1 :], *FIELDS])) for n in range(3)),
    ("8.3.1 two methods", STREAM, request(fields=[PSEUDO[0], *PSEUDO, *FIELDS])),
    (
        "8.4 PUSH_PROMISE of a client",
        CONNECTION,
        headers() + frame(5, END_HEADERS, 1, b"\0\0\0\x02" + block()),
    ),
    ("a request is answered", ANSWERS, request()),
]

for name, wanted, *given in CASES:

    @check(name)
    def holds(wanted=wanted, given=given):
        found = outcome(*given)
        assert found in ENOUGH.get(wanted, (wanted,)), f"it {found}"


if shutil.which("h2load"):

    @check("h2load: 200 requests on 4 connections")
    def load():
        with open("message", "wb") as file:
            file.write(MESSAGE)
        fields = [word for name, value in FIELDS for word in ("-H", f"{name}: {value}")]
        words = ["h2load", "-n", "200", "-c", "4", "-m", "20", "-d", "message", *fields, f"http://{GRPC}{PATH}"]
        told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
        assert "200 succeeded, 0 failed" in told, told[-300:]


if shutil.which("curl"):

    def curl(*words):
        """(version of HTTP, status) of the answer of /health."""
        shown = ["-s", "-o", "/dev/null", "-w", "%{http_version} %{http_code}"]
        done = subprocess.run(["curl", *shown, *words, f"{URL}/health"], capture_output=True, text=True, timeout=60)
        return done.stdout

    @check("curl: an upgrade to HTTP/2 is not taken, and the request is answered")
    def upgrade():
        assert curl("--http2") == "1.1 200", curl("--http2")

    @check("curl: HTTP/2 on the port of HTTP/1.1 is refused, and others are served")
    def prior_knowledge():
        told = curl("--http2-prior-knowledge")
        assert not told.endswith("200"), told
        assert curl() == "1.1 200"


finish(importlib.metadata.version("hpack"))
