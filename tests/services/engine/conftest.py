"""Fixtures of the engine's tests: small random checkpoints of the real `transformers` architecture classes.

`checkpoint("llama3-gqa-tied")` gives a folder as Hugging Face would write it (config, safetensors, tokenizer);
`reference("llama3-gqa-tied")` gives the `transformers` model that the folder holds, in float32. Both are made once
per test session. The fixture `variant` runs a test once for every architecture variant.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.attention import AttentionBatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests share few cores: torch and the kernels use one thread unless a test says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=sorted(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    """The name of each architecture variant in turn."""
    return str(request.param)


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
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()  # type: ignore[no-any-return]

    return get


class PagedRun:
    """A model, a pool full of NaN and sequences whose pages lie in it in random order."""

    def __init__(self, model: Any, *, page_size: int = 16, num_pages: int = 64, seed: int = 0) -> None:
        config = model.config
        self.model = model
        self.page_size = page_size
        shape = (num_pages, config.num_kv_heads, config.num_layers, 2, page_size, config.head_dim)
        self.pool_data = torch.full(shape, float("nan"), dtype=model.dtype)
        self.free_pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.page_tables: dict[Any, list[int]] = {}
        self.num_computed: dict[Any, int] = {}

    def step(self, parts: Mapping[Any, list[int]]) -> dict[Any, torch.Tensor]:
        """Computes the next tokens of each named sequence in one step; the logits of all of them, [tokens, V]."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for name, ids in parts.items():
            first = self.num_computed.get(name, 0)
            self.num_computed[name] = first + len(ids)
            table = self.page_tables.setdefault(name, [])
            while len(table) * self.page_size < first + len(ids):
                table.append(self.free_pages.pop())
            token_ids += ids
            positions += range(first, first + len(ids))
            slots += [
                table[p // self.page_size] * self.page_size + p % self.page_size for p in range(first, first + len(ids))
            ]
            starts.append(len(token_ids))
        widest = max(len(self.page_tables[name]) for name in parts)
        # What lies beyond a sequence's own pages must never be looked at.
        tables = [self.page_tables[name] + [-7] * (widest - len(self.page_tables[name])) for name in parts]
        batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor([self.num_computed[name] for name in parts], dtype=torch.int32),
            page_tables=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        wanted = torch.arange(len(token_ids))
        logits = self.model.forward(torch.tensor(token_ids), torch.tensor(positions), batch, self.pool_data, wanted)
        return {name: logits[starts[i] : starts[i + 1]] for i, name in enumerate(parts)}


@pytest.fixture
def paged_run() -> type[PagedRun]:
    """The class PagedRun."""
    return PagedRun


def _random_model(variant: Variant, *, seed: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the oracle's own deprecations are not ours
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
        import copy

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
