"""Has forms of answers compiled on threads of their own, so that no event loop and no engine waits for it.

Knows neither requests nor workers.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from services.runtime.answer_form import AnswerForm
from services.runtime.errors import Overloaded
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
MAX_KNOWN_FORMS = 256
_LOOK_AGAIN_S = 0.01

T = TypeVar("T")


class FormChecks:
    """Whether forms can be served, by compiling them; for one event loop.

    Those that were found good are remembered, so that an application that always sends the same one pays once.
    """

    def __init__(self, *, check: Callable[[AnswerForm], None] = check_form, timeout_s: float = CHECK_TIMEOUT_S) -> None:
        self._check = check
        self._timeout_s = timeout_s
        self._threads = _Threads("schema-check")
        self._good: OrderedDict[AnswerForm, None] = OrderedDict()
        self._written: OrderedDict[str, str] = OrderedDict()
        self._num_waiting = 0

    async def check(self, form: AnswerForm) -> None:
        """Return if it can be served.

        Raises:
            UnusableSchema: it cannot, or not within the time limit, which is TooComplex.
            Overloaded: too many others are being checked, or other work has the cores.
        """
        if form in self._good:
            self._good.move_to_end(form)
            return
        await self._run_in_turn(lambda: self._check(form))
        self._good[form] = None
        if len(self._good) > MAX_KNOWN_FORMS:
            self._good.popitem(last=False)

    async def written(self, asked: str) -> str:
        """As `services.structured.grammar_text.lark_of`, beside the event loop; raises what `check` does too."""
        if not asked.startswith("%"):
            return asked
        known = self._written.get(asked)
        if known is None:
            known = self._written[asked] = await self._run_in_turn(lambda: lark_of(asked))
            if len(self._written) > MAX_KNOWN_FORMS:
                self._written.popitem(last=False)
        self._written.move_to_end(asked)
        return known

    async def _run_in_turn(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= MAX_WAITING_CHECKS:
            raise Overloaded("too many schemas are being checked", retry_after_s=self._timeout_s)
        self._num_waiting += 1
        try:
            return await self._run(work)
        finally:
            self._num_waiting -= 1

    async def _run(self, work: Callable[[], T]) -> T:
        check = _Check(work)
        checking = asyncio.wrap_future(self._threads.submit(check))
        try:
            await asyncio.wait((checking,), timeout=self._timeout_s)
            if not check.has_begun:
                raise Overloaded("too many schemas are being checked", retry_after_s=self._timeout_s)
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
            # A thread cannot be interrupted: what has begun goes on to its own limits, and nobody waits. What has not
            # is taken back, also where the caller leaves.
            checking.cancel()


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
    def has_begun(self) -> bool:
        return self._begun_s is not None

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
        """As `Grammars.begin`, without blocking; whoever waits has a deadline."""
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
