"""What a gateway and its workers must agree on about a model, read from its folder: never loads a weight into memory.

Weights are compared by a sample: three pieces of each tensor, wherever the files put it. Two sets of weights that were
trained differently differ in it; a change of a few numbers may not. What tells weights apart to the byte is the
identity of an answer (`services.runtime.identity`), which only a process that has loaded them knows.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

import msgspec

from services.runtime.errors import ModelError

MAX_FILE_BYTES = 256 * 1024 * 1024
"""No tokenizer or configuration comes near this."""
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The safetensors format's own limit."""
SAMPLE_BYTES = 1024
"""The size of each of a tensor's three pieces: its beginning, its middle and its end."""

_Digest = Annotated[str, msgspec.Meta(max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]

logger = logging.getLogger(__name__)


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a checkpoint. `tokenizer` is a digest of tokenizer.json, `weights` of a sample; empty: none exists."""

    vocab_size: _Count
    context_length_tokens: _Count
    eos_token_ids: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=256)]
    tokenizer: _Digest = ""
    weights: _Digest = ""

    @property
    def vocabulary(self) -> str:
        """Names the meaning of token ids."""
        return f"{self.vocab_size}/{self.tokenizer or 'unknown'}"


def read_model_facts(folder: Path) -> ModelFacts:
    """Reads a checkpoint folder. Raises ModelError with one sentence that says what to do."""
    config = read_json_object(folder, "config.json")
    if "text_config" in config or "vision_config" in config or "audio_config" in config:
        raise ModelError(f"{folder} holds a model of images or sound beside text; use one of text alone")
    has_tokenizer = (folder / "tokenizer.json").is_file()
    return ModelFacts(
        vocab_size=_positive_int(folder, config, "vocab_size"),
        context_length_tokens=_positive_int(folder, config, "max_position_embeddings"),
        eos_token_ids=_eos_token_ids(folder, config),
        tokenizer=digest_of_tokenizer(read_text(folder, "tokenizer.json")) if has_tokenizer else "",
        weights=sample_weights(folder),
    )


def digest_of_tokenizer(tokenizer_json: str) -> str:
    """Returns 32 hex digits."""
    return hashlib.sha256(tokenizer_json.encode()).hexdigest()[:32]


def sample_weights(folder: Path) -> str:
    """Returns 32 hex digits over name, type, shape and three pieces of each tensor; empty without readable weights."""
    digest = hashlib.sha256()
    try:
        samples = {name: sample for path in _weight_files(folder) for name, sample in _samples(path)}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # The worker that loads the weights reports what is wrong with them; here they only cannot be compared.
        logger.info("the weights cannot be sampled", extra={"folder": str(folder), "error": repr(error)})
        return ""
    for name in sorted(samples):
        digest.update(samples[name])
    return digest.hexdigest()[:32] if samples else ""


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        # A name with a folder in it could point anywhere on this machine.
        return [folder / name for name in sorted(names) if Path(name).name == name]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))[:1]


def _samples(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(header_bytes))
        for name, tensor in header.items():
            if name != "__metadata__":
                yield name, _sample(file, 8 + header_bytes, name, tensor)


def _sample(file: BinaryIO, data_start: int, name: str, tensor: Mapping[str, Any]) -> bytes:
    start, end = tensor["data_offsets"]
    digest = hashlib.sha256(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
    for offset in (start, (start + end) // 2, max(start, end - SAMPLE_BYTES)):
        file.seek(data_start + offset)
        digest.update(file.read(min(SAMPLE_BYTES, end - offset)))
    return digest.digest()


def _positive_int(folder: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is int and value > 0:
        return value
    raise ModelError(f"{folder}/config.json has {key} = {value!r}; it must be a positive integer")


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ends of sequence of both files: chat models often name more of them in generation_config.json."""
    generation_config = read_json_object(folder, "generation_config.json", is_required=False)
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


def read_json_object(folder: Path, name: str, *, is_required: bool = True) -> Mapping[str, Any]:
    """Returns a model folder's file that is a JSON object; empty where it may be absent and is. Raises ModelError."""
    if not is_required and not (folder / name).is_file():
        return {}
    try:
        value = json.loads(read_text(folder, name))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder}/{name} is not valid JSON; download the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{folder}/{name} does not hold a JSON object; download the model again")
    return cast(Mapping[str, Any], value)


def read_text(folder: Path, name: str) -> str:
    """Returns a file of a model folder as text. Raises ModelError."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ModelError(f"{path} is larger than {MAX_FILE_BYTES} bytes; this is not a usable {name}")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelError(f"{folder} has no {name}; download the complete model") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as text; check its permissions and content") from error
