"""Attacks on what runs around the requests: what is installed, readers of logs, a neighbour that takes all cores."""

from __future__ import annotations

import os
import random
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.cluster import running_cluster
from tests.attack.base import REPOSITORY, Row, Target, attack, cluster
from tests.faults.neighbour import FAIR_FACTOR, beside_busy_program

BUSY_S = 15.0
"""`make test-faults ARGS=busy_neighbour` takes ten minutes."""
MOST_PACKAGES = 60
FOR_DEVELOPMENT = {"pytest", "playwright", "schemathesis", "transformers", "openai", "ruff", "mypy", "hypothesis"}


@attack(22, alone=True)
async def installed_packages(target: Target) -> Sequence[Row]:
    """What `make run` installs, as its lock file says."""
    lock = REPOSITORY / "requirements" / "serve.lock"
    text = lock.read_text() if lock.is_file() else ""
    pinned = re.findall(r"^([a-z0-9._-]+)==\S+.*\\\n\s+--hash=sha256:", text, re.MULTILINE)
    unpinned = [name for name in re.findall(r"^([a-z0-9._-]+)", text, re.MULTILINE) if name not in pinned]
    strangers = sorted(FOR_DEVELOPMENT & set(pinned))
    return [
        Row(
            "packages that serving installs",
            f"pinned with hashes, at most {MOST_PACKAGES}, none for development",
            f"{len(pinned)} with hashes, {len(unpinned)} without, for development: {', '.join(strangers) or 'none'}",
            0 < len(pinned) <= MOST_PACKAGES and not unpinned and not strangers,
        )
    ]


@attack(23, alone=True)
async def log_files(target: Target) -> Sequence[Row]:
    """Reads logs as another user of the machine; puts a link where a log is written."""
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="tandem-attack-logs-"))
    before = os.umask(0o022)
    try:
        async with cluster(f"--log-dir={folder / 'new'}", has_keys=False):
            modes = {path.name: path.stat().st_mode & 0o777 for path in (folder / "new", *(folder / "new").iterdir())}
        readable = sorted(f"{name} {mode:o}" for name, mode in modes.items() if mode & 0o077)
        happened = f"readable: {', '.join(readable)}" if readable else f"{len(modes)} of them closed to others"
        rows.append(Row("another user reads logs", "files 0600, folder 0700", happened, not readable))
        rows.append(await _through_a_link(folder))
    finally:
        os.umask(before)
        shutil.rmtree(folder)
    return rows


async def _through_a_link(folder: Path) -> Row:
    """A folder into which everybody may write, with a link to a file of the victim's."""
    precious, shared = folder / "precious", folder / "shared"
    precious.write_text("precious")
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "gateway.log").symlink_to(precious)
    what = "a link in the place of a log in a folder that others may write to"
    try:
        async with cluster(f"--log-dir={shared}", has_keys=False):
            pass
    except RuntimeError as error:
        said = "can be written to by others" in str(error)
        return Row(what, "refused with a sentence", "refused" if said else str(error)[-80:], said)
    changed = precious.read_text() != "precious"
    return Row(what, "refused with a sentence", "written through" if changed else "started", held=False)


@attack(26, alone=True)
async def busy_neighbour(target: Target) -> Sequence[Row]:
    """A program that computes on every core, beside a cluster at its defaults."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-attack-logs-"))
    try:
        with running_cluster(f"--log-dir={folder / 'logs'}") as up:
            found = await beside_busy_program(
                up, folder / "logs" / "gateway.log", seconds=BUSY_S, chance=random.Random(26)
            )
    finally:
        shutil.rmtree(folder)
    lost = sorted(set(found.lost_workers))
    return [
        Row("requests beside a busy program", "0 failed", f"{found.failures.total()} of {found.num_answers} failed "
            f"{dict(found.failures) or ''}", not found.failures),
        Row("seeded answers that are not their repeat", "0", f"{len(found.different)} {found.different[:2] or ''}",
            not found.different),
        Row("workers lost", "0", f"{len(lost)} {lost[:2] or ''}", not lost),
        Row("time per token beside it over alone", f"at most {2 * FAIR_FACTOR:g}, a fair share is {FAIR_FACTOR:g}",
            f"{found.factor:.1f} ({found.alone_s * 1e3:.2f} -> {found.beside_s * 1e3:.2f} ms)",
            found.factor <= 2 * FAIR_FACTOR),
    ]  # fmt: skip
