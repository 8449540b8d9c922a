"""Scaling by the API of Kubernetes, against a server that speaks this part of it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planning.autoscaler.actors import ActorFailed, Sizes
from planning.autoscaler.kubernetes import KubernetesActor
from services.cluster.leadership import Lease
from services.runtime.clock import ManualClock
from tests.planning.autoscaler.pages import FakeKubernetes

NOTHING = Sizes(0, 0)


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[FakeKubernetes]:
    server = FakeKubernetes(tmp_path, prefill=2, decode=0)
    yield server
    server.close()


def actor_of(server: FakeKubernetes, decode: str = "statefulsets/tandem-decode") -> KubernetesActor:
    return KubernetesActor(server.url, "statefulsets/tandem-prefill", decode, account=server.account)


def test_only_what_differs_is_changed(kubernetes: FakeKubernetes) -> None:
    actor = actor_of(kubernetes)
    assert actor.sizes(NOTHING) == Sizes(2, 0)
    actor.resize(Sizes(2, 3))
    actor.resize(Sizes(2, 3))
    assert kubernetes.patches == [("statefulsets/tandem-decode", 3)]
    assert actor.sizes(NOTHING) == Sizes(2, 3)


def test_the_change_of_somebody_else_is_not_overwritten(kubernetes: FakeKubernetes) -> None:
    actor = actor_of(kubernetes)
    actor.sizes(NOTHING)
    kubernetes.set("decode", 7)
    with pytest.raises(ActorFailed, match="has been modified"):
        actor.resize(Sizes(2, 3))
    assert kubernetes.replicas()["decode"] == 7
    assert actor.sizes(NOTHING) == Sizes(2, 7)
    actor.resize(Sizes(2, 3))
    assert kubernetes.replicas()["decode"] == 3


def test_an_order_whose_lease_has_ended_changes_nothing(kubernetes: FakeKubernetes) -> None:
    clock = ManualClock()
    actor = replace(actor_of(kubernetes), clock=clock)
    actor.sizes(NOTHING)
    lease = Lease("a", clock.monotonic(), clock.monotonic() + 12.0)
    clock.advance(12.1)
    with pytest.raises(ActorFailed, match="decode is not scaled to 3: the lease has ended"):
        actor.resize(Sizes(2, 3), lease)
    assert kubernetes.patches == []
    actor.resize(Sizes(2, 3), replace(lease, until_s=lease.until_s + 12.0))
    assert kubernetes.patches == [("statefulsets/tandem-decode", 3)]


def test_a_token_that_was_replaced_is_read_anew(kubernetes: FakeKubernetes) -> None:
    actor = actor_of(kubernetes)
    actor.sizes(NOTHING)
    kubernetes.token = "second"
    with pytest.raises(ActorFailed, match="Unauthorized"):
        actor.sizes(NOTHING)
    (kubernetes.account / "token").write_text("second\n")
    assert actor.sizes(NOTHING) == Sizes(2, 0)


def test_what_is_missing_is_named(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    with pytest.raises(ActorFailed, match=r"statefulsets/other cannot be read: .*not found"):
        actor_of(kubernetes, "statefulsets/other").sizes(NOTHING)
    nowhere = KubernetesActor(kubernetes.url, "statefulsets/a", "statefulsets/b", account=tmp_path)
    with pytest.raises(ActorFailed, match="a pod with a service account"):
        nowhere.sizes(NOTHING)


def test_a_server_of_another_authority_is_not_believed(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    stranger = FakeKubernetes(other, prefill=1, decode=1)
    try:
        (kubernetes.account / "ca.crt").write_bytes((stranger.account / "ca.crt").read_bytes())
        with pytest.raises(ActorFailed, match="certificate was not signed by a CA that is believed here"):
            actor_of(kubernetes).sizes(NOTHING)
    finally:
        stranger.close()
