"""What a scrape shows of connections and of the memory that requests take."""

import pytest

from gateway.http.bodies import Bodies
from gateway.http.connections import Connections
from gateway.http.metrics import HttpUse
from gateway.limits import MAX_BODY_BYTES
from services.runtime.errors import Overloaded


def shown(use):
    return {
        (sample.name, *sample.labels.values()): sample.value for metric in use.collect() for sample in metric.samples
    }


def test_a_scrape_shows_what_is_held_now_and_what_was_refused():
    connections, bodies = Connections(1), Bodies(MAX_BODY_BYTES)
    use = HttpUse(connections, bodies)
    connections.enter(idle := type("Link", (), {"abort": lambda self: None})())
    connections.enter(type("Link", (), {"abort": lambda self: None})())
    connections.leave(idle)
    connections.unread.take(3)
    connections.later.take(4)
    with bodies.claim("a", num_bytes=1000):
        with pytest.raises(Overloaded):
            bodies.claim("b", num_bytes=MAX_BODY_BYTES)
        figures = shown(use)
    assert figures["tandem_http_connections",] == 1
    assert figures["tandem_http_connections_cut_total", "idle"] == 1
    assert figures["tandem_http_connections_cut_total", "new"] == 0
    assert [figures["tandem_http_request_bytes", what] for what in ("bodies", "unread", "pipelined")] == [1000, 3, 4]
    assert [figures["tandem_body_refusals_total", whose] for whose in ("tenant", "all")] == [0, 1]
    assert shown(use)["tandem_http_request_bytes", "bodies"] == 0
