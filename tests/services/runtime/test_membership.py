"""Proofs of membership: one serves for the call that it was made for and for nothing else."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.clock import ManualClock
from services.runtime.errors import NotProven, PermissionDenied, Unauthenticated, WorkerUnavailable
from services.runtime.membership import (
    ANSWER_KEY,
    CHALLENGE_BYTES,
    CHALLENGE_S,
    MAX_SECRETS,
    NONCE_BYTES,
    NONCES_KEY,
    PROOFS_KEY,
    ROLE_KEY,
    Guard,
    Member,
    Proof,
    is_signed,
    sign_record,
)

SESSION, LINK = "/tandem.v1.DecodeWorker/Session", "/tandem.v1.Link/Connect"
OURS, OTHERS, THIRD = b"a" * 32, b"b" * 32, b"c" * 32
INCARNATION, ANOTHER = "1" * 32, "2" * 32
SECRETS = st.lists(st.sampled_from([OURS, OTHERS, THIRD]), min_size=1, max_size=3, unique=True).map(tuple)
METHODS = st.sampled_from([(SESSION, "gateway"), (LINK, "prefill"), (LINK, "decode")])


def held(*secrets: bytes) -> Callable[[], tuple[bytes, ...]]:
    return lambda: secrets


def proof_for(guard: Guard, *secrets: bytes, method: str = SESSION, role: str = "gateway") -> Proof:
    return Member(held(*(secrets or (OURS,))), role).proof_for(method, INCARNATION, guard.challenge())


def guard_of(*secrets: bytes, clock: ManualClock | None = None, incarnation: str = INCARNATION) -> Guard:
    return Guard(held(*(secrets or (OURS,))), incarnation=incarnation, clock=clock or ManualClock())


@given(caller=SECRETS, worker=SECRETS, call=METHODS)
def test_both_sides_believe_each_other_where_one_secret_is_the_same(
    caller: tuple[bytes, ...], worker: tuple[bytes, ...], call: tuple[str, str]
) -> None:
    guard = guard_of(*worker)
    proof = proof_for(guard, *caller, method=call[0], role=call[1])
    if set(caller) & set(worker):
        proof.check(guard.check(call[0], dict(proof.metadata)))
    else:
        with pytest.raises(Unauthenticated, match="--cluster-secret-file"):
            guard.check(call[0], dict(proof.metadata))


@given(data=st.data(), key=st.sampled_from([ROLE_KEY, NONCES_KEY, PROOFS_KEY]))
def test_a_proof_with_one_bit_changed_is_none(data: st.DataObject, key: str) -> None:
    guard = guard_of()
    shown = dict(proof_for(guard).metadata)
    value = shown[key]
    raw = bytearray(value.encode() if isinstance(value, str) else value)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 6))
    shown[key] = raw.decode() if isinstance(value, str) else bytes(raw)
    with pytest.raises((Unauthenticated, PermissionDenied)):
        guard.check(SESSION, shown)


@given(shown=st.dictionaries(st.sampled_from([ROLE_KEY, NONCES_KEY, PROOFS_KEY]), st.binary(max_size=200) | st.text()))
def test_whatever_is_shown_is_refused_with_an_error_of_ours(shown: dict[str, str | bytes]) -> None:
    with pytest.raises(Unauthenticated):
        guard_of().check(SESSION, shown)


def test_a_caller_that_shows_nothing_is_told_what_it_needs() -> None:
    with pytest.raises(Unauthenticated, match=r"--cluster-secret-file .* --redis and --cluster"):
        guard_of().check(SESSION, {})


def test_a_proof_serves_for_no_other_method_role_worker_or_second_time() -> None:
    guard, other = guard_of(), guard_of(incarnation=ANOTHER)
    shown = dict(proof_for(guard).metadata)
    for method, changed in (
        (LINK, shown),
        ("/tandem.v1.PrefillWorker/Session", shown),
        (SESSION, shown | {ROLE_KEY: "decode"}),
    ):
        with pytest.raises(Unauthenticated):
            guard.check(method, changed)
    with pytest.raises(Unauthenticated):  # relayed to another worker
        other.check(SESSION, shown)
    guard.check(SESSION, shown)
    with pytest.raises(Unauthenticated, match="was used"):
        guard.check(SESSION, shown)


def test_a_proof_meant_for_a_worker_that_died_opens_no_other_one() -> None:
    """Somebody at its address passes on the nonce of a worker that lives, and then the proof."""
    alive = guard_of()
    relayed = Member(held(OURS), "gateway").proof_for(SESSION, ANOTHER, alive.challenge())
    with pytest.raises(Unauthenticated, match="is not one of this"):
        alive.check(SESSION, dict(relayed.metadata))


def test_a_worker_that_comes_back_knows_no_nonce_of_its_earlier_life() -> None:
    shown = dict(proof_for(guard_of()).metadata)
    with pytest.raises(Unauthenticated, match="nonce"):
        guard_of().check(SESSION, shown)


def test_a_nonce_serves_for_five_seconds() -> None:
    clock = ManualClock()
    guard = guard_of(clock=clock)
    early, late = proof_for(guard), proof_for(guard)
    clock.advance(CHALLENGE_S - 0.01)
    guard.check(SESSION, dict(early.metadata))
    clock.advance(0.02)
    with pytest.raises(Unauthenticated, match="last 5 s"):
        guard.check(SESSION, dict(late.metadata))
    with pytest.raises(Unauthenticated):
        guard.check(SESSION, dict(early.metadata))


def test_nothing_is_kept_of_strangers_and_nothing_for_long_of_members() -> None:
    clock = ManualClock()
    guard = guard_of(clock=clock)
    for _ in range(1000):
        guard.challenge()
        with pytest.raises(Unauthenticated):
            guard.check(SESSION, dict(proof_for(guard, OTHERS).metadata))
    assert len(guard._used) == 0
    for _ in range(100):
        guard.check(SESSION, dict(proof_for(guard).metadata))
    clock.advance(CHALLENGE_S + 1)
    guard.check(SESSION, dict(proof_for(guard).metadata))
    assert len(guard._used) == 1


def test_a_member_of_another_role_is_told_so() -> None:
    guard = guard_of()
    with pytest.raises(PermissionDenied, match=r"tandem\.v1\.DecodeWorker"):
        guard.check(SESSION, dict(proof_for(guard, role="prefill").metadata))


def test_health_and_the_question_for_a_nonce_need_no_proof() -> None:
    assert guard_of().check("/grpc.health.v1.Health/Check", {}) == ()
    assert guard_of().check("/tandem.v1.Membership/Challenge", {}) == ()


def test_an_answer_that_is_not_for_this_call_is_not_believed() -> None:
    guard = guard_of()
    proof, other = proof_for(guard), proof_for(guard)
    ((key, value),) = guard.check(SESSION, dict(other.metadata))
    mine = dict(proof.metadata)[PROOFS_KEY]
    for answer in (None, (), ((key, value),), ((key, b""),), ((key, mine),)):  # the last: our own proof, sent back
        with pytest.raises(NotProven, match="the worker has not proven"):
            proof.check(answer)
    assert key == ANSWER_KEY


def test_neither_side_goes_on_before_it_knows_the_secret() -> None:
    with pytest.raises(WorkerUnavailable, match="does not know its cluster's secret yet"):
        Guard(held(), incarnation=INCARNATION).check(SESSION, {})
    with pytest.raises(NotProven, match="not known yet"):
        Member(held(), "gateway").proof_for(SESSION, INCARNATION, bytes(CHALLENGE_BYTES))
    with pytest.raises(NotProven, match="wrong length"):
        Member(held(OURS), "gateway").proof_for(SESSION, INCARNATION, b"short")


def test_more_proofs_than_there_may_be_secrets_are_not_looked_at() -> None:
    guard = guard_of()
    shown = dict(proof_for(guard).metadata)
    proof = shown[PROOFS_KEY]
    assert isinstance(proof, bytes)
    with pytest.raises(Unauthenticated):
        guard.check(SESSION, shown | {PROOFS_KEY: proof * (MAX_SECRETS + 1)})


def test_secrets_are_in_no_repr() -> None:
    proof = proof_for(guard_of())
    for shown in (proof, Member(held(OURS), "gateway"), dataclasses.replace(proof)):
        assert "aaaa" not in repr(shown)
    assert len(proof.nonces) == NONCE_BYTES + CHALLENGE_BYTES


@given(signers=SECRETS, readers=SECRETS, record=st.binary(max_size=100), change=st.binary(min_size=1, max_size=4))
def test_a_record_is_believed_as_it_was_signed(
    signers: tuple[bytes, ...], readers: tuple[bytes, ...], record: bytes, change: bytes
) -> None:
    signature = sign_record(signers, "c", record)
    assert is_signed(readers, "c", record, signature) == bool(set(signers) & set(readers))
    assert not is_signed(readers, "d", record, signature)
    assert not is_signed(readers, "c", record + change, signature)
    assert not is_signed(readers, "c", record, change)
