"""The CPU kernels: C++ sources, their builder and the binding; results of a row never depend on the other rows."""
