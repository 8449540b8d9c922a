"""Has forms of answers compiled on threads of their own, so that no event loop and no engine waits for it.

Knows neither requests nor workers.
"""

import asyncio
import contextlib
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from services.runtime.errors import Overloaded
from services.structured.form import AnswerForm
from services.structured.grammar import Grammars, GrammarState, TooComplex, check_form
from services.structured.grammar_text import lark_of

NUM_THREADS = 2
CHECK_TIMEOUT_S = 0.5
"""Usual schemas take a millisecond. The limits of `services.structured.cost` and of the grammar library end the
compilation of any other about here on an idle core, which is why threads do: they cannot be killed as a process can,
but start at once and cost nothing where no schema is checked. Counted is the time on a core: where others have the
cores it may take `PATIENCE` times as long, and is nobody's fault after that."""
PATIENCE = 8
MAX_WAITING_CHECKS = 256
TENANT_PART = 4
"""A tenant with a name may have one part in this many of them, so that others' find room."""
MAX_KNOWN_FORMS = 256
MAX_KNOWN_FORMS_OF_TENANT = 16
"""Half of what a worker keeps compiled (`grammar.MAX_CACHED_GRAMMARS`): with more of them that are known here, and so
cost nothing here, one tenant could have workers compile all the time."""
_LOOK_AGAIN_S = 0.01

T = TypeVar("T")


class FormChecks:
    """Whether forms can be served, by compiling them; for one event loop.

    Those that were found good are remembered, so that an application that always sends the same one pays once. Tenants
    take turns, and one with a name never has all threads: its dear forms keep nobody else's waiting.
    """

    def __init__(self, *, check: Callable[[AnswerForm], None] = check_form, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._threads = _Threads("schema-check")
        self._places = _Places(NUM_THREADS)
        self._good: OrderedDict[tuple[str, AnswerForm], None] = OrderedDict()
        """Forms that were found good, by tenant, the last used behind."""
        self._written: OrderedDict[str, str] = OrderedDict()

    async def check(self, form: AnswerForm, *, tenant: str = "") -> None:
        """Return if it can be served.

        Raises:
            UnusableSchema: it cannot, or not within the time limit, which is TooComplex.
            Overloaded: too many others, or too many of this tenant, are being checked, or other work has the cores.
        """
        key = (tenant, form)
        if key in self._good:
            self._good.move_to_end(key)
            return
        await self._run(lambda: self._check(form), tenant)
        self._good[key] = None
        own = [other for other in self._good if other[0] == tenant] if tenant else []
        if len(own) > MAX_KNOWN_FORMS_OF_TENANT:
            del self._good[own[0]]
        elif len(self._good) > MAX_KNOWN_FORMS:
            self._good.popitem(last=False)

    async def written(self, asked: str, *, tenant: str = "") -> str:
        """As `services.structured.grammar_text.lark_of`, beside the event loop; raises what `check` does too."""
        if not asked.startswith("%"):
            return asked
        known = self._written.get(asked)
        if known is None:
            known = self._written[asked] = await self._run(lambda: lark_of(asked), tenant)
            if len(self._written) > MAX_KNOWN_FORMS:
                self._written.popitem(last=False)
        self._written.move_to_end(asked)
        return known

    async def _run(self, work: Callable[[], T], tenant: str) -> T:
        # As long as a check may take: on a busy machine a line of usual schemas moves slowly too.
        if not await self._places.take(tenant, timeout_s=PATIENCE * self._timeout_s):
            raise Overloaded("too many schemas are being checked", retry_after_s=self._timeout_s)
        check, loop = _Check(work), asyncio.get_running_loop()
        beginning = self._threads.submit(check)
        # A thread cannot be interrupted: what has begun runs to its own limits and keeps its place until then, and
        # nobody waits.
        beginning.add_done_callback(lambda _: _call_on(loop, self._places.give_back, tenant))
        checking = asyncio.wrap_future(beginning)
        try:
            give_up_s = time.monotonic() + PATIENCE * self._timeout_s
            while not checking.done():
                left_s = self._timeout_s - check.spent_s
                if left_s <= 0:
                    raise TooComplex(f"it takes longer than {self._timeout_s:g} s to compile")
                if time.monotonic() > give_up_s:
                    raise Overloaded("this machine is too busy to check schemas", retry_after_s=self._timeout_s)
                await asyncio.wait((checking,), timeout=max(left_s, _LOOK_AGAIN_S))
            return checking.result()
        finally:
            checking.cancel()


def _call_on(loop: asyncio.AbstractEventLoop, call: Callable[[str], None], tenant: str) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(call, tenant)


class _Places:
    """Who may use a thread: tenants in turn, and in turn of their coming within one."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the one whose turn is next first."""

    async def take(self, tenant: str, *, timeout_s: float) -> bool:
        """Wait for a place; False: too many wait, or none came free."""
        num_own = self._held[tenant] + len(self._waiting.get(tenant, ()))
        if self._held.total() + sum(map(len, self._waiting.values())) >= MAX_WAITING_CHECKS:
            return False
        if tenant and num_own >= max(1, MAX_WAITING_CHECKS // TENANT_PART):
            return False
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        self._call_next()
        try:
            await asyncio.wait((turn,), timeout=timeout_s)
        except BaseException:
            if turn.done():
                self.give_back(tenant)
            raise
        finally:
            if not turn.done():
                turn.cancel()
                self._leave_line(tenant, turn)
        return not turn.cancelled()

    def give_back(self, tenant: str) -> None:
        """The thread is free."""
        self._held[tenant] -= 1
        self._held += Counter()  # without those that hold none
        self._call_next()

    def _leave_line(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        line = self._waiting[tenant]
        line.remove(turn)
        if not line:
            del self._waiting[tenant]

    def _call_next(self) -> None:
        while (tenant := next(filter(self._may_have, self._waiting), None)) is not None:
            line = self._waiting.pop(tenant)
            self._held[tenant] += 1
            line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line  # behind all others

    def _may_have(self, tenant: str) -> bool:
        most = self._num_places if not tenant else max(1, self._num_places - 1)
        return self._held.total() < self._num_places and self._held[tenant] < most


class _Check(Generic[T]):
    """One check, for a thread to run, and how long it has had a core."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._clock = time.CLOCK_MONOTONIC
        self._begun_s: float | None = None

    def __call__(self) -> T:
        if hasattr(time, "pthread_getcpuclockid"):  # not everywhere
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._begun_s = time.clock_gettime(self._clock)
        return self._work()

    @property
    def spent_s(self) -> float:
        """Until now, as long as it runs."""
        return 0.0 if self._begun_s is None else time.clock_gettime(self._clock) - self._begun_s


class GrammarCompiler:
    """Makes the grammars of sequences; for one event loop."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = _Threads("grammar")

    async def begin(
        self, form: AnswerForm, *, eos_token_ids: Sequence[int], token_ids: Sequence[int] = ()
    ) -> GrammarState:
        """As `Grammars.begin`, without blocking; the caller has a deadline."""
        beginning = self._threads.submit(
            lambda: self._grammars.begin(form, eos_token_ids=eos_token_ids, token_ids=token_ids)
        )
        return await asyncio.wrap_future(beginning)


class _Threads:
    """A few threads that are started when there is something to do for the first time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, run: Callable[[], T]) -> "Future[T]":
        if self._executor is None:
            self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix=self._name)
        return self._executor.submit(run)
