"""The tokenizer of the demo model, and a text of several alphabets as its tokens."""

import asyncio

import pytest

from gateway.models.model_files import read_model_files
from gateway.models.tokenizer import ModelTokenizer

ANSWER_TEXT = "hello world, naïve café 🙂 日本語 end 🙃 of it, hello there"


@pytest.fixture(scope="module")
def model_tokenizer(model_folder):
    return ModelTokenizer(read_model_files(model_folder))


@pytest.fixture(scope="module")
def answer_ids(model_tokenizer):
    return asyncio.run(model_tokenizer.encode(ANSWER_TEXT, add_special_tokens=False))
