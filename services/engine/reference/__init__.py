"""The reference implementation of the decoder, with which the fast decoders are compared.

It is optimized for readability, never for speed.
"""
