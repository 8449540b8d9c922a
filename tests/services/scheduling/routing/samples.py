"""Workers and requests to route, small ones and drawn ones."""

from hypothesis import strategies as st

from services.scheduling.links import PeerLink, PeerLinks
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.router import Router
from services.scheduling.routing.views import RouteRequest, WorkerView


def view(worker_id, **facts):
    facts = {"num_requests": 0, "waiting_tokens": 0, "pages_available": 1000} | facts
    return WorkerView(worker_id, "0" * 32, 1000, max_sequence_tokens=10_000, **facts)


def request(**facts):
    return RouteRequest(**({"num_prompt_tokens": 1000, "max_new_tokens": 100, "kv_bytes_per_token": 100_000} | facts))


def decodes(routes):
    return [route.decode.worker_id for route in routes]


def prefills(route):
    return [worker.worker_id for worker in route.prefills]


VIEWS = st.builds(
    WorkerView,
    worker_id=st.just(""),
    incarnation=st.just("0"),
    pages_total=st.sampled_from([10, 100, 1000]),
    pages_available=st.integers(0, 1000),
    num_requests=st.integers(0, 40),
    waiting_tokens=st.one_of(st.just(0), st.integers(0, 50_000)),
    max_sequence_tokens=st.sampled_from([100, 3000, 10_000]),
    num_running=st.integers(0, 40),
    context_tokens=st.integers(0, 100_000),
    model=st.sampled_from(["", "m", "n"]),
    region=st.sampled_from(["", "east", "west"]),
    tenants=st.sampled_from([frozenset(), frozenset({"t"}), frozenset({"u", "v"})]),
    pool=st.sampled_from(["", "", "long"]),
    page_size=st.sampled_from([8, 16]),
    prefill_speed=st.builds(PrefillSpeed, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-7)),
    decode_speed=st.builds(DecodeSpeed, st.floats(0, 0.1), st.floats(0, 1e-3), st.floats(0, 1e-6)),
    link_speed=st.builds(LinkSpeed, st.floats(0, 0.1), st.floats(1e6, 1e11)),
    links=st.dictionaries(
        st.sampled_from([f"d{i}" for i in range(6)]),
        st.builds(PeerLink, st.floats(0, 0.1), st.floats(1e5, 1e11), st.one_of(st.just(0.0), st.floats(0, 1e9))),
        max_size=6,
    ).map(PeerLinks),
    queue_s=st.one_of(st.none(), st.floats(0, 100)),
)
ROLES = st.lists(VIEWS, max_size=6)


@st.composite
def cases(draw):
    """A request, prefill workers and decode workers; in half of the cases everybody can serve it."""
    ps = [worker.replaced(worker_id=f"p{i}") for i, worker in enumerate(draw(ROLES))]
    ds = [worker.replaced(worker_id=f"d{i}") for i, worker in enumerate(draw(ROLES))]
    if draw(st.booleans()):
        able = {"model": "m", "tenants": frozenset(), "pages_total": 1000, "max_sequence_tokens": 10_000}
        ps, ds = ([worker.replaced(**able) for worker in role] for role in (ps, ds))
    cached = {worker.worker_id: draw(st.integers(0, 250)) * 16 for worker in ps + ds if draw(st.booleans())}
    asked = RouteRequest(
        num_prompt_tokens=draw(st.integers(1, 4000)),
        max_new_tokens=draw(st.integers(0, 2000)),
        model=draw(st.sampled_from(["", "m"])),
        tenant=draw(st.sampled_from(["", "t", "x"])),
        region=draw(st.sampled_from(["", "east"])),
        pool=draw(st.sampled_from([None, "", "long"])),
        affinity_key=draw(st.sampled_from(["", "k"])),
        cached_tokens=cached,
        kv_bytes_per_token=draw(st.sampled_from([0, 1000, 1_000_000])),
    )
    return asked, ps, ds


def can_serve(worker, asked, num_tokens):
    return (
        worker.max_sequence_tokens >= num_tokens
        and worker.pages_total * worker.page_size >= num_tokens
        and asked.model in ("", worker.model)
        and (not worker.tenants or asked.tenant in worker.tenants)
    )


def hot_router(worker, **settings):
    """One that has sent everything to this worker so far, for what it has cached."""
    router = Router(settings=RoutingSettings(hot_min_hits=1, **settings))
    for _ in range(9):
        router._hits.note(worker.worker_id, 1.0)
    return router


def changed(views, index, **facts):
    return [*views[:index], views[index].replaced(**facts), *views[index + 1 :]]


def linked(worker_id, **links):
    return view(worker_id, links=PeerLinks({name: PeerLink(0.002, *link) for name, link in links.items()}))
