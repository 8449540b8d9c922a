"""The CPU kernels: C++ sources, their builder and the binding.

Results of a row never depend on the other rows. Knows no model and no page's holder.
"""
