"""The payload paths of the handoff, one module each, behind one interface.

A transport carries frames. The protocol interprets them and decides whether they may be placed.
"""
