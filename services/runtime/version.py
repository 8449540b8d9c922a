"""Which version of this project runs."""

import functools
from importlib import metadata

DISTRIBUTION = "tandem-serving"


@functools.cache
def version() -> str:
    """As the installed distribution says."""
    return metadata.version(DISTRIBUTION)
