"""Each module has a test file at the place that mirrors it, and each test file a module; the exceptions are listed."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.test_house import PACKAGES, ROOT

TESTED_BY = {
    "cli/drain.py": "cli/test_scale.py",
    "cli/logs.py": "cli/test_scale.py",
    "cli/serve.py": "cli/test_commands.py",
    "cli/up_scopes.py": "cli/test_join.py",
    "services/engine/cache/store.py": "services/engine/cache/test_host_tier.py",
    "cli/bench_load.py": "cli/test_bench.py",
    "services/engine/cpu/decoder.py": "services/engine/test_model.py",
    "services/engine/gpu/decoder.py": "services/engine/gpu/test_gpu_runner.py",
    "services/engine/gpu/graphs.py": "services/engine/gpu/test_gpu_runner.py",
    "services/engine/gpu_runner.py": "services/engine/gpu/test_gpu_runner.py",
    "services/engine/kernels/library.py": "services/engine/kernels/test_build.py",
    "services/engine/parallel/decoder.py": "services/engine/test_parallel.py",
    "services/engine/parallel/group.py": "services/engine/test_parallel.py",
    "services/engine/parallel/meeting.py": "services/engine/test_parallel.py",
    "services/engine/parallel/messages.py": "services/engine/test_parallel.py",
    "services/engine/parallel/part.py": "services/engine/test_parallel.py",
    "services/engine/reference/attention_sdpa.py": "services/engine/gpu/test_attention_triton.py",
    "services/engine/reference/decoder.py": "services/engine/test_model.py",
    "services/engine/steps/guesses.py": "services/engine/speculation/test_draft.py",
    "services/engine/steps/step.py": "services/engine/test_runner.py",
    "services/engine/weights/load.py": "services/engine/test_model.py",
    "services/engine/weights/mapped.py": "services/engine/weights/test_shared.py",
    "services/engine/weights/shard.py": "services/engine/test_parallel.py",
    "services/cluster/change_log.py": "services/cluster/test_registry.py",
    "services/cluster/tenant_usage.py": "services/cluster/test_rate_limits.py",
    "services/hub/fetching.py": "services/hub/test_huggingface.py",
    "services/hub/models.py": "services/hub/test_s3.py",
    "services/runtime/engines.py": "worker/test_config.py",
    "services/runtime/orders.py": "cli/test_control.py",
    "services/scheduling/entry.py": "services/scheduling/test_queue.py",
    "services/runtime/gpu_facts.py": "worker/test_nvml.py",
    "services/runtime/model_size.py": "deploy/test_rules.py",
    "kv_transfer/page_kernels.py": "kv_transfer/test_device_pages.py",
    "kv_transfer/protocol/counters.py": "kv_transfer/protocol/test_receiver.py",
    "kv_transfer/protocol/messages.py": "kv_transfer/test_wire.py",
    "kv_transfer/protocol/receiver_transfer.py": "kv_transfer/protocol/test_receiver.py",
    "kv_transfer/receive_link.py": "kv_transfer/test_handoff.py",
    "kv_transfer/receive_thread.py": "kv_transfer/test_handoff.py",
    "kv_transfer/send_link.py": "kv_transfer/test_handoff.py",
    "kv_transfer/send_thread.py": "kv_transfer/test_handoff.py",
    "kv_transfer/sending.py": "kv_transfer/test_handoff.py",
    "kv_transfer/transports/base.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/cuda_ipc.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/handshake.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/loopback.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/nccl.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/shm.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/tcp.py": "kv_transfer/transports/test_channels.py",
    "kv_transfer/transports/tls.py": "kv_transfer/transports/test_channels.py",
    "worker/engine.py": "worker/test_engine_worker.py",
    "worker/vllm/core.py": "worker/vllm/test_decode.py",
    "gateway/vectors/places.py": "gateway/vectors/test_embedder.py",
    "gateway/anthropic/answers.py": "gateway/anthropic/test_writer.py",
    "gateway/anthropic/errors.py": "gateway/anthropic/test_writer.py",
    "gateway/assembly.py": "gateway/test_process.py",
    "gateway/edge/grpc_messages.py": "gateway/edge/test_grpc_chat.py",
    "gateway/forms/answer_forms.py": "gateway/test_chat_tools.py",
    "gateway/http/refusals.py": "gateway/http/test_protocol.py",
    "gateway/requests/acceptance.py": "gateway/test_bad_input.py",
    "gateway/requests/answer.py": "gateway/test_exactly_once.py",
    "gateway/requests/call.py": "gateway/test_adoption.py",
    "gateway/requests/dispatch.py": "gateway/test_faults.py",
    "gateway/requests/observer.py": "gateway/observability/test_request_log.py",
    "gateway/requests/placing.py": "gateway/test_wishes.py",
    "gateway/stored/service.py": "gateway/stored/test_keeping.py",
    "services/cluster/answer_records.py": "services/cluster/test_answers.py",
    "services/cluster/answer_scripts.py": "services/cluster/test_answers.py",
    "services/cluster/wakeups.py": "services/cluster/test_registry.py",
    "gateway/topology/views.py": "gateway/topology/test_members.py",
    "gateway/types.py": "gateway/openai/test_requests.py",
    "decode_worker/config.py": "cli/test_children.py",
    "dual_worker/config.py": "cli/test_children.py",
    "worker/role.py": "worker/test_role_change.py",
    "planning/simulator/html_report.py": "cli/test_replay.py",
    "planning/simulator/report.py": "planning/simulator/test_cluster.py",
    "planning/planner/page.py": "planning/planner/test_search.py",
    "planning/planner/question.py": "planning/planner/test_search.py",
    "planning/simulator/decode.py": "planning/simulator/test_cluster.py",
    "planning/simulator/jobs.py": "planning/simulator/test_cluster.py",
    "planning/simulator/prefill.py": "planning/simulator/test_cluster.py",
    "tandem/engine.py": "tandem/test_llm.py",
    "tandem/outputs.py": "tandem/test_llm.py",
    "tandem/params.py": "tandem/test_llm.py",
}
"""Modules that are tested along with others, and the file below tests/ that does it."""
DATA = {
    "services/cluster/batch_scripts.py",
    "services/cluster/journal_scripts.py",
    "services/cluster/prefix_scripts.py",
    "services/cluster/rate_limit_scripts.py",
    "services/cluster/registry_scripts.py",
    "services/runtime/quiet_grpc.py",
    "services/runtime/version.py",
    "kv_transfer/protocol/actions.py",
    "gateway/requests/policies.py",
    "gateway/topology/events.py",
    "prefill_worker/config.py",
}
"""Modules that decide nothing: records, scripts of other languages, names."""
PROGRAMS = {
    "services/engine/parallel/rank.py": "services/engine/parallel/test_processes.py starts it",
    "decode_worker/role.py": "worker/test_startup.py starts it",
    "prefill_worker/role.py": "worker/test_startup.py starts it",
    "worker/extra.py": "test_wheel.py starts workers without it",
    "worker/vllm/rank.py": "worker/vllm/test_ranks.py starts it",
    "worker/loading.py": "both workers' programs use it: tests/integration",
    "worker/vllm/connector.py": "vLLM imports it: worker/vllm/test_installed.py",
}
"""Modules that run in another process than the tests', or with a package that they lack."""
WHOLE = {
    "cli/test_up_autoscale.py",
    "cli/test_demo_model.py",
    "cli/test_documentation.py",
    "decode_worker/test_giving_way.py",
    "decode_worker/test_grammars.py",
    "decode_worker/test_preempted_answers.py",
    "decode_worker/test_preemption.py",
    "gateway/dashboard/test_page_in_browser.py",
    "gateway/openai/test_prompt_logprobs.py",
    "gateway/test_accepted_numbers.py",
    "gateway/test_adapters.py",
    "gateway/test_adoption.py",
    "gateway/test_background_tasks.py",
    "gateway/test_bad_input.py",
    "gateway/test_books.py",
    "gateway/test_cached_tokens.py",
    "gateway/test_chat_tools.py",
    "gateway/test_early_heads.py",
    "gateway/test_exactly_once.py",
    "gateway/test_faults.py",
    "gateway/test_gpu_health.py",
    "gateway/test_kept_workers.py",
    "gateway/test_leaving_clients.py",
    "gateway/test_models.py",
    "gateway/test_openai_fields.py",
    "gateway/test_regions.py",
    "gateway/test_other_weights.py",
    "gateway/test_process.py",
    "gateway/test_prompt_logprobs.py",
    "gateway/test_responses.py",
    "gateway/test_slow_workers.py",
    "gateway/test_strangers.py",
    "gateway/test_streams.py",
    "gateway/test_tenant_weights.py",
    "kv_transfer/protocol/test_properties.py",
    "kv_transfer/test_attacks.py",
    "kv_transfer/test_contradictions.py",
    "kv_transfer/test_device_handoff.py",
    "kv_transfer/test_generations.py",
    "kv_transfer/test_handoff.py",
    "kv_transfer/test_membership.py",
    "kv_transfer/test_model.py",
    "kv_transfer/test_moves.py",
    "kv_transfer/test_mutants.py",
    "kv_transfer/test_processes.py",
    "kv_transfer/transports/test_channels.py",
    "planning/simulator/test_against_simdistserve.py",
    "planning/simulator/test_against_splitwise.py",
    "planning/simulator/test_against_vllm.py",
    "planning/simulator/test_overload.py",
    "prefill_worker/test_grammars.py",
    "services/cluster/test_redis_tls.py",
    "services/cluster/test_rights.py",
    "services/cluster/test_sentinel.py",
    "services/engine/gpu/test_benchmark.py",
    "services/engine/gpu/test_compile.py",
    "services/engine/gpu/test_cuda.py",
    "services/engine/gpu/test_gpu_runner.py",
    "services/engine/test_parallel.py",
    "services/engine/test_prompt_logprobs.py",
    "services/engine/test_structured_answers.py",
    "services/runtime/test_proving.py",
    "services/runtime/test_secrecy.py",
    "services/scheduling/test_cold_burst.py",
    "services/scheduling/test_standstill.py",
    "services/scheduling/test_step_noise.py",
}
"""Test files that show what several modules of a package do together; no new one without a reason to be whole."""


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name not in ("__init__.py", "__main__.py"):
                yield path.relative_to(ROOT)


@functools.cache
def imported(path: Path) -> frozenset[Path]:
    """The files of this project that a file imports, in whatever scope."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    files = (Path(*name.split(".")).with_suffix(".py") for name in names)
    return frozenset(file for file in files if (ROOT / file).is_file())


def reached(test: Path) -> set[Path]:
    """All that a test file may import, directly or not, with the fixtures beside it and above."""
    found, new = set(), {test, *(each for above in test.parents if (ROOT / (each := above / "conftest.py")).is_file())}
    while new:
        found |= new
        new = {file for path in new for file in imported(path)} - found
    return found


def test_every_module_is_tested_where_one_looks_for_it() -> None:
    alone = {str(path) for path in modules() if not (ROOT / "tests" / path.parent / f"test_{path.name}").exists()}
    assert len(alone) < len(list(modules())) / 4
    assert alone == TESTED_BY.keys() | DATA | PROGRAMS.keys()


def test_what_is_tested_along_with_others_is_within_reach_of_its_test() -> None:
    reach = {test: reached(Path("tests", test)) for test in set(TESTED_BY.values())}
    assert {name: test for name, test in TESTED_BY.items() if Path(name) not in reach[test]} == {}


def test_modules_of_data_decide_nothing() -> None:
    deciding = (ast.If, ast.For, ast.While, ast.Try, ast.IfExp, ast.Match)
    nodes = {name: ast.walk(ast.parse((ROOT / name).read_text())) for name in DATA}
    assert {name for name in DATA if any(isinstance(node, deciding) for node in nodes[name])} == set()


def test_every_test_file_has_its_module() -> None:
    below = (path.relative_to(ROOT / "tests") for path in sorted((ROOT / "tests").rglob("test_*.py")))
    names = [path for path in below if path.parts[0] in PACKAGES]
    assert len(names) > 200
    assert {str(path) for path in names if not (ROOT / path.parent / path.name.removeprefix("test_")).exists()} == WHOLE
