"""Batches in a real Redis: one owner, one result for each row, whatever comes late or twice."""

import asyncio
import itertools
import json

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from services.cluster.batch_scripts import MAX_ACTIVE, MAX_BATCHES, OVER, Reply, Status
from services.cluster.batches import (
    LEASE_S,
    BatchRefused,
    BatchStore,
    Order,
    Result,
    has_result,
)
from services.cluster.embedded_redis import EmbeddedRedis
from services.cluster.files import CHUNK_BYTES, OVERHEAD_BYTES, FilesFull, FileStore, Room, new_id
from services.cluster.keys import Keys
from services.cluster.redis_store import Store
from tests.services.cluster.test_answers import calls_inside

KEYS = Keys("test")


@pytest.fixture
def files(patient_store):
    return FileStore(patient_store, room=Room())


@pytest.fixture
def batches(patient_store, files):
    return BatchStore(patient_store, files)


def order(tenant="acme", **changes):
    return Order(tenant, "d" * 64, "/v1/completions", "file-input", 86_400, "24h", **changes)


async def create(batches, tenant="acme", **changes):
    asked = order(tenant, **changes)
    return await batches.create(new_id("batch_"), asked, output_id=new_id("file-"), error_id=new_id("file-"))


async def begun(batches, *, total=10, row_bytes=0, **changes):
    await create(batches, **changes)
    batch = await batches.claim("first")
    assert await batches.advance(batch, Status.IN_PROGRESS, total=total, row_bytes=row_bytes) is Reply.DONE
    return batch


async def finish(batches, batch):
    assert await batches.advance(batch, Status.FINALIZING, outcome=Status.COMPLETED) is Reply.DONE
    assert await batches.advance(batch, Status.COMPLETED) is Reply.DONE
    return await batches.find(batch.id)


async def content(files, file_id):
    file = await files.find(file_id)
    chunks = [await files.chunk(file_id, index) for index in range(file.num_chunks)]
    whole = b"".join(chunks)
    assert len(whole) == file.num_bytes
    return whole


def end_lease(client, batch, keys=KEYS):
    """Lets another gateway claim a batch that is pinned to no region."""
    client.zadd(f"{keys.waiting_batches_prefix}*/{batch.order.tenant}", {batch.id: 0})
    client.zadd(keys.waiting_batches_prefix + "*", {batch.order.tenant: 0})


async def test_a_batch_is_what_was_asked_for(batches, client):
    made = await create(batches, metadata=json.dumps({"ä": "b"}), output_ttl_s=7200)
    assert made.order == order(metadata=json.dumps({"ä": "b"}), output_ttl_s=7200)
    assert (made.status, made.epoch, made.total, made.completed, made.failed) == (Status.VALIDATING, 0, 0, 0, 0)
    assert made.times_s["expires"] == made.times_s["created"] + 86_400
    assert await batches.find(made.id) == made
    assert await batches.find("batch_none") is None
    assert 30 * 86_400 < client.ttl(KEYS.batch_prefix + made.id) <= 31 * 86_400
    again = await batches.create(made.id, order("other"), output_id="file-a", error_id="file-b")
    assert again == made


async def test_a_batch_has_one_owner_until_its_claim_ends(batches, client):
    made = await create(batches)
    first = await batches.claim("first")
    assert (first.id, first.epoch, first.owner) == (made.id, 1, "first")
    assert await batches.claim("second") is None
    lease_ms = client.zscore(f"{KEYS.waiting_batches_prefix}*/acme", made.id)
    seconds, micros = client.time()
    assert 0 < lease_ms - seconds * 1000 - micros / 1000 <= LEASE_S * 1000
    end_lease(client, made)
    assert (await batches.renew(first)).reply is Reply.DONE
    assert await batches.claim("second") is None
    end_lease(client, made)
    second = await batches.claim("second")
    assert second.epoch == 2
    assert (await batches.renew(first)).reply is Reply.FENCED
    await batches.release(first)
    assert await batches.claim("third") is None
    await batches.release(second)
    assert (await batches.claim("third")).epoch == 3


async def test_of_two_owners_with_one_epoch_the_later_one_counts(batches, client):
    made = await create(batches)
    first = await batches.claim("first")
    # Redis has failed over to a copy that did not know of the claim yet.
    client.hset(KEYS.batch_prefix + made.id, "epoch", 0)
    end_lease(client, made)
    second = await batches.claim("second")
    assert second.epoch == first.epoch
    assert (await batches.renew(first)).reply is Reply.FENCED
    assert await batches.advance(first, Status.IN_PROGRESS, total=1) is Reply.FENCED
    assert (await batches.renew(second)).reply is Reply.DONE


async def test_tenants_that_have_nothing_running_come_first(batches):
    ids = []
    for tenant in ("acme", "acme", "bolt"):
        ids.append((await create(batches, tenant)).id)
        await asyncio.sleep(0.002)  # the order is by the millisecond
    assert await batches.claim("me", full_tenants=["acme", "bolt"]) is None
    taken = [await batches.claim("me", busy_tenants=["acme"]) for _ in range(4)]
    assert [batch and batch.id for batch in taken] == [ids[2], ids[0], ids[1], None]


async def test_what_is_held_to_regions_is_claimed_there_only(batches):
    made = await create(batches, regions="eu,eu-west")
    for region in ("us", "", "eu-w"):
        assert await batches.claim("elsewhere", region=region) is None
    claimed = await batches.claim("here", region="eu")
    assert (claimed.id, claimed.order.regions) == (made.id, "eu,eu-west")


async def test_results_are_whole_lines_in_chunks(batches, files):
    batch = await begun(batches, total=9)
    own_bytes = await files.num_bytes("acme") - 2  # without the bits of its rows
    line = b"x" * (CHUNK_BYTES // 2) + b"\n"
    for row in range(8):
        assert await batches.record(batch, [Result(row, b"%d" % row + line, has_failed=row == 3)]) is Reply.DONE
    assert await batches.record(batch, [Result(8, b"8\n", False)]) is Reply.DONE
    over = await finish(batches, batch)
    assert (over.total, over.completed, over.failed) == (9, 8, 1)
    assert (
        await content(files, over.output_file_id)
        == b"".join(b"%d" % row + line for row in (0, 1, 2, 4, 5, 6, 7)) + b"8\n"
    )
    assert await content(files, over.error_file_id) == b"3" + line
    assert (await files.find(over.output_file_id)).num_chunks == 4
    assert await files.num_bytes("acme") == 8 * len(b"0" + line) + 2 + 2 * OVERHEAD_BYTES + own_bytes
    assert await batches.claim("next") is None


async def test_files_of_a_batch_expire_by_their_own_creation(batches, files, client):
    batch = await begun(batches, output_ttl_s=7200)
    key = KEYS.batch_prefix + batch.id
    # It was made so long ago that files of that time would be gone.
    client.hincrby(key, "at:created", -8000)
    line = b"x" * CHUNK_BYTES + b"\n"
    for row in range(2):
        assert await batches.record(batch, [Result(row, line, False)]) is Reply.DONE
    chunks = [f"{KEYS.file_prefix}{client.hget(key, 'output').decode()}:{index}" for index in range(2)]
    for chunk in chunks:  # for as long as it may run
        assert abs(client.ttl(chunk) - client.ttl(key)) <= 1
    over = await finish(batches, batch)
    file = await files.find(over.output_file_id)
    assert file.expires_s == file.created_s + 7200
    assert file.created_s == over.times_s["completed"]
    assert {client.expiretime(name) for name in (*chunks, KEYS.file_prefix + file.id)} == {file.expires_s}
    assert client.zscore(KEYS.file_expiry, file.id) == file.expires_s * 1000
    assert not client.exists(KEYS.batch_prefix + batch.id + ":done")


async def test_a_full_store_refuses_results_but_not_words_about_rows(patient_store, files, client):
    batches = BatchStore(patient_store, FileStore(patient_store, room=Room(tenant_bytes=4_000)))
    batch = await begun(batches)
    assert await batches.record(batch, [Result(0, b"x" * 2_000, False)]) is Reply.DONE
    assert await batches.record(batch, [Result(1, b"x" * 1_500, False)]) is Reply.FULL
    assert not has_result(await batches.done_rows(batch), 1)
    assert await batches.record(batch, [Result(1, b"x" * 1_500, True)], beyond_room=True) is Reply.DONE
    with pytest.raises(FilesFull):
        await create(batches)


async def test_a_line_for_each_row_has_its_room_from_the_beginning(patient_store):
    files = FileStore(patient_store, room=Room(tenant_bytes=20_000))
    batches = BatchStore(patient_store, files)
    batch = await begun(batches, total=100, row_bytes=100)
    held = await files.num_bytes("acme")
    assert held > 10_000
    # Nobody takes that room: neither another file, nor another batch, nor long results of this one.
    with pytest.raises(FilesFull):
        await files.put_chunk(new_id("file-"), "acme", 0, b"x" * 8_000)
    await create(batches)
    other = await batches.claim("second")
    assert await batches.advance(other, Status.IN_PROGRESS, total=100, row_bytes=100) is Reply.FULL
    assert await batches.record(batch, [Result(0, b"x" * 9_000, False)]) is Reply.FULL
    short = [Result(row, b"y" * 100, True) for row in range(100)]
    assert await batches.record(batch, short, beyond_room=True) is Reply.DONE
    assert await files.num_bytes("acme") <= 20_000
    await finish(batches, batch)
    for over in (batch.id, other.id):
        assert await batches.find(over) is not None
    assert await files.num_bytes("acme") < 10_000 + 8 * OVERHEAD_BYTES


async def test_what_a_batch_does_not_need_any_more_is_given_back(batches, files, client):
    batch = await begun(batches, total=100, row_bytes=100)
    begun_bytes = await files.num_bytes("acme")
    assert await batches.record(batch, [Result(0, b"y" * 40, False)]) is Reply.DONE
    assert await files.num_bytes("acme") == begun_bytes - 100 + 40 + OVERHEAD_BYTES
    assert await batches.record(batch, [Result(0, b"y" * 90, False)]) is Reply.DONE  # it has its result
    assert await files.num_bytes("acme") == begun_bytes - 100 + 40 + OVERHEAD_BYTES
    await batches.cancel(batch.id, "acme")
    assert await batches.advance(batch, Status.CANCELLED) is Reply.DONE
    assert await files.num_bytes("acme") == begun_bytes - 100 * 100 - 13 + 40 + OVERHEAD_BYTES
    over = await batches.find(batch.id)
    await files.delete(over.output_file_id, "acme")
    own_bytes = await files.num_bytes("acme")
    assert own_bytes == begun_bytes - 100 * 100 - 13
    client.zadd(KEYS.file_expiry, {batch.id: 1})
    assert await files.swept_bytes() == 0


async def test_large_words_about_a_batch_are_counted(batches, files):
    before = await files.num_bytes("acme")
    await create(batches, metadata="m" * 5_000)
    assert await files.num_bytes("acme") - before > 5_000 + OVERHEAD_BYTES
    batch = await batches.claim("first")
    held = await files.num_bytes("acme")
    assert await batches.advance(batch, Status.FAILED, errors="e" * 3_000) is Reply.DONE
    assert await files.num_bytes("acme") == held + 3_000


async def test_forgotten_results_are_noticed(batches, client):
    batch = await begun(batches)
    await batches.record(batch, [Result(0, b"zero\n", False)])
    output = client.hget(KEYS.batch_prefix + batch.id, "output").decode()
    client.delete(f"{KEYS.file_prefix}{output}:0")
    assert await batches.record(batch, [Result(1, b"one\n", False)]) is Reply.LOST
    other = await begun(batches, tenant="bolt")
    client.delete(KEYS.batch_prefix + other.id + ":done")
    assert await batches.record(other, [Result(0, b"zero\n", False)]) is Reply.LOST
    client.delete(KEYS.batch_prefix + other.id)
    assert await batches.record(other, [Result(0, b"zero\n", False)]) is Reply.GONE
    assert (await batches.renew(other)).reply is Reply.GONE


async def test_a_batch_whose_window_is_over_says_so(batches, client):
    batch = await begun(batches)
    assert not (await batches.renew(batch)).is_expired
    client.hset(KEYS.batch_prefix + batch.id, "at:expires", client.time()[0])
    assert (await batches.renew(batch)).is_expired


async def test_batches_of_a_tenant_are_bounded(batches, client):
    for _ in range(MAX_ACTIVE):
        await create(batches)
    with pytest.raises(BatchRefused, match="active"):
        await create(batches)
    await create(batches, "bolt")
    # The oldest of those that are over are evicted.
    old = {f"batch_{number:03}": 0 for number in range(MAX_BATCHES)}
    client.zadd(KEYS.batches_prefix + "core", old)
    kept = await create(batches, "core")
    assert client.zcard(KEYS.batches_prefix + "core") == MAX_BATCHES
    assert client.zscore(KEYS.batches_prefix + "core", "batch_000") is None
    assert await batches.page("core", after="", limit=3) == ([kept], False)


async def test_only_its_tenant_cancels_a_batch(batches):
    batch = await begun(batches)
    assert await batches.cancel(batch.id, "bolt") is Reply.GONE
    assert await batches.cancel("batch_none", "acme") is Reply.GONE
    assert await batches.cancel(batch.id, "acme") is Reply.DONE
    assert await batches.cancel(batch.id, "acme") is Reply.DONE
    assert (await batches.renew(batch)).status is Status.CANCELLING
    assert await batches.advance(batch, Status.FINALIZING, outcome=Status.COMPLETED) is Reply.REFUSED
    assert await batches.advance(batch, Status.CANCELLED) is Reply.DONE
    assert await batches.cancel(batch.id, "acme") is Reply.REFUSED


NUM_ROWS = 11
_MACHINES = itertools.count()
_ALLOWED = {
    Status.IN_PROGRESS: {Status.VALIDATING},
    Status.FINALIZING: {Status.IN_PROGRESS},
    Status.COMPLETED: {Status.FINALIZING},
    Status.EXPIRED: {Status.FINALIZING},
    Status.CANCELLED: {Status.CANCELLING},
    Status.FAILED: {Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING},
}


class BatchMachine(RuleBasedStateMachine):
    """Owners come and go, and each of them, also one of long ago, may write at any time."""

    url = ""
    claims = Bundle("claims")

    def __init__(self):
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = redis.Redis.from_url(self.url)
        self.store = Store(self.url, cluster=f"machine-{next(_MACHINES)}", timeout_s=5.0)
        self.files = FileStore(self.store, room=Room())
        self.batches = BatchStore(self.store, self.files, lease_s=1000.0)
        self.batch = self.run(create(self.batches))
        self.status = Status.VALIDATING
        self.epoch = 0
        self.is_leased = False
        self.results = {}
        """Row → (line, has failed), as first recorded."""

    def run(self, work):
        return self.runner.run(work)

    def teardown(self):
        self.run(self.store.close())
        self.runner.close()
        self.redis.close()

    @property
    def is_over(self):
        return self.status in OVER

    @rule()
    def owner_dies(self):
        if not self.is_over:
            end_lease(self.redis, self.batch, self.store.keys)
            self.is_leased = False

    @initialize(target=claims, begins=st.booleans())
    def first_claim(self, begins):
        claimed = self.claim_now()
        if begins:
            self.advance_now(claimed, Status.IN_PROGRESS)
        return claimed

    @rule(target=claims)
    def claim(self):
        return self.claim_now()

    def claim_now(self):
        claimed = self.run(self.batches.claim("somebody"))
        if self.is_leased or self.is_over:
            assert claimed is None
            return multiple()
        self.epoch += 1
        self.is_leased = True
        assert claimed.epoch == self.epoch
        return claimed

    @rule(claim=claims, releases=st.booleans())
    def renew(self, claim, releases):
        if releases:
            self.run(self.batches.release(claim))
        else:
            reply = self.run(self.batches.renew(claim)).reply
            assert reply is (Reply.DONE if claim.epoch == self.epoch else Reply.FENCED)
        if claim.epoch == self.epoch:
            self.is_leased = not releases

    @rule(claim=claims, status=st.sampled_from(sorted(_ALLOWED)))
    def advance(self, claim, status):
        self.advance_now(claim, status)

    def advance_now(self, claim, status):
        details = {"total": NUM_ROWS} if status is Status.IN_PROGRESS else {}
        reply = self.run(self.batches.advance(claim, status, outcome=Status.COMPLETED, **details))
        if claim.epoch != self.epoch:
            assert reply is Reply.FENCED
        elif self.status is status or self.status in _ALLOWED[status]:
            assert reply is Reply.DONE
            self.status = status
        else:
            assert reply is Reply.REFUSED

    @rule(
        claim=claims,
        rows=st.lists(st.tuples(st.integers(0, NUM_ROWS - 1), st.booleans()), min_size=1, max_size=4),
        word=st.integers(0, 10**6),
        beyond_room=st.booleans(),
    )
    def record(self, claim, rows, word, beyond_room):
        results = [Result(row, b"%d %d\n" % (row, word), has_failed) for row, has_failed in rows]
        reply = self.run(self.batches.record(claim, results, beyond_room=beyond_room))
        if claim.epoch != self.epoch:
            assert reply is Reply.FENCED
        elif self.status not in (Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING):
            assert reply is Reply.REFUSED
        elif self.run(self.batches.find(self.batch.id)).total == 0:
            assert reply is Reply.LOST  # cancelled before its rows were counted: it has none to record
        else:
            assert reply is Reply.DONE
            for result in results:
                self.results.setdefault(result.row, (result.line, result.has_failed))

    @rule()
    def cancel(self):
        reply = self.run(self.batches.cancel(self.batch.id, "acme"))
        if self.status in (Status.VALIDATING, Status.IN_PROGRESS, Status.CANCELLING):
            assert reply is Reply.DONE
            self.status = Status.CANCELLING
        else:
            assert reply is Reply.REFUSED

    @invariant()
    def counts_are_those_of_the_first_results(self):
        batch = self.run(self.batches.find(self.batch.id))
        num_failed = sum(has_failed for _, has_failed in self.results.values())
        assert (batch.completed, batch.failed) == (len(self.results) - num_failed, num_failed)
        assert (batch.status, batch.epoch) == (self.status, self.epoch)
        if self.status in (Status.IN_PROGRESS, Status.FINALIZING):
            bits = self.run(self.batches.done_rows(batch))
            assert {row for row in range(NUM_ROWS) if has_result(bits, row)} == self.results.keys()

    @invariant()
    def files_have_each_row_once(self):
        batch = self.run(self.batches.find(self.batch.id))
        if not self.is_over:
            assert not batch.output_file_id
            assert not batch.error_file_id
            return
        for file_id, of_failed in ((batch.output_file_id, False), (batch.error_file_id, True)):
            wanted = sorted(line for line, has_failed in self.results.values() if has_failed is of_failed)
            assert bool(file_id) == bool(wanted)
            if file_id:
                assert sorted(self.run(content(self.files, file_id)).splitlines(keepends=True)) == wanted


@pytest.fixture(scope="module")
def machine_redis():
    with EmbeddedRedis() as server:
        yield server


@pytest.mark.parametrize("num_examples", [25, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_whoever_dies_and_whatever_comes_late_each_row_has_its_first_result(machine_redis, num_examples):
    class Machine(BatchMachine):
        url = machine_redis.url

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )


async def test_batches_that_others_have_cost_nothing(batches, client):
    num_calls = {}
    for num_others in (32, 320):
        for number in range(num_others):
            await create(batches, f"t{number // MAX_ACTIVE}", regions="eu")
        before = calls_inside(client)
        made = await create(batches, "ours", regions="us")
        claimed = await batches.claim("me", region="us", full_tenants=["t0"])
        assert claimed.id == made.id
        await batches.release(claimed)
        num_calls[num_others] = calls_inside(client) - before
        for key in client.scan_iter("*"):
            client.delete(key)
    assert num_calls[320] <= num_calls[32]
