"""Every fault can be installed: a plan that names a function which no longer exists would end its worker."""

import json
import subprocess
import sys

import pytest

PLANS = [
    {"corrupt": ["payload_bit"]},
    {"watch": True},
    {"hello": "fingerprint"},
    {"hello": "stale_peer"},
    {"poison": 7},
    {"slow_step_s": 0.1},
]


@pytest.mark.parametrize("plan", PLANS, ids=json.dumps)
def test_a_plan_can_be_installed(plan: dict[str, object]) -> None:
    code = f"from tests.faults import faulty_worker; faulty_worker.install({plan!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
