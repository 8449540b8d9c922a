"""The sans-I/O state machines of the handoff."""
