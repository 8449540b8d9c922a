"""CPU kernels: C++ sources, their build, and their Python binding.

The result of a row never depends on other rows. Does not depend on models or on page holders.
"""
