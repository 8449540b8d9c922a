"""The workers of a running `tandem up`: which there are, how their number and their roles change. Knows no socket."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cli.children import AUTOSCALER, GATEWAY, ROLES, ChildSpec, ModelPlan, first_role, model_file, role_file
from cli.restarts import Phase
from cli.supervisor import Supervisor
from services.runtime.errors import ConfigError

LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Resized:
    """What became of an order: workers that begin, the new roles of those that change it, and those to be drained."""

    started: list[str]
    changed: dict[str, str]
    drained: list[str]


class Fleet:
    """Adds and drains workers, and changes their roles; the gateway finds and leaves them by itself.

    `make_specs` has the workers of all models for the plans that it is given. A worker's name is that of its first
    role; `roles` is the folder with a file for each that has another one now. `ready` returns the roles of the workers
    that take requests now, by name.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        plans: Sequence[ModelPlan],
        *,
        make_specs: Callable[[Sequence[ModelPlan]], Sequence[ChildSpec]],
        roles: Path,
        ready: Callable[[], Awaitable[Mapping[str, str]]],
    ) -> None:
        self._supervisor = supervisor
        self._plans = list(plans)
        self._make_specs = make_specs
        self._folder = roles
        self._ready = ready
        self._others: dict[str, str] = {}
        """The roles of workers that have another one than their first."""
        self._away: set[str] = set()
        """Workers of the plans that are not to run, though later ones of their first role are."""
        self._changing: set[str] = set()
        self._is_closed = False
        for file in (*roles.glob(role_file(roles, "*").name), *roles.glob(model_file(roles, "*").name)):
            file.unlink()  # an earlier run's

    def children(self) -> list[dict[str, Any]]:
        """All processes that are kept running, as JSON can have them."""
        return [
            {"name": child.name, "pid": child.pid, "phase": child.state.phase.value, "log": str(child.log)}
            for child in self._supervisor.children.values()
        ]

    async def drain(self, name: str, *, grace_s: float) -> None:
        """Has a worker finish what it runs, and starts it no more. Raises ConfigError for a name that no worker has."""
        self._check_runs(name)
        await self._supervisor.retire([name], grace_s=grace_s)

    @property
    def total_sizes(self) -> dict[str, int]:
        """How many workers of each role all models together are to have."""
        sizes = [self._sizes(plan) for plan in self._plans]
        return {role: sum(one[role] for one in sizes) for role in ROLES}

    def sizes(self, model: str | None) -> dict[str, int]:
        """Returns how many workers of each role a model is to have. Raises ConfigError."""
        return self._sizes(self._plans[self._index(model)])

    def resize(self, model: str | None, *, prefill: int | None, decode: int | None) -> Resized:
        """Sets how many workers a model is to have; None leaves a role. Starts those that are missing.

        Where one role has too many and the other too few, workers change their role. Otherwise the newest of a role
        are to be drained. `finish` sees to both. Raises ConfigError.
        """
        index = self._index(model)
        plan = self._plans[index]
        if plan.sharers:
            raise ConfigError(
                f"the workers of {plan.name} are shared by models: the models file says how many there are"
            )
        has = self._sizes(plan)
        more = {
            role: 0 if wanted is None else wanted - has[role]
            for role, wanted in zip(ROLES, (prefill, decode), strict=True)
        }
        changed: dict[str, str] = {}
        drained: list[str] = []
        for role, other in (ROLES, ROLES[::-1]):
            newest_first = self._newest_first(plan, role)
            num = max(0, min(-more[role], more[other])) if not plan.fixed else 0
            for name in newest_first[:num]:
                self._set_role(name, other)
            changed |= dict.fromkeys(newest_first[:num], other)
            more[role] += num
            more[other] -= num
            drained += newest_first[num : num + max(0, -more[role])]
        self._away |= set(drained)
        for role in ROLES:
            for _ in range(more[role]):
                plan = self._add(plan, role)
        self._plans[index] = self._trimmed(plan)
        return Resized(self._start_missing(), changed, sorted(set(drained) & self._workers()))

    async def finish(self, resized: Resized, *, grace_s: float) -> None:
        """Has workers finish what they run, and end or have another role. One that is wanted again is started anew.

        Raises ConfigError for one that does not change its role in the time.
        """
        changes = [self._until_changed(name, role, timeout_s=grace_s) for name, role in resized.changed.items()]
        await asyncio.gather(self._supervisor.retire(resized.drained, grace_s=grace_s), *changes)
        self._start_missing()

    async def change_role(self, name: str, role: str, *, timeout_s: float, is_forced: bool) -> bool:
        """Has a worker hand over or finish what it runs and take the other role. False: it has this one.

        Raises ConfigError for a worker that does not run here or cannot change its role now, for the last one of its
        role unless `is_forced`, and for one that is not done in the time, which keeps its role.
        """
        self._check_runs(name)
        plan = next((plan for plan in self._plans if name in self._members(plan)), None)
        if plan is None or self._supervisor.children[name].state.phase is Phase.STOPPING:
            raise ConfigError(f"{name} is ending")
        if plan.fixed:
            raise ConfigError(f"{name} {plan.fixed}: it cannot change its role")
        if name in self._changing:
            raise ConfigError(f"{name} is changing its role: wait until it has")
        before = self._role_of(name)
        if before == role:
            return False
        if self._sizes(plan)[before] == 1 and not is_forced:
            raise ConfigError(
                f"{name} is the only {before} worker of {plan.name}: --force changes its role all the same"
            )
        self._set_role(name, role)
        await self._until_changed(name, role, timeout_s=timeout_s)
        return True

    def close(self) -> None:
        """Starts no workers from now on: everything ends."""
        self._is_closed = True

    async def _until_changed(self, name: str, role: str, *, timeout_s: float) -> None:
        self._changing.add(name)
        try:
            async with asyncio.timeout(timeout_s):
                while (await self._ready()).get(name) != role:
                    if name not in self._supervisor.children or self._role_of(name) != role:
                        raise ConfigError(f"{name} was told otherwise before it was a {role} worker")
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            self._set_role(name, next(other for other in ROLES if other != role))
            raise ConfigError(
                f"{name} is no {role} worker after {timeout_s:g} s and keeps its role: it has requests that take "
                f"longer and no other worker takes over, or its log says why: {self._supervisor.children[name].log}"
            ) from None
        finally:
            self._changing.discard(name)

    def _members(self, plan: ModelPlan) -> dict[str, str]:
        """The roles of a model's workers by name, the oldest of each first role first."""
        names = [
            name
            for role, count in zip(ROLES, (plan.num_prefill, plan.num_decode), strict=True)
            for number in range(count)
            if (name := plan.worker_name(role, number)) not in self._away
        ]
        return {name: self._role_of(name) for name in names}

    def _sizes(self, plan: ModelPlan) -> dict[str, int]:
        counts = Counter(self._members(plan).values())
        return {role: counts[role] for role in ROLES}

    def _newest_first(self, plan: ModelPlan, role: str) -> list[str]:
        """A model's workers of a role: those that had the other one first, then the others, each latest first."""
        names = [name for name, now in reversed(self._members(plan).items()) if now == role]
        return sorted(names, key=lambda name: name not in self._others)

    def _add(self, plan: ModelPlan, role: str) -> ModelPlan:
        """The plan with one worker more of a role, which is one that was sent away or a new one."""
        count = f"num_{role}"
        names = [plan.worker_name(role, number) for number in range(getattr(plan, count) + 1)]
        name = next((name for name in names if name in self._away), names[-1])
        self._away.discard(name)
        self._set_role(name, role)
        return replace(plan, **{count: getattr(plan, count) + 1}) if name == names[-1] else plan

    def _trimmed(self, plan: ModelPlan) -> ModelPlan:
        """The plan without the workers that are away and later than all others of their first role."""
        for role in ROLES:
            count = getattr(plan, f"num_{role}")
            while count and (name := plan.worker_name(role, count - 1)) in self._away:
                self._away.discard(name)
                count -= 1
            plan = replace(plan, **{f"num_{role}": count})
        return plan

    def _role_of(self, name: str) -> str:
        return self._others.get(name, first_role(name))

    def _set_role(self, name: str, role: str) -> None:
        """Tells a worker, and whatever is started under its name, which role it is to have from now on."""
        file = role_file(self._folder, name)
        if role == first_role(name):
            self._others.pop(name, None)
            file.unlink(missing_ok=True)
        else:
            self._others[name] = role
            file.write_text(role)

    def _start_missing(self) -> list[str]:
        running = self._workers()
        missing = [
            spec for spec in self._make_specs(self._plans) if spec.name not in running and spec.name not in self._away
        ]
        if not self._is_closed:
            self._supervisor.start(missing, is_vital=False)  # what serves already continues without them
        return [spec.name for spec in missing]

    def _index(self, model: str | None) -> int:
        names = [plan.name for plan in self._plans]
        for plan in self._plans:
            model = plan.name if model in plan.sharers else model
        if model is None and len(names) > 1:
            raise ConfigError(f"several models are served, so --model must name one of {', '.join(names)}")
        if model is not None and model not in names:
            raise ConfigError(f"no model {model!r:.100} is served; those are {', '.join(names)}")
        return 0 if model is None else names.index(model)

    def _check_runs(self, name: str) -> None:
        workers = self._workers()
        if name not in workers:
            raise ConfigError(f"no worker {name!r:.100} runs here; those are {', '.join(sorted(workers)) or 'none'}")

    def _workers(self) -> set[str]:
        return {name for name in self._supervisor.children if name not in (GATEWAY, AUTOSCALER)}
