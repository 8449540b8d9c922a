"""What every program is built from.

Imports none of the programs above it.
"""
