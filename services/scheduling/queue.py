"""The order in which requests get their turn: bounded, strictly by class, by one of four strategies within it. Pure.

Every strategy gives an entry one number when it comes, its rank, that never changes while it waits; the smallest goes
first, and of equal ones the first that came. Most ranks come in order already, all of them or those of one level or
tenant: such entries form runs, and the heap of a class holds the first of each run. Entries that came out of order
since the last turn are sorted into one more run at the next; only the first few of them, for which a run would cost
more, go into the heap themselves. An entry that leaves early stays as a shell until it comes up or shells outnumber the
living.

| strategy | rank |
|---|---|
| `fcfs` | place: arrival + PASSED_TIMES · time of its prompt, at most MAX_PASSED_S |
| `priority` | place − level · ageing_s: a level is worth `ageing_s` of waiting, and no entry starves |
| `sla` | when its turn is due: the least slack goes first, since slack shrinks equally fast for all |
| `fair` | start tag of start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) by tenant, in tokens over weight |

So a short prompt goes before long ones that came a little earlier, and none that came more than MAX_PASSED_S after a
long one does. `fair` counts tokens, and keeps the order of each tenant.

Where more comes than can be served, some turns come too late for what their class is promised, and served in order they
would make the next ones late too: computed for nothing. So an entry that is late already (`yield_late`) goes behind all
others of its class. Its turn comes while none of them waits; a new entry does not count it as work ahead.

A turn is due at the deadline less the service time, or when the client's target for the first token says so. Where a
client said neither, it is due UNSAID_S after its place: among such entries the order is that of `fcfs`.
"""

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from operator import itemgetter

from services.scheduling.entry import UNSAID_S, QueueEntry, ServiceClass

SHELLS_KEPT = 64
"""A heap is cleared of shells when it has more of them than this and than living entries."""
MAX_RUNS = 64
"""Levels of one class with a run of their own; all further levels share one run."""
MAX_LOOSE = 8
"""Entries out of order, of those that came since the last turn, that go into the heap without a run."""
STRATEGIES = ("fcfs", "priority", "sla", "fair")


class QueueFull(Exception):
    """The queue has no room, and no request of a lower class could make room."""


@dataclass(slots=True)
class _Account:
    """A tenant's use of one class, in tokens over weight, on the class's virtual clock."""

    charged_to: float = 0.0
    """Where its next entry starts, unless that is in the past."""
    last_start: float = 0.0
    """The last start tag: a tenant's entries keep their order, even where one of them left and was not charged."""
    run: "_Run" = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting entries of one class, those that are late or the others."""

    num_waiting: int = 0
    tokens: int = 0
    prompts_s: float = 0.0
    heap: "list[_Item]" = field(default_factory=list)
    num_shells: int = 0
    run: "_Run" = field(default_factory=deque)
    runs: "dict[int, _Run]" = field(default_factory=dict)
    """Runs by level."""
    strays: "_Run" = field(default_factory=deque)
    """Entries that came out of order since the last turn, which is when they are sorted and become a run."""
    num_loose: int = 0
    """Entries that came out of order since the last turn and are in the heap already."""
    youngest: "list[_Item]" = field(default_factory=list)
    """Filed items, the youngest last; shells and items that had their turn are among them."""
    virtual_time: float = 0.0
    accounts: dict[str, _Account] = field(default_factory=dict)
    prune_accounts_at: int = SHELLS_KEPT

    def clear(self) -> None:
        """Forgets everything once no entry waits: all tenants start anew as equals."""
        self.heap.clear()
        self.run.clear()
        self.runs.clear()
        self.strays.clear()
        self.num_loose = 0
        self.num_shells = 0
        self.prompts_s = 0.0  # additions and subtractions of floats leave something
        self.youngest.clear()
        self.virtual_time = 0.0
        self.accounts.clear()

    def sort_strays(self) -> None:
        """Makes a run of the entries that came out of order since the last turn."""
        self.num_loose = 0
        if self.strays:
            ordered = sorted(self.strays, key=_RANK)
            self.strays.clear()
            self.strays.extend(ordered)
            heappush(self.heap, ordered[0])
            self.strays = deque()


_RANK = itemgetter(0)
_Item = tuple[float, int, QueueEntry, _Lane, "_Run | None"]
"""Rank, number in order of coming (below zero: it came back), entry, class, and run.

Its identity tells a living item from a shell.
"""
_Run = deque[_Item]


class RequestQueue:
    """All waiting requests of one gateway, at most `max_waiting`. Costs O(log n) in and out, O(1) to leave early.

    A full queue pushes out the youngest of the lowest class rather than refuse one of a higher class. Resumed
    requests, whose clients have part of the answer already, go before everybody, are never pushed out, come in beyond
    the bound, and do not expire.

    `ageing_s` is what one level counts for in strategy `priority`. `tenant_weights` are shares in strategy `fair`; a
    tenant that is not in it has weight 1.
    """

    def __init__(
        self,
        *,
        strategy: str = "fcfs",
        max_waiting: int,
        ageing_s: float = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"there is no strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
        if not (0 <= ageing_s < inf and all(weight > 0 for weight in (tenant_weights or {}).values())):
            raise ValueError(
                "ageing_s must be a number of seconds and not negative, and weights of tenants must be positive"
            )
        ranked = {"fcfs": self._by_place, "priority": self._by_priority, "sla": self._by_slack, "fair": self._by_share}
        self._ranked = ranked[strategy]
        self._is_fcfs = strategy == "fcfs"
        self._is_fair = strategy == "fair"
        self._max_waiting = max_waiting
        self._ageing_s = ageing_s
        self._weights = {} if tenant_weights is None else tenant_weights  # no copy: it is read live, and may change
        self._resumed = _Lane()
        self._classes = tuple(_Lane() for _ in ServiceClass)
        self._late = tuple(_Lane() for _ in ServiceClass)
        self._lanes = (self._resumed, *(lane for pair in zip(self._classes, self._late, strict=True) for lane in pair))
        self._waiting: dict[Hashable, _Item] = {}
        """All waiting entries, in order of coming."""
        self._num_pushed = 0
        self._num_pushed_back = 0
        self._num_filed = 0
        """Entries with a higher number are not yet among the youngest or in order of deadlines; most never will be."""
        self._latest_starts: list[tuple[float, int, bool, _Item]] = []
        """A heap by `latest_start_s`; an item that was put behind the others is in it beside its shell."""
        self._promises: list[tuple[float, int, _Item]] = []
        """A heap by `promised_s` of the entries that have not yielded."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def max_waiting(self) -> int:
        """The bound, which only resumed requests may exceed."""
        return self._max_waiting

    def __contains__(self, key: Hashable) -> bool:
        return key in self._waiting

    @property
    def num_waiting_by_class(self) -> dict[ServiceClass, int]:
        """Entries of each class, resumed ones included."""
        counts = {one: self._classes[one].num_waiting + self._late[one].num_waiting for one in ServiceClass}
        for item in self._waiting.values() if self._resumed.num_waiting else ():
            if item[3] is self._resumed:
                counts[item[2].service_class] += 1
        return counts

    def waiting_tokens(self, service_class: ServiceClass) -> int:
        """Returns the tokens before a new entry of this class: of its class, higher ones and resumed requests.

        Late ones of its class are behind it.
        """
        return sum(lane.tokens for lane in self._lanes[: 2 * service_class + 2]) if self._waiting else 0

    def waiting_prompts_s(self, service_class: ServiceClass) -> float:
        """Returns the time that the prompts before a new entry of this class take, one after the other."""
        return sum(lane.prompts_s for lane in self._lanes[: 2 * service_class + 2]) if self._waiting else 0.0

    def num_ahead(self, service_class: ServiceClass) -> int:
        """Returns how many entries go before a new one of this class: its class, higher ones and resumed ones."""
        return sum(lane.num_waiting for lane in self._lanes[: 2 * service_class + 2]) if self._waiting else 0

    def push(self, entry: QueueEntry, *, is_resumed: bool = False) -> QueueEntry | None:
        """Lets an entry wait. Returns the entry that had to leave for it, if any.

        Raises QueueFull, and ValueError for a key that waits already or times that are not numbers.
        """
        waiting = self._waiting
        key = entry.key
        if key in waiting:
            raise ValueError(f"{key!r} waits already")
        place_s = entry.place_s if entry.prompt_s else entry.arrived_s
        if not entry.deadline_s - entry.service_s - place_s <= inf:
            raise ValueError(f"the times of {key!r} are not numbers")
        pushed_out = None
        if is_resumed:
            lane = self._resumed
            rank, run = entry.arrived_s, lane.run
        else:
            if len(waiting) >= self._max_waiting:
                pushed_out = self._push_out(entry.service_class)
            lane = self._classes[entry.service_class]
            rank, run = (place_s, lane.run) if self._is_fcfs else self._ranked(lane, entry, place_s)
        self._num_pushed = number = self._num_pushed + 1
        item: _Item
        if not run:
            waiting[key] = item = (rank, number, entry, lane, run)
            run.append(item)
            heappush(lane.heap, item)
        elif rank >= run[-1][0]:
            waiting[key] = item = (rank, number, entry, lane, run)
            run.append(item)
        elif lane.num_loose < MAX_LOOSE:
            lane.num_loose += 1
            waiting[key] = item = (rank, number, entry, lane, None)
            heappush(lane.heap, item)
        else:
            waiting[key] = item = (rank, number, entry, lane, lane.strays)
            lane.strays.append(item)
        lane.num_waiting += 1
        lane.tokens += entry.cost_tokens
        lane.prompts_s += entry.prompt_s
        return pushed_out

    def peek(self) -> QueueEntry | None:
        """Returns the entry whose turn is next; None: no entry waits."""
        for lane in self._lanes:
            if lane.num_waiting:
                lane.sort_strays()
                while not self._is_living(lane.heap[0]):
                    _drop_first_shell(lane)
                return lane.heap[0][2]
        return None

    def pop(self) -> QueueEntry:
        """Takes out the entry whose turn it is. Raises IndexError if no entry waits."""
        waiting = self._waiting
        for lane in self._lanes:
            if lane.num_waiting:
                if lane.num_loose:
                    lane.sort_strays()
                heap = lane.heap
                while True:
                    item = heap[0]
                    run = item[4]
                    if run is None:
                        heappop(heap)
                    else:
                        run.popleft()
                        if run:  # the next one steps forward
                            heapreplace(heap, run[0])
                        else:
                            heappop(heap)
                    entry = item[2]
                    key = entry.key
                    if not lane.num_shells or waiting.get(key) is item:
                        break
                    lane.num_shells -= 1
                del waiting[key]
                lane.num_waiting -= 1
                lane.tokens -= entry.cost_tokens
                lane.prompts_s -= entry.prompt_s
                lane.virtual_time = item[0]
                if not lane.num_waiting:
                    lane.clear()
                return entry
        raise IndexError("nobody waits")

    def push_back(self, entry: QueueEntry, *, is_resumed: bool = False) -> None:
        """Undoes a `pop`: the entry waits again, before others of its rank, even beyond the bound."""
        self._file()
        lane = self._resumed if is_resumed else self._classes[entry.service_class]
        if self._is_fair and not is_resumed:
            rank = lane.virtual_time  # The clock stands at the start tag of the entry whose turn it was.
        else:
            rank = entry.arrived_s if is_resumed else self._ranked(lane, entry, entry.place_s)[0]
        self._num_pushed_back += 1
        item: _Item = (rank, -self._num_pushed_back, entry, lane, None)
        self._waiting[entry.key] = item
        self._file_item(item)
        self._enter(lane, item)

    def remove(self, key: Hashable) -> QueueEntry | None:
        """Takes out an entry that leaves early; its tenant is not charged for it. None: it does not wait."""
        item = self._waiting.pop(key, None)
        if item is None:
            return None
        self._leave(item)
        entry = item[2]
        account = item[3].accounts.get(entry.tenant)
        if account is not None:
            account.charged_to -= self._share(entry)
        return entry

    def expire(self, now_s: float) -> list[QueueEntry]:
        """Takes out entries that would end after their deadlines if their turn came now, the most urgent first."""
        self._file()
        expired = []
        while self._latest_starts and self._latest_starts[0][0] < now_s:
            item = heappop(self._latest_starts)[3]
            if self._is_living(item):
                self.remove(item[2].key)
                expired.append(item[2])
        return expired

    def yield_late(self, now_s: float) -> list[QueueEntry]:
        """Puts entries whose turn comes too late behind the others of their class, and returns them, each only once.

        Strategy `fair` does not: there a tenant's entries keep their order.
        """
        if self._is_fair or not self._waiting:
            return []
        self._file()
        yielded = []
        while self._promises and self._promises[0][0] < now_s:
            item = heappop(self._promises)[2]
            if self._is_living(item):
                self._put_behind(item)
                yielded.append(item[2])
        return yielded

    def has_yielded(self, key: Hashable) -> bool:
        """Returns whether a waiting entry is behind the others of its class, since it is late."""
        item = self._waiting[key]
        return item[3] is self._late[item[2].service_class]

    def _put_behind(self, item: _Item) -> None:
        rank, number, entry, _, _ = item
        late = self._late[entry.service_class]
        moved: _Item = (rank, number, entry, late, None)
        self._waiting[entry.key] = moved  # the same place in the order of coming
        self._leave(item)
        self._enter(late, moved)
        insort(late.youngest, moved, key=_number)
        if entry.deadline_s < inf:
            heappush(self._latest_starts, (entry.latest_start_s, number, True, moved))

    @staticmethod
    def _enter(lane: _Lane, item: _Item) -> None:
        """Counts an item that is in no run."""
        heappush(lane.heap, item)
        lane.num_waiting += 1
        lane.tokens += item[2].cost_tokens
        lane.prompts_s += item[2].prompt_s

    def _leave(self, item: _Item) -> None:
        """Makes an item a shell."""
        entry, lane = item[2], item[3]
        lane.num_waiting -= 1
        lane.tokens -= entry.cost_tokens
        lane.prompts_s -= entry.prompt_s
        lane.num_shells += 1
        if not lane.num_waiting:
            lane.clear()
        elif lane.num_shells > lane.num_waiting + SHELLS_KEPT:
            self._clear_of_shells(lane)

    def _push_out(self, service_class: ServiceClass) -> QueueEntry:
        self._file()
        for lane in self._lanes[: 2 * service_class + 2 : -1]:
            while lane.youngest:
                item = lane.youngest.pop()
                if self._is_living(item):
                    self.remove(item[2].key)
                    return item[2]
        raise QueueFull(f"{len(self)} requests wait, none of them of a lower class")

    def _clear_of_shells(self, lane: _Lane) -> None:
        lane.sort_strays()
        heap: list[_Item] = []
        for item in lane.heap:
            run = item[4]
            if run is None:
                heap += self._living((item,))
            else:
                living = tuple(self._living(run))
                run.clear()
                run.extend(living)
                heap += living[:1]
        heapify(heap)
        lane.heap = heap
        lane.num_shells = 0

    def _is_living(self, item: _Item) -> bool:
        return self._waiting.get(item[2].key) is item

    def _living(self, items: Iterable[_Item]) -> Iterable[_Item]:
        return filter(self._is_living, items)

    def _file(self) -> None:
        """Puts the entries that came since the last call and still wait in order of age and of the latest start."""
        new = []
        for item in reversed(self._waiting.values()):
            if item[1] <= self._num_filed:
                break
            new.append(item)
        self._num_filed = self._num_pushed
        for item in reversed(new):
            self._file_item(item)
        heap = self._latest_starts
        if len(heap) > 2 * len(self) + SHELLS_KEPT:
            self._latest_starts = [filed for filed in heap if self._is_living(filed[3])]
            heapify(self._latest_starts)
        if len(self._promises) > 2 * len(self) + SHELLS_KEPT:
            self._promises = [filed for filed in self._promises if self._is_living(filed[2])]
            heapify(self._promises)
        for lane in self._lanes[1:]:
            if len(lane.youngest) > 2 * lane.num_waiting + SHELLS_KEPT:
                lane.youngest = list(self._living(lane.youngest))

    def _file_item(self, item: _Item) -> None:
        _, number, entry, lane, _ = item
        if lane is not self._resumed:
            lane.youngest.append(item)
            if entry.deadline_s < inf:
                heappush(self._latest_starts, (entry.latest_start_s, number, False, item))
            if entry.promised_s < inf and number > 0:  # an entry that came back keeps its place
                heappush(self._promises, (entry.promised_s, number, item))

    def _share(self, entry: QueueEntry) -> float:
        return entry.cost_tokens / self._weights.get(entry.tenant, 1.0)

    # Each returns the rank of an entry that comes, and the run at whose end it may stand.

    def _by_place(self, lane: _Lane, entry: QueueEntry, place_s: float) -> tuple[float, _Run]:
        return place_s, lane.run

    def _by_slack(self, lane: _Lane, entry: QueueEntry, place_s: float) -> tuple[float, _Run]:
        due_s = entry.due_s
        if due_s is None:
            due_s = entry.deadline_s - entry.service_s
        return due_s if due_s < inf else place_s + UNSAID_S, lane.run

    def _by_priority(self, lane: _Lane, entry: QueueEntry, place_s: float) -> tuple[float, _Run]:
        level = entry.level
        run = lane.runs.get(level)
        if run is None:
            run = lane.run
            if len(lane.runs) < MAX_RUNS:
                run = lane.runs[level] = deque()
        return place_s - level * self._ageing_s, run

    def _by_share(self, lane: _Lane, entry: QueueEntry, place_s: float) -> tuple[float, _Run]:
        """The rank is the start tag: where the tenant's earlier entries end, but never in the past."""
        tenant = entry.tenant
        account = lane.accounts.get(tenant)
        if account is None:
            account = _new_account(lane, tenant)
        start = account.charged_to
        if start < lane.virtual_time:
            start = lane.virtual_time
        account.charged_to = start + entry.cost_tokens / self._weights.get(tenant, 1.0)
        if start > account.last_start:
            account.last_start = start
            return start, account.run
        return account.last_start, account.run


def _number(item: _Item) -> int:
    return item[1]


def _new_account(lane: _Lane, tenant: str) -> _Account:
    """Opens an account. Where many tenants come and go, accounts with nothing left to their charge are dropped."""
    if len(lane.accounts) >= lane.prune_accounts_at:
        now = lane.virtual_time
        for other, account in list(lane.accounts.items()):
            if account.charged_to <= now and account.last_start <= now:
                del lane.accounts[other]
        lane.prune_accounts_at = 2 * len(lane.accounts) + SHELLS_KEPT
    account = lane.accounts[tenant] = _Account()
    return account


def _drop_first_shell(lane: _Lane) -> None:
    run = heappop(lane.heap)[4]
    if run is not None:
        run.popleft()
        if run:
            heappush(lane.heap, run[0])
    lane.num_shells -= 1
