"""Containers, built and run: `make test-containers`."""
