"""The callers that may show and steer a cluster over gRPC: an operator's certificate, an admin's key, or everybody."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.access.door import FrontDoor
from gateway.access.keys import digest_of_key, new_key
from gateway.edge.grpc_cluster import ClusterService
from gateway.requests.turns import GroupState, TurnsState
from gateway.topology.troubles import Troubles
from services.runtime import rpc
from services.runtime.errors import PermissionDenied, Unauthenticated
from services.runtime.tls import Identity, TlsFiles
from services.scheduling.pools import Pool, Pools
from tests.certificates import Authority

ADMIN, USER = new_key(), new_key()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("ca")).issue("gateway", roles=["gateway"])


@pytest.fixture(autouse=True)
def no_identity_is_left() -> Iterator[None]:
    yield
    rpc.set_identity(None)


def door(folder: Path | None) -> FrontDoor:
    if folder is None:
        return FrontDoor(cast(Any, None))
    keys = folder / "keys.toml"
    keys.write_text(
        f'[[key]]\nsha256 = "{digest_of_key(ADMIN)}"\ntenant = "ops"\nadmin = true\n'
        f'[[key]]\nsha256 = "{digest_of_key(USER)}"\ntenant = "acme"\n'
    )
    return FrontDoor(cast(Any, None), key_file=keys)


def check(asked: FrontDoor, *, role: str | None = None, key: str | None = None) -> None:
    """Checks a caller with a certificate of this role ('': a certificate without a role), or without one."""
    shown = {} if role is None else {"x509_pem_cert": [b"..."], "peer_uri": [f"spiffe://tandem/{role}".encode()]}
    metadata = () if key is None else (("authorization", f"Bearer {key}"),)
    context = SimpleNamespace(auth_context=lambda: shown, invocation_metadata=lambda: metadata)
    nothing = cast(Any, None)
    service = ClusterService(nothing, nothing, door=asked, troubles=Troubles(), placements=nothing)
    service._check_operator(cast(Any, context))


def test_pools_and_models_by_turns_are_in_the_topology() -> None:
    turns = TurnsState({"a": "awake", "b": "on_disk"}, [GroupState("a-0", "a", "awake", 2.5)], {"disk": 1.5})
    requests = SimpleNamespace(num_queued=0, num_running=0, prefill_choice="auto", turns=SimpleNamespace(state=turns))
    pools = Pools([Pool("slow", ("batch", "low"), 5, "strict")])
    topology = SimpleNamespace(members=list, presence=SimpleNamespace(gone=()), pools=pools)
    nothing = cast(Any, None)
    service = ClusterService(
        cast(Any, requests), cast(Any, topology), door=nothing, troubles=Troubles(), placements=nothing
    )
    shown = service._snapshot()
    (pool,) = shown.pools
    assert (pool.name, list(pool.classes), pool.min_prompt_tokens, pool.rule) == ("slow", ["batch", "low"], 5, "strict")
    assert dict(shown.turns.models) == {"a": "awake", "b": "on_disk"}
    (group,) = shown.turns.groups
    assert (group.group, group.model, group.state, group.for_s) == ("a-0", "a", "awake", 2.5)
    assert dict(shown.turns.switch_s) == {"disk": 1.5}


def test_without_keys_and_ca_everybody_is_an_operator(files: TlsFiles) -> None:
    check(door(None))
    rpc.set_identity(Identity(TlsFiles(files.cert, files.key)))
    check(door(None))


def test_with_a_ca_it_takes_an_operators_certificate(files: TlsFiles) -> None:
    rpc.set_identity(Identity(files))
    check(door(None), role="operator")
    with pytest.raises(Unauthenticated, match="--operator-port"):
        check(door(None))
    for role in ("", "gateway", "prefill", "decode"):
        with pytest.raises(PermissionDenied, match="role operator"):
            check(door(None), role=role)


def test_with_keys_an_admins_key_will_do_where_no_certificate_is_shown(files: TlsFiles, tmp_path: Path) -> None:
    asked = door(tmp_path)
    for identity in (None, Identity(files)):
        rpc.set_identity(identity)
        check(asked, key=ADMIN)
        with pytest.raises(Unauthenticated):
            check(asked)
        with pytest.raises(PermissionDenied):
            check(asked, key=USER)
    check(asked, role="operator")
    with pytest.raises(PermissionDenied, match="role operator"):
        check(asked, role="decode", key=ADMIN)
