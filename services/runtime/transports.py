"""The names of the channels that pages travel on between workers."""

TRANSPORTS = ("shm", "tcp", "nccl", "cuda_ipc")
"""Those that an operator may choose. TLS replaces `tcp` by `tls`, which is not chosen by name."""
