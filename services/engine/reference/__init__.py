"""The readable decoder, the oracle of the fast ones.

It is never tuned, and imports none of them.
"""
