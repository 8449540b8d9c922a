import asyncio
import threading

import pytest

from services.runtime.errors import Overloaded
from services.structured import compiler
from services.structured.compiler import FormChecks, GrammarCompiler
from services.structured.form import AnswerForm
from services.structured.grammar import MAX_CACHED_GRAMMARS, Grammars, TooComplex, UnusableSchema
from tests.waiting import HANG_LIMIT_S

WAIT_S = HANG_LIMIT_S


class Gate:
    """Stands for `check_form`: counts, and does not end while it is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.begun: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, form: AnswerForm) -> None:
        self.begun.append(form.json_schema)
        self.threads.add(threading.get_ident())
        assert self.is_open.wait(WAIT_S)
        if form.json_schema == "wrong":
            raise UnusableSchema("it is wrong")


@pytest.fixture
def gate() -> Gate:
    return Gate()


async def test_good_schemas_are_compiled_once_and_beside_the_event_loop(gate: Gate) -> None:
    gate.is_open.set()
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    for _ in range(3):
        await checks.check(AnswerForm("good"))
        with pytest.raises(UnusableSchema, match="it is wrong"):
            await checks.check(AnswerForm("wrong"))
    assert gate.begun == ["good", "wrong", "wrong", "wrong"]
    assert threading.get_ident() not in gate.threads


async def test_only_so_many_are_remembered(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_KNOWN_FORMS", 2)
    gate.is_open.set()
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    for schema in ("a", "b", "a", "c", "a", "b"):
        await checks.check(AnswerForm(schema))
    assert gate.begun == ["a", "b", "c", "b"]


async def test_fewer_are_remembered_of_a_tenant_than_workers_keep_compiled(gate: Gate) -> None:
    gate.is_open.set()
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    await checks.check(AnswerForm("of another"), tenant="a")
    for n in range(MAX_CACHED_GRAMMARS):
        await checks.check(AnswerForm(f"{n}"), tenant="b")
    begun = len(gate.begun)
    await checks.check(AnswerForm("of another"), tenant="a")
    for n in range(MAX_CACHED_GRAMMARS - compiler.MAX_KNOWN_FORMS_OF_TENANT, MAX_CACHED_GRAMMARS):
        await checks.check(AnswerForm(f"{n}"), tenant="b")
    assert len(gate.begun) == begun
    await checks.check(AnswerForm("0"), tenant="b")
    assert len(gate.begun) == begun + 1


async def test_one_that_takes_too_long_is_refused_and_so_are_those_behind_it(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is little CPU time and much elapsed time, so that a thread gets the one within the other anywhere."""
    monkeypatch.setattr(compiler, "PATIENCE", 800)

    def check(form: AnswerForm) -> None:
        gate.begun.append(form.json_schema)
        while not gate.is_open.is_set():
            pass

    checks = FormChecks(check=check, timeout_s=0.005)
    try:
        asked = [checks.check(AnswerForm(f"slow {n}")) for n in range(compiler.NUM_THREADS + 1)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        # What had begun runs to its end, to nobody's use; what had not never begins.
        assert len(gate.begun) <= compiler.NUM_THREADS
        for n, result in enumerate(results):
            kind = TooComplex if f"slow {n}" in gate.begun else Overloaded
            assert type(result) is kind
            assert kind is Overloaded or result.code == "grammar_too_complex"
            assert kind is Overloaded or "0.005 s" in str(result)
    finally:
        gate.is_open.set()
    await FormChecks(check=gate, timeout_s=WAIT_S).check(AnswerForm("other"))
    assert any(type(result) is Overloaded for result in results)


async def test_one_that_gets_no_core_is_not_too_complex(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate takes no time of a core: as if other processes had them all."""
    monkeypatch.setattr(compiler, "PATIENCE", 3)
    with pytest.raises(Overloaded, match="too busy"):
        await FormChecks(check=gate, timeout_s=0.2).check(AnswerForm("usual"))
    gate.is_open.set()
    await FormChecks(check=gate, timeout_s=0.2).check(AnswerForm("usual"))


async def test_the_line_before_a_thread_moves_slowly_on_a_busy_machine(gate: Gate) -> None:
    checks, loop = FormChecks(check=gate, timeout_s=0.2), asyncio.get_running_loop()
    loop.call_later(0.6, gate.is_open.set)  # without a core until then
    await asyncio.gather(*(checks.check(AnswerForm(str(n))) for n in range(2 * compiler.NUM_THREADS)))


async def test_one_that_had_to_wait_has_its_whole_time(gate: Gate) -> None:
    """It waits for half of the limit and then takes a little more than the other half."""
    timeout_s, may_end = 4.0, threading.Event()

    def check(form: AnswerForm) -> None:
        gate(form)
        assert form.json_schema != "late" or may_end.wait(WAIT_S)

    checks, loop = FormChecks(check=check, timeout_s=timeout_s), asyncio.get_running_loop()
    before = [asyncio.create_task(checks.check(AnswerForm(str(n)))) for n in range(compiler.NUM_THREADS)]
    late = asyncio.create_task(checks.check(AnswerForm("late")))
    loop.call_later(timeout_s * 0.5, gate.is_open.set)
    loop.call_later(timeout_s * 1.05, may_end.set)
    await asyncio.gather(*before, late)
    assert gate.begun[-1] == "late"
    assert may_end.is_set()


async def test_there_is_a_limit_to_how_many_wait(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING_CHECKS", 3)
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    waiting = [asyncio.create_task(checks.check(AnswerForm(str(n)))) for n in range(3)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await checks.check(AnswerForm("one more"))
    finally:
        gate.is_open.set()
    await asyncio.gather(*waiting)
    await checks.check(AnswerForm("one more"))


async def test_a_tenants_dear_schemas_keep_nobody_elses_waiting(gate: Gate) -> None:
    def check(form: AnswerForm) -> None:
        if form.json_schema.startswith("dear"):
            gate(form)

    checks = FormChecks(check=check, timeout_s=WAIT_S)
    dear = [asyncio.create_task(checks.check(AnswerForm(f"dear {n}"), tenant="b")) for n in range(40)]
    try:
        await asyncio.sleep(0)
        for n in range(5):
            await asyncio.wait_for(checks.check(AnswerForm(f"usual {n}"), tenant="a"), WAIT_S / 2)
        assert len(gate.begun) < compiler.NUM_THREADS
    finally:
        gate.is_open.set()
    await asyncio.gather(*dear)
    assert len(gate.begun) == 40


async def test_a_tenants_waiting_schemas_leave_room_for_others(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING_CHECKS", 8)
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    waiting = [asyncio.create_task(checks.check(AnswerForm(f"b {n}"), tenant="b")) for n in range(2)]
    try:
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await checks.check(AnswerForm("one more"), tenant="b")
        waiting.append(asyncio.create_task(checks.check(AnswerForm("a"), tenant="a")))
        await asyncio.sleep(0)
        assert not waiting[-1].done()
    finally:
        gate.is_open.set()
    await asyncio.gather(*waiting)


async def test_tenants_take_turns(gate: Gate) -> None:
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    first = [asyncio.create_task(checks.check(AnswerForm(f"first {n}"), tenant=f"t{n}")) for n in range(2)]
    await asyncio.sleep(0)
    asked = [("b", "b 0"), ("b", "b 1"), ("b", "b 2"), ("a", "a 0"), ("a", "a 1")]
    later = []
    for tenant, schema in asked:
        later.append(asyncio.create_task(checks.check(AnswerForm(schema), tenant=tenant)))
        await asyncio.sleep(0)
    gate.is_open.set()
    await asyncio.gather(*first, *later)
    places = {schema: gate.begun.index(schema) for _, schema in asked}
    assert places["a 0"] < places["b 1"], "one of each tenant, and not all of the first one's"


async def test_a_caller_that_leaves_makes_room(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_WAITING_CHECKS", 1)
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    leaving = asyncio.create_task(checks.check(AnswerForm("left")))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gate.is_open.set()
    await checks.check(AnswerForm("next"))


async def test_what_a_caller_that_leaves_has_asked_for_never_begins(gate: Gate) -> None:
    checks = FormChecks(check=gate, timeout_s=WAIT_S)
    begun = [asyncio.create_task(checks.check(AnswerForm(f"begun {n}"))) for n in range(compiler.NUM_THREADS)]
    leaving = [asyncio.create_task(checks.check(AnswerForm(f"left {n}"))) for n in range(3)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    results = await asyncio.gather(*leaving, return_exceptions=True)
    assert {type(result) for result in results} == {asyncio.CancelledError}
    gate.is_open.set()
    await asyncio.gather(*begun)
    await checks.check(AnswerForm("next"))
    assert sorted(gate.begun) == ["begun 0", "begun 1", "next"]


async def test_grammars_are_made_beside_the_event_loop(grammars: Grammars) -> None:
    made = GrammarCompiler(grammars)
    state = await made.begin(AnswerForm('{"type":"null"}'), eos_token_ids=(1,))
    assert state.num_tokens == 0
    with pytest.raises(UnusableSchema, match="uniqueItems"):
        await made.begin(AnswerForm('{"type":"array","uniqueItems":true}'), eos_token_ids=(1,))
