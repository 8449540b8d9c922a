"""Pure policies: plain data and a time in, a decision out.

No I/O, no clock, no session, no registry.
"""
