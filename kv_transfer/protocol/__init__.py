"""The state machines of the handoff: events and the time go in, actions come out.

No I/O, no clock, no threads, no tensors, no RPC.
"""
