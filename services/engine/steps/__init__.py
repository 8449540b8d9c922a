"""Plain data of a step: sequences, plans, outcomes, draft tokens.

Contains no computation and does not depend on a device.
"""
