import errno
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch

from services.engine.cache import swap
from services.engine.cache.pages import PageAllocator, PageCounts
from services.engine.engine import Engine, EngineParts, load_engine, load_warm_engine
from services.engine.runner import ModelRunner
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, SampledToken, StepPlan, StepResult
from services.runtime.errors import ConfigError, InvalidRequest, ModelError
from services.runtime.identity import AnswerIdentity

Load = Callable[..., EngineParts]

# Around pages of 16 and 64 tokens and chunks of 64.
BOUNDARY_LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200)


@pytest.fixture(scope="module")
def loaded() -> dict[Any, EngineParts]:
    """What `load` has made so far."""
    return {}


@pytest.fixture(scope="module")
def load(checkpoint: Callable[..., Path], loaded: dict[Any, EngineParts]) -> Load:
    """`load(variant, dtype=…, page_size=…)`: the parts, made once per combination."""

    def get(variant: str, *, dtype: str = "float32", page_size: int = 16, num_tokens: int = 16 * 512) -> EngineParts:
        key = (variant, dtype, page_size, num_tokens)
        if key not in loaded:
            loaded[key] = load_engine(
                checkpoint(variant, dtype=dtype),
                dtype=dtype,
                device="cpu",
                page_size=page_size,
                num_pages=num_tokens // page_size,
                threads=1,
            )
        return loaded[key]

    return get


@pytest.fixture(autouse=True)
def nothing_is_left_behind(loaded: dict[Any, EngineParts]) -> Iterator[None]:
    yield
    for parts in loaded.values():
        parts.allocator.check_integrity()
        assert parts.allocator.counts().free == parts.pool.num_pages
        assert parts.allocator.num_promised_pages == 0


def skip_unless_exact(parts: EngineParts) -> None:
    if not parts.model.exact:
        pytest.skip("the model does not claim exactness on this machine")


def oracle(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy answer of `transformers.generate`, without stopping early."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def mixed_samplings(count: int, *, max_tokens: int = 12) -> list[Sampling]:
    """Greedy, seeded and filtered requests in turn."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.1},
    ]
    return [Sampling(max_tokens=max_tokens, seed=1000 + i, **kinds[i % len(kinds)]) for i in range(count)]


class TestOracle:
    """Greedy output equals transformers.generate, token for token, in float32."""

    @pytest.mark.parametrize("page_size", [16, 64])
    def test_prompt_lengths_around_boundaries(
        self,
        load: Load,
        reference: Callable[[str], Any],
        random_ids: Callable[..., list[int]],
        variant: str,
        page_size: int,
    ) -> None:
        lengths = BOUNDARY_LENGTHS if page_size == 16 else (1, 63, 64, 65, 128)
        prompts = [random_ids(length, seed=length) for length in lengths]
        engine = Engine(load(variant, page_size=page_size), chunk_tokens=64)
        answers = engine.generate(prompts, Sampling(max_tokens=10, temperature=0))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == oracle(reference(variant), prompt, 10), f"prompt of {len(prompt)} tokens"

    def test_long_answers_cross_pages(
        self, load: Load, reference: Callable[[str], Any], random_ids: Callable[..., list[int]]
    ) -> None:
        prompt = random_ids(30)
        engine = Engine(load("llama3-gqa-tied"))
        (answer,) = engine.generate([prompt], Sampling(max_tokens=90, temperature=0))
        assert answer == oracle(reference("llama3-gqa-tied"), prompt, 90)

    def test_logprobs_equal_log_softmax(
        self, load: Load, reference: Callable[[str], Any], random_ids: Callable[..., list[int]]
    ) -> None:
        prompt = random_ids(20)
        engine = Engine(load("qwen3-qk-norm"))
        engine.add(prompt, Sampling(max_tokens=1, temperature=0, logprobs=3))
        ((_, token, reason),) = engine.step()
        assert isinstance(token, SampledToken)
        assert reason == "length"
        with torch.no_grad():
            expected = reference("qwen3-qk-norm")(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert [id_ for id_, _ in token.top] == expected.topk(3).indices.tolist()
        assert [value for _, value in token.top] == pytest.approx(expected.topk(3).values.tolist(), abs=1e-4)
        assert token.logprob == token.top[0][1]


class TestSameAnswer:
    """A request gives the same tokens whatever the batch, the chunks and the page size."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_alone_or_together_small_or_large_chunks(
        self, load: Load, random_ids: Callable[..., list[int]], dtype: str
    ) -> None:
        lengths = (1, 3, 16, 17, 40, 63, 64, 65, 90, 100, 120, 128, 129, 150, 199, 230)
        prompts = [random_ids(length, seed=i) for i, length in enumerate(lengths)]
        samplings = mixed_samplings(16)
        for variant in ("llama3-gqa-tied", "qwen3-qk-norm"):
            parts = load(variant, dtype=dtype)
            skip_unless_exact(parts)
            expected = [
                Engine(parts, chunk_tokens=512).generate([prompt], sampling)[0]
                for prompt, sampling in zip(prompts, samplings, strict=True)
            ]
            for chunk_tokens, page_size in itertools.product((64, 512), (16, 64)):
                engine = Engine(load(variant, dtype=dtype, page_size=page_size), chunk_tokens=chunk_tokens)
                assert engine.generate(prompts, samplings) == expected, (variant, chunk_tokens, page_size)
            assert Engine(parts, chunk_tokens=7, max_batch=5).generate(prompts, samplings) == expected

    @pytest.mark.slow
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_every_architecture_and_two_threads(
        self, load: Load, random_ids: Callable[..., list[int]], variant: str, dtype: str
    ) -> None:
        prompts = [random_ids(length, seed=length) for length in (1, 15, 16, 17, 63, 64, 65, 100, 129)]
        samplings = mixed_samplings(len(prompts), max_tokens=30)
        parts = load(variant, dtype=dtype)
        skip_unless_exact(parts)
        expected = [Engine(parts).generate([p], s)[0] for p, s in zip(prompts, samplings, strict=True)]
        torch.set_num_threads(2)
        try:
            for chunk_tokens, page_size in itertools.product((5, 64, 512), (1, 16, 64)):
                engine = Engine(load(variant, dtype=dtype, page_size=page_size), chunk_tokens=chunk_tokens)
                assert engine.generate(prompts, samplings) == expected, (chunk_tokens, page_size)
        finally:
            torch.set_num_threads(1)

    def test_joining_a_running_batch_changes_nothing(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        parts = load("llama3-gqa-tied")
        prompts = [random_ids(20 + 9 * i, seed=i) for i in range(6)]
        samplings = mixed_samplings(6, max_tokens=20)
        expected = [Engine(parts).generate([p], s)[0] for p, s in zip(prompts, samplings, strict=True)]
        engine = Engine(parts, chunk_tokens=16)
        sequences = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            sequences.append(engine.add(prompt, sampling))
            for _ in range(3):
                engine.step()
        engine.cancel(sequences.pop(2))
        while engine.has_work:
            engine.step()
        del expected[2]
        assert [seq.token_ids[seq.num_prompt_tokens :] for seq in sequences] == expected

    def test_seeds_and_only_seeds_make_a_difference(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        engine = Engine(load("llama-mha"))
        prompt = random_ids(20)
        answers = engine.generate([prompt] * 8, [Sampling(max_tokens=12, seed=i // 2) for i in range(8)])
        assert answers[::2] == answers[1::2]
        assert len({tuple(answer) for answer in answers}) == 4


class TestResume:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        "arguments",
        [
            {"temperature": 0},
            {"temperature": 1.0, "seed": 5},
            {
                "temperature": 1.2,
                "seed": -9,
                "top_p": 0.95,
                "frequency_penalty": 0.6,
                "presence_penalty": 0.4,
                "repetition_penalty": 1.3,
                "min_tokens": 15,
                "stop_token_ids": frozenset(range(0, 331, 7)),
            },
        ],
    )
    def test_replay_goes_on_with_the_same_tokens(
        self, load: Load, random_ids: Callable[..., list[int]], dtype: str, arguments: dict[str, Any]
    ) -> None:
        parts = load("qwen2-bias", dtype=dtype)
        skip_unless_exact(parts)
        prompt = random_ids(35)
        sampling = Sampling(max_tokens=24, **arguments)
        neighbour = (random_ids(50, seed=9), Sampling(max_tokens=40, seed=3))
        (whole,) = Engine(parts).generate([prompt], sampling)
        assert len(whole) >= sampling.min_tokens
        for cut in (1, 2, 7, 13, len(whole) - 1):
            engine = Engine(parts, chunk_tokens=16)
            engine.add(*neighbour)
            resumed = engine.add(prompt, sampling, emitted_token_ids=whole[:cut])
            new_tokens = []
            while resumed.finish_reason() is None:
                for output in engine.step():
                    assert isinstance(output.outcome, SampledToken)
                    if output.sequence is resumed:
                        new_tokens.append(output.outcome.token_id)
            engine.close()
            assert new_tokens == whole[cut:]

    def test_what_has_ended_cannot_be_resumed(self, load: Load) -> None:
        engine = Engine(load("llama-mha"))
        with pytest.raises(InvalidRequest, match="already end"):
            engine.add([1], Sampling(max_tokens=2), emitted_token_ids=[3, 4])


class TestStopping:
    def test_stop_token_ends_and_is_kept(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        engine = Engine(load("llama-mha"))
        prompt = random_ids(12)
        (free,) = engine.generate([prompt], Sampling(max_tokens=20, temperature=0))
        at = next(i for i in range(3, 20) if free[i] not in free[:i])
        stop = frozenset({free[at], 330})
        (stopped,) = engine.generate([prompt], Sampling(max_tokens=20, temperature=0, stop_token_ids=stop))
        assert stopped == free[: at + 1]

    def test_min_tokens_holds_the_stop_token_back(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        engine = Engine(load("llama-mha"))
        prompt = random_ids(12)
        (free,) = engine.generate([prompt], Sampling(max_tokens=20, temperature=0))
        stop = frozenset(free[:8])
        (held,) = engine.generate([prompt], Sampling(max_tokens=20, min_tokens=6, temperature=0, stop_token_ids=stop))
        assert len(held) > 6
        assert not stop & set(held[:6])

    def test_finish_reasons_come_with_the_last_token(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        engine = Engine(load("llama-mha"))
        everything = frozenset(range(331))
        stops = engine.add(random_ids(5), Sampling(max_tokens=9, stop_token_ids=everything))
        runs_out = engine.add(random_ids(5), Sampling(max_tokens=3, temperature=0))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [o.finish_reason for o in outputs if o.sequence is stops] == ["stop"]
        assert [o.finish_reason for o in outputs if o.sequence is runs_out] == [None, None, "length"]
        assert engine.step() == []


class TestCapacity:
    def test_more_work_than_pages_waits_and_finishes(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        parts = load("llama-mha", num_tokens=16 * 12)
        prompts = [random_ids(30 + i, seed=i) for i in range(9)]
        sampling = Sampling(max_tokens=30, temperature=0)
        engine = Engine(parts, chunk_tokens=64)
        expected = Engine(load("llama-mha")).generate(prompts, sampling)
        sequences = [engine.add(prompt, sampling) for prompt in prompts]
        while engine.has_work:
            engine.step()
            parts.allocator.check_integrity()
        assert [s.token_ids[s.num_prompt_tokens :] for s in sequences] == expected

    def test_a_step_computes_no_more_prompt_than_a_chunk(
        self, load: Load, random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parts = load("llama-mha")
        engine = Engine(parts, chunk_tokens=20, max_batch=4)
        run, steps = parts.runner.run, []

        def watch(plan: StepPlan) -> StepResult:
            in_prompt = [item for item in plan.items if item.sequence.num_generated_tokens == 0]
            steps.append((sum(item.num_scheduled_tokens for item in in_prompt), len(plan.items)))
            return run(plan)

        monkeypatch.setattr(parts.runner, "run", watch)
        engine.generate([random_ids(50)] * 6, Sampling(max_tokens=30, temperature=0))
        assert max(num_tokens for num_tokens, _ in steps) == 20
        assert max(num_sequences for _, num_sequences in steps) == 4
        assert sum(num_tokens for num_tokens, _ in steps) == 6 * 50

    def test_a_request_that_fills_the_pool_to_the_last_token(
        self, load: Load, random_ids: Callable[..., list[int]]
    ) -> None:
        engine = Engine(load("llama-mha", num_tokens=64))
        (answer,) = engine.generate([random_ids(40)], Sampling(max_tokens=24, temperature=0))
        assert len(answer) == 24

    @pytest.mark.parametrize(
        ("num_tokens", "num_prompt", "max_tokens", "message", "field"),
        [
            (
                8192,
                500,
                13,
                "context length is 512 tokens, but 513 were requested: 500 in the prompt and 13",
                "max_tokens",
            ),
            (8192, 512, 1, "context length is 512 tokens", "prompt"),
            (64, 60, 5, r"KV memory holds 64 tokens \(4 pages\), but 65 were", "max_tokens"),
            (64, 500, 20, "context length is 512 tokens", "prompt"),
        ],
    )
    def test_what_can_never_fit_is_refused_with_the_numbers(
        self, load: Load, num_tokens: int, num_prompt: int, max_tokens: int, message: str, field: str
    ) -> None:
        parts = load("llama-mha", num_tokens=num_tokens)
        with pytest.raises(InvalidRequest, match=message) as caught:
            parts.limits.check_fits(num_prompt, max_tokens)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.field == field
        with pytest.raises(InvalidRequest, match=message):
            Engine(parts).add([1] * num_prompt, Sampling(max_tokens=max_tokens))
        parts.limits.check_fits(8, 56)

    @pytest.mark.parametrize(
        ("prompt", "arguments", "emitted", "field"),
        [
            ([1, 331], {}, [], "prompt"),
            ([-1], {}, [], "prompt"),
            ([], {}, [], "prompt"),
            ([1], {"logit_bias": {331: 1.0}}, [], "logit_bias"),
            ([1], {}, [400], "emitted_token_ids"),
        ],
    )
    def test_unknown_tokens_are_refused(
        self, load: Load, prompt: list[int], arguments: dict[str, Any], emitted: list[int], field: str
    ) -> None:
        engine = Engine(load("llama-mha"))
        with pytest.raises(InvalidRequest) as caught:
            engine.add(prompt, Sampling(max_tokens=4, **arguments), emitted_token_ids=emitted)
        assert caught.value.field == field
        assert not engine.has_work

    def test_one_bad_prompt_runs_none(self, load: Load) -> None:
        engine = Engine(load("llama-mha"))
        with pytest.raises(InvalidRequest):
            engine.generate([[1, 2], [9999]], Sampling(max_tokens=4))
        assert not engine.has_work

    def test_cancel_anywhere_gives_pages_back(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        parts = load("llama-mha", num_tokens=16 * 12)
        engine = Engine(parts, chunk_tokens=16, max_batch=2)
        prefilling, decoding, waiting = (
            engine.add(random_ids(length), Sampling(max_tokens=40)) for length in (60, 4, 5)
        )
        for _ in range(5):
            engine.step()
        assert decoding.num_generated_tokens > 0
        for sequence in (waiting, prefilling, decoding, decoding):
            engine.cancel(sequence)
        assert not engine.has_work
        assert parts.allocator.counts().free == parts.pool.num_pages

    def test_a_failing_sequence_leaves_the_others(self, load: Load, random_ids: Callable[..., list[int]]) -> None:
        parts = load("llama-mha")
        engine = Engine(parts)
        sampling = Sampling(max_tokens=6, temperature=0)
        prompts = [random_ids(20, seed=i) for i in range(3)]
        expected = engine.generate(prompts, sampling)
        sequences = [engine.add(prompt, sampling) for prompt in prompts]
        engine.step()
        parts.pool.data[sequences[1].page_table[0]] = float("nan")
        failures: list[Sequence] = []
        while engine.has_work:
            failures += [o.sequence for o in engine.step() if isinstance(o.outcome, NonFiniteLogits)]
        assert failures == [sequences[1]]
        assert [sequences[i].token_ids[20:] for i in (0, 2)] == [expected[i] for i in (0, 2)]
        # The poisoned pages go to the next one, which writes before it reads.
        assert engine.generate(prompts, sampling) == expected


class TestLoadEngine:
    def test_parts_belong_together(self, load: Load) -> None:
        parts = load("llama-mqa-odd", page_size=64)
        layout = parts.pool.layout
        assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.page_size) == (3, 1, 20, 64)
        assert layout.dtype == parts.model.dtype == torch.float32
        assert parts.allocator.num_pages == parts.pool.num_pages == 128
        assert re.fullmatch("[0-9a-f]{32}", parts.fingerprint)

    def test_whatever_changes_a_token_is_in_its_identity(self, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
        folder = checkpoint("llama-mha")
        rotated = tmp_path / "rotated"
        shutil.copytree(folder, rotated)
        config = json.loads((rotated / "config.json").read_text())
        (rotated / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))

        def identity(folder: Path, **settings: Any) -> AnswerIdentity:
            parts = load_engine(folder, device="cpu", num_pages=4, **settings)
            return parts.identity(vocabulary="v", grammars="g")

        one = identity(folder)
        assert one == identity(folder, page_size=32), "what changes no token is not in it"
        assert identity(folder, dtype="bfloat16") == replace(one, dtype="bfloat16")
        other = identity(rotated)
        assert other.config != one.config
        assert other == replace(one, config=other.config)
        assert torch.__version__ in one.arithmetic

    def test_kv_memory_sets_the_number_of_pages(self, checkpoint: Callable[..., Path]) -> None:
        folder = checkpoint("llama-mha")
        page_bytes = 4 * 3 * 2 * 16 * 16 * 4
        parts = load_engine(folder, device="cpu", kv_memory_bytes=10 * page_bytes + 5)
        assert parts.pool.layout.page_bytes == page_bytes
        assert parts.pool.num_pages == 10

    def test_default_memory_is_bounded(self, checkpoint: Callable[..., Path]) -> None:
        parts = load_engine(checkpoint("llama-mha"), device="cpu")
        assert 0 < parts.pool.num_pages * parts.pool.layout.page_bytes <= 1 << 30

    def test_the_host_tier_has_the_pages_that_fit_and_is_off_on_a_cpu(self, checkpoint: Callable[..., Path]) -> None:
        folder = checkpoint("llama-mha")
        for asked, num_slots in ((None, None), (0, None), (10 * 4 * 3 * 2 * 16 * 16 * 4 + 5, 10)):
            tier = load_engine(folder, device="cpu", num_pages=4, host_tier_bytes=asked).tier
            assert (None if tier is None else tier.stats().total) == num_slots

    def test_a_host_tier_that_cannot_be_allocated_is_told(
        self, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> NoReturn:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr(swap, "host_zeros", refuse)
        with pytest.raises(ConfigError, match="MiB of the host's memory for KV pages cannot be allocated"):
            load_engine(checkpoint("llama-mha"), device="cpu", num_pages=4, host_tier_bytes=1 << 20)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"host_tier_bytes": 5}, "5 bytes of host tier do not hold one page"),
            ({"host_tier_bytes": 1 << 60}, "but .* MiB of memory are available"),
            ({"num_pages": 1, "kv_memory_bytes": 1}, "both set"),
            ({"num_pages": 0}, "num_pages is 0"),
            ({"kv_memory_bytes": 5}, "5 bytes of KV memory do not hold one page"),
            ({"num_pages": 10**9}, "but .* MiB of memory are available on cpu"),
            ({"page_size": 0}, "page_size is 0"),
            ({"gpu_memory_share": 1.1}, "gpu_memory_share is 1.1"),
            ({"threads": 0}, "threads is 0"),
            ({"dtype": "int8"}, "dtype"),
            ({"device": "toaster"}, "device"),
        ],
    )
    def test_wrong_settings(self, checkpoint: Callable[..., Path], arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_engine(checkpoint("llama-mha"), **{"device": "cpu", **arguments})

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="does not exist"):
            load_engine(tmp_path / "nothing")

    @pytest.mark.parametrize(("page_size", "num_pages"), [(16, 64), (4, 2), (1, 1)])
    def test_a_warm_engine_has_run_and_holds_nothing(
        self, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, page_size: int, num_pages: int
    ) -> None:
        runs: list[int] = []
        run = ModelRunner.run
        monkeypatch.setattr(ModelRunner, "run", lambda self, plan: (runs.append(len(plan.items)), run(self, plan))[1])
        parts = load_warm_engine(checkpoint("llama-mha"), device="cpu", page_size=page_size, num_pages=num_pages)
        assert bool(runs) == (page_size * num_pages > 3)
        assert parts.allocator.counts() == PageCounts(total=num_pages, free=num_pages, cached=0, reserved=0, used=0)
        cold = load_engine(checkpoint("llama-mha"), device="cpu", page_size=page_size, num_pages=64)
        warm = replace(parts, pool=cold.pool, runner=ModelRunner(parts.model, cold.pool))
        warm = replace(warm, allocator=PageAllocator(64))
        sampling = Sampling(max_tokens=5, temperature=0.0)
        assert Engine(warm).generate([[5, 6, 7]], sampling) == Engine(cold).generate([[5, 6, 7]], sampling)

    def test_a_model_that_gives_no_numbers_is_served_all_the_same(
        self, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(self: Engine, *_: object) -> list[list[int]]:
            raise NonFiniteLogits("NaN")

        monkeypatch.setattr(Engine, "generate", fail)
        load_warm_engine(checkpoint("llama-mha"), device="cpu", num_pages=64)
        assert "not finite" in caplog.text

    def test_threads_are_set(self, checkpoint: Callable[..., Path]) -> None:
        before = torch.get_num_threads()
        try:
            load_engine(checkpoint("llama-mha"), device="cpu", num_pages=4, threads=2)
            assert torch.get_num_threads() == 2
        finally:
            torch.set_num_threads(before)


def test_the_gpu_is_named_as_nvml_names_it(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = load("llama-mha")
    assert parts.gpu_uuid is None
    uuids = {torch.device("cuda:1"): "8f6c3ee2-0000-4a53-8a3f-2d5a5b7f6c11"}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuids[device]))
    on_gpu = SimpleNamespace(device=torch.device("cuda:1"))
    assert replace(parts, model=cast(Any, on_gpu)).gpu_uuid == "GPU-8f6c3ee2-0000-4a53-8a3f-2d5a5b7f6c11"
