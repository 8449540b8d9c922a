"""Pools of workers: which one a request belongs to, by its class and its prompt's length, and which workers it may use.

Workers with the same label (`--pool`) are a pool, and those without one are the pool with the empty name. A request
belongs to the first pool of the operator's list whose conditions it meets, or to the unnamed one.

    strict      its requests use its workers only, and its workers take no others
    preferred   its requests go to its workers first, unless these are much busier, and its workers take others too

The unnamed pool is preferred, and so is a pool that workers name and the list does not: it has no requests of its own.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from services.runtime.errors import ConfigError

MAX_POOLS = 32
MAX_FILE_BYTES = 2**16
POOL_NAME = r"[A-Za-z0-9_.-]{1,64}"


class Audience(NamedTuple):
    """The requests that may use the same workers: those of a tenant, a pool, and an `identity_key`; empty: any.

    `regions` are those to which their data is held; None: it may be anywhere.
    """

    tenant: str = ""
    pool: str = ""
    bound_to: str = ""
    regions: frozenset[str] | None = None


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """Workers with one label, and their requests: of these classes (empty: of all), with prompts at least this long."""

    name: Annotated[str, Meta(pattern=rf"^{POOL_NAME}$(?!\n)")]
    classes: tuple[Literal["critical", "interactive", "normal", "low", "batch"], ...] = ()
    min_prompt_tokens: Annotated[int, Meta(ge=0)] = 0
    rule: Literal["strict", "preferred"] = "preferred"


class PoolsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The pools file."""

    pool: Annotated[tuple[Pool, ...], Meta(min_length=1, max_length=MAX_POOLS)]


class Pools:
    """The operator's list, in the order in which pools are tried. Raises ConfigError where one cannot be meant."""

    def __init__(self, pools: Sequence[Pool] = ()) -> None:
        self._pools = tuple(pools)
        self._strict = frozenset(pool.name for pool in pools if pool.rule == "strict")
        for number, pool in enumerate(pools):
            if not (pool.classes or pool.min_prompt_tokens):
                raise ConfigError(f"pool[{number}]: classes or min_prompt_tokens must say which requests are its own")
            if any(pool.name == other.name for other in pools[:number]):
                raise ConfigError(f"pool[{number}].name: {pool.name!r} is another pool's name")

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools)

    def __bool__(self) -> bool:
        return bool(self._pools)

    def of(self, service_class: str, num_prompt_tokens: int | None) -> str | None:
        """Returns the name of a request's pool. None: it depends on the length of the prompt, which is not known."""
        for pool in self._pools:
            if pool.classes and service_class not in pool.classes:
                continue
            if pool.min_prompt_tokens and num_prompt_tokens is None:
                return None
            if (num_prompt_tokens or 0) >= pool.min_prompt_tokens:
                return pool.name
        return ""

    def may_use(self, pool: str, label: str) -> bool:
        """Returns whether a pool's requests may go to a worker with this label."""
        return pool == label or not (pool in self._strict or label in self._strict)


NO_POOLS = Pools()
