"""The workers of a running `tandem up`: which there are, and how their number changes. Knows no socket."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cli.children import AUTOSCALER, GATEWAY, ChildSpec, ModelPlan
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
        self._is_closed = False

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

    def sizes(self, model: str | None) -> dict[str, int]:
        """Returns how many workers of each role a model is to have. Raises ConfigError."""
        plan = self._plans[self._index(model)]
        return {"prefill": plan.num_prefill, "decode": plan.num_decode}

    def resize(self, model: str | None, *, prefill: int | None, decode: int | None) -> dict[str, list[str]]:
        """Sets how many workers a model is to have; None leaves a role. Starts those that are missing.

        Returns the names that were started, and those to be drained: the newest ones of a role. Raises ConfigError.
        """
        index = self._index(model)
        before = {spec.name for spec in self._make_specs(self._plans)}
        plan = self._plans[index]
        self._plans[index] = replace(
            plan,
            num_prefill=plan.num_prefill if prefill is None else prefill,
            num_decode=plan.num_decode if decode is None else decode,
        )
        wanted = {spec.name for spec in self._make_specs(self._plans)}
        return {"started": self._start_missing(), "drained": sorted((before - wanted) & self._workers())}

    def close(self) -> None:
        """Starts no workers from now on: everything ends."""
        self._is_closed = True

    async def retire(self, names: Sequence[str], *, grace_s: float) -> None:
        """Has workers finish what they run and end. One that is wanted again by then is started anew."""
        await self._supervisor.retire(names, grace_s=grace_s)
        self._start_missing()

    def _start_missing(self) -> list[str]:
        running = self._workers()
        missing = [spec for spec in self._make_specs(self._plans) if spec.name not in running]
        if not self._is_closed:
            self._supervisor.start(missing, is_vital=False)  # what serves already continues without them
        return [spec.name for spec in missing]

    def _index(self, model: str | None) -> int:
        names = [plan.name for plan in self._plans]
        if model is None and len(names) > 1:
            raise ConfigError(f"several models are served, so --model must name one of {', '.join(names)}")
        if model is not None and model not in names:
            raise ConfigError(f"no model {model!r:.100} is served; those are {', '.join(names)}")
        return 0 if model is None else names.index(model)

    def _workers(self) -> set[str]:
        return {name for name in self._supervisor.children if name not in (GATEWAY, AUTOSCALER)}
