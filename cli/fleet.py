"""The workers of a running `tandem up`: which there are, and how their number changes. Knows no socket."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cli.children import GATEWAY, ChildSpec, ModelPlan
from cli.supervisor import Supervisor
from services.runtime.errors import ConfigError


class Fleet:
    """Adds and drains workers; the gateway finds and leaves them by itself.

    `make_specs` has the workers of all models for the plans that it is given.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        plans: Sequence[ModelPlan],
        *,
        make_specs: Callable[[Sequence[ModelPlan]], Sequence[ChildSpec]],
    ) -> None:
        self._supervisor = supervisor
        self._plans = list(plans)
        self._make_specs = make_specs

    def children(self) -> list[dict[str, Any]]:
        """All processes that are kept running, as JSON can have them."""
        return [
            {"name": child.name, "pid": child.pid, "phase": child.state.phase.value, "log": str(child.log)}
            for child in self._supervisor.children.values()
        ]

    async def drain(self, name: str, *, grace_s: float) -> None:
        """Has a worker finish what it runs, and starts it no more. Raises ConfigError for a name that no worker has."""
        workers = self._workers()
        if name not in workers:
            raise ConfigError(f"no worker {name!r:.100} runs here; those are {', '.join(sorted(workers)) or 'none'}")
        await self._supervisor.retire([name], grace_s=grace_s)

    async def scale(
        self, model: str | None, *, prefill: int | None, decode: int | None, grace_s: float
    ) -> dict[str, list[str]]:
        """Brings a model to these numbers of workers; None leaves a role. Returns the names started and drained.

        Those that are too many finish what they run first, the newest ones of a role. Raises ConfigError.
        """
        names = [plan.name for plan in self._plans]
        if model is None and len(names) > 1:
            raise ConfigError(f"several models are served, so --model must name one of {', '.join(names)}")
        if model is not None and model not in names:
            raise ConfigError(f"no model {model!r:.100} is served; those are {', '.join(names)}")
        index = 0 if model is None else names.index(model)
        before = {spec.name for spec in self._make_specs(self._plans)}
        plan = self._plans[index]
        self._plans[index] = replace(
            plan,
            num_prefill=plan.num_prefill if prefill is None else prefill,
            num_decode=plan.num_decode if decode is None else decode,
        )
        wanted = {spec.name: spec for spec in self._make_specs(self._plans)}
        running = self._workers()
        started = [spec for name, spec in wanted.items() if name not in running]
        self._supervisor.start(started)
        surplus = sorted(before - wanted.keys() & running)
        await self._supervisor.retire(surplus, grace_s=grace_s)
        return {"started": [spec.name for spec in started], "drained": surplus}

    def _workers(self) -> set[str]:
        return {name for name in self._supervisor.children if name != GATEWAY}
