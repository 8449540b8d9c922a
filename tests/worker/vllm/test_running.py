"""vLLM itself behind the engines: what it computes, whose blocks stay, and when they come free."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is in .venv-vllm: make test-vllm")

from services.engine.steps.sequence import Sampling, Sequence
from services.engine.steps.step import SampledToken
from services.runtime.errors import InvariantViolated
from services.runtime.page_keys import page_keys
from tests.vllm.lora import MERGED, write_adapter
from worker.vllm.core import Computed, Core, StepDone
from worker.vllm.loading import VllmModel, VllmSettings, load_vllm

# vLLM's own warnings, and those of what it imports, are not ours.
pytestmark = pytest.mark.filterwarnings("default")

NUM_BLOCKS, BLOCK = 40, 32
STEP_TOKENS = 64
VOCAB = 512
SALTS = [bytes([number]) * 32 for number in range(4)]
ADAPTERS = ("a", "b")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmModel]:
    """The only engine that this process may have."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.1,
    )
    folder, adapters = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("adapters")
    LlamaForCausalLM(config).float().save_pretrained(folder)
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder, adapters / name, seed=seed)
    loaded = load_vllm(
        VllmSettings(
            model_dir=folder,
            num_blocks=NUM_BLOCKS,
            threads=1,
            step_tokens=STEP_TOKENS,
            max_batch=8,
            adapters={name: adapters / name for name in ADAPTERS},
        )
    )
    yield loaded
    loaded.close()


@pytest.fixture
def core(model: VllmModel) -> Iterator[Core]:
    """vLLM with nothing in it, and nothing left in it afterwards."""
    core = model._running
    core.check_books()
    yield core
    drain(core)
    core.check_books()


@pytest.fixture
def lost(model: VllmModel) -> Callable[[], set[int]]:
    """Blocks that transfers were told to have lost, since the test began."""
    blocks = range(NUM_BLOCKS + 1)
    before = model.allocator.generations(blocks)
    return lambda: {block for block in blocks if model.allocator.generations(blocks)[block] != before[block]}


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    chance = random.Random(f"{seed} {num_tokens}")
    return [chance.randrange(VOCAB) for _ in range(num_tokens)]


def asking(prompt: list[int], *, max_tokens: int = 12, emitted: tuple[int, ...] = (), adapter: str = "") -> Sequence:
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
    sequence = Sequence("a", prompt, sampling=sampling, emitted_token_ids=emitted)
    sequence.adapter = adapter
    return sequence


def drain(core: Core, *sequences: tuple[str, Sequence]) -> list[StepDone]:
    """Steps until nothing more is to be done, and appends each token to its sequence."""
    by_id, steps = dict(sequences), []
    while True:
        steps.append(core.step())
        for computed in steps[-1].computed:
            if computed.request_id in by_id and isinstance(computed.outcome, SampledToken):
                by_id[computed.request_id].append_token(computed.outcome.token_id)
        if not steps[-1].has_more:
            return steps


NAMES = itertools.count()


def alone(core: Core, prompt: list[int], *, max_tokens: int = 12, adapter: str = "") -> list[int]:
    """What vLLM answers to a prompt that nobody handed over."""
    name, sequence = f"alone{next(NAMES)}", asking(prompt, max_tokens=max_tokens, adapter=adapter)
    core.add(name, sequence, salt=adapter.encode() * 32 or SALTS[0], service_class=2)
    drain(core, (name, sequence))
    return sequence.token_ids[len(prompt) :]


class Given:
    """Blocks for tokens that are to arrive."""

    def __init__(self) -> None:
        self.block_ids: tuple[int, ...] = ()
        self.num_cached_tokens = -1

    def __call__(self, block_ids: tuple[int, ...], num_cached_tokens: int) -> None:
        self.block_ids, self.num_cached_tokens = block_ids, num_cached_tokens


def hand_over(
    model: VllmModel, prompt: list[int], *, name: str, salt: bytes, adapter: str = ""
) -> tuple[Sequence, Given]:
    """Computes a prompt under one salt, copies its blocks to those of another request, and has that one continue."""
    core = model._running
    core.add_held(f"p{name}", asking(prompt, adapter=adapter), salt=SALTS[1], service_class=2)
    last = [one for step in drain(core) for one in step.computed][-1]
    assert isinstance(last.outcome, SampledToken)
    given = Given()
    core.add_awaited(f"d{name}", prompt, given, salt=salt, service_class=2, adapter=adapter)
    assert not core.step().computed
    first = given.num_cached_tokens // BLOCK
    num_pages = len(last.block_ids)
    (pieces,) = model.pool.parts
    pieces[:, list(given.block_ids[first:num_pages])] = pieces[:, list(last.block_ids[first:])]
    core.let_go(f"p{name}")
    sequence = asking(prompt, emitted=(last.outcome.token_id,), adapter=adapter)
    core.arrived(f"d{name}", sequence)
    drain(core, (f"d{name}", sequence))
    return sequence, given


@pytest.mark.parametrize("num_tokens", [1, 10, 31, 32, 33, 64, 300, 600])
def test_an_answer_from_pages_that_arrived_is_what_vllm_answers_alone(
    model: VllmModel, core: Core, num_tokens: int
) -> None:
    prompt = prompt_of(num_tokens)
    expected = alone(core, prompt)
    sequence, given = hand_over(model, prompt, name=f"whole{num_tokens}", salt=SALTS[2])
    assert given.num_cached_tokens == 0
    assert sequence.token_ids[num_tokens:] == expected


def test_pages_that_are_cached_where_they_arrive_are_not_written(model: VllmModel, core: Core) -> None:
    prompt = prompt_of(200, seed=5)
    expected = alone(core, prompt)
    hand_over(model, prompt, name="first", salt=SALTS[3])
    sequence, given = hand_over(model, prompt, name="again", salt=SALTS[3])
    assert given.num_cached_tokens == 192
    assert sequence.token_ids[200:] == expected


@pytest.mark.parametrize("num_emitted", [1, 5, 11])
def test_a_resumed_answer_continues(core: Core, num_emitted: int) -> None:
    prompt = prompt_of(100, seed=6)
    expected = alone(core, prompt)
    sequence = asking(prompt, emitted=tuple(expected[:num_emitted]))
    core.add(f"resumed{num_emitted}", sequence, salt=SALTS[0], service_class=2)
    drain(core, (f"resumed{num_emitted}", sequence))
    assert sequence.token_ids[100:] == expected


def test_a_second_prompt_finds_the_blocks_of_the_first_and_holds_them(core: Core) -> None:
    prompt = prompt_of(100, seed=7)
    assert core.add_held("one", asking(prompt), salt=SALTS[1], service_class=2) == ()
    blocks = [one.block_ids for step in drain(core) for one in step.computed][-1]
    core.let_go("one")
    drain(core)
    assert core.counts().used == 0
    assert core.add_held("two", asking(prompt), salt=SALTS[1], service_class=2) == blocks[:3]
    assert core.counts().used == 3  # before its turn
    core.let_go("two")
    assert core.add_held("three", asking(prompt), salt=SALTS[2], service_class=2) == ()
    core.let_go("three")


def test_held_blocks_stay_after_the_prompt_is_computed(core: Core) -> None:
    core.add_held("p", asking(prompt_of(100, seed=8)), salt=SALTS[1], service_class=2)
    drain(core)
    for _ in range(3):
        core.step()
    assert core.counts().used == 4
    core.let_go("p")
    drain(core)
    assert core.counts().used == 0


def test_chunks_tell_their_blocks_before_the_next_is_computed(core: Core) -> None:
    core.add_held("p", asking(prompt_of(150, seed=9)), salt=SALTS[1], service_class=2)
    chunks = [one for step in drain(core) for one in step.computed]
    told = [(one.start, one.num_tokens, len(one.block_ids)) for one in chunks]
    assert told == [(0, 64, 2), (64, 64, 4), (128, 22, 5)]
    assert [one.outcome is None for one in chunks] == [True, True, False]
    assert chunks[0].block_ids == chunks[-1].block_ids[:2]
    core.let_go("p")


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_that_is_let_go_while_it_is_computed_leaves_nothing(core: Core, steps: int) -> None:
    core.add_held("p", asking(prompt_of(600, seed=10)), salt=SALTS[1], service_class=2)
    for _ in range(steps):
        core.step()
    core.let_go("p")
    drain(core)
    core.check_books()


@pytest.mark.parametrize("has_blocks", [False, True])
@pytest.mark.parametrize("has_arrived", [False, True])
@pytest.mark.parametrize("has_continued", [False, True])
def test_a_transfer_that_is_aborted_leaves_nothing(
    core: Core, has_blocks: bool, has_arrived: bool, has_continued: bool
) -> None:
    if has_arrived and not has_blocks:
        pytest.skip("nothing arrives without blocks")
    given, prompt = Given(), prompt_of(100, seed=11)
    core.add_awaited("d", prompt, given, salt=SALTS[2], service_class=2)
    if has_blocks:
        core.step()
        assert core.counts().reserved == len(given.block_ids) == 4
    if has_arrived:
        core.arrived("d", asking(prompt, emitted=(1,)))
    if has_continued:
        core.step()
        core.step()
    core.abort("d")
    drain(core)
    assert core.counts().free == NUM_BLOCKS
    core.check_books()


def test_blocks_of_an_awaited_request_stay_while_others_compute(core: Core) -> None:
    given, prompt = Given(), prompt_of(100, seed=12)
    core.add_awaited("d", prompt, given, salt=SALTS[2], service_class=2)
    other = asking(prompt_of(50, seed=12))
    core.add("o", other, salt=SALTS[0], service_class=2)
    done = [one.request_id for step in drain(core, ("o", other)) for one in step.computed]
    assert set(done) == {"o"}
    assert core.counts().reserved == 4
    assert not core.step().has_more, "an engine that only waits for pages sleeps"
    core.abort("d")


def test_a_reservation_without_room_waits_and_can_be_withdrawn(core: Core) -> None:
    first, second = Given(), Given()
    core.add_awaited("a", prompt_of(900, seed=13), first, salt=SALTS[2], service_class=2)
    core.add_awaited("b", prompt_of(900, seed=14), second, salt=SALTS[2], service_class=2)
    drain(core)
    assert (len(first.block_ids), len(second.block_ids)) == (29, 0)
    core.abort("b")
    drain(core)
    assert core.counts().reserved == 29
    core.abort("a")


def test_preempted_answers_are_computed_again_and_stay_the_same(core: Core) -> None:
    prompts = [prompt_of(300, seed=15 + number) for number in range(3)]
    expected = [alone(core, prompt, max_tokens=160) for prompt in prompts]
    sequences = [(f"s{number}", asking(prompt, max_tokens=160)) for number, prompt in enumerate(prompts)]
    for name, sequence in sequences:
        core.add(name, sequence, salt=SALTS[0], service_class=2)
    steps = drain(core, *sequences)
    assert any(step.preempted for step in steps), "the pool is too large for this test"
    assert [sequence.token_ids[300:] for _, sequence in sequences] == expected


def test_a_sender_hears_that_it_has_lost_its_blocks(core: Core, lost: Callable[[], set[int]]) -> None:
    """A prompt that is computed while more urgent answers grow into its room loses its blocks, and gets others."""
    prompt = prompt_of(8 * BLOCK, seed=22)
    (expected,) = alone(core, prompt, max_tokens=1)
    answers = [(f"s{number}", asking(prompt_of(318, seed=19 + number), max_tokens=60)) for number in range(3)]
    for name, answer in answers:
        core.add(name, answer, salt=SALTS[0], service_class=1)
    chunks: list[Computed] = []
    has_held = False
    had: set[int] = set()
    while True:
        step = core.step()
        for one in step.computed:
            chunks.append(one)
            if one.request_id == "p" and not lost():
                had |= set(one.block_ids)
            for name, answer in answers:
                if one.request_id == name and isinstance(one.outcome, SampledToken):
                    answer.append_token(one.outcome.token_id)
        if step.preempted:
            assert step.preempted == ("p",)
        if not has_held and all(answer.num_generated_tokens for _, answer in answers):
            assert core.counts().free == 8
            core.add_held("p", asking(prompt), salt=SALTS[1], service_class=4)
            has_held = True
        elif not step.has_more:
            break
    assert had
    assert lost() == had
    assert [one.outcome for one in chunks if one.request_id == "p"][-1] == SampledToken(expected)
    core.let_go("p")


def test_what_is_left_over_is_found(model: VllmModel) -> None:
    core = model._running
    core.add_held("p", asking(prompt_of(40, seed=30)), salt=SALTS[1], service_class=2)
    drain(core)
    with pytest.raises(InvariantViolated, match="2 blocks"):
        core.check_books()
    core.let_go("p")
    drain(core)
    core.check_books()


def test_what_a_worker_knows_of_the_model(model: VllmModel) -> None:
    assert model.limits.num_pages == NUM_BLOCKS
    assert model.limits.page_size == BLOCK
    assert model.limits.context_length_tokens == NUM_BLOCKS * BLOCK
    assert model.limits.vocab_size == VOCAB
    assert model.pool.layout.page_bytes == 3 * 2 * BLOCK * 64 * 4
    assert not model.is_exact
    assert model.loss is None
    assert model.gpu_uuid is None
    identity = model.identity(vocabulary="v", grammars="g")
    assert identity.engine.startswith("vllm/0.")
    assert "block-32" in identity.numerics
    assert len(model.fingerprint) == 32


def test_cached_blocks_are_told_by_the_names_that_a_gateway_gives_them(model: VllmModel, core: Core) -> None:
    def changes_of(steps: list[StepDone]) -> tuple[set[bytes], set[bytes]]:
        added = {key for step in steps for key in step.changes.added}
        return added, {key for step in steps for key in step.changes.evicted}

    prompt = prompt_of(200, seed=21)
    keys = page_keys(prompt, salt=SALTS[3], page_size=BLOCK)
    core.add_held("named", asking(prompt), salt=SALTS[3], service_class=2)
    added, _ = changes_of(drain(core))
    assert added == set(keys)
    core.let_go("named")
    assert changes_of(drain(core)) == (set(), set())
    core.add_held("again", asking(prompt), salt=SALTS[3], service_class=2)
    assert changes_of(drain(core))[0] == set()  # a block that is computed once more has a name that is known
    core.let_go("again")
    evicted: set[bytes] = set()
    for seed in range(22, 25):  # more than the pool holds
        other = asking(prompt_of(600, seed=seed), max_tokens=1)
        core.add(f"other{seed}", other, salt=SALTS[0], service_class=2)
        evicted |= changes_of(drain(core, (f"other{seed}", other)))[1]
    assert evicted >= set(keys)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_adapter_answers_as_the_model_that_it_makes_also_from_pages_that_arrived(
    model: VllmModel, core: Core, adapter: str
) -> None:
    import torch
    from transformers import LlamaForCausalLM

    prompt = prompt_of(100, seed=31)
    answer = alone(core, prompt, adapter=adapter)
    merged = LlamaForCausalLM.from_pretrained(Path(model._running._adapters[adapter].lora_path) / MERGED)
    with torch.no_grad():
        likeliest = merged(torch.tensor([prompt + answer])).logits[0].argmax(-1).tolist()
    assert answer == likeliest[99:-1]
    assert answer != alone(core, prompt)
    sequence, given = hand_over(model, prompt, name=f"changed{adapter}", salt=adapter.encode() * 16, adapter=adapter)
    assert given.num_cached_tokens == 0
    assert sequence.token_ids[100:] == answer


def test_adapters_and_the_model_itself_share_a_step(core: Core) -> None:
    prompt = prompt_of(60, seed=32)
    expected = {name: alone(core, prompt, adapter=name) for name in ("", *ADAPTERS)}
    asked = {f"mixed{name}": asking(prompt, adapter=name) for name in expected}
    for name, sequence in asked.items():
        core.add(name, sequence, salt=name.encode() * 5, service_class=2)
    steps = drain(core, *asked.items())
    assert any(len({one.request_id for one in step.computed}) == 3 for step in steps)
    assert {name.removeprefix("mixed"): one.token_ids[60:] for name, one in asked.items()} == expected


def steps_with(core: Core, sequences: dict[str, Sequence], num_steps: int) -> list[StepDone]:
    """Some steps, whose tokens become the sequences'."""
    steps = []
    for _ in range(num_steps):
        steps.append(core.step())
        for one in steps[-1].computed:
            if isinstance(one.outcome, SampledToken):
                sequences[one.request_id].append_token(one.outcome.token_id)
    return steps


@pytest.mark.parametrize(("service_class", "num_preempted"), [(1, 1), (4, 0)])
def test_a_better_class_has_the_blocks_of_a_worse_one_which_answers_the_same_later(
    core: Core, service_class: int, num_preempted: int
) -> None:
    prompts = {f"batch{seed}{service_class}": prompt_of(18 * BLOCK, seed=40 + seed) for seed in range(2)}
    expected = {name: alone(core, prompt, max_tokens=30) for name, prompt in prompts.items()}
    batch = {name: asking(prompt, max_tokens=30) for name, prompt in prompts.items()}
    for name, sequence in batch.items():
        core.add(name, sequence, salt=name.encode() * 4, service_class=4)
        while not sequence.num_generated_tokens:
            steps_with(core, batch, 1)
    given = Given()
    core.add_awaited("better", prompt_of(6 * BLOCK), given, salt=SALTS[0], service_class=service_class)
    steps = steps_with(core, batch, 2)
    assert [len(step.preempted) for step in steps] == [0, num_preempted]
    assert bool(given.block_ids) == bool(num_preempted)
    youngest = list(batch)[-1]
    assert set(steps[-1].preempted) <= {youngest}
    core.abort("better")
    drain(core, *batch.items())
    assert {name: one.token_ids[18 * BLOCK :] for name, one in batch.items()} == expected


def test_a_better_class_has_the_place_of_a_worse_one(core: Core) -> None:
    prompts = {f"place{number}": prompt_of(10, seed=50 + number) for number in range(8)}
    expected = {name: alone(core, prompt, max_tokens=20) for name, prompt in prompts.items()}
    batch = {name: asking(prompt, max_tokens=20) for name, prompt in prompts.items()}
    for name, sequence in batch.items():
        core.add(name, sequence, salt=name.encode() * 4, service_class=4)
    steps_with(core, batch, 3)
    better = asking(prompt_of(9), max_tokens=3)
    core.add("better", better, salt=SALTS[0], service_class=1)
    same = asking(prompt_of(8), max_tokens=3)
    core.add("same", same, salt=SALTS[0], service_class=4)
    steps = steps_with(core, batch | {"better": better, "same": same}, 3)
    assert [step.preempted for step in steps] == [(), ("place7",), ()]
    assert better.num_generated_tokens == 2
    assert not same.num_generated_tokens
    drain(core, *batch.items(), ("better", better), ("same", same))
    assert {name: one.token_ids[10:] for name, one in batch.items()} == expected
