"""A discrete-event run of the cluster's own policies over a recorded trace, under a virtual clock."""
