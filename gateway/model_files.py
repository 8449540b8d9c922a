"""What the gateway reads of a model folder: config.json, generation_config.json, tokenizer.json, the chat template.

Never reads weights and never imports torch or the engine; the workers judge the weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from services.runtime.errors import ModelError

ARCHITECTURES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
MAX_FILE_BYTES = 256 * 1024 * 1024
"""No tokenizer or configuration comes near this."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The facts of one model folder.

    `chat_template` is None where the folder has none. `special_tokens` holds the texts that templates refer to,
    such as `bos_token`, by that name.
    """

    folder: Path
    vocab_size: int
    context_length_tokens: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read_model_files(folder: Path) -> ModelFiles:
    """Reads and checks a model folder. Raises ModelError with one sentence that says what to do."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give --model a Hugging Face checkpoint folder")
    config = _read_json_object(folder, "config.json")
    _check_architecture(folder, config)
    tokenizer_config = _read_json_object(folder, "tokenizer_config.json", is_required=False)
    return ModelFiles(
        folder=folder,
        vocab_size=_positive_int(folder, config, "vocab_size"),
        context_length_tokens=_positive_int(folder, config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(folder, config),
        tokenizer_json=_read_text(folder, "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def _check_architecture(folder: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in ARCHITECTURES:
        return
    known = ", ".join(sorted(ARCHITECTURES))
    raise ModelError(f"{folder}/config.json names the architectures {names!r}; use a model of one of: {known}")


def _positive_int(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is int and value > 0:
        return value
    raise ModelError(f"{folder}/config.json has {key} = {value!r}; it must be a positive integer")


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ends of sequence from both files: chat models often name more of them in generation_config.json."""
    generation_config = _read_json_object(folder, "generation_config.json", is_required=False)
    ids: list[int] = []
    for source in (config, generation_config):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise ModelError(f"{folder} names the eos_token_id {value!r}; it must be token ids")
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _read_text(folder, "chat_template.jinja")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None or isinstance(template, str):
        return template
    raise ModelError(f"{folder}/tokenizer_config.json has a chat_template that is not a text; correct or remove it")


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


def _read_json_object(folder: Path, name: str, *, is_required: bool = True) -> Mapping[str, Any]:
    if not is_required and not (folder / name).is_file():
        return {}
    try:
        value = json.loads(_read_text(folder, name))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder}/{name} is not valid JSON; download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{folder}/{name} does not hold a JSON object; download the model again")
    return cast(Mapping[str, Any], value)


def _read_text(folder: Path, name: str) -> str:
    path = folder / name
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_FILE_BYTES} bytes; this is not a usable {name}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no {name}; download the complete model") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as text; check its permissions and content") from error
