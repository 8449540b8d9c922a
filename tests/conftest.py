"""Small random checkpoints of the real `transformers` architecture classes, for every test that runs a model.

`checkpoint("llama3-gqa-tied")` gives a folder as Hugging Face would write it (config, safetensors, tokenizer);
`reference("llama3-gqa-tied")` gives the `transformers` model that the folder holds, in float32. Both are made once
per test session. torch is imported only by the tests that ask for one.
"""

import copy
import json
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.failure_details import cluster_states, log_tails
from tests.fake_api import FakeApi
from tests.waiting import HANG_LIMIT_S

# How fast the machine is, is no property of what is tested.
settings.register_profile(
    "tandem", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tandem")

# Processes that the tests start inherit this; what a shell starts in the background ignores it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test with several waits that hang ends with the message of the first one.
os.environ.setdefault("PYTEST_TIMEOUT", str(3 * HANG_LIMIT_S))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Triton looks at this when it is first imported. Where there is no GPU, its kernels are interpreted on the CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

# Not a multiple of any vector width, so that tails are exercised.
VOCAB_SIZE = 331
TOKENIZER_VOCAB_SIZE = 320

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Variant:
    """One architecture class with the arguments that make it special."""

    architecture: str
    arguments: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "llama-mha": Variant("Llama", {"num_key_value_heads": 4}),
    "llama3-gqa-tied": Variant("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-mqa-odd": Variant(
        "Llama",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "hidden_size": 54,
            "intermediate_size": 75,
        },
    ),
    "llama-bias": Variant("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-wide-head": Variant("Mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2-bias": Variant("Qwen2", {}),
    "qwen2-tied": Variant("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3-qk-norm": Variant("Qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": Variant("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "attention_bias": True}),
}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Adds the logs of the test's processes to a failure, while fixtures still keep these alive."""
    report = yield
    if report.failed:
        folder = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # no public name
        report.sections += [*cluster_states(), *log_tails(folder, call.start)]
    return report


@pytest.fixture(scope="session")
def tokenizer_json() -> str:
    """A byte-level BPE tokenizer trained on a few lines, as the text of its `tokenizer.json`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    lines = ["def main() -> None:", "    return the quick brown fox", "naïve café, Größe, 東京, 🙂"] * 20
    tokenizer.train_from_iterator(lines, trainer)
    return str(tokenizer.to_str())


@pytest.fixture(scope="session")
def reference() -> Callable[[str], Any]:
    """`reference(variant)` is the `transformers` model of a variant, float32, eval mode; the same object every time."""
    models: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in models:
            models[name] = _random_model(VARIANTS[name], seed=sorted(VARIANTS).index(name))
        return models[name]

    return get


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, reference: Callable[[str], Any], tokenizer_json: str
) -> Callable[..., Path]:
    """`checkpoint(variant, sharded=False, dtype="float32")` is a checkpoint folder; treat it as read-only."""
    folders: dict[tuple[str, bool, str], Path] = {}

    def get(name: str, *, sharded: bool = False, dtype: str = "float32") -> Path:
        key = (name, sharded, dtype)
        if key not in folders:
            folder = tmp_path_factory.mktemp(f"{name}-{'sharded' if sharded else 'single'}-{dtype}-")
            _save(reference(name), folder, sharded=sharded, dtype=dtype)
            _save_tokenizer(folder, tokenizer_json)
            folders[key] = folder
        return folders[key]

    return get


@pytest.fixture
def random_ids() -> Callable[..., list[int]]:
    """`random_ids(length, seed=0)` is a reproducible list of token ids below VOCAB_SIZE."""

    def get(length: int, *, seed: int = 0) -> list[int]:
        chance = random.Random(1000 + seed)
        return [chance.randrange(VOCAB_SIZE) for _ in range(length)]

    return get


def _random_model(variant: Variant, *, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's own deprecations are not ours
        import torch
        import transformers

        arguments: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **variant.arguments,
        }
        config = getattr(transformers, f"{variant.architecture}Config")(**arguments)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{variant.architecture}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide enough that logits differ clearly; norms and biases random too, so that a dropped one is seen.
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


def _save(model: Any, folder: Path, *, sharded: bool, dtype: str) -> None:
    saved = model
    if dtype != "float32":
        import torch

        saved = copy.deepcopy(model).to(getattr(torch, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == sharded


def _save_tokenizer(folder: Path, tokenizer_json: str) -> None:
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.fixture
def api() -> Iterator[FakeApi]:
    fake = FakeApi()
    yield fake
    fake.close()
