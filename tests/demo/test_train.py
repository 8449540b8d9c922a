import argparse
import copy
from collections.abc import Iterator

import pytest
import torch

from demo import train
from demo.train import ASSISTANT, BOS, END, USER, Batches, Lessons, Llama, Shape, Text

SMALL = Shape(32, 2, 2, 1, 48, 1e-3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other spin, and other tests want the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> Llama:
    torch.manual_seed(1)
    model = Llama(SMALL)
    with torch.no_grad():  # as it begins, every token follows itself
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model.requires_grad_(requires_grad=False)


def chat(question: int, answer: int) -> list[int]:
    return [BOS, USER, 204, *range(300, 300 + question), END, 204, ASSISTANT, 204, *range(900, 900 + answer), END]


def test_what_is_written_behind_prompts_is_what_whole_passes_choose(model: Llama) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(6, 2048, (3, 7), generator=generator)
    rows = model.continued(prompts, 40, 0.0, generator)
    assert torch.equal(rows[:, :7], prompts)
    assert torch.equal(model(rows[:, :-1])[:, 6:].argmax(-1), rows[:, 7:])
    assert len(rows[:, 7:].unique()) > 10, "a text of one token would show nothing"


def test_answers_are_drawn_by_the_generator(model: Llama) -> None:
    prompts = torch.randint(6, 2048, (3, 7), generator=torch.Generator().manual_seed(1))
    one, same, other = (model.continued(prompts, 20, 1.0, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_half_of_the_prompts_end_where_an_answer_begins() -> None:
    text = Text([chat(30 + n, 50) for n in range(40)])
    prompts = text.prompts(64, torch.Generator().manual_seed(1))
    assert prompts.shape == (64, train.ANSWER_PROMPT_TOKENS)
    at_answers = ((prompts[:, -2] == ASSISTANT) & (prompts[:, -1] == 204)).sum()
    assert 32 <= at_answers <= 36  # of the others one in eighty or so does by chance


def test_a_draft_comes_to_say_what_the_model_says(model: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_STEP", 2048)
    batches = Batches([chat(30 + n % 7, 60) for n in range(400)], seed=1)
    lessons = Lessons(model, batches, argparse.Namespace(seed=1, bfloat16=False, answers=64))
    draft = copy.deepcopy(model).requires_grad_()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape) * parameter.std(), alpha=0.5)
    inputs = lessons.next()
    least, before = float(model.loss_to(model, inputs)), float(draft.loss_to(model, inputs).detach())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=1e-2)
    for _ in range(5):
        draft.loss_to(model, lessons.next()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert least < float(draft.loss_to(model, inputs).detach()) < before
    assert lessons.agreement(draft) < lessons.agreement(model) == 1.0
