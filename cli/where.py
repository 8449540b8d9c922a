"""`tandem where`: the workers that have a request, from GET /cluster/requests/ID of any gateway."""

import json
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO
from urllib.parse import quote

from cli.commands import CommandParser
from services.runtime.api_client import GatewaySettings, get_json
from services.runtime.config import option
from services.runtime.kinds import argument, flag, number, text

ROLES = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class WhereSettings(GatewaySettings):
    """Shows where a request is, whichever gateway takes care of it. Exit code 1 if it is not known."""

    request: str = option(argument(text()), help="Its id, as answers and logs have it.")
    json: bool = option(flag(), default=False, help="Prints the answer as it is.")
    timeout: float = option(number(0.1, 600), default=5.0, help="Seconds to wait for the answer.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(WhereSettings, lambda settings: run(settings, sys.stdout))


def run(settings: WhereSettings, stdout: TextIO) -> int:
    """Asks and prints; returns the exit code. Raises ApiUnreachable or ApiRefused."""
    place = f"/cluster/requests/{quote(settings.request, safe='')}"
    found = get_json(settings.url, place, timeout_s=settings.timeout, api_key=settings.api_key, tls=settings.tls())
    if settings.json:
        print(json.dumps(found, indent=2), file=stdout)
        return 0
    began = datetime.fromtimestamp(found["began_unix_s"], UTC).isoformat(timespec="milliseconds")
    regions = {role: f" in {region}" for role, region in found.get("regions", {}).items() if region}
    workers = [f"{role}: {found[f'{role}_worker'] or 'none'}{regions.get(role, '')}" for role in ROLES]
    attempt = "" if found["attempt"] == 1 else f", attempt {found['attempt']}"
    state = found["state"]
    if state == "interrupted":
        state = f"interrupted: its gateway {found['gateway']} died while it was {found['last_state']}"
    print(f"{found['id']}: {state}{attempt}; {', '.join(workers)}; began {began}", file=stdout)
    return 0
