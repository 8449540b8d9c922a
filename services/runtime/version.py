"""Which version of this project runs."""

import functools
from importlib import metadata

DISTRIBUTION = "tandem-serving"


@functools.cache
def version() -> str:
    """Returns the version of the installed distribution."""
    return metadata.version(DISTRIBUTION)
