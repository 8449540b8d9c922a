"""LoRA adapters of a model, and models, as settings name them: what clients call each, and its folder."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from services.runtime.engines import NATIVE
from services.runtime.errors import ConfigError
from services.runtime.kinds import Kind

MAX_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,255}")


def folders_by_name() -> Kind[Mapping[str, Path]]:
    """The folder of each adapter, or model, by its name."""

    def parse(value: str) -> Mapping[str, Path]:
        pairs = [item.partition("=")[::2] for item in value.split(",")]
        found = {name: Path(folder).expanduser() for name, folder in pairs if _NAME.fullmatch(name) and folder}
        if "\0" in value or len(found) != len(pairs) or len(found) > MAX_ADAPTERS:
            raise ValueError
        return found

    rule = f"NAME=DIR with a name of its own; at most {MAX_ADAPTERS}, in one flag each or with commas between them"
    return Kind(parse, rule, metavar="NAME=DIR", is_list=True)


def write_folders(folders: Mapping[str, Path]) -> str:
    """Returns the text that becomes these folders by name."""
    return ",".join(f"{name}={folder}" for name, folder in folders.items())


def check_adapters(names: Collection[str], *, engine: str) -> None:
    """Raises ConfigError for adapters of a model that this project's own engine computes."""
    if names and engine == NATIVE:
        raise ConfigError(
            f"the model has the adapters {', '.join(names)}, and its engine is {NATIVE}, which computes models as "
            "they are: --engine vllm computes with adapters"
        )
