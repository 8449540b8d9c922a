"""Computes prompts in chunks and streams their pages out."""
