"""The blocking client is what its tool makes of the asyncio one."""

import inspect
import subprocess
import sys
from pathlib import Path

from tandem_client import AsyncClient, Client

from tests.waiting import HANG_LIMIT_S

TOOL = Path(__file__).resolve().parents[2] / "tools" / "blocking_client.py"


def test_the_file_is_what_the_tool_writes() -> None:
    done = subprocess.run([sys.executable, str(TOOL), "--check"], check=False, timeout=HANG_LIMIT_S)
    assert done.returncode == 0, "run tools/blocking_client.py"


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    def methods(client: type) -> dict[str, list[str]]:
        found = {name: one for name, one in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
        return {name: [str(each) for each in inspect.signature(one).parameters.values()] for name, one in found.items()}

    assert methods(Client) == methods(AsyncClient)
    assert len(methods(Client)) > 8
