"""Ends a worker's process with one sentence where the packages that it computes with are not installed.

To be imported before them: without this the end would be the traceback of whichever import comes first.
"""

import sys
from functools import partial

from services.runtime import extras, process

if code := process.exit_code(partial(extras.check, "worker")):
    sys.exit(code)
