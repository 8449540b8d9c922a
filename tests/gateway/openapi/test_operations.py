"""The table of operations: it has every route that is served, and no other."""

import re

from gateway.openapi.operations import OPERATIONS


async def test_it_has_every_route_and_no_other(system):
    served = {
        (re.sub(r":[a-z]+}", "}", route.path), method.lower())
        for route in system.gateway.api.routes
        for method in route.methods - {"HEAD"}
        if not is_part_of_a_page(route.path)
    }
    assert {(operation.path, operation.method) for operation in OPERATIONS} == served


def is_part_of_a_page(path: str) -> bool:
    """Whether it is a file of the dashboard, which is no API of anybody's, or the way from the slash to the page."""
    return path.startswith("/dashboard/") and (path.endswith("/") or "." in path.rpartition("/")[2])
