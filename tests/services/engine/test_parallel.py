"""A model on several ranks gives the bits of one. Ranks are threads here, with the connections that processes have."""

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from kv_transfer.page_bytes import Destination, PageReader, PageWriter, wire_layout
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.engine import Engine, load_engine
from services.engine.model import Model, load_model
from services.engine.parallel.meeting import STEP_TIMEOUT_S, Meeting
from services.engine.parallel.messages import receive_object, send_object
from services.engine.parallel.part import RankPart
from services.engine.reference.decoder import DecoderStep
from services.engine.runner import ModelRunner
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import PooledState, SampledToken, StepItem, StepPlan
from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.config import load_config
from services.engine.weights.load import ShardWeights
from services.engine.weights.shard import Parallelism, Shard, part_of
from services.runtime.errors import ConfigError, ModelError

# Every way of cutting: heads shared, KV heads shared by two and by three ranks, uneven rows, stages, both.
CUTS = [
    ("llama-mha", 4, 1),
    ("llama3-gqa-tied", 2, 1),
    ("llama3-gqa-tied", 4, 1),
    ("llama3-gqa-tied", 2, 2),
    ("llama-mqa-odd", 3, 1),
    ("llama-bias", 2, 1),
    ("mistral-wide-head", 1, 3),
    ("qwen2-bias", 2, 3),
    ("qwen2-tied", 2, 1),
    ("qwen2-tied", 1, 2),
    ("qwen3-qk-norm", 2, 1),
    ("qwen3-tied-bias", 4, 1),
]


class ThreadRanks:
    """All ranks of a model, each computing in a thread of its own: a decoder."""

    def __init__(self, model_dir: Path, parallelism: Parallelism, store_path: Path, *, dtype: str) -> None:
        settings = {
            "model_dir": str(model_dir),
            "dtype": dtype,
            "device": "cpu",
            "threads": 1,
            "tensor_parallel": parallelism.tensor,
            "pipeline_parallel": parallelism.pipeline,
        }
        self.parts = [RankPart.load(settings, rank) for rank in range(parallelism.num_ranks)]
        self.threads = ThreadPoolExecutor(parallelism.num_ranks)
        list(self.threads.map(lambda part: part.connect(store_path), self.parts))

    def forward(self, step: DecoderStep) -> torch.Tensor:
        return self.forward_with_states(step)[0]

    def forward_with_states(self, step: DecoderStep) -> tuple[torch.Tensor, torch.Tensor]:
        def compute(part: RankPart) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.inference_mode():
                return part.forward_with_states(step)

        given, *_ = self.threads.map(compute, self.parts)
        return given

    def model(self) -> Model:
        return Model(self.parts[0].source, self, fingerprint="f")


@pytest.fixture
def thread_ranks(tmp_path: Path) -> Iterator[Callable[..., ThreadRanks]]:
    made: list[ThreadRanks] = []

    def make(model_dir: Path, tensor: int, pipeline: int, *, dtype: str = "float32") -> ThreadRanks:
        made.append(ThreadRanks(model_dir, Parallelism(tensor, pipeline), tmp_path / f"store-{len(made)}", dtype=dtype))
        return made[-1]

    yield make
    for ranks in made:
        ranks.threads.shutdown()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("variant", "tensor", "pipeline"), CUTS)
def test_bits_are_those_of_one_rank(
    variant: str,
    tensor: int,
    pipeline: int,
    dtype: str,
    checkpoint: Any,
    thread_ranks: Any,
    paged_run: Any,
    random_ids: Any,
) -> None:
    folder = checkpoint(variant)
    runs = [
        paged_run(model, page_size=8)
        for model in (load_model(folder, dtype=dtype), thread_ranks(folder, tensor, pipeline, dtype=dtype).model())
    ]
    steps = [
        {"a": random_ids(21)},
        {"a": random_ids(1, seed=1), "b": random_ids(37, seed=2)},
        {"b": random_ids(1, seed=3), "c": random_ids(9, seed=4), "a": random_ids(1, seed=5)},
    ]
    for step in steps:
        alone, together = (run.step(step) for run in runs)
        for name in step:
            assert torch.equal(alone[name], together[name])
    alone, together = (run.pool_data.view(torch.uint8) for run in runs)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("degrees", "page_sizes"),
    [((1, 2), (8, 8)), ((2, 1), (8, 8)), ((2, 2), (8, 16)), ((2, 4), (8, 8)), ((2, 4), (16, 8)), ((4, 1), (8, 8))],
)
def test_pages_go_from_any_degree_to_any(
    degrees: tuple[int, int],
    page_sizes: tuple[int, int],
    dtype: str,
    checkpoint: Any,
    thread_ranks: Any,
    random_ids: Any,
) -> None:
    """A prompt is computed by one model, its pages go to the pool of another one, which continues."""
    folder, prompt = checkpoint("llama3-gqa-tied"), random_ids(37)
    sampling = Sampling(max_tokens=8, temperature=0.9, seed=5)
    expected = Engine(load_engine(folder, dtype=dtype, num_pages=16)).generate([prompt], sampling)[0]
    source, target = (thread_ranks(folder, degree, 1, dtype=dtype).model() for degree in degrees)
    pools = [PagePool(layout_of(source, page_size), 16) for page_size in page_sizes]

    first = Sequence(0, prompt, sampling=sampling)
    first.page_table = [9, 2, 11, 0, 5][: pools[0].layout.num_pages_for(len(prompt))]
    (token,) = ModelRunner(source, pools[0]).run(StepPlan([StepItem(first, len(prompt))])).outcomes
    assert isinstance(token, SampledToken)

    pages = [1, 7, 8, 3, 15, 6]
    writer = PageWriter(pools[1], wire_layout(pools[0].layout, fingerprint="f", exact=True))
    data = np.concatenate(PageReader(pools[0]).pieces(first.page_table))
    writer.write(data, 0, Destination(tuple(pages), 0, len(prompt)))
    second = Sequence(1, prompt, sampling=sampling, emitted_token_ids=[token.token_id])
    second.page_table, second.num_computed_tokens = pages, len(prompt)
    runner = ModelRunner(target, pools[1])
    while second.finish_reason() is None:
        (token,) = runner.run(StepPlan([StepItem(second, 1)])).outcomes
        assert isinstance(token, SampledToken)
        second.num_computed_tokens += 1
        second.append_token(token.token_id)
    assert second.token_ids[len(prompt) :] == expected


@pytest.mark.parametrize(("variant", "tensor", "pipeline"), [("llama3-gqa-tied", 2, 2), ("llama-mqa-odd", 3, 1)])
def test_hidden_states_are_those_of_one_rank(
    variant: str, tensor: int, pipeline: int, checkpoint: Any, thread_ranks: Any, random_ids: Any
) -> None:
    folder, found = checkpoint(variant), []
    for model in (load_model(folder), thread_ranks(folder, tensor, pipeline).model()):
        runner, items = ModelRunner(model, PagePool(layout_of(model, 8), 16)), []
        for number, pooling in enumerate(("mean", None, "last")):
            sequence = Sequence(number, random_ids(20 + number, seed=number), sampling=Sampling(max_tokens=1))
            sequence.page_table, sequence.pooling = [*range(5 * number, 5 * number + 5)], pooling
            items.append(StepItem(sequence, sequence.num_prompt_tokens, wants_token=pooling is None))
        mean, token, last = runner.run(StepPlan(items)).outcomes
        assert isinstance(mean, PooledState)
        assert isinstance(last, PooledState)
        found.append((mean.state.tobytes(), token, last.state.tobytes()))
    assert found[0] == found[1]


def layout_of(model: Model, page_size: int) -> PageLayout:
    config = model.config
    return PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, page_size, model.dtype)


def test_without_kernels_results_are_close(
    checkpoint: Any, thread_ranks: Any, paged_run: Any, random_ids: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("qwen3-qk-norm")
    expected = paged_run(load_model(folder)).step({"a": random_ids(33)})["a"]
    monkeypatch.setattr("services.engine.model._find_kernels", lambda: (None, "no compiler"))
    model = thread_ranks(folder, 2, 2).model()
    assert not model.exact
    run = paged_run(model)
    run.pool_data.zero_()
    torch.testing.assert_close(run.step({"a": random_ids(33)})["a"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("variant", "tensor", "pipeline"), CUTS)
def test_ranks_read_their_part_and_each_row_counts_once(
    variant: str, tensor: int, pipeline: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(variant, sharded=True)
    read = watch_reading(monkeypatch)
    whole = load_model(folder).fingerprint
    all_bytes = read.pop()
    parallelism = Parallelism(tensor, pipeline)
    settings = {"model_dir": folder, "dtype": "float32", "device": "cpu", "threads": 1}
    settings |= {"tensor_parallel": tensor, "pipeline_parallel": pipeline}
    parts = []
    for rank in range(parallelism.num_ranks):
        parts.append(RankPart.load(settings, rank))
        # Embedding and head may be most of so small a model: a stage without them reads little, one with them much.
        assert read.pop() < all_bytes * (0.65 if pipeline == 1 else 0.85)
    sums = [part.row_sums for part in parts]
    assert parts[0].fingerprint(sums[1:]) == whole
    sums[-1]["model.layers.2.mlp.down_proj.weight"] += 1
    assert parts[0].fingerprint(sums[1:]) != whole


def watch_reading(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets, for each loading, how many bytes of tensors were asked for."""
    loads: list[int] = []
    read_tensor, load_map = Checkpoint.tensor, Checkpoint._map_tensors

    def begin(self: Checkpoint) -> dict[str, str]:
        loads.append(0)
        return load_map(self)

    def tensor(self: Checkpoint, *args: Any, **options: Any) -> torch.Tensor:
        found = read_tensor(self, *args, **options)
        loads[-1] += found.numel() * found.element_size()
        return found

    monkeypatch.setattr(Checkpoint, "_map_tensors", begin)
    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    return loads


def test_a_rank_waits_for_the_stage_before_as_long_as_a_step_may_take() -> None:
    limits: list[timedelta] = []
    exchange = SimpleNamespace(wait=lambda *limit: limits.extend(limit))
    for rank in range(2):
        meeting = object.__new__(Meeting)
        meeting._shard = Shard(Parallelism(1, 2), rank)
        meeting._all = cast(Any, SimpleNamespace(send=lambda *_: exchange, recv=lambda *_: exchange))
        if rank == 0:
            meeting.pass_on(torch.zeros(1, 2))
        else:
            meeting.take_over(torch.zeros(1, 2))
        meeting.bring_to_first(torch.zeros(1, 2) if rank else None, 1, 2)
    assert limits == [timedelta(seconds=STEP_TIMEOUT_S)] * 4


def test_strangers_at_the_ports_of_ranks_change_nothing(tmp_path: Path) -> None:
    before = listening_ports()
    with ThreadPoolExecutor(2) as threads:
        shards = [Shard(Parallelism(2), rank) for rank in range(2)]
        meetings = list(threads.map(lambda shard: Meeting(shard, tmp_path / "store"), shards))
        addresses = listening_ports() - before
        assert len(addresses) == 2
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        strangers = [socket.create_connection(address) for address in addresses for _ in range(20)]
        for index, stranger in enumerate(strangers):
            stranger.sendall(random.Random(index).randbytes(index * 7))
            if index % 2:
                stranger.close()
        parts = [torch.full((3, 2), float(rank)) for rank in range(2)]
        gathered = list(threads.map(lambda meeting, part: meeting.gather(part, 4), meetings, parts))
        for stranger in strangers:
            stranger.close()
    assert [rows.tolist() for rows in gathered] == [[[0.0, 0.0, 1.0, 1.0]] * 3] * 2


def listening_ports() -> set[tuple[str, int]]:
    """Where this process listens."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            own.add(os.readlink(entry))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            host, port = fields[1].split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)))
    return found


def test_weights_are_shared_out(checkpoint: Any, thread_ranks: Any) -> None:
    first, second = thread_ranks(checkpoint("llama3-gqa-tied"), 1, 2).parts
    weights: list[ShardWeights] = [part._weights for part in (first, second)]
    assert [len(part.layers) for part in weights] == [1, 2]
    assert weights[0].lm_head is None
    assert weights[1].embedding is None


def test_a_tensor_that_only_another_stage_reads_may_be_wrong(checkpoint: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoint("llama-mha")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    settings = {"model_dir": tmp_path, "dtype": "auto", "device": "cpu", "threads": 1}
    settings |= {"tensor_parallel": 1, "pipeline_parallel": 3}
    RankPart.load(settings, 0)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.2"):
        RankPart.load(settings, 2)


@pytest.mark.parametrize(
    ("variant", "tensor", "pipeline", "rule"),
    [
        ("llama-mqa-odd", 2, 1, "must divide the model's 3 attention heads"),
        ("llama-mha", 3, 1, "must divide the model's 4 attention heads"),
        ("llama-mha", 1, 4, "at most the model's 3 layers"),
        ("llama-mha", 0, 1, "at least 1"),
    ],
)
def test_what_cannot_be_cut_is_refused(variant: str, tensor: int, pipeline: int, rule: str, checkpoint: Any) -> None:
    with pytest.raises(ConfigError, match=rule):
        Parallelism(tensor, pipeline).check(load_config(checkpoint(variant)))


@pytest.mark.parametrize("size", [1, 5, 54, 331, 4096])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
def test_parts_are_neighbours_and_only_the_last_are_shorter(size: int, num_parts: int) -> None:
    parts = [part_of(size, num_parts, index) for index in range(num_parts)]
    assert [row for part in parts for row in part] == list(range(size))
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert all(length == lengths[0] for length in lengths[: size // lengths[0]])


def test_kv_heads_are_shared_by_neighbours(checkpoint: Any) -> None:
    config = load_config(checkpoint("llama3-gqa-tied"))
    shards = [Shard(Parallelism(4), rank) for rank in range(4)]
    assert [list(shard.kv_heads(config)) for shard in shards] == [[0], [0], [1], [1]]
    assert [shard.is_first_of_kv_group(config) for shard in shards] == [True, False, True, False]


def test_a_file_that_a_rank_is_given_is_handed_to_no_child_of_it():
    ours, theirs = socket.socketpair()
    with ours, theirs, open("/dev/null", "rb") as file:
        send_object(ours, {"pages": 1}, fds=(file.fileno(),))
        value, fds = receive_object(theirs, max_fds=1)
    assert (value, [os.get_inheritable(fd) for fd in fds]) == ({"pages": 1}, [False])
    os.close(fds[0])
