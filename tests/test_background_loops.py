"""Endless loops run under the root of `services.runtime.background_tasks`, which restarts them after an error.

An unexpected error ends a task of asyncio for good, and nothing shows it until its owner awaits the task. So each place
that creates a task whose coroutine may loop for ever is an error here, unless `OTHER_ROOTS` names what notices its end.
"""

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from tests.test_house import sources

CREATORS = {"create_task", "ensure_future", "begin_task", "run_coroutine_threadsafe"}
"""Functions whose first argument becomes a task."""
THE_ROOT = "services/runtime/background_tasks.py"

OTHER_ROOTS = {
    "cli/bench_load.py:Load.open_loop:self._one": "its task group raises the error",
    "cli/supervisor.py:Supervisor._spawn:self._watch": "`_keeper_ended` ends everything",
    "cli/supervisor.py:Supervisor.start:self._keep": "`_keeper_ended` ends everything",
    "cli/up.py:Up._until_over:?": "the function waits for it and raises its error",
    "cli/up.py:Up._until_over:self._stop.wait": "an event, which does not fail",
    "cli/up.py:Up._until_over:self._supervisor.gave_up.wait": "an event, which does not fail",
    "decode_worker/moves.py:Moves.on_hand_over:self._hand_over": "`_on_ended` fails the attempt",
    "decode_worker/worker.py:DecodeWorker._on_admit:self._begin_grammar": "`_on_grammar_made` fails the attempt",
    "gateway/assembly.py:Gateway.stop:self.batches.close": "the function awaits it",
    "gateway/batches/runner.py:BatchRun._answer_rows:self._ask_rows": "the function raises its error",
    "gateway/http/server.py:HttpServer._listen:self._server.serve": "`stop` awaits it",
    "gateway/named/requests.py:Journals._begin:self._generate": "it gives its error to its readers",
    "gateway/requests/fan_out.py:all_of:?": "the function raises its error",
    "gateway/requests/fan_out.py:merged:_close_when_done": "the function raises its error",
    "gateway/requests/fan_out.py:merged:_forward": "the function raises its error",
    "gateway/topology/session.py:WorkerSession._serve:self._write_commands": "it ends the session",
    "kv_transfer/link_retries.py:LinkRetries.failed:self._retry": "it logs its error, and the next request tries again",
    "kv_transfer/receive_link.py:ReceiveLink._begin_work:?": "`_on_work_ended` fails the Link",
    "kv_transfer/receive_link.py:ReceiveLink.start:?": "`_on_task_ended` fails the Link",
    "kv_transfer/send_link.py:SendLink.__init__:?": "`_on_task_ended` fails the Link",
    "kv_transfer/send_link.py:SendLink._on_poster_ended:self._close_call": "it runs once, after the Link has failed",
    "kv_transfer/sending.py:SendLinks._link_to:self._dial": "those who need the Link await it",
    "kv_transfer/sending.py:SendLinks._note_link:self._improve": "it runs once; without it the Link stays as it is",
    "prefill_worker/worker.py:PrefillWorker._take:self._serve": "it fails its attempt",
    "services/cluster/claimed_work.py:ClaimedWork._begin_one:run.run": "it catches everything, and its lease expires",
    "services/runtime/grpc_server.py:_Core._make_request_call_future:self._refuse_unknown": "the library awaits it",
    "tandem/llm.py:LLM._all:?": "its task group raises the error",
    "tandem/llm.py:LLM._run:?": "the function raises its error",
    "worker/engine_worker.py:EngineWorker.abort_transfer:transfer.abort": "`ended` fails the worker",
    "worker/engine_worker.py:EngineWorker.begin_task:?": "its callers are listed themselves",
    "worker/host.py:_Life._first_of:?": "the function raises its error, which ends the worker",
    "worker/host.py:load_or_stop:stop.wait": "an event, which does not fail",
    "worker/host.py:serve_until_drained:_publish_load": "`_Life._first_of` raises its error, which ends the worker",
    "worker/host.py:serve_until_drained:_tell_whether_found": "it writes two log lines and ends",
    "worker/host.py:serve_until_drained:_watch_engine": "`_Life._first_of` raises its error, which ends the worker",
    "worker/sessions.py:SessionServer.serve:self._read": "it ends the session",
}
"""Task (`file:function that creates it:coroutine`) → what notices its errors and acts on them."""


@dataclass
class Function:
    """An asynchronous function, and the asynchronous functions that it may run."""

    path: str
    class_name: str
    name: str
    has_loop: bool = False
    calls: set[tuple[str, str]] = field(default_factory=set)
    """(`self`, an empty string or another object's text; the function's name)."""


@dataclass
class Creation:
    """A place that creates a task. `run` is the called coroutine, or None for any other argument."""

    path: str
    within: str
    class_name: str
    run: tuple[str, str] | None
    text: str

    @property
    def key(self) -> str:
        return f"{self.path}:{self.within}:{self.text}"


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function without those of the functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
            yield from own_nodes(child)


def called(call: ast.Call) -> tuple[str, str] | None:
    """Returns the object and the name of what is called, or None for anything without a name."""
    match call.func:
        case ast.Name(name):
            return "", name
        case ast.Attribute(owner, name):
            return ast.unparse(owner), name
    return None


def may_loop(function: ast.AsyncFunctionDef) -> bool:
    """Returns whether a function has a loop whose number of rounds nothing in it bounds."""
    for node in own_nodes(function):
        if isinstance(node, ast.AsyncFor):
            return True
        if isinstance(node, ast.While) and any(
            isinstance(inner, ast.Await | ast.AsyncFor | ast.AsyncWith | ast.Yield) for inner in own_nodes(node)
        ):
            return True
    return False


class Program:
    """The asynchronous functions of some modules, and the places that create tasks."""

    def __init__(self, modules: Iterator[tuple[str, str]]) -> None:
        self.functions: dict[str, list[Function]] = {}
        self.creations: list[Creation] = []
        for path, text in modules:
            self._read(path, ast.parse(text), "", "")

    def _read(self, path: str, node: ast.AST, class_name: str, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._read(path, child, child.name, child.name)
                continue
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self._read(path, child, class_name, within)
                continue
            name = f"{within}.{child.name}".lstrip(".")
            calls = [call for call in own_nodes(child) if isinstance(call, ast.Call)]
            if isinstance(child, ast.AsyncFunctionDef):
                names = {known for call in calls if (known := called(call)) is not None}
                function = Function(path, class_name, child.name, may_loop(child), names)
                self.functions.setdefault(child.name, []).append(function)
            for call in calls:
                known = called(call)
                if known is not None and known[1] in CREATORS and call.args:
                    run = called(call.args[0]) if isinstance(call.args[0], ast.Call) else None
                    text = "?" if run is None else ".".join(filter(None, run))
                    self.creations.append(Creation(path, name, class_name, run, text))
            self._read(path, child, class_name, name)

    def unsupervised(self) -> Iterator[str]:
        """Yields the tasks that may loop for ever outside the root."""
        endless = self._endless()
        for creation in self.creations:
            runs = [] if creation.run is None else self._resolve(creation.path, creation.class_name, creation.run)
            # If the argument is no call, nothing here tells what runs.
            if creation.path != THE_ROOT and (creation.run is None or any(id(run) in endless for run in runs)):
                yield creation.key

    def _endless(self) -> set[int]:
        """Returns the functions that have an unbounded loop, or may run one that has."""
        callers: dict[int, list[Function]] = {}
        left = []
        for function in itertools.chain.from_iterable(self.functions.values()):
            if function.has_loop:
                left.append(function)
            for call in function.calls:
                for other in self._resolve(function.path, function.class_name, call):
                    callers.setdefault(id(other), []).append(function)
        endless: set[int] = set()
        while left:
            function = left.pop()
            if id(function) not in endless:
                endless.add(id(function))
                left += callers.get(id(function), [])
        return endless

    def _resolve(self, path: str, class_name: str, call: tuple[str, str]) -> list[Function]:
        """Returns the functions that a call may mean: those of the class or module, or else all of that name."""
        owner, name = call
        found = self.functions.get(name, [])
        if owner == "self":
            return [one for one in found if (one.path, one.class_name) == (path, class_name)] or found
        if not owner:
            found = [one for one in found if not one.class_name]
            return [one for one in found if one.path == path] or found
        return found


def test_no_endless_loop_runs_outside_the_root() -> None:
    found = set(Program(sources()).unsupervised())
    unsupervised = sorted(found - OTHER_ROOTS.keys())
    assert not unsupervised, (
        "these tasks may loop for ever, and an unexpected error ends them unnoticed; start them with "
        "services.runtime.background_tasks.supervise, or name in OTHER_ROOTS what notices their end:\n"
        + "\n".join(unsupervised)
    )
    assert not sorted(OTHER_ROOTS.keys() - found), "these entries of OTHER_ROOTS name no such task any longer"


SUPERVISED = """
from services.runtime.background_tasks import supervise

class Look:
    def start(self):
        self._task = supervise(self._follow, name="look")

    async def _follow(self):
        while True:
            await asyncio.sleep(1)
"""
LOOPS = {
    "while True": "while True:\n            await asyncio.sleep(1)",
    "until it is closed": "while not self._is_closed:\n            await asyncio.sleep(1)",
    "an endless iterator": "async for _ in self.changes():\n            self.note()",
    "in a block": "async with self._lock:\n            while True:\n                await asyncio.sleep(1)",
    "in another method": "await self._begin()",
    "in another object": "await self._writer.write_on()",
}
ELSEWHERE = """
class Writer:
    async def write_on(self):
        while True:
            await self.flush()
"""


def unsupervised(*texts: str) -> list[str]:
    return list(Program(iter([(f"gateway/m{number}.py", text) for number, text in enumerate(texts)])).unsupervised())


def test_a_supervised_loop_is_no_finding() -> None:
    assert unsupervised(SUPERVISED) == []


@pytest.mark.parametrize("create", ["asyncio.create_task({})", "loop.create_task({}, name='x')", "begin_task({})"])
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_each_kind_of_loop_outside_the_root_is_found(loop: str, create: str) -> None:
    text = f"""
class Look:
    def start(self):
        self._task = {create.format("self._follow()")}

    async def _follow(self):
        {loop}

    async def _begin(self):
        await forever()

async def forever():
    while True:
        await asyncio.sleep(1)
"""
    assert unsupervised(text, ELSEWHERE) == ["gateway/m0.py:Look.start:self._follow"]


def test_a_task_that_ends_by_itself_is_no_finding() -> None:
    text = """
class Look:
    def start(self):
        self._task = asyncio.create_task(self._once())

    async def _once(self):
        for name in self.names:
            await self.note(name)
"""
    assert unsupervised(text) == []


def test_a_task_whose_coroutine_is_not_known_is_found() -> None:
    assert unsupervised("def start(run):\n    asyncio.create_task(run)\n") == ["gateway/m0.py:start:?"]
