"""Fixtures for other people's programs in front of a gateway: `make compat` runs them."""

from tests.gateway.conftest import (
    cluster_name,
    make_system,
    model_folder,
    pair_type,
    redis_url,
    tokenizer,
    worker_type,
)

__all__ = ["cluster_name", "make_system", "model_folder", "pair_type", "redis_url", "tokenizer", "worker_type"]
