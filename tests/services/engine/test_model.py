import importlib.util
import random
import shutil
import warnings
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine import model as models
from services.engine.kernels.library import Kernels
from services.engine.model import Model, load_model
from services.runtime.errors import ConfigError, InvariantViolated

# Around the page sizes (16 and 5) and the kernels' key blocks (32).
PROMPT_LENGTHS = (1, 4, 15, 16, 17, 33, 70)


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize("page_size", [16, 5])
def test_prompt_logits_equal_transformers(
    checkpoint, reference, random_ids, paged_run, variant, page_size, use_kernels
):
    model = load_model(checkpoint(variant), device="cpu", use_kernels=use_kernels)
    assert model.exact == use_kernels
    run = paged_run(model, page_size=page_size)
    for length in PROMPT_LENGTHS:
        ids = random_ids(length, seed=length)
        logits = run.step({length: ids})[length]
        torch.testing.assert_close(logits, reference_logits(reference(variant), ids), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3-tied-bias", "llama-mha"])
def test_checkpoints_of_embedding_models_are_read_whose_names_have_no_prefix(
    checkpoint, random_ids, paged_run, tmp_path, name
):
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({key.removeprefix("model."): tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    ids = random_ids(20)
    whole, base = (paged_run(load_model(folder)).step({"a": ids})["a"] for folder in (checkpoint(name), tmp_path))
    assert torch.equal(whole, base)


def test_greedy_decode_equals_transformers_generate(checkpoint, reference, random_ids, paged_run, variant):
    prompts = {length: random_ids(length, seed=length) for length in (3, 15, 16, 17, 31)}
    run = paged_run(load_model(checkpoint(variant), device="cpu"))
    logits = run.step(prompts)
    answers: dict[int, list[int]] = {length: [] for length in prompts}
    for _ in range(10):
        chosen = {length: int(rows[-1].argmax()) for length, rows in logits.items()}
        for length, token in chosen.items():
            answers[length].append(token)
        logits = run.step({length: [token] for length, token in chosen.items()})
    for length, prompt in prompts.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.tensor([prompt])
            expected = reference(variant).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, eos_token_id=None
            )
        assert answers[length] == expected[0, length:].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_bitwise_the_same_however_they_are_computed(checkpoint, random_ids, paged_run, variant, dtype):
    model = load_model(checkpoint(variant), dtype=dtype, device="cpu")
    assert model.exact
    sequences = {length: random_ids(length, seed=length) for length in (5, 40, 100)}
    alone = {name: paged_run(model).step({name: ids})[name] for name, ids in sequences.items()}

    for page_size, chunk, threads in ((16, 1, 1), (16, 7, 2), (64, 32, 1), (5, 33, 1)):
        torch.set_num_threads(threads)
        run = paged_run(model, page_size=page_size, seed=chunk)
        for name, ids in sequences.items():
            parts = [run.step({name: ids[at : at + chunk]})[name] for at in range(0, len(ids), chunk)]
            assert torch.equal(torch.cat(parts), alone[name]), (name, page_size, chunk)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_bitwise_the_same_in_any_batch(checkpoint, random_ids, paged_run, variant, dtype):
    model = load_model(checkpoint(variant), dtype=dtype, device="cpu")
    sequences = {name: random_ids(10 + 9 * name, seed=name) for name in range(8)}
    alone = {name: paged_run(model).step({name: ids})[name] for name, ids in sequences.items()}

    chance = random.Random(1)
    run = paged_run(model)
    parts: dict[int, list[torch.Tensor]] = {name: [] for name in sequences}
    todo = dict(sequences)
    while todo:
        chosen = chance.sample(sorted(todo), chance.randint(1, len(todo)))
        step = {name: todo[name][: chance.choice([1, 1, 1, 3, 18, 40])] for name in chosen}
        for name, logits in run.step(step).items():
            parts[name].append(logits)
            todo[name] = todo[name][len(step[name]) :]
        todo = {name: ids for name, ids in todo.items() if ids}
    for name, logits in alone.items():
        assert torch.equal(torch.cat(parts[name]), logits)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(checkpoint, reference, random_ids, paged_run, variant):
    ids = random_ids(40)
    exact = reference_logits(reference(variant), ids)
    model = load_model(checkpoint(variant), dtype="bfloat16", device="cpu")
    ours = paged_run(model).step({0: ids})[0]
    import copy

    theirs = reference_logits(copy.deepcopy(reference(variant)).to(torch.bfloat16), ids).float()
    assert (ours - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


def test_sharded_and_half_precision_checkpoints_load(checkpoint, random_ids, paged_run):
    ids = random_ids(20)
    single = load_model(checkpoint("qwen3-qk-norm"), device="cpu")
    sharded = load_model(checkpoint("qwen3-qk-norm", sharded=True), device="cpu")
    assert single.fingerprint == sharded.fingerprint
    assert torch.equal(paged_run(single).step({0: ids})[0], paged_run(sharded).step({0: ids})[0])

    half = load_model(checkpoint("qwen3-qk-norm", dtype="bfloat16"), device="cpu")
    assert half.dtype == torch.bfloat16
    assert half.fingerprint != single.fingerprint
    assert load_model(checkpoint("qwen3-qk-norm", dtype="float16"), device="cpu").dtype == torch.float32


def test_fingerprint_tells_models_apart_but_not_dtypes(checkpoint):
    folder = checkpoint("llama-mha")
    assert load_model(folder, dtype="bfloat16").fingerprint == load_model(folder, dtype="float32").fingerprint
    assert load_model(folder).fingerprint != load_model(checkpoint("llama-bias")).fingerprint


def test_only_wanted_logits_are_computed(checkpoint, random_ids, paged_run, step_inputs):
    for use_kernels in (True, False):
        model = load_model(checkpoint("llama-mha"), device="cpu", use_kernels=use_kernels)
        inputs = step_inputs(model, random_ids(9))
        all_rows = model.forward(*inputs)
        wanted = torch.tensor([8, 2, 8, 8, 0, 1, 2, 3, 4, 5, 6, 7])
        assert torch.equal(model.forward(*inputs[:-1], wanted), all_rows[wanted])
        assert model.forward(*inputs[:-1], wanted[:0]).shape == (0, model.config.vocab_size)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, 331, "a token id is outside the vocabulary"),
        (0, -1, "a token id is outside the vocabulary"),
        (1, 512, "a position is outside the model's context"),
        (1, -1, "a position is outside the model's context"),
        (4, 9, "a logits index is outside the step"),
    ],
)
def test_step_that_contradicts_itself_is_refused(checkpoint, random_ids, step_inputs, index, value, message):
    model = load_model(checkpoint("llama-mha"), device="cpu")
    inputs = list(step_inputs(model, random_ids(9)))
    before = inputs[3].clone()
    inputs[index] = inputs[index].clone()
    inputs[index][3] = value
    with pytest.raises(InvariantViolated, match=message):
        model.forward(*inputs)
    torch.testing.assert_close(inputs[3], before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("slot_mapping", [128] * 9, "a slot is outside"),
        ("slot_mapping", [-1] * 9, "a slot is outside"),
        ("page_tables", [[8, 0, 0, 0]], "a page id is outside"),
        ("page_tables", [[-1, 0, 0, 0]], "a page id is outside"),
        ("context_lens", [8], "lengths contradict"),
        ("context_lens", [65], "lengths contradict"),
        ("context_lens", [-5], "lengths contradict"),
        ("query_start", [0, 8], "lengths contradict"),
        ("query_start", [1, 9], "lengths contradict"),
    ],
)
def test_batch_that_contradicts_itself_is_refused(checkpoint, random_ids, step_inputs, field, value, message):
    import dataclasses

    model = load_model(checkpoint("llama-mha"), device="cpu")
    token_ids, positions, batch, pool_data, wanted = step_inputs(model, random_ids(9))
    wrong = torch.tensor(value, dtype=getattr(batch, field).dtype)
    broken = dataclasses.replace(batch, **{field: wrong})
    with pytest.raises(InvariantViolated, match=message):
        model.forward(token_ids, positions, broken, pool_data, wanted)


def test_tensors_of_wrong_type_or_shape_are_refused(checkpoint, random_ids, step_inputs):
    model = load_model(checkpoint("llama-mha"), device="cpu")
    inputs = step_inputs(model, random_ids(9))
    for index, wrong in (
        (0, inputs[0].int()),
        (1, inputs[1][:-1]),
        (3, inputs[3].bfloat16()),
        (3, inputs[3].transpose(0, 1)),
        (3, inputs[3][:, :1]),
    ):
        broken = [*inputs[:index], wrong, *inputs[index + 1 :]]
        with pytest.raises(InvariantViolated, match="a kernel was given"):
            model.forward(*broken)


def test_step_beyond_the_context_is_refused(checkpoint, random_ids, paged_run):
    model = load_model(checkpoint("llama-mha"), device="cpu")
    run = paged_run(model)
    run.step({0: random_ids(512)})
    with pytest.raises(InvariantViolated, match="beyond the model's context"):
        run.step({0: [1]})


def test_model_serves_without_kernels_and_says_so(checkpoint, monkeypatch, caplog):
    from services.engine import model as model_module
    from services.engine.kernels.build import KernelsUnavailable

    def fail() -> Kernels:
        raise KernelsUnavailable("there is no C++ compiler")

    monkeypatch.setattr(model_module, "load_kernels", fail)
    model: Model = load_model(checkpoint("llama-mha"), device="cpu")
    assert not model.exact
    assert model.arithmetic == f"torch-{torch.__version__}"
    assert model.kernels_error == "there is no C++ compiler"
    assert "there is no C++ compiler" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [{"dtype": "int8"}, {"dtype": "float16", "device": "cpu"}, {"device": "tpu"}, {"device": "meta"}, {"device": ""}],
)
def test_wrong_dtype_or_device_is_a_config_error(checkpoint, settings):
    with pytest.raises(ConfigError):
        load_model(checkpoint("llama-mha"), **settings)


@pytest.fixture
def step_inputs():
    from services.engine.reference.attention import AttentionBatch

    def make(model: Model, ids: list[int]) -> tuple[Any, ...]:
        config, count = model.config, len(ids)
        pool = torch.full((8, config.num_kv_heads, config.num_layers, 2, 16, config.head_dim), float("nan"))
        batch = AttentionBatch(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([count], dtype=torch.int32),
            page_tables=torch.tensor([[3, 1, 4, 5]], dtype=torch.int32),
            slot_mapping=torch.tensor([[3, 1, 4, 5][i // 16] * 16 + i % 16 for i in range(count)]),
        )
        return torch.tensor(ids), torch.arange(count), batch, pool, torch.arange(count)

    return make


def test_triton_that_does_not_work_is_told_and_done_without(caplog: pytest.LogCaptureFixture) -> None:
    """Here for want of a GPU; elsewhere for want of a compiler or of Python's headers."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton for this system")
    assert models._triton_error().startswith("Triton does not work: ")
    assert "Triton does not work here" in caplog.text
