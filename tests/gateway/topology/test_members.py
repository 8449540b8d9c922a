"""Workers in rotation as requests see them: what is kept of them, and until when."""

import asyncio
import functools
import math

import msgspec
import pytest

from gateway.requests.mailbox import Mailbox
from gateway.requests.tokens import TokenLog
from gateway.topology.books import Bookings, Books
from gateway.topology.members import Topology
from gateway.topology.reports import WorkerLoad
from gateway.topology.views import FRESH_S
from services.cluster.registry import WorkerRecord
from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.pools import Audience, Pool, Pools
from services.scheduling.prediction import DEFAULT_LINK, DecodeSpeed

PROMPT = (2, 100)


def views(topology, role, model):
    """The workers of a role as a request sees them."""
    usual, workers = topology.usual_speeds(model), topology.workers(model)
    prefill = usual.prefill if role == "prefill" else usual.local
    return getattr(workers, role).views(usual, prefill, PROMPT, topology.now_s())


def record(worker_id, **facts):
    """The record of a worker that has no address yet, so that nobody connects to it."""
    facts = {"kv_bytes_per_token": 100, "page_size": 16, "layout_fingerprint": "same", "tenants": ()} | facts
    facts = {"identity": f"weights={facts['layout_fingerprint']}", "incarnation": "0" * 32} | facts
    return WorkerRecord(
        id=worker_id,
        role="prefill" if worker_id.startswith("p") else "decode",
        pid=1,
        host="localhost",
        address="",
        started_unix_ns=0,
        state="starting",
        model="m",
        exact=True,
        max_sequence_tokens=1000,
        **facts,
    )


@pytest.fixture
async def make_topology():
    made = []

    def make(*records, **settings):
        topology = Topology(gateway_incarnation="1" * 32, on_change=lambda: None, **settings)
        made.append(topology)
        topology.take_membership(records)
        for member in topology.members():
            come_up(member, WorkerLoad(pages_total=100, pages_free=50))
        return topology

    yield make
    for topology in made:
        await topology.close()


def come_up(member, load):
    """Has the worker's session come up with this load."""
    member.session.is_up = True
    report(member, load)


def report(member, load):
    member.session.load = load
    if load.running:
        member.session._worked_at_s = asyncio.get_running_loop().time()
    member.session._on_change(member.session)


def lane_of(topology, tenant, bound_to=""):
    return topology.lane_of("m", Audience(tenant, "", bound_to))


def member_of(topology, worker_id):
    return next(member for member in topology.members() if member.record.id == worker_id)


async def test_a_view_follows_load_bookings_open_attempts_record_and_speeds(make_topology):
    topology = make_topology(record("d-0"), record("p-0"))
    member = member_of(topology, "d-0")

    def seen(*names):
        view = views(topology, "decode", "m")[0]
        return tuple(getattr(view, name) for name in names)

    assert seen("pages_available", "num_requests", "waiting_tokens", "region") == (50, 0, 0, "")
    report(member, WorkerLoad(pages_total=100, pages_free=20, pages_promised=5, running=3, waiting_tokens=7))
    assert seen("pages_available", "num_requests", "waiting_tokens", "num_running") == (15, 3, 7, 3)
    bookings = Bookings()
    bookings.enter(member.session.books, member.session.books, num_pages=4, prompt=PROMPT)
    assert seen("pages_available", "num_requests", "waiting_tokens") == (11, 3, 100)
    bookings.leave()
    assert seen("pages_available", "num_requests", "waiting_tokens") == (15, 3, 7)
    for number in range(5):
        member.session.open(("r", number), Mailbox(TokenLog(10 + number)))
    assert seen("num_requests", "steps_left") == (5, 14)
    member.record = msgspec.structs.replace(member.record, region="east")
    assert seen("region") == ("east",)
    fast = DecodeSpeed(1e-6, 1e-6, 1e-9)
    report(member, WorkerLoad(pages_total=100, pages_free=20, running=1, decode_speed=fast))
    topology._models.clear()
    assert seen("decode_speed") == (fast,)
    member.session._worked_at_s -= 2 * FRESH_S
    assert seen("num_running") == (1,)


async def test_a_view_has_the_links_of_its_worker_and_what_is_on_its_way(make_topology):
    topology = make_topology(record("d-0"), record("p-0"))
    member = member_of(topology, "p-0")

    def link(worker_id):
        return views(topology, "prefill", "m")[0].links.get(worker_id)

    assert link("d-0") is None
    slow, fast = PeerLink(0.001, 4e6, 1000), PeerLink(0.0021, 0.9e9)
    member.session.links = PeerLinks({"d-0": slow, "d-1": fast})
    assert link("d-0") == slow
    # As fast as is usual: of two that differ by chance one would get everything.
    assert link("d-1") == PeerLink(DEFAULT_LINK.latency_s, DEFAULT_LINK.bytes_per_s)
    bookings = Bookings()
    for worker_id, num_bytes, underway in (("d-0", 10, 1010), ("d-0", 5000, 6000), ("d-2", 7, 7)):
        bookings.enter(Books(), member.session.books, num_pages=1, prompt=PROMPT, handoff=(worker_id, num_bytes))
        assert link(worker_id).underway_bytes == underway
    bookings.leave()
    assert link("d-0") == slow
    assert link("d-2") is None


async def test_a_load_keeps_the_rotation_and_a_worker_that_leaves_ends_it(make_topology):
    topology = make_topology(record("d-0"), record("d-1"))
    before = topology.workers("m").decode
    report(member_of(topology, "d-0"), WorkerLoad(pages_total=100, pages_free=1))
    assert topology.workers("m").decode is before
    assert views(topology, "decode", "m")[0].pages_available == 1
    report(member_of(topology, "d-0"), WorkerLoad(pages_total=100, is_draining=True))
    assert views(topology, "decode", "m").worker_ids == ["d-1"]
    report(member_of(topology, "d-0"), WorkerLoad(pages_total=100))
    assert views(topology, "decode", "m").worker_ids == ["d-0", "d-1"]
    member = member_of(topology, "d-1")
    member.session.is_up = False
    member.session._on_change(member.session)
    assert views(topology, "decode", "m").worker_ids == ["d-0"]
    assert views(topology, "decode", "other").worker_ids == []


async def test_whoever_waits_hears_of_every_load(make_topology):
    topology = make_topology(record("d-0"))
    noted = []
    with topology.watched(lambda: noted.append(1)):
        for pages_free in range(3):
            report(member_of(topology, "d-0"), WorkerLoad(pages_total=100, pages_free=pages_free))
    assert len(noted) == 3


async def test_what_all_workers_have_in_common_follows_those_in_rotation(make_topology):
    topology = make_topology(
        record("d-0"), record("d-1", layout_fingerprint="other", page_size=32), record("p-0", kv_bytes_per_token=300)
    )
    assert topology.cache_layouts("m") == {("same", 16), ("other", 32)}
    assert not topology.is_uniform("m")
    assert topology.kv_bytes_per_token("m") == 300
    assert topology.max_sequence_tokens("m") == 1000
    report(member_of(topology, "d-1"), WorkerLoad(is_draining=True))
    assert topology.cache_layouts("m") == {("same", 16)}
    assert topology.is_uniform("m")
    assert (topology.kv_bytes_per_token("n"), topology.max_sequence_tokens("n")) == (0, None)


async def test_the_share_that_is_free_is_that_of_the_emptiest_worker_one_may_use(make_topology):
    topology = make_topology(record("d-0"), record("d-1", tenants=("t",)))
    lane = functools.partial(lane_of, topology)
    report(member_of(topology, "d-0"), WorkerLoad(pages_total=100, pages_free=10))
    report(member_of(topology, "d-1"), WorkerLoad(pages_total=100, pages_free=60, pages_cached=10))
    assert topology.free_share("m", Audience()) == 0.1
    assert topology.free_share("m", Audience("t")) == 0.7
    assert topology.free_share("n", Audience()) == 1.0
    assert (lane("t"), lane("u")) == (Audience("t"), Audience())
    topology.take_membership([record("d-0"), record("d-1", tenants=("u",))])
    # A worker without an address gets another session with each record.
    come_up(member_of(topology, "d-0"), WorkerLoad())
    assert (lane("t"), lane("u")) == (Audience(), Audience("u"))
    assert topology.open_ids("decode", "m", Audience("t")) == {"d-0"}


async def test_workers_of_a_strict_pool_are_open_to_its_requests_only(make_topology):
    pools = Pools([Pool("slow", ("batch",), rule="strict")])
    topology = make_topology(
        record("d-0"), record("d-1", pool="slow"), record("d-2", pool="slow", tenants=("t",)), pools=pools
    )
    open_to = functools.partial(topology.open_ids, "decode", "m")
    assert open_to(Audience()) == {"d-0"}
    assert open_to(Audience("t")) == {"d-0"}
    assert open_to(Audience(pool="slow")) == {"d-1"}
    assert open_to(Audience("t", "slow")) == {"d-1", "d-2"}
    assert topology.lane_of("m", Audience("u", "slow")) == Audience(pool="slow")


async def test_workers_elsewhere_are_closed_to_what_is_held_to_regions(make_topology):
    topology = make_topology(record("d-0", region="eu"), record("d-1", region="us"), record("d-2"))
    open_to = functools.partial(topology.open_ids, "decode", "m")

    def held(*regions, tenant=""):
        return Audience(tenant, regions=frozenset(regions))

    assert [open_to(held(*regions)) for regions in (["eu"], ["eu", "us"], ["ap"])] == [{"d-0"}, {"d-0", "d-1"}, set()]
    assert topology.lane_of("m", held("eu", "ap", tenant="t")) == held("eu")
    assert topology.lane_of("m", held("ap")) == topology.lane_of("m", held("mars")) == held()
    assert topology.lane_of("m", held("eu", "us", "")) == Audience(), "all may be used"
    assert topology.workers("m").decode.near_ids("eu") == {"d-0", "d-2"}
    assert [topology.workers("m").is_spread(region) for region in ("eu", "")] == [True, False]
    member_of(topology, "d-1").record = msgspec.structs.replace(member_of(topology, "d-1").record, state="ready")
    member_of(topology, "d-1").session.is_up = False
    topology._changed()
    assert [topology.is_away("decode", "m", audience=held(region)) for region in ("us", "eu")] == [True, False]
    assert not topology.workers("m").is_spread("eu")


async def test_weights_that_others_do_not_have_are_a_lane_of_their_own(make_topology):
    topology = make_topology(record("d-0"), record("d-1", tenants=("t",)))
    lane = functools.partial(lane_of, topology)
    same, other = record("d-0"), record("d-1", layout_fingerprint="other")
    assert (lane("u", same.identity_key), lane("t", same.identity_key)) == (Audience(), Audience("t"))
    topology.take_membership([same, other])
    for worker_id in ("d-0", "d-1"):
        come_up(member_of(topology, worker_id), WorkerLoad())
    assert len({lane("u"), lane("u", same.identity_key), lane("u", other.identity_key)}) == 3


DTYPES = ("weights=same dtype=bfloat16", "weights=same dtype=float32")


async def test_an_answer_goes_on_only_where_all_that_decides_its_tokens_is_the_same(make_topology):
    one, two = (record(f"d-{n}", identity=text) for n, text in enumerate(DTYPES))
    prefill = record("p-0", identity=DTYPES[0])
    topology = make_topology(one, two, prefill)
    assert topology.open_ids("decode", "m", Audience(bound_to=one.identity_key)) == {"d-0"}
    assert topology.open_ids("decode", "m", Audience()) == {"d-0", "d-1"}
    assert topology.prefill_ids("m", decode=member_of(topology, "d-0").session.peer) == ["p-0"]
    assert topology.prefill_ids("m", decode=member_of(topology, "d-1").session.peer) == []
    assert not topology.can_take_over("d-1", member_of(topology, "d-0").session.peer)
    assert not topology.is_uniform("m")
    assert [member.is_exact for member in topology.members()] == [False] * 3


async def test_who_allows_it_gets_answers_that_go_on_inexactly_and_are_told_so(make_topology):
    one, two = (record(f"d-{n}", identity=text) for n, text in enumerate(DTYPES))
    other_weights = record("d-2", identity="weights=other dtype=bfloat16", layout_fingerprint="other")
    topology = make_topology(one, two, other_weights, allows_inexact=True)
    assert topology.open_ids("decode", "m", Audience(bound_to=one.identity_key)) == {"d-0", "d-1"}
    assert topology.can_take_over("d-1", member_of(topology, "d-0").session.peer)
    assert not make_topology(one, allows_inexact=True).members()[0].is_exact
    assert make_topology(one).members()[0].is_exact


async def test_a_worker_that_does_not_say_what_it_computes_with_is_like_no_other(make_topology):
    """Two workers of an older version may differ in what neither of them says."""
    older = [record(f"d-{n}", identity="", incarnation=str(n) * 32) for n in range(2)]
    topology = make_topology(*older)
    assert topology.open_ids("decode", "m", Audience(bound_to=older[0].identity_key)) == {"d-0"}
    assert [member.is_exact for member in topology.members()] == [False] * 2
    assert not make_topology(older[0]).members()[0].is_exact


async def test_a_worker_that_is_left_out_is_in_no_rotation_and_said_once(make_topology, caplog):
    caplog.set_level("INFO")
    topology = make_topology(
        record("d-0"), record("d-1", max_running=1), judge=lambda one: "it is wrong" * one.max_running
    )
    wrong = member_of(topology, "d-1")
    assert (wrong.state, wrong.left_out) == ("left_out", "it is wrong")
    assert topology.open_ids("decode", "m", Audience()) == {"d-0"}
    topology.take_membership([record("d-0"), record("d-1", max_running=1)])
    wrong.session.is_up = False
    topology.take_membership([record("d-0")])
    said = [(line.message, line.worker) for line in caplog.records if "left out" in line.message]
    assert [worker for _, worker in said] == ["d-1", "d-1"]
    assert "has gone" in said[1][0]


async def test_who_vanished_is_missed_and_who_had_said_that_it_leaves_is_not(make_topology):
    topology = make_topology(record("d-0"), record("d-1"), record("d-2"), record("p-0"))
    report(member_of(topology, "d-1"), WorkerLoad(is_draining=True))
    topology.take_membership([record("d-0"), record("d-1"), msgspec.structs.replace(record("d-2"), state="draining")])
    report(member_of(topology, "d-1"), WorkerLoad())  # of a new session, which has said nothing yet
    for worker_id in ("d-0", "d-1", "d-2"):
        member_of(topology, worker_id).session.is_up = False
    topology.take_membership([])
    assert [gone.worker.id for gone in topology.presence.gone] == ["d-0"]
    topology.take_membership([record("d-0")])
    topology.look_for_missing()
    assert topology.presence.gone == []
    assert [member.record.id for member in topology.members()] == ["d-0", "p-0"]


async def test_a_worker_that_stays_after_all_is_missed_when_it_vanishes(make_topology):
    draining, ready = (msgspec.structs.replace(record("d-0"), state=state) for state in ("draining", "ready"))
    topology = make_topology(ready)
    for said in (draining, ready):
        topology.take_membership([said])
    member_of(topology, "d-0").session.is_up = False
    topology.take_membership([])
    assert [gone.worker.id for gone in topology.presence.gone] == ["d-0"]


async def test_a_worker_that_changes_its_role_is_another_member_and_not_missed(make_topology):
    before, other = (msgspec.structs.replace(record(name), state="ready") for name in ("d-0", "p-0"))
    topology = make_topology(before, other)
    assert topology.num_ready("decode") == 1
    topology.take_membership([msgspec.structs.replace(before, state="draining"), other])
    after = msgspec.structs.replace(before, role="prefill", incarnation="f" * 32, state="starting", address="")
    topology.take_membership([after, other])
    assert [(one.record.role, one.record.id) for one in topology.members()] == [
        ("decode", "d-0"),
        ("prefill", "d-0"),
        ("prefill", "p-0"),
    ], "the old session is still up"
    assert topology.num_ready("decode") == 0
    member_of(topology, "d-0").session.is_up = False
    topology.take_membership([msgspec.structs.replace(after, state="ready", address="h:1"), other])
    (member,) = [one for one in topology.members() if one.record.id == "d-0"]
    come_up(member, WorkerLoad(pages_total=100, pages_free=50))
    assert sorted(topology.rotation_ids("prefill", "m")) == ["d-0", "p-0"]
    topology.look_for_missing()
    assert topology.presence.gone == []


async def test_watchers_hear_that_something_is_wrong(make_topology):
    topology = make_topology(record("d-0"))
    noted = []
    with topology.watched(lambda: noted.append(1)):
        topology.tell_watchers()
    topology.tell_watchers()
    assert noted == [1]


async def test_a_pair_is_none_while_one_of_its_workers_has_another_model(make_topology):
    """Workers that models share change one after the other; the records of each life are told apart by incarnation."""
    small, large = {"layout_fingerprint": "small"}, {"layout_fingerprint": "large"}
    topology = make_topology(record("d-0", **small), record("p-0", **small))
    decode = member_of(topology, "d-0").session.peer
    assert topology.prefill_ids("m", decode=decode) == ["p-0"]
    changed = msgspec.structs.replace(record("p-0", incarnation="1" * 32, **large), model="n")
    topology.take_membership([record("d-0", **small), changed])
    come_up(member_of(topology, "p-0"), WorkerLoad(pages_total=100, pages_free=50))
    assert [topology.prefill_ids(model, decode=decode) for model in "mn"] == [[], []]
    assert (topology.rotation_ids("prefill", "n"), topology.rotation_ids("decode", "n")) == (["p-0"], [])
    also = msgspec.structs.replace(record("d-0", incarnation="1" * 32, **large), model="n")
    topology.take_membership([also, changed])
    for member in topology.members():
        come_up(member, WorkerLoad(pages_total=100, pages_free=50))
    now = member_of(topology, "d-0").session.peer
    assert [topology.prefill_ids(model, decode=now) for model in "mn"] == [[], ["p-0"]]


async def test_until_the_registry_has_been_read_there_may_be_workers(monkeypatch):
    topology = Topology(gateway_incarnation="1" * 32, on_change=lambda: None)
    try:
        topology.start()
        assert topology.is_away("decode", "m", audience=Audience())
        topology.take_membership([], is_stale=True)
        assert topology.is_away("decode", "m", audience=Audience()), "Redis says nothing yet"
        monkeypatch.setattr("gateway.topology.members.LEASE_TTL_S", 0.0)
        assert topology.is_away("decode", "m", audience=Audience()), "the gateway has just started"
        topology.settled_at_s = topology.now_s()
        assert not topology.is_away("decode", "m", audience=Audience()), "nobody waits longer than a lease lasts"
        monkeypatch.undo()
        topology.take_membership([])
        assert not topology.is_away("decode", "m", audience=Audience())
    finally:
        await topology.close()


async def test_leases_are_looked_up_of_connected_workers_that_are_quiet(make_topology, monkeypatch):
    topology = make_topology(record("p-0"), record("d-0"), record("d-1"))
    now_s = asyncio.get_running_loop().time()
    for worker_id, ago_s in (("p-0", -60), ("d-0", 60), ("d-1", 60)):
        come_up(member_of(topology, worker_id), WorkerLoad())
        member_of(topology, worker_id).session._heard_at_s = now_s - ago_s
    member_of(topology, "d-1").session.is_up = False
    assert list(topology.quiet_workers()) == ["d-0"]
    topology.take_renewals({"d-0": 0.5})
    assert topology._last_renewal_s("d-0") > topology._last_renewal_s("p-0") == -math.inf


async def test_whose_pages_fit_is_compared_once_for_each_identity(make_topology, monkeypatch):
    topology = make_topology(*(record(f"p-{n}") for n in range(20)), *(record(f"d-{n}") for n in range(20)))
    for member in topology.members():
        come_up(member, WorkerLoad())
    calls, may_go_on = [], topology.may_go_on
    monkeypatch.setattr(topology, "may_go_on", lambda began, here: calls.append(here) or may_go_on(began, here))
    for number in range(20):
        decode = member_of(topology, f"d-{number}").session.peer
        assert len(topology.prefill_ids("m", decode=decode)) == 20
    assert len(calls) == 20


async def test_the_order_of_workers_is_found_once_until_one_changes(make_topology):
    topology = make_topology(record("p-0"), record("d-0"))
    before = topology.members()
    before.clear()
    assert [member.record.id for member in topology.members()] == ["d-0", "p-0"]
    topology.take_membership([record("d-0"), record("d-1"), record("p-0")])
    assert [member.record.id for member in topology.members()] == ["d-0", "d-1", "p-0"]
