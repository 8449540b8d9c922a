"""Guesses of the next tokens, from a draft model or from the text.

A guess never changes an answer: the model verifies each.
"""
