"""A rolling update under load, with a process for each pod, as the manifests say; and a cluster with certificates."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.deploy.manifests import ROOT

TIMEOUT_S = 400

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 30)]


def run(*components: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.deploy.as_rendered", *components]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.stdout.startswith("skipped:"):
        pytest.skip(done.stdout.removeprefix("skipped:").strip())
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_no_stream_fails_while_every_pod_is_replaced() -> None:
    result = run()
    assert result["failures"] == []
    assert result["answers"] > 20
    assert len(result["stops"]) == 6
    for name, stop in result["stops"].items():
        assert stop["exit_code"] == 0, name
        # Liveness is asked in vain only while the process ends: never long enough for a restart.
        assert stop["silent_s"] < 5, name
        assert stop["times_ready"] == 0, name
    assert result["redis_away"] == {"all_live": True, "workers_ready": True}


def test_a_cluster_with_certificates_starts_and_answers() -> None:
    result = run("monitoring", "tls", "tls-certificates")
    assert result["failures"] == []
    assert len(result["started_s"]) == 7
    assert result["redis_away"] == {"all_live": True, "workers_ready": True}
