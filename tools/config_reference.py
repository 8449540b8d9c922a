#!/usr/bin/env python3
"""Writes docs/configuration.md: every setting of every program, from the classes that read them.

usage: tools/config_reference.py [--check]      (--check: exit status 1 if the file is not what would be written)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cli.autoscaler import ReplayDecisionsSettings  # noqa: E402
from cli.bench import BenchSettings  # noqa: E402
from cli.chat import ChatSettings  # noqa: E402
from cli.completion import CompletionSettings  # noqa: E402
from cli.doctor import DoctorSettings  # noqa: E402
from cli.drain import DrainSettings  # noqa: E402
from cli.keys import CheckKeysSettings, NewKeySettings, TenantSettings  # noqa: E402
from cli.logs import LogsSettings  # noqa: E402
from cli.models import ModelsSettings  # noqa: E402
from cli.plan import PlanSettings  # noqa: E402
from cli.probe import ProbeSettings  # noqa: E402
from cli.profile import ProfileSettings  # noqa: E402
from cli.replay import ReplaySettings  # noqa: E402
from cli.role import RoleSettings  # noqa: E402
from cli.scale import ScaleSettings  # noqa: E402
from cli.status import StatusSettings  # noqa: E402
from cli.top import TopSettings  # noqa: E402
from cli.up_settings import UpSettings  # noqa: E402
from cli.where import WhereSettings  # noqa: E402
from decode_worker.config import DecodeWorkerConfig  # noqa: E402 - the path comes first
from dual_worker.config import DualWorkerConfig  # noqa: E402
from gateway.config import GatewayConfig  # noqa: E402
from planning.autoscaler.config import AutoscalerConfig  # noqa: E402
from prefill_worker.config import PrefillWorkerConfig  # noqa: E402
from services.runtime.config import Setting, forwarded_of, settings_of  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
PROGRAMS: dict[str, type[Any]] = {
    "tandem up": UpSettings,
    "python -m gateway": GatewayConfig,
    "python -m prefill_worker": PrefillWorkerConfig,
    "python -m decode_worker": DecodeWorkerConfig,
    "python -m dual_worker": DualWorkerConfig,
    "python -m planning.autoscaler": AutoscalerConfig,
    "tandem scale": ScaleSettings,
    "tandem role": RoleSettings,
    "tandem drain": DrainSettings,
    "tandem logs": LogsSettings,
    "tandem status": StatusSettings,
    "tandem where": WhereSettings,
    "tandem top": TopSettings,
    "tandem chat": ChatSettings,
    "tandem bench": BenchSettings,
    "tandem doctor": DoctorSettings,
    "tandem probe": ProbeSettings,
    "tandem models": ModelsSettings,
    "tandem keys new": NewKeySettings,
    "tandem keys tenant": TenantSettings,
    "tandem keys check": CheckKeysSettings,
    "tandem autoscaler replay": ReplayDecisionsSettings,
    "tandem profile": ProfileSettings,
    "tandem plan": PlanSettings,
    "tandem replay": ReplaySettings,
    "tandem completion": CompletionSettings,
}
HEAD = """# Configuration

Every setting of every program. A flag wins over the environment variable, that over the file of settings, and that over
the default; an empty variable counts as not given. A setting that is true or false is a flag without a value: `--pin`,
and `--no-pin` for false. A value that breaks its rule ends the program with exit code 2 and says which. Among other
variables our code heeds `CXX` (compiler of the CPU kernels), `XDG_CACHE_HOME` (where they are kept), `XDG_RUNTIME_DIR`
(where `tandem up` listens for `tandem scale`, `role`, `drain` and `logs`), `NO_COLOR` and `NCCL_HOSTID`.

Commands of `tandem` read `tandem.toml` in the current folder, or the file that `--config` or `TANDEM_CONFIG` names. It
has a table for each command, with a line for each setting, as its flag is called; `tandem serve` has those of `[up]`,
and commands that ask a gateway find the one of `[up]` where their own table has no `url`:

```toml
[up]
model = "models/Llama-3.2-1B-Instruct"
decode = 2
kv-memory = "4GiB"
pin = false
api-keys = "keys.toml"

[status]
url = "https://tandem.example"
```

This page is written by `tools/config_reference.py` from the code; a test compares them.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name, config_class) for name, config_class in PROGRAMS.items())])


def _section(name: str, config_class: type[Any]) -> str:
    bases = {other: base for other, base in PROGRAMS.items() if base in config_class.__mro__[1:]}
    inherited = {setting.name for base in bases.values() for setting in settings_of(base)}
    rows = [
        f"| {_names(setting)} | {_default(setting)} | {_cell(setting.help)} | {_cell(setting.kind.rule)} |"
        for setting in settings_of(config_class)
        if setting.name not in inherited
    ]
    head = ["| setting | default | what it does | rule |", "| --- | --- | --- | --- |"]
    words = " ".join((config_class.__doc__ or "").split())
    if bases:
        words += f" It takes all settings of {' and '.join(f'`{other}`' for other in bases)}, and these:"
    return "\n".join([f"## {name}", "", words, "", *head, *rows, "", *_forwarded(config_class)])


def _forwarded(config_class: type[Any]) -> list[str]:
    """The settings that a program passes on to others, in whose sections they are explained."""
    lines = []
    for name, settings in forwarded_of(config_class).items():
        names = ", ".join(f"`{setting.flag or setting.variable}`" for setting in settings)
        lines.append(f"- settings of {name}: {names}")
    if not lines:
        return []
    intro = "It takes settings of the programs that it starts too, and gives each program those that it has:"
    return [intro, "", *lines, ""]


def _names(setting: Setting) -> str:
    return "<br>".join(
        f"`{name}`" for name in (setting.flag, "" if setting.kind.is_positional else setting.variable) if name
    )


def _default(setting: Setting) -> str:
    words = "required" if setting.is_required else setting.default_text.removeprefix(f"{ROOT}/")
    return words if setting.is_required or not words else f"`{_cell(words)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    """Writes or compares."""
    text = page()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
