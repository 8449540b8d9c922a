"""The fair choice among work that waits, against queues in memory."""

from services.cluster.pending_work import ANYWHERE, MAX_BUSY, PAGE_TENANTS, claim_oldest


class Queues:
    """Tenants with one piece each, by queue, in the order of their time."""

    def __init__(self, **queues: list[str]) -> None:
        self.queues = {queue.replace("anywhere", ANYWHERE): tenants for queue, tenants in queues.items()}
        self.lost: set[str] = set()
        self.num_pages = 0

    async def claim(self, *, region: str = "us", busy: list[str] | None = None, full: list[str] | None = None) -> str:
        async def waiting(num_skipped: int) -> list[list[bytes]]:
            self.num_pages += 1
            pages = []
            for queue in (ANYWHERE, region):
                tenants = list(enumerate(self.queues.get(queue, [])))[num_skipped : num_skipped + PAGE_TENANTS]
                pages.append([value for at, tenant in tenants for value in (tenant.encode(), b"%d" % at)])
            return pages

        async def claim(queue: str, tenant: str) -> str | None:
            return None if tenant in self.lost else f"{queue}/{tenant}"

        busy, full = busy or [], full or []
        return await claim_oldest(waiting, claim, region=region, busy_tenants=busy, full_tenants=full) or ""


async def test_the_oldest_of_both_queues_is_claimed() -> None:
    queues = Queues(anywhere=["a", "c"], us=["b", "d"], eu=["e"])
    assert await queues.claim() == "*/a"
    assert await queues.claim(full=["a"]) == "us/b"
    assert await queues.claim(full=["a", "b"]) == "*/c"
    assert await queues.claim(full=["a", "b", "c", "d"]) == ""
    assert await queues.claim(region="eu", full=["a", "c"]) == "eu/e"


async def test_busy_tenants_come_last_and_in_order() -> None:
    queues = Queues(us=["a", "b", "c"])
    assert await queues.claim(busy=["a", "b"]) == "us/c"
    assert await queues.claim(busy=["c", "b"], full=["a"]) == "us/b"
    queues.lost = {"c", "a"}
    assert await queues.claim(busy=["a", "b"]) == "us/b"


async def test_all_pages_are_read_before_a_busy_tenant_is_served() -> None:
    tenants = [f"t{number}" for number in range(3 * PAGE_TENANTS)]
    queues = Queues(us=tenants)
    assert await queues.claim(full=tenants[:-1]) == f"us/{tenants[-1]}"
    assert queues.num_pages == 3
    assert await queues.claim(busy=tenants[:-1]) == f"us/{tenants[-1]}"
    assert await queues.claim(busy=tenants) == "us/t0"
    queues.lost = set(tenants[:MAX_BUSY])
    assert await queues.claim(busy=tenants) == "", "more than one gateway can work on are not tried"
