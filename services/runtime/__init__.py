"""Configuration, errors, gRPC, telemetry, logging and clock of every service; no torch, no redis."""
