"""Configuration, errors, gRPC, telemetry, logging and clock of every program.

No torch, no Redis, and no knowledge of gateways, workers or requests.
"""
