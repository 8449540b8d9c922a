"""Bodies of requests until they are done with: what they may take together and by tenant; long ones beside the loop.

Both APIs claim from one `Bodies`, on the event loop. Knows neither HTTP nor gRPC.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from gateway.limits import MAX_BODY_BYTES
from services.runtime.errors import Overloaded, RateLimited, RequestCancelled

LONG_BODY_BYTES = 256 * 1024
"""The longest body that the event loop reads itself: 8 MiB of empty objects would hold up all streams for 1 s."""
SMALL_BODY_BYTES = 64 * 1024
"""A claim up to this size may take from the reserve."""
RESERVE_PART = 8
"""One part in this many of all memory is the reserve for small bodies."""
TENANT_PART = 4
"""A tenant may have one part in this many of the reserve and, where no setting says otherwise, of the rest."""
RETRY_AFTER_S = 1.0

T = TypeVar("T")


class Bodies:
    """All bodies that are being received, read or worked on; together they have at most `max_bytes`.

    An eighth of them is a reserve for small bodies, so that long ones never keep them out. A tenant has at most
    `tenant_bytes` of the rest (not given: a quarter, and always enough for one body) and a quarter of the reserve.
    The tenant with the empty name, which everybody is where no keys are asked for, has no share of its own.
    """

    def __init__(self, max_bytes: int, *, tenant_bytes: int | None = None) -> None:
        self.num_refused: Counter[str] = Counter()
        """Claims that found no room, by "tenant" or "all"."""
        reserve_bytes = min(max_bytes // RESERVE_PART, max(0, max_bytes - MAX_BODY_BYTES))
        rest_bytes = max_bytes - reserve_bytes
        if tenant_bytes is None:
            tenant_bytes = rest_bytes // TENANT_PART
        self._rest = _Pool(rest_bytes, max(tenant_bytes, MAX_BODY_BYTES))
        self._reserve = _Pool(reserve_bytes, reserve_bytes // TENANT_PART)
        self._long = asyncio.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes that are claimed now."""
        return self._rest.num_bytes + self._reserve.num_bytes

    @property
    def tenant_bytes(self) -> int:
        """The most that one tenant's long bodies may have."""
        return self._rest.tenant_bytes

    def claim(self, tenant: str = "", *, num_bytes: int = 0) -> "Claim":
        """Returns the claim of one body, to be released by leaving its scope or by `Claim.release`.

        Raises RateLimited for bytes beyond the tenant's share and Overloaded for those beyond that of all.
        """
        claim = Claim(self, tenant)
        if num_bytes:
            claim.add(num_bytes)
        return claim

    async def take(
        self, receive: Callable[["Claim"], Awaitable[bytes]], read: Callable[[bytes], T], *, tenant: str = ""
    ) -> T:
        """Returns what `read` makes of the body that `receive` gets. The memory is free again when `read` is over."""
        with self.claim(tenant) as claim:
            return await self.read(claim, receive, read)

    async def read(
        self, claim: "Claim", receive: Callable[["Claim"], Awaitable[bytes]], read: Callable[[bytes], T]
    ) -> T:
        """Returns what `read` makes of the body, and a claim that the caller keeps, such as until texts are tokens.

        `receive` adds the bytes to the claim as they come, which raises for those that find no room. What a client
        announces takes none: it may never come. Raises RequestCancelled for a long body whose client has left before
        its turn came.
        """
        body = await receive(claim)
        if len(body) <= LONG_BODY_BYTES:
            return read(body)
        # One at a time: several threads would take the interpreter from the event loop in turns.
        async with self._long:
            if claim.is_given_up():
                raise RequestCancelled("the client left")
            return await asyncio.to_thread(read, body)

    def _move(self, claim: "Claim", num_bytes: int) -> None:
        """Makes a claim have this many bytes. Raises RateLimited or Overloaded, and then it has what it had."""
        held = claim.num_bytes
        pool = self._reserve if claim.is_small else self._rest
        if claim.is_small and num_bytes <= SMALL_BODY_BYTES and pool.grow(claim.tenant, num_bytes - held) is None:
            return
        if not claim.is_small or held == 0:
            # What has found no room in the reserve once stays in the rest: the reserve is for others then.
            refusal = self._rest.grow(claim.tenant, num_bytes - held)
        else:
            refusal = self._rest.grow(claim.tenant, num_bytes)
            if refusal is None:
                self._reserve.shrink(claim.tenant, held)
        if refusal is not None:
            self.num_refused[refusal] += 1
            raise self._refusal(refusal)
        claim.is_small = False

    def _release(self, claim: "Claim") -> None:
        (self._reserve if claim.is_small else self._rest).shrink(claim.tenant, claim.num_bytes)

    def _refusal(self, whose: str) -> RateLimited | Overloaded:
        if whose == "tenant":
            return RateLimited(
                f"the requests that this tenant is sending take the {self._rest.tenant_bytes} bytes that a tenant may",
                retry_after_s=RETRY_AFTER_S,
                limit="body_memory",
            )
        return Overloaded("the bodies of requests that are being sent take all the memory that they may")


def _never() -> bool:
    return False


class Claim:
    """Bytes that one body holds. It is a scope, and may be kept beyond the body's reading until `release`."""

    __slots__ = ("_bodies", "is_given_up", "is_small", "num_bytes", "tenant")

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self.tenant = tenant
        self.num_bytes = 0
        self.is_small = True
        """Whether its bytes are in the reserve; `Bodies` decides."""
        self.is_given_up: Callable[[], bool] = _never
        """Whether its client has left, so that nobody waits for what is made of the body."""
        self._bodies = bodies

    def add(self, num_bytes: int) -> None:
        """Claims more. Raises RateLimited beyond the tenant's share, Overloaded beyond that of all."""
        self._bodies._move(self, self.num_bytes + num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives all of it back; a second time does nothing."""
        if self.num_bytes:
            self._bodies._release(self)
            self.num_bytes = 0
            self.is_small = True

    def __enter__(self) -> "Claim":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class _Pool:
    """Memory of which all have at most `max_bytes` and each tenant with a name at most `tenant_bytes`."""

    def __init__(self, max_bytes: int, tenant_bytes: int) -> None:
        self.num_bytes = 0
        self.tenant_bytes = min(max_bytes, tenant_bytes)
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, int] = {}

    def grow(self, tenant: str, num_bytes: int) -> str | None:
        """Takes memory and returns None, or returns whose share is used up: "tenant" or "all"."""
        if self.num_bytes + num_bytes > self._max_bytes:
            return "all"
        if tenant:
            held = self._by_tenant.get(tenant, 0) + num_bytes
            if held > self.tenant_bytes:
                return "tenant"
            self._by_tenant[tenant] = held
        self.num_bytes += num_bytes
        return None

    def shrink(self, tenant: str, num_bytes: int) -> None:
        """Gives memory back."""
        self.num_bytes -= num_bytes
        if tenant:
            held = self._by_tenant.get(tenant, 0) - num_bytes
            if held > 0:
                self._by_tenant[tenant] = held
            else:
                self._by_tenant.pop(tenant, None)
