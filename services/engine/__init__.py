"""Runs a model over a paged KV cache; no gRPC, no redis, no protobuf."""
