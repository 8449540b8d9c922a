"""The readable decoder, the oracle of the fast ones.

It is written to be read, and never tuned.
"""
