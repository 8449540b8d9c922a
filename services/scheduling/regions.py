"""Where a request's data may be: the regions to which a tenant or a client holds it. Pure.

What is held is seen by no worker and no gateway of another region. Workers and gateways without a region are in none of
those that a rule names.
"""

from collections.abc import Collection

from services.runtime.errors import PermissionDenied

REGION = r"[A-Za-z0-9_.-]{1,64}"
MAX_REGIONS = 16

Residency = tuple[str, ...]
"""The regions in which data may be, in order; empty: all."""


def residency_of(regions: Collection[str]) -> Residency:
    """Returns the rule that these regions make, whatever their order."""
    return tuple(sorted(set(regions)))


def permits(residency: Residency, region: str) -> bool:
    """Returns whether data may be in a region; empty: in what has none."""
    return not residency or region in residency


def narrows(asked: Residency, rule: Residency) -> bool:
    """Returns whether what is asked for allows no region that the rule does not."""
    return not rule or (bool(asked) and set(asked) <= set(rule))


def named(residency: Residency) -> str:
    """Returns the regions of a rule in words, such as `the regions eu and us`."""
    *others, last = residency
    return f"the regions {', '.join(others)} and {last}" if others else f"the region {last}"


def check_residency(residency: Residency, region: str, *, held: str) -> None:
    """Raises PermissionDenied where data must not be in a gateway's region; `held` says by what it is held."""
    if not permits(residency, region):
        where = f"in the region {region}" if region else "in no region (--region)"
        raise PermissionDenied(
            f"the request's data is held to {named(residency)} ({held}), and this gateway is {where}",
            code="wrong_region",
        )
