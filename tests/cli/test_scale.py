"""Orders to a running `tandem up`: scale, drain, logs, with stand-ins for the services."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.drain import DrainSettings
from cli.logs import LogsSettings
from cli.scale import ScaleSettings
from services.runtime.errors import ConfigError
from tests.cli.test_up import ROOT, Cluster, wait_until
from tests.waiting import HANG_LIMIT_S


def test_a_number_must_be_given() -> None:
    with pytest.raises(ConfigError, match="neither --prefill nor --decode"):
        ScaleSettings()
    assert DrainSettings(worker="decode-0").timeout == 600.0
    assert LogsSettings().lines == 100


def test_a_running_cluster_takes_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cluster = Cluster(tmp_path)
    try:
        url = cluster.ready_line().partition("http=")[2].split()[0]

        def tandem(*words: str) -> tuple[int, str, str]:
            command = [sys.executable, "-m", "cli.main", *words, "--url", url]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False)
            return done.returncode, done.stdout, done.stderr

        assert tandem("scale", "--decode", "2") == (0, "started: decode-1\ndrained: none\n", "")
        wait_until((tmp_path / "decode-1.pid").exists)
        pid = cluster.pid_of("decode-0")
        code, _, stderr = tandem("role", "decode-7", "prefill")
        assert (code, stderr) == (
            1,
            "error: no worker 'decode-7' runs here; those are decode-0, decode-1, prefill-0\n",
        )
        code, _, stderr = tandem("role", "prefill-0", "decode")
        assert (code, stderr.partition(":")[0], "--force" in stderr) == (1, "error", True)
        code, _, stderr = tandem("role", "decode-1", "prefill", "--timeout", "0.5")
        assert (code, "keeps its role" in stderr) == (1, True), "a stand-in has one role"
        assert tandem("drain", "decode-0") == (0, "decode-0 has ended\n", "")
        assert not Path(f"/proc/{pid}").exists()
        code, _, stderr = tandem("drain", "decode-0")
        assert (code, stderr) == (1, "error: no worker 'decode-0' runs here; those are decode-1, prefill-0\n")
        assert tandem("logs", "--of", "decode-1") == (0, "loaded\n", "")
        code, _, stderr = tandem("logs", "--of", "decode-7")
        assert (code, stderr) == (2, "error: --of is 'decode-7' but must name one of gateway, prefill-0, decode-1\n")
    finally:
        cluster.process.terminate()
        assert cluster.end() == 0
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()
    code, _, stderr = tandem("scale", "--decode", "1")
    assert code == 1
    assert "no `tandem up` of this user with HTTP port" in stderr


def test_logs_follow_in_the_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    from cli import logs

    entries = [
        json.dumps({"time": f"2026-01-01T00:00:0{second}.000+00:00", "message": str(second)}) for second in range(6)
    ]
    files = {"a": tmp_path / "a.log", "b": tmp_path / "b.log"}
    files["a"].write_text("".join(f"{entries[number]}\n" for number in (0, 2)) + "half a li")
    files["b"].write_text("".join(f"{entries[number]}\n" for number in (1, 3)))
    children = [{"name": name, "log": str(path)} for name, path in files.items()]
    monkeypatch.setattr(logs, "order", lambda *_, **__: children)
    rounds = []

    def wait(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 1:
            with files["a"].open("a") as file:
                file.write(f"ne\n{entries[5]}\n")
            with files["b"].open("a") as file:
                file.write(f"{entries[4]}\n")
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(logs.time, "sleep", wait)
    with pytest.raises(KeyboardInterrupt):
        logs.run(LogsSettings(follow=True), sys.stdout)
    assert capsys.readouterr().out.splitlines() == [*entries[:4], "half a line", entries[4], entries[5]]
