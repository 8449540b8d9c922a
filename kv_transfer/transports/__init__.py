"""The payload paths of the handoff, one file each, behind one interface."""
