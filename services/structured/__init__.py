"""Answers that must have a given form: which tokens may come next."""
