"""Has SIGTERM end a process that is only just starting, where it is the first one of a container.

The kernel gives a first process no signal for which it has no handler, and imports take seconds: a container that is
told to stop meanwhile would run until it is killed. To be imported before anything that takes long. Elsewhere nothing
changes.
"""

import os
import signal

if os.getpid() == 1:
    # It holds nothing yet. What serves has a handler of its own later (services.runtime.process).
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
