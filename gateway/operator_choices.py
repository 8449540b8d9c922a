"""What an operator's settings mean to the parts of a gateway: its policies, its targets, the limits of its health."""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gateway.config import GatewayConfig
from gateway.edge.health import HealthLimits
from gateway.models.catalog import ModelCatalog, load_catalog
from gateway.models.catalog_file import ModelEntry, read_models_file
from gateway.requests.policies import Policies, RoomLimits
from gateway.requests.queue import Lane
from gateway.topology.expected import ExpectedFile
from gateway.topology.members import Topology
from services.hub.models import local_model
from services.runtime import toml_file
from services.runtime.errors import ConfigError
from services.scheduling.disaggregation import DisaggregationSettings
from services.scheduling.lanes import LaneOrder
from services.scheduling.overload import Targets
from services.scheduling.pools import MAX_FILE_BYTES, Audience, Pools, PoolsFile
from services.scheduling.queue import RequestQueue
from services.scheduling.routing.price import RoutingSettings
from services.scheduling.routing.router import Router

logger = logging.getLogger(__name__)


def model_entries(config: GatewayConfig) -> tuple[ModelEntry, ...]:
    """Returns the entries of the models file, or one entry for the model that --model and --model-name describe."""
    if config.models is not None:
        return tuple(replace(entry, path=local_model(entry.path)) for entry in read_models_file(config.models))
    assert config.model is not None
    return (ModelEntry(config.served_name, config.model, lora=config.lora or {}),)


def model_catalog(config: GatewayConfig, entries: Sequence[ModelEntry]) -> ModelCatalog:
    """Returns the served models. Raises ModelError if a model folder cannot be used."""
    catalog = load_catalog(
        entries,
        max_tokenize_chars=config.max_tokenize_chars,
        generation_config=config.generation_config,
        embeddings=config.embeddings,
    )
    for model in catalog:
        if model.sampling_defaults:
            defaults = dict(model.sampling_defaults)
            logger.info("sampling defaults of a model", extra={"model": model.name, "defaults": defaults})
    return catalog


def targets(config: GatewayConfig) -> Targets:
    """Returns the times that requests are to keep."""
    return Targets(config.ttft_target_s or None, config.itl_target_s or None)


def pools(config: GatewayConfig) -> Pools:
    """Returns the pools of workers. Raises ConfigError that names file, key and rule."""
    if config.pools is None:
        return Pools()
    text = toml_file.read_text(config.pools, "the pools file", max_bytes=MAX_FILE_BYTES)
    try:
        return Pools(toml_file.parse(text, PoolsFile).pool)
    except ConfigError as error:
        raise ConfigError(f"{config.pools}: {error.message}") from error


def expected(config: GatewayConfig) -> Callable[[], Mapping[str, int]]:
    """Returns what gives the number of workers of each role that there should be."""
    numbers = dict(config.expect or {})
    return ExpectedFile(config.expect_file, numbers).numbers if config.expect_file is not None else lambda: numbers


def policies(config: GatewayConfig) -> Policies:
    """Returns how requests are placed and tried again."""
    disaggregation = DisaggregationSettings(local_prefill_tokens=config.local_prefill_tokens)
    settings = RoutingSettings(disaggregation=disaggregation, distances_s=config.region_distance or {})
    return Policies(
        router=Router(config.routing, settings=settings),
        room=RoomLimits(ahead_s=config.ahead_s, itl_s=config.itl_target_s or None),
        region=config.region,
        targets=targets(config),
        max_attempts=config.max_attempts,
        max_request_s=config.max_request_s,
        failover_wait_s=config.failover_wait_s,
        max_queue_wait_s=config.max_queue_wait_s,
        pulls_prefixes=config.pull_prefixes,
        rebalances=config.rebalance,
        model_files=config.model_files,
        turn_s=config.model_turn_s,
    )


def lane_order(config: GatewayConfig, tenant_weights: Mapping[str, float]) -> LaneOrder:
    """Returns the order among the lanes of one model's queue; the weights are read live."""
    return LaneOrder(config.queue_strategy, ageing_s=config.priority_ageing_s, tenant_weights=tenant_weights)


def lane_maker(
    config: GatewayConfig,
    topology: Topology,
    *,
    model: str,
    tenant_weights: Mapping[str, float],
    are_answered: bool = True,
) -> Callable[[Audience], Lane]:
    """Returns what makes the lanes of one model's queue; the weights are read live.

    Texts that are not `are_answered` need no room at decode workers.
    """

    def make(audience: Audience) -> Lane:
        waiting = RequestQueue(
            strategy=config.queue_strategy,
            ageing_s=config.priority_ageing_s,
            max_waiting=config.max_queued_requests,
            tenant_weights=tenant_weights,
        )
        ids = functools.partial(topology.open_ids, model=model, audience=audience)
        return Lane(
            waiting,
            targets=targets(config),
            free_share=lambda: topology.free_share(model, audience) if are_answered else 1.0,
            num_computing=lambda: len(ids("prefill") or ids("decode")),
        )

    return make


def health_limits(config: GatewayConfig) -> HealthLimits:
    """Returns beyond what `/health?verbose` calls something wrong."""
    given_s = config.health_max_ttft_s
    return HealthLimits(
        max_queued=config.health_max_queued,
        ttft_p99_s=(config.ttft_target_s if given_s is None else given_s) or None,
        max_error_share=config.health_max_error_share,
        max_gpu_c=config.health_max_gpu_c,
        min_free_share=config.health_min_free_share,
    )
