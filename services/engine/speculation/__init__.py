"""Draft tokens from a draft model or from the text itself.

Draft tokens never change a response, because the model verifies each of them.
"""
