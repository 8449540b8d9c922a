"""Guesses of the next tokens, from a draft model or from the text."""
