"""An endpoint picker gets the sums of a model's answers and the use of its decode workers' pages."""

from prometheus_client import CollectorRegistry, generate_latest

from gateway.observability.model_server import ModelServer


def page(population, use):
    registry = CollectorRegistry()
    registry.register(ModelServer(lambda: population, lambda models: {model: use[model] for model in models}))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_classes_are_summed_and_models_are_not():
    population = {
        ("large", "normal", "queued"): 3,
        ("large", "low", "queued"): 4,
        ("large", "normal", "running"): 2,
        ("small", "normal", "running"): 0,
    }
    assert page(population, {"large": 0.5, "small": 1.0}) == [
        'vllm:num_requests_waiting{model_name="large"} 7.0',
        'vllm:num_requests_waiting{model_name="small"} 0.0',
        'vllm:num_requests_running{model_name="large"} 2.0',
        'vllm:num_requests_running{model_name="small"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="large"} 0.5',
        'vllm:kv_cache_usage_perc{model_name="small"} 1.0',
    ]


def test_a_gateway_without_a_model_shows_none():
    assert page({}, {}) == []
