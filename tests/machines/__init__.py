"""Several machines on one: each a network namespace, with links between them that can be far, slow, lossy or cut."""
