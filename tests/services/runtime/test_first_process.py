import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG_LIMIT_S

STARTING = "import services.runtime.first_process, time; print(flush=True); time.sleep(60)"


@pytest.mark.parametrize("program", [STARTING, STARTING.replace("services.runtime.first_process", "os")])
def test_the_first_process_of_a_container_ends_while_it_starts(program: str) -> None:
    """And without the module it does not, which is what it is for."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            pytest.skip(f"no process-id namespace can be made: {process.stderr.read().decode()}")
        first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        handle = os.pidfd_open(first)
        try:
            os.kill(first, signal.SIGTERM)
            has_ended = bool(select.select([handle], [], [], 10.0 if program == STARTING else 0.3)[0])
        finally:
            os.close(handle)
            process.kill()
    assert has_ended == (program == STARTING)


def test_elsewhere_sigterm_stays_as_it_was() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTING], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(timeout=HANG_LIMIT_S) == -signal.SIGTERM
