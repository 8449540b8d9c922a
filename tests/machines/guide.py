"""`python -m tests.machines.guide`: follows docs/several-machines.md on machines of namespaces, and prints the answer.

Every block of commands that names a machine runs there as it stands. What is put in its place: paths that all
namespaces would share (`PATHS`), and the programs that a namespace lacks (`SHIMS`): a service manager, scp, users.
With TANDEM_TEST_REDIS, that server is Redis.
Where namespaces are not permitted it says so and exits with 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.cluster.embedded_redis import _binary
from tests.faults.harness import DEMO_MODEL, REPOSITORY
from tests.limited_redis import OTHER_SERVER
from tests.machines.bed import ENTER, know_names
from tests.machines.network import Network, NotPermitted

GUIDE = REPOSITORY / "docs" / "several-machines.md"
BLOCK_TIMEOUT_S = 150.0
NEEDED = ("ip", "openssl", "curl", "bash", "setsid", "unshare", *ENTER)
INSIDE = "--inside"
# Process 1 is a shell: that a parent is process 1 means elsewhere that the real one has died.
OWN_PROCESSES = ("unshare", "--mount-proc", "--pid", "--fork", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh")
"""Whatever the page starts ends with the program that follows it, also when that is killed."""
PATHS = ("/etc/tandem", "/etc/redis", "/etc/systemd", "/var/lib/redis")
"""Each machine has a folder of its own for these."""

_SCP = """#!/bin/bash
# The last argument is MACHINE:FOLDER.
target="${@: -1}"
exec cp "${@:1:$#-1}" "$MACHINES/${target%%:*}${target#*:}"
"""
_SYSTEMCTL = """#!/bin/bash
# enable --now UNIT, restart UNIT: starts what the unit says, with its environment, from its folder.
set -eu
unit="${@: -1}"
if [ "$unit" = redis-server ]; then
  setsid redis-server "$HERE/etc/redis/redis.conf" > "$HERE/redis.log" 2>&1 &
  exit
fi
file="$unit"
if [[ "$unit" = *@* ]]; then file="${unit%@*}@"; export TANDEM_ID="${unit#*@}"; fi
field() {
  sed -n "s/^$1=//p" "$HERE/etc/systemd/system/$file.service" | grep -v ^- |
    sed "s#/opt/tandem/.venv/bin/python#$PYTHON#; s#/opt/tandem#$REPOSITORY#; s#/etc/tandem#$HERE/etc/tandem#"
}
set -a; . "$(field EnvironmentFile)"; set +a
cd "$(field WorkingDirectory)"
setsid $(field ExecStart) > "$HERE/$unit.log" 2>&1 &
started=$!
if [[ "$unit" = *worker@* || "$unit" = *prefill@* || "$unit" = *decode@* ]]; then
  # A unit of the type notify: systemctl returns when it is ready.
  until grep -q '"message":"ready"' "$HERE/$unit.log"; do kill -0 $started; sleep 0.1; done
fi
"""
SHIMS = {
    "scp": _SCP,
    "systemctl": _SYSTEMCTL,
    "chown": "#!/bin/sh\n",
    "redis-server": '#!/bin/sh\nexec "$SERVER" "$@"\n',
    "tandem": '#!/bin/sh\nexec "$PYTHON" -m cli.main "$@"\n',
}


@dataclass(frozen=True)
class Block:
    """Commands of the page, and the machine on which they are to be run."""

    machine: str
    commands: str


def blocks(page: str) -> list[Block]:
    """The page's commands in order."""
    found = re.findall(r"^```sh ([a-z0-9-]+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [Block(machine, commands) for machine, commands in found]


def machines_of(page: list[Block]) -> list[str]:
    """Every machine once, in the order in which the page comes to it."""
    return list(dict.fromkeys(block.machine for block in page))


def adapted(commands: str, here: Path) -> str:
    """Returns the commands with the paths of one machine."""
    for path in PATHS:
        commands = commands.replace(path, f"{here}{path}")
    commands = commands.replace("/opt/tandem/.venv/bin/tandem", "tandem")
    commands = commands.replace("/opt/tandem", str(REPOSITORY))
    commands = commands.replace("/srv/models/tandem-demo", str(here / "tandem-demo"))
    # scp's target is a path of the other machine.
    return re.sub(rf"(\s\S+:){re.escape(str(here))}/", r"\1/", commands)


def follow(network: Network, folder: Path) -> Iterator[tuple[Block, str]]:
    """Runs the blocks, and gives each with what it printed. Raises RuntimeError."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in SHIMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    for machine in network.names:
        for path in (*PATHS, "/etc/systemd/system"):
            (folder / machine / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        shutil.copytree(DEMO_MODEL, folder / machine / "tandem-demo", copy_function=os.symlink)
    for block in blocks(GUIDE.read_text()):
        here = folder / block.machine
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        environment |= {
            "PATH": f"{programs}:{environment['PATH']}",
            "MACHINES": str(folder),
            "HERE": str(here),
            "PYTHON": sys.executable,
            "REPOSITORY": str(REPOSITORY),
            "SERVER": os.environ.get(OTHER_SERVER) or _binary(),
            "PYTHONPATH": str(REPOSITORY),
        }
        done = subprocess.run(
            ["nsenter", f"--net={network.machines[block.machine].path}", "bash", "-eu", "-o", "pipefail"],
            input=adapted(block.commands, here),
            cwd=here,
            env=environment,
            capture_output=True,
            text=True,
            timeout=BLOCK_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            logs = {log.name: log.read_text()[-1500:] for log in folder.glob("*/*.log")}
            raise RuntimeError(f"on {block.machine}:\n{block.commands}\n{done.stdout}\n{done.stderr[-1500:]}\n{logs}")
        yield block, done.stdout


def main() -> int:
    """The program."""
    missing = [program for program in NEEDED if shutil.which(program) is None]
    page = blocks(GUIDE.read_text())
    try:
        if missing:
            raise NotPermitted(f"{', '.join(missing)} is not installed")
        if INSIDE not in sys.argv:
            tried = subprocess.run([*OWN_PROCESSES, "true"], capture_output=True, text=True, timeout=20, check=False)
            if tried.returncode != 0:
                raise NotPermitted(tried.stderr.strip())
            os.execvp(OWN_PROCESSES[0], [*OWN_PROCESSES, sys.executable, "-m", "tests.machines.guide", INSIDE])
        with Network(machines_of(page)) as network, tempfile.TemporaryDirectory(prefix="tandem-guide-") as folder:
            know_names(network)
            answer = ""
            for block, printed in follow(network, Path(folder)):
                sys.stderr.write(f"{block.machine}: {block.commands.splitlines()[0]}\n")
                answer = printed
            sys.stdout.write(answer)
    except NotPermitted as error:
        sys.stdout.write(f"skipped: machines cannot be made here: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
