"""A rolling update under load, with a process for each pod, as the manifests say: without and with certificates."""

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


@pytest.mark.parametrize("components", [(), ("monitoring", "tls", "tls-certificates")], ids=["plain", "certificates"])
def test_no_stream_fails_while_every_pod_is_replaced(components: tuple[str, ...]) -> None:
    result = run(*components)
    assert result["failures"] == []
    assert result["answers"] > 20
    assert len(result["started_s"]) == 7
    assert len(result["stops"]) == 6
    for name, stop in result["stops"].items():
        assert stop["exit_code"] == 0, name
        # Liveness is asked in vain only while the process ends: never long enough for a restart.
        assert stop["silent_s"] < 5, name
        assert stop["times_ready"] == 0, name
    assert result["redis_away"] == {"all_live": True, "workers_ready": True}
    say = f"{' '.join(components) or 'plain'}: {result['answers']} answers, {len(result['failures'])} failed"
    sys.stderr.write(
        f"\nrollout: {say}; seconds to stop: { {name: stop['s'] for name, stop in result['stops'].items()} }\n"
    )
