"""A Redis whose user has only the rights that the guide gives it; what was refused to it is known at the end.

With TANDEM_TEST_REDIS, tests run another server than the embedded one, for example the oldest that the guide allows.
"""

import os
import re
import shutil
from pathlib import Path

import redis

from services.cluster.embedded_redis import EmbeddedRedis

OTHER_SERVER = "TANDEM_TEST_REDIS"
"""Variable: path of a redis-server or valkey-server."""
GUIDE = Path(__file__).parents[1] / "docs" / "several-machines.md"
USER, PASSWORD = "tandem", "sesame"


def other_server() -> str | None:
    """Returns the redis-server that TANDEM_TEST_REDIS names or that is installed. None without one."""
    return os.environ.get(OTHER_SERVER) or shutil.which("redis-server")


def documented_rules() -> list[str]:
    """The rules of the guide's user, without its password."""
    found = re.findall(rf"^user {USER} on >\S+ (.+)$", GUIDE.read_text(), re.MULTILINE)
    assert len(found) == 1, "the guide has one line of a user"
    return str(found[0]).split()


class LimitedRedis(EmbeddedRedis):
    """`url` is the user's, `admin_url` may do everything."""

    @property
    def admin_url(self) -> str:
        return super().url

    @property
    def url(self) -> str:
        return f"{self.admin_url}?username={USER}&password={PASSWORD}"

    def refused(self) -> list[str]:
        """What the user was refused since the last start, as in `evalsha: key (lua)`. Forgets it."""
        with redis.Redis.from_url(self.admin_url, decode_responses=True) as admin:
            entries = admin.acl_log()
            admin.acl_log_reset()
        return [f"{entry['object']}: {entry['reason']} ({entry['context']})" for entry in entries]

    def _arguments(self) -> list[str]:
        return [*super()._arguments(), "--user", USER, "on", f">{PASSWORD}", *documented_rules()]
