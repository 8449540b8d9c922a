"""`tandem serve MODEL`: `tandem up` with the model as its first word."""

from dataclasses import dataclass
from pathlib import Path

from cli import up
from cli.commands import CommandParser
from cli.up_settings import UpSettings
from services.hub.source import model_source
from services.runtime.config import option
from services.runtime.kinds import argument


@dataclass(frozen=True, kw_only=True)
class ServeSettings(UpSettings):
    """Serves MODEL on this machine, as `tandem up --model MODEL` does; its settings in a file are those of [up]."""

    model: Path = option(argument(model_source()), help="Its folder, or its name, under which it is downloaded.")


def add_to(parser: CommandParser) -> None:
    """Gives the parser what this command takes and does."""
    parser.runs(ServeSettings, up.run, table="up")
