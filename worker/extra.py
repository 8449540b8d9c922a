"""Exits with a one-line error if the packages that a worker computes with are not installed.

Import this module before those packages. Otherwise the process would end with the traceback of the first failing
import.
"""

import sys
from functools import partial

from services.runtime import extras, process

if code := process.exit_code(partial(extras.check, "worker")):
    sys.exit(code)
