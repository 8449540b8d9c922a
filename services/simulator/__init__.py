"""The simulator: the same policies and protocol under a virtual clock."""
