import io
from pathlib import Path

from services.hub.fetching import RemoteFile
from services.hub.progress import Meter

FILE = RemoteFile("model.safetensors", 100_000_000, Path("x"), "http://x")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bytes_speed_and_seconds_left_now_and_then() -> None:
    stream, now_s = io.StringIO(), [0.0]
    meter = Meter(stream, clock=lambda: now_s[0])
    for second in range(11):
        now_s[0] = float(second)
        meter(FILE, second * 10_000_000)
    assert stream.getvalue().splitlines() == [
        "model.safetensors: 0.0 of 100.0 MB",
        "model.safetensors: 50.0 of 100.0 MB, 10.0 MB/s, 5 s left",
        "model.safetensors: 100.0 of 100.0 MB",
    ]


def test_a_small_file_has_one_line() -> None:
    stream = io.StringIO()
    meter = Meter(stream, clock=lambda: 0.0)
    small = RemoteFile("config.json", 627, Path("x"), "http://x")
    for num_bytes in (0, 300, 627):
        meter(small, num_bytes)
    assert stream.getvalue() == "config.json: 0.6 of 0.6 kB\n"


def test_a_terminal_has_one_line_that_changes() -> None:
    stream, now_s = Terminal(), [0.0]
    meter = Meter(stream, clock=lambda: now_s[0])
    meter(FILE, 0)
    now_s[0] = 0.1
    meter(FILE, 1)
    now_s[0] = 1.0
    meter(FILE, FILE.size_bytes)
    said = stream.getvalue()
    assert said.count("\n") == 1
    assert said.endswith("\r\x1b[Kmodel.safetensors: 100.0 of 100.0 MB\n")
    assert said.count("\r") == 2
