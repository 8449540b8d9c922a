"""Files, and batches of requests that run without a connection."""
