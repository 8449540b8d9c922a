"""Answers that must have a given form: which tokens may come next.

Knows no API's spelling of a form, no worker and no step.
"""
