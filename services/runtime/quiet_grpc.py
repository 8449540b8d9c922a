"""Keeps gRPC's core from writing lines of its own to stderr, many a second for a peer that cannot connect.

To be imported before anything that loads gRPC, which looks at the environment once. What is wrong with a connection
stands in our own log. GRPC_VERBOSITY, where it is set, stays.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
