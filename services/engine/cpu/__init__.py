"""CPU implementation of the decoder.

Its results equal the results of `reference`, and no row depends on other rows of a step.
"""
