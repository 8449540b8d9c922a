"""Orders to a `tandem up`, by its socket."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.control import taking_orders
from planning.autoscaler.actors import ActorFailed, LocalActor, PrintOnly, Sizes
from services.cluster.leadership import Lease
from services.runtime.errors import ConfigError
from services.runtime.orders import socket_path


async def test_a_running_cluster_is_asked_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    told: list[Any] = []

    async def sizes(order: Any) -> Any:
        return {"prefill": 2, "decode": 3}

    async def scale(order: Any) -> Any:
        told.append(order)
        if order["decode"] > 8:
            raise ConfigError("there is no room")
        return {"started": [], "drained": []}

    actor = LocalActor("http://127.0.0.1:4711", "demo", 60.0)
    with pytest.raises(ActorFailed, match="HTTP port 4711"):
        actor.sizes(Sizes(0, 0))
    async with taking_orders(socket_path(4711), {"sizes": sizes, "scale": scale}):
        assert await asyncio.to_thread(actor.sizes, Sizes(0, 0)) == Sizes(2, 3)
        await asyncio.to_thread(actor.resize, Sizes(1, 4), Lease("a", 1.0, 2.0))
        with pytest.raises(ActorFailed, match="no room"):
            await asyncio.to_thread(actor.resize, Sizes(1, 9))
    expected = {"do": "scale", "model": "demo", "grace_s": 60.0, "waits": False, "prefill": 1, "decode": 4}
    assert told[0] == {**expected, "lease": {"holder": "a", "since_s": 1.0, "until_s": 2.0}}
    assert told[1] == {**expected, "decode": 9, "lease": None}


def test_a_folder_that_others_may_enter_fails_the_order_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "tandem").mkdir(mode=0o777)
    (tmp_path / "tandem").chmod(0o777)
    with pytest.raises(ActorFailed, match="mode 0700"):
        LocalActor("http://127.0.0.1:4711", None, 60.0).resize(Sizes(1, 1))


def test_who_only_prints_takes_what_is_ready_for_what_is_to_be() -> None:
    assert PrintOnly().sizes(Sizes(3, 4)) == Sizes(3, 4)
    PrintOnly().resize(Sizes(5, 5))
