"""Plain data of a step: sequences, plans, outcomes, guesses.

Computes nothing and knows no device.
"""
