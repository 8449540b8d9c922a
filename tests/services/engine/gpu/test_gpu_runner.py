"""Plans over graphs and steps launched ahead give what one sequence after the other gives.

The model is a toy that says something else whenever a key of the context, its place or its page were wrong: a token's
id is its key, and the next token follows from all keys in the pages. Only the last tests run a real decoder.
"""

import dataclasses
import functools
import itertools
import math

import msgspec
import pytest
import torch

from services.engine.cache.pages import PageAllocator
from services.engine.cache.pool import PageLayout, PagePool
from services.engine.engine import Engine, EngineParts
from services.engine.gpu import graphs
from services.engine.gpu.decoder import TritonDecoder
from services.engine.gpu.graphs import DecodeGraphs, Row, buckets
from services.engine.gpu_runner import GpuRunner
from services.engine.model import Model, ModelSource, load_model
from services.engine.reference.decoder import DecoderStep
from services.engine.runner import ModelRunner
from services.engine.sampling import sample
from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import NonFiniteLogits, StepItem, StepPlan
from services.engine.weights.checkpoint import Checkpoint
from services.engine.weights.config import load_config
from services.engine.weights.linear import TorchLinear
from services.engine.weights.load import WeightPlacement, load_weights
from services.runtime.errors import InvariantViolated

VOCAB_SIZE = 331
POISON = 300


def toy_logits(keys: list[int]) -> torch.Tensor:
    """[V] after these tokens; not finite after POISON."""
    if keys[-1] == POISON:
        return torch.full((VOCAB_SIZE,), math.nan)
    mixed = sum((index + 1) * (key + 1) for index, key in enumerate(keys)) % 9973
    return torch.sin(0.37 * mixed + 0.01 * torch.arange(VOCAB_SIZE).square()) * 3


class ToyDecoder(TritonDecoder):
    """Reads and writes the pool through the inputs that the real one gets."""

    def __init__(self, config):
        self.config = config

    def hidden(self, step):
        batch = step.batch
        self._write(step.token_ids, batch.slot_mapping, step.pool_data)
        ends = batch.query_start.tolist()
        logits = torch.full((len(step.token_ids), VOCAB_SIZE), math.nan)  # of padding
        for row, (start, end) in enumerate(itertools.pairwise(ends)):
            for at in range(start, end):
                keys = self._read(batch.page_tables[row], int(step.positions[at]) + 1, step.pool_data)
                logits[at] = toy_logits(keys)
        return logits, torch.zeros_like(logits)

    def logits(self, x, residual, wanted):
        return x[wanted]

    def decode(self, step):
        self._write(step.token_ids, step.slot_mapping, step.pool_data)
        logits = torch.zeros(len(step.token_ids), VOCAB_SIZE)
        for row, length in enumerate(step.rows.context_lens.tolist()):
            if length:
                assert length == step.positions[row] + 1
                table = step.rows.page_ids[step.rows.table_starts[row] :]
                logits[row] = toy_logits(self._read(table, length, step.pool_data))
        return logits

    def _write(self, token_ids, slots, pool_data):
        page_size = pool_data.shape[4]
        for token_id, slot in zip(token_ids.tolist(), slots.tolist(), strict=True):
            if slot >= 0:
                pool_data[slot // page_size, 0, 0, 0, slot % page_size, 0] = token_id

    def _read(self, table, length, pool_data):
        keys = pool_data[table[: -(-length // pool_data.shape[4])].long(), 0, 0, 0, :, 0].flatten()[:length]
        return [int(key) for key in keys]


class ToyModel:
    kernels = None

    def __init__(self, config):
        self.config, self.decoder, self.device = config, ToyDecoder(config), torch.device("cpu")

    def step(self, token_ids, positions, *, batch, pool_data, logits_indices):
        return DecoderStep(token_ids, positions, batch, pool_data, logits_indices, torch.empty(0))

    def whole_rope(self):
        return torch.empty(0)


@pytest.fixture
def parts(checkpoint):
    """The parts of a toy whose pool has 40 pages of 4 tokens, for at most 4 rows at a time."""
    config = dataclasses.replace(
        load_config(checkpoint("llama-mha")), num_kv_heads=1, num_layers=1, head_dim=2, hidden_size=VOCAB_SIZE
    )
    pool = PagePool(PageLayout(1, 1, 2, 4, torch.float32), 40)
    pool.data.fill_(-77)
    model = ToyModel(config)
    return EngineParts(config, model, pool, PageAllocator(40), GpuRunner(model, pool, max_rows=4), "toy")


def alone(prompt, sampling):
    """The answer, computed from nothing but the tokens."""
    sequence = Sequence(0, prompt, sampling=sampling)
    while sequence.finish_reason() is None:
        (token,) = sample(toy_logits(sequence.token_ids)[None], [sequence])
        sequence.append_token(token.token_id)
    return sequence.token_ids[len(prompt) :]


SAMPLINGS = [
    Sampling(max_tokens=14, temperature=0.0),
    Sampling(max_tokens=9, temperature=1.0, seed=3),
    Sampling(max_tokens=1, temperature=0.8, seed=4),
    Sampling(max_tokens=11, temperature=0.8, min_p=0.05, seed=5),
]
PROMPTS = [[5, 6, 7], [1], [9] * 4, [2, 3, 4, 5, 6]]


def test_answers_are_those_of_each_sequence_alone(parts):
    answers = Engine(parts).generate(PROMPTS, SAMPLINGS)
    assert answers == [alone(*one) for one in zip(PROMPTS, SAMPLINGS, strict=True)]
    assert parts.allocator.counts().used == 0


def test_next_step_is_launched_before_tokens_are_read(parts, monkeypatch):
    happened = []
    launch, tokens = DecodeGraphs.launch, graphs.Launched.tokens
    monkeypatch.setattr(DecodeGraphs, "launch", lambda *a: happened.append("launch") or launch(*a))
    monkeypatch.setattr(graphs.Launched, "tokens", lambda *a: happened.append("read") or tokens(*a))
    (answer,) = Engine(parts).generate([[5, 6, 7]], Sampling(max_tokens=8, temperature=0.0))
    assert len(answer) == 8
    # The first token is the prompt's. Each later step is in flight before the one before it is read; none is in vain.
    assert happened == ["launch", *["launch", "read"] * 6, "read"]
    assert (parts.runner.num_launched_ahead, parts.runner.num_ahead_used) == (6, 6)


def test_a_chunk_is_launched_before_the_tokens_of_decode_rows_beside_it_are_read(parts, monkeypatch):
    happened = []
    launch, tokens, hidden = DecodeGraphs.launch, graphs.Launched.tokens, ToyDecoder.hidden
    monkeypatch.setattr(DecodeGraphs, "launch", lambda *a: happened.append("launch") or launch(*a))
    monkeypatch.setattr(graphs.Launched, "tokens", lambda *a: happened.append("read") or tokens(*a))
    monkeypatch.setattr(ToyDecoder, "hidden", lambda *a: happened.append("chunk") or hidden(*a))
    one, other = (Sequence(index, [index + 3, 4], sampling=SAMPLINGS[0]) for index in range(2))
    computed(parts, one)
    other.page_table = parts.allocator.allocate(5, state="used")
    happened.clear()
    decoded, prompt = parts.runner.run(StepPlan([StepItem(one, 1), StepItem(other, 2)])).outcomes
    assert happened == ["launch", "chunk", "read"]
    assert (decoded.token_id, prompt.token_id) == (
        int(toy_logits(one.token_ids).argmax()),
        int(toy_logits(other.token_ids).argmax()),
    )


def test_what_joins_leaves_or_stops_changes_no_answer(parts):
    """All at once: more sequences than rows, answers that stop early, and some cancelled, while steps are in flight."""
    engine = Engine(parts, max_batch=9, chunk_tokens=6)
    cases, sequences = [], []
    for index in range(9):
        prompt = [index + 1] * (1 + index % 5)
        sampling = msgspec.structs.replace(SAMPLINGS[index % 4], seed=index, max_tokens=4 + index)
        stop = alone(prompt, sampling)[2] if index % 3 == 0 else 330
        cases.append((prompt, msgspec.structs.replace(sampling, stop_token_ids=frozenset({stop}))))
    waiting = list(cases)
    cancelled = None
    for step in range(200):
        if waiting and step % 2 == 0:
            sequences.append(engine.add(*waiting.pop(0)))
        if step == 9:
            cancelled = sequences[1]
            engine.cancel(cancelled)
        engine.step()
        if not waiting and not engine.has_work:
            break
    for (prompt, sampling), sequence in zip(cases, sequences, strict=True):
        expected = alone(prompt, sampling)
        given = sequence.token_ids[len(prompt) :]
        assert given == (expected[: len(given)] if sequence is cancelled else expected)
    assert parts.runner.num_ahead_used > 10
    assert parts.allocator.counts().free == 40


@pytest.mark.parametrize(
    "shaping",
    [
        {"top_p": 0.5},
        {"top_k": 3},
        {"repetition_penalty": 1.7},
        {"logit_bias": {3: 4.0}},
        {"min_tokens": 6, "stop_token_ids": frozenset(range(100))},
        {"logprobs": 2},
    ],
)
def test_what_the_device_does_not_choose_is_chosen_on_the_host(parts, shaping):
    shaped = Sampling(max_tokens=9, seed=8, **shaping)
    answers = Engine(parts).generate(PROMPTS[:2], [shaped, SAMPLINGS[1]])
    assert answers == [alone(PROMPTS[0], shaped), alone(PROMPTS[1], SAMPLINGS[1])]


def test_greedy_answers_are_chosen_on_the_device_whatever_top_p_is(parts):
    Engine(parts).generate([[5]], Sampling(max_tokens=5, temperature=0.0, top_p=0.5, top_k=2))
    assert parts.runner.num_ahead_used == 3


def test_a_row_that_is_not_finite_fails_alone(parts):
    engine = Engine(parts)
    good = engine.add([5, 6], SAMPLINGS[0])
    bad = engine.add([5, 6], Sampling(max_tokens=9, logit_bias={POISON: 1000.0}, top_k=1))
    failures = []
    while engine.has_work:
        for output in engine.step():
            if isinstance(output.outcome, NonFiniteLogits):
                failures.append(output.sequence)
            if output.sequence is bad and bad.num_generated_tokens == 1:
                bad.sampling = Sampling(max_tokens=9)  # from now on the device chooses
    assert failures == [bad]
    assert good.token_ids[2:] == alone([5, 6], SAMPLINGS[0])


def computed(parts, sequence):
    """A sequence whose prompt is in pages, with its first token."""
    sequence.page_table = parts.allocator.allocate(5, state="used")
    parts.runner.run(StepPlan([StepItem(sequence, sequence.num_tokens, wants_token=False)]))
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.append_token(7)


def decode(parts, *sequences):
    outcomes = parts.runner.run(StepPlan([StepItem(one, 1) for one in sequences])).outcomes
    for one, outcome in zip(sequences, outcomes, strict=True):
        one.num_computed_tokens += 1
        one.append_token(outcome.token_id)


@pytest.mark.parametrize("change", ["pages", "token", "replay", "joined", "left", "order"])
def test_a_step_ahead_is_used_only_for_what_it_computed(parts, change):
    sampling = Sampling(max_tokens=20, temperature=0.0)
    one, other = (Sequence(index, [index + 3, 4, 5, 6], sampling=sampling) for index in range(2))
    computed(parts, one)
    computed(parts, other)
    decode(parts, *((one,) if change == "joined" else (one, other)))
    assert parts.runner.num_launched_ahead == 1
    if change == "pages":  # it was preempted, and came back to pages in which the new key is not
        page_ids = parts.allocator.allocate(5, state="used")
        parts.pool.data[page_ids] = parts.pool.data[one.page_table]
        parts.pool.data[page_ids[1], 0, 0, 0, 1] = -5
        one.page_table = page_ids
    elif change == "token":
        one.token_ids[-1] = 11
    elif change == "replay":
        one.num_computed_tokens -= 1
    rows = (one,) if change == "left" else (other, one)
    if change == "replay":
        parts.runner.run(StepPlan([StepItem(one, 1), StepItem(other, 1)]))
        assert parts.runner.num_ahead_used == 0
        return
    before = {id(row): list(row.token_ids) for row in rows}
    decode(parts, *rows)
    assert parts.runner.num_ahead_used == (1 if change in ("left", "order") else 0)
    for row in rows:
        assert row.token_ids[-1] == int(toy_logits(before[id(row)]).argmax())
        keys = parts.pool.data[row.page_table, 0, 0, 0, :, 0].flatten()[: len(row.token_ids) - 1]
        assert keys.tolist() == row.token_ids[:-1]


def test_nothing_is_launched_ahead_without_a_page_for_it(parts):
    sequence = Sequence(0, [3, 4, 5], sampling=Sampling(max_tokens=20, temperature=0.0))
    computed(parts, sequence)
    del sequence.page_table[1:]  # room for four tokens
    decode(parts, sequence)
    assert parts.runner.num_launched_ahead == 0


def test_more_rows_than_the_largest_bucket_take_several_steps(parts):
    prompts = [[index + 1] for index in range(7)]
    answers = Engine(parts).generate(prompts, Sampling(max_tokens=5, temperature=0.0))
    assert answers == [alone(prompt, Sampling(max_tokens=5, temperature=0.0)) for prompt in prompts]


def proposals(answer, num_right):
    """The next tokens of an answer, and two that are not its own."""
    return *answer[:num_right], *((token_id + 1) % 200 for token_id in answer[num_right : num_right + 2])


@pytest.mark.parametrize("num_right", [0, 1, 2, 5])
@pytest.mark.parametrize("shaping", [{}, {"top_p": 0.5}, {"logprobs": 1}])
def test_what_is_proposed_counts_as_far_as_it_would_have_been_chosen(parts, shaping, num_right):
    """Three sequences with proposals, and one without: more rows than a graph has."""
    samplings = [*(Sampling(max_tokens=12, seed=seed, **shaping) for seed in range(2)), *SAMPLINGS[:2]]
    sequences = [Sequence(index, [index + 3, 4], sampling=sampling) for index, sampling in enumerate(samplings)]
    answers = [alone(one.token_ids, one.sampling) for one in sequences]
    for one, answer in zip(sequences, answers, strict=True):
        computed(parts, one)
        one.token_ids[-1] = answer[0]
    while running := [one for one in sequences if one.finish_reason() is None]:
        items = []
        for one in running:
            to_come = answers[one.sequence_id][one.num_generated_tokens :]
            items.append(StepItem(one, 1, proposed=() if one is sequences[-1] else proposals(to_come, num_right)))
        outcomes = parts.runner.run(StepPlan(items)).outcomes
        for item, outcome in zip(items, outcomes, strict=True):
            tokens = outcome.tokens if item.proposed else (outcome,)
            if item.proposed:
                num_left = len(answers[item.sequence.sequence_id]) - item.sequence.num_generated_tokens
                assert len(tokens) == min(num_right + 1, num_left)
            for token in tokens:
                assert (token.logprob is None) == (item.sequence.sampling.logprobs is None)
                item.sequence.num_computed_tokens += 1
                item.sequence.append_token(token.token_id)
    assert [one.token_ids[2:] for one in sequences] == answers


@pytest.mark.parametrize("sizes", [(11,), (2, 9), (4, 3, 4), (5, 6), (1,) * 11])
def test_an_answer_that_is_computed_again_in_chunks_continues_as_it_would_have(parts, sizes):
    """A prompt of 4 tokens and 8 of an answer, in chunks that end anywhere, beside a sequence that decodes."""
    prompt, sampling = [3, 4, 5, 6], Sampling(max_tokens=12, temperature=0.9, seed=7)
    whole = alone(prompt, sampling)
    resumed = Sequence(0, prompt, sampling=sampling, emitted_token_ids=whole[:8])
    resumed.page_table = parts.allocator.allocate(5, state="used")
    neighbour = Sequence(1, [9, 8], sampling=sampling)
    computed(parts, neighbour)
    assert parts.runner.replays_in_chunks
    for size in sizes:
        of_chunk, of_neighbour = parts.runner.run(StepPlan([StepItem(resumed, size), StepItem(neighbour, 1)])).outcomes
        assert of_chunk is None
        resumed.num_computed_tokens += size
        neighbour.num_computed_tokens += 1
        assert of_neighbour.token_id == sample(toy_logits(neighbour.token_ids)[None], [neighbour])[0].token_id
        neighbour.append_token(of_neighbour.token_id)
    keys = parts.pool.data[resumed.page_table, 0, 0, 0, :, 0].flatten()[:11]
    assert keys.tolist() == resumed.token_ids[:11]
    while resumed.finish_reason() is None:
        decode(parts, resumed)
    assert resumed.token_ids[4:] == whole


def test_a_chunk_that_ends_an_answer_gives_the_next_token(parts):
    """Also where the host chooses it; what comes before only leaves its keys."""
    for index, shaping in enumerate(({}, {"top_p": 0.5})):
        sampling = Sampling(max_tokens=12, temperature=0.9, seed=7, **shaping)
        whole = alone([3, 4], sampling)
        resumed = Sequence(index, [3, 4], sampling=sampling, emitted_token_ids=whole[:6])
        resumed.page_table = parts.allocator.allocate(5, state="used")
        (outcome,) = parts.runner.run(StepPlan([StepItem(resumed, 8)])).outcomes
        assert outcome.token_id == whole[6]


def test_a_proposal_outside_the_vocabulary_is_refused(parts):
    sequence = Sequence(0, [3], sampling=Sampling(max_tokens=20))
    computed(parts, sequence)
    with pytest.raises(InvariantViolated, match="outside the vocabulary"):
        parts.runner.run(StepPlan([StepItem(sequence, 1, proposed=(4, VOCAB_SIZE))]))


def test_plans_that_contradict_themselves_are_refused(parts):
    sequence = Sequence(0, [3], sampling=Sampling(max_tokens=20))
    computed(parts, sequence)
    sequence.token_ids[-1] = VOCAB_SIZE
    with pytest.raises(InvariantViolated, match="outside the vocabulary"):
        parts.runner.run(StepPlan([StepItem(sequence, 1)]))
    sequence.token_ids[-1] = 1
    del sequence.page_table[:]
    with pytest.raises(InvariantViolated, match="cannot hold"):
        parts.runner.run(StepPlan([StepItem(sequence, 1)]))


# -- graphs ------------------------------------------------------------------------------------------------------------


def row(position, page_ids):
    return Row(token_id=position, position=position, page_ids=page_ids, noise_key=0, temperature=0.0, min_p_margin=0.0)


def test_buckets_grow_with_the_batch_and_the_largest_is_captured_first(parts):
    assert buckets(1) == [1]
    assert buckets(4) == [1, 2, 4]
    assert buckets(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    sizes = []

    def capture(function):
        sizes.append(function.args[0])
        function()
        function()
        return function

    DecodeGraphs(parts.model.decoder, parts.pool, torch.empty(0), max_rows=16, capture=capture)
    assert sizes == [16, 8, 4, 2, 1]
    assert (parts.pool.data == -77).all(), "capturing wrote to a page"


def test_a_step_is_one_copy_of_what_is_used_of_it(parts, monkeypatch):
    decode_graphs = DecodeGraphs(parts.model.decoder, parts.pool, torch.empty(0), max_rows=4)
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, *a, **k: copies.append(to) or copy(to, *a, **k))
    decode_graphs.launch([row(4, [7, 8]), row(0, [9])])
    inputs = [one for one in copies if one.dtype == torch.uint8]
    assert len(inputs) == 1
    assert inputs[0].data_ptr() == decode_graphs._inputs.data_ptr()
    assert inputs[0].numel() < decode_graphs._inputs.numel()


def test_rows_that_share_pages_beyond_the_scratch_are_computed_all_the_same(checkpoint):
    """256 tokens of room, and four rows of 900 tokens that share all their pages but the last."""
    config = dataclasses.replace(load_config(checkpoint("llama-mha")), context_length_tokens=1024)
    pool = PagePool(PageLayout(1, 1, 2, 64, torch.float32), 18)
    seen = []

    class Noting(ToyDecoder):
        def decode(self, step):
            seen.append((step.scratch.num_splits, int(step.rows.split_starts[-1])))
            return super().decode(step)

    pool.data.zero_()
    decode_graphs = DecodeGraphs(Noting(config), pool, torch.empty(0), max_rows=4)
    launched = decode_graphs.launch([row(900, [*range(14), 14 + index]) for index in range(4)])
    assert len(launched.tokens()) == 4
    ((room, needed),) = seen
    assert room >= needed == 16 > 18 * 64 // 256 + 1 + 4


def test_rows_without_their_pages_or_in_wrong_number_are_refused(parts):
    decode_graphs = DecodeGraphs(parts.model.decoder, parts.pool, torch.empty(0), max_rows=2)
    for rows in ([], [row(0, [1])] * 3, [row(4, [1])], [row(-1, [1])]):
        with pytest.raises(InvariantViolated, match="a decode"):
            decode_graphs.launch(rows)


# -- the real decoder --------------------------------------------------------------------------------------------------


def triton_model(folder, device, dtype=torch.float32):
    config = load_config(folder)
    checkpoint = Checkpoint(folder)
    placement = WeightPlacement(dtype, device, TorchLinear, TorchLinear.of)
    weights = load_weights(config, checkpoint, placement)
    checkpoint.close()
    source = ModelSource(config, checkpoint, placement, kernels=None)
    return Model(source, TritonDecoder(config, weights), fingerprint="")


def engine_of(model, runner_class, **settings):
    config = model.config
    layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, model.dtype)
    pool = PagePool(layout, 24, device=model.device)
    pool.data.fill_(math.nan)
    return EngineParts(config, model, pool, PageAllocator(24), runner_class(model, pool, **settings), "")


@pytest.mark.parametrize("name", [pytest.param("llama3-gqa-tied", marks=pytest.mark.slow), "qwen3-tied-bias"])
def test_decoder_and_graphs_answer_as_the_cpu_does(checkpoint, random_ids, device, name):
    """Greedy and seeded, prompts in chunks beside decode rows; pages full of NaN where nothing was written."""
    prompts = [random_ids(17, seed=1), random_ids(3, seed=2)]
    samplings = [Sampling(max_tokens=5, temperature=0.0), Sampling(max_tokens=6, temperature=0.9, seed=5, min_p=0.01)]
    ours = engine_of(triton_model(checkpoint(name), device), GpuRunner, max_rows=2)
    answers = Engine(ours, chunk_tokens=12).generate(prompts, samplings)
    oracle = engine_of(load_model(checkpoint(name), device="cpu"), ModelRunner)
    assert answers == Engine(oracle).generate(prompts, samplings)
    assert ours.runner.num_ahead_used > 0


@pytest.mark.parametrize(("name", "dtype"), [("llama-mqa-odd", torch.float32), ("qwen3-qk-norm", torch.bfloat16)])
def test_prompt_logits_equal_the_readable_decoders(checkpoint, random_ids, paged_run, name, dtype):
    """On the CPU, where the readable decoder's tensors are."""
    model = triton_model(checkpoint(name), torch.device("cpu"), dtype)
    oracle = load_model(checkpoint(name), device="cpu", dtype=str(dtype).removeprefix("torch."), use_kernels=False)
    ids = random_ids(21)
    run, expected = paged_run(model), paged_run(oracle)
    ours = torch.cat([run.step({0: part})[0] for part in (ids[:16], ids[16:20], ids[20:])])
    errors = (ours - expected.step({0: ids})[0]).abs()
    most, mean = (3e-5, 3e-6) if dtype == torch.float32 else (0.15, 0.01)
    assert errors.max() < most
    assert errors.mean() < mean


def test_rows_of_one_sequence_in_a_step_are_those_of_steps_of_their_own(checkpoint, random_ids, device):
    """What verifying proposals rests on: a row reads the keys that the rows before it write in the same step."""
    parts = engine_of(triton_model(checkpoint("qwen3-qk-norm"), device), GpuRunner, max_rows=4)
    ids = random_ids(9)
    launch = parts.runner._graphs.launch

    def logits(page_ids, groups):
        sequence = Sequence(0, ids[:6], sampling=Sampling(max_tokens=9))
        sequence.page_table = page_ids
        parts.runner.run(StepPlan([StepItem(sequence, 6, wants_token=False)]))
        found = []
        for positions in groups:
            rows = [dataclasses.replace(row(at, page_ids), token_id=ids[at]) for at in positions]
            launch(rows).wait()
            found.append(parts.runner._graphs.logits[: len(rows)].clone())
        return torch.cat(found)

    alone, together = logits([3], [[6], [7], [8]]), logits([5], [[6, 7, 8]])
    # Not to the bit: products of matrices, torch's here, may depend on the number of rows.
    assert (alone - together).abs().max() < 1e-5 < 0.01 < (alone[1] - alone[2]).abs().max()


def test_hidden_states_are_those_of_the_reference(checkpoint, device):
    folder = checkpoint("qwen3-qk-norm")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found = []
    small = functools.partial(GpuRunner, max_rows=1, max_prompt_tokens=16)
    for model, runner_type in (
        (triton_model(folder, device, dtype), small),
        (load_model(folder, dtype=str(dtype).removeprefix("torch."), device="cpu", use_kernels=False), ModelRunner),
    ):
        config = model.config
        layout = PageLayout(config.num_layers, config.num_kv_heads, config.head_dim, 16, model.dtype)
        runner, items = runner_type(model, PagePool(layout, 6, device=model.device)), []
        for number, pooling in enumerate(("mean", None, "last")):
            sequence = Sequence(number, range(3 + number, 10 + number), sampling=Sampling(max_tokens=1, temperature=0))
            sequence.page_table, sequence.pooling = [2 * number], pooling
            items.append(StepItem(sequence, 7, wants_token=pooling is None))
        mean, token, last = runner.run(StepPlan(items)).outcomes
        found.append((torch.tensor(mean.state) / 7, token.token_id, torch.tensor(last.state)))
    (mean, token_id, last), expected = found
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(mean, expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(last, expected[2], rtol=tolerance, atol=tolerance)
    assert dtype == torch.bfloat16 or token_id == expected[1]
