"""The payload paths of the handoff, one file each, behind one interface.

A transport carries frames; what they mean, and whether they may be placed, is the protocol's business.
"""
