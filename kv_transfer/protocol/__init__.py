"""State machines of the handoff. They turn events and the current time into actions.

No I/O, no clock, no threads, no tensors, no RPC.
"""
