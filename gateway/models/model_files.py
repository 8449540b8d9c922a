"""What the gateway reads of a model folder: config.json, generation_config.json, tokenizer.json, the chat template.

A sample of the weights is read, to compare it with the workers' (`services.runtime.model_facts`). Never imports torch
or the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.runtime.errors import ModelError
from services.runtime.model_facts import ModelFacts, read_json_object, read_model_facts, read_text


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The facts of one model folder.

    `chat_template` is None where the folder has none. `special_tokens` holds the texts that templates refer to,
    such as `bos_token`, by that name.
    """

    folder: Path
    facts: ModelFacts
    tokenizer_json: str
    chat_template: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def read_model_files(folder: Path) -> ModelFiles:
    """Reads and checks a model folder. Raises ModelError with one sentence that says what to do."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give --model a Hugging Face checkpoint folder")
    tokenizer_config = read_json_object(folder, "tokenizer_config.json", is_required=False)
    return ModelFiles(
        folder=folder,
        facts=read_model_facts(folder),
        tokenizer_json=read_text(folder, "tokenizer.json"),
        chat_template=_chat_template(folder, tokenizer_config),
        special_tokens=_special_tokens(tokenizer_config),
    )


def _chat_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder, "chat_template.jinja")
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
