"""What all connections of a server hold together, and which one ends for a new one."""

from gateway.http.connections import Budget, Connection, Connections, connection_of, in_process_scope


class Link:
    """A connection that notes its end."""

    def __init__(self):
        self.is_aborted = False

    def abort(self):
        self.is_aborted = True


def entered(connections, num):
    links = [Link() for _ in range(num)]
    assert [connections.enter(link) for link in links] == [True] * num
    return links


def test_a_silent_connection_ends_before_one_between_two_requests():
    connections = Connections(2)
    older, silent = entered(connections, 2)
    connections.mark_busy(older)
    connections.mark_idle(older)
    assert connections.enter(Link())
    assert (silent.is_aborted, older.is_aborted) == (True, False)
    assert connections.num_ended == 1


def test_the_one_that_is_idle_longest_ends_first():
    connections = Connections(3)
    links = entered(connections, 3)
    for link in links:
        connections.mark_busy(link)
    for link in (links[1], links[0]):
        connections.mark_idle(link)
    for _ in range(2):
        (new,) = entered(connections, 1)
        connections.mark_busy(new)
    assert [link.is_aborted for link in links] == [True, True, False]


def test_where_all_are_busy_a_new_one_is_refused_and_still_counted_until_it_leaves():
    connections = Connections(1)
    (busy,) = entered(connections, 1)
    connections.mark_busy(busy)
    refused = Link()
    assert not connections.enter(refused)
    assert (connections.num_refused, connections.num_open) == (1, 2)
    connections.leave(refused)
    assert connections.num_open == 1
    connections.leave(busy)
    assert connections.enter(Link())


def test_a_busy_connection_is_never_ended():
    connections = Connections(1)
    (link,) = entered(connections, 1)
    connections.mark_busy(link)
    connections.mark_idle(link)
    connections.mark_busy(link)
    assert not connections.enter(Link())
    assert not link.is_aborted


def test_a_budget_is_taken_whole_or_not_at_all():
    budget = Budget(10)
    assert budget.take(7)
    assert not budget.take(4)
    assert budget.num_bytes == 7
    budget.give(7)
    assert budget.take(10)


def test_a_request_is_told_once_that_its_client_left():
    told = []
    connection = Connection()
    connection.lose()
    assert connection.is_lost
    connection.on_lost = lambda: told.append("left")
    connection.lose()
    assert told == ["left"]


def test_a_request_in_this_process_has_a_client_that_never_leaves():
    scope = in_process_scope("POST", "/v1/completions", [(b"a", b"b")])
    connection = connection_of(scope)
    assert (connection.is_lost, connection.can_write()) == (False, False)
    assert (scope["method"], scope["path"], scope["headers"]) == ("POST", "/v1/completions", [(b"a", b"b")])
