"""The random Llama of `benchmarks.engine` in the forms that whole servers take: ours, llama.cpp's and OpenVINO's.

Servers of text need a vocabulary. Its words mean nothing here, as prompts are sent as token ids.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from safetensors.numpy import load_file
from tokenizers.decoders import ByteLevel

from benchmarks.engine import VOCABULARY, export_for_openvino, make_model

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
FIRST_TOKEN_ID = len(SPECIAL_TOKENS)
"""Prompts are made of the ids from here on."""

GGUF_ALIGNMENT = 32
GGUF_UINT32, GGUF_INT32, GGUF_FLOAT32, GGUF_STRING, GGUF_ARRAY = 4, 5, 6, 8, 9
GGUF_F32_TENSOR = 0
NORMAL_TOKEN, CONTROL_TOKEN, BYTE_TOKEN = 1, 3, 6


def make_served_model(folder: Path, dtype: str, **shape: int) -> Path:
    """A checkpoint with random weights and a tokenizer. `shape`: see `make_model`."""
    transformers.logging.disable_progress_bar()
    make_model(folder, dtype, **shape)
    write_tokenizer(folder, VOCABULARY)
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Writes a tokenizer for a model of this number of tokens."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL_TOKENS, *letters]
    words += [f"w{number}" for number in range(vocabulary - len(words))]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))


def make_openvino_model(folder: Path, python: Path) -> Path:
    """Writes `make_model`'s weights in OpenVINO's form, without a tokenizer, with the Python of its environment."""
    return export_for_openvino(python, make_model(folder, "float32"))


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """A float32 checkpoint of a Llama as one file for llama.cpp."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = {
        _gguf_name(name): _for_llama_cpp(name, tensor, config)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    with file.open("wb") as out:
        entries = _gguf_entries(config)
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries)))
        for key, value in entries.items():
            out.write(_gguf_text(key) + value)
        offset = 0
        for name, tensor in tensors.items():
            shape = tensor.shape[::-1]
            out.write(_gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_F32_TENSOR, offset))
            offset += _padded(tensor.nbytes)
        out.write(bytes(_padded(out.tell()) - out.tell()))
        for tensor in tensors.values():
            out.write(tensor.tobytes() + bytes(_padded(tensor.nbytes) - tensor.nbytes))
    return file


def _gguf_entries(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Keys and values of the file's head, values as they stand in it."""
    byte_words = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [*SPECIAL_TOKENS, *byte_words]
    words += [f"w{number}" for number in range(config["vocab_size"] - len(words))]
    kinds = [CONTROL_TOKEN] * len(SPECIAL_TOKENS) + [BYTE_TOKEN] * len(byte_words)
    kinds += [NORMAL_TOKEN] * (len(words) - len(kinds))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    numbers = {
        "general.file_type": 0,
        "llama.vocab_size": config["vocab_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.dimension_count": head_dim,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 2,
    }
    rope = config.get("rope_parameters") or config
    reals = {
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": rope["rope_theta"],
    }
    texts = {"general.architecture": "llama", "general.name": "random", "tokenizer.ggml.model": "llama"}
    scores = struct.pack(f"<{len(words)}f", *(-float(index) for index in range(len(words))))
    return {
        **{key: struct.pack("<I", GGUF_STRING) + _gguf_text(text) for key, text in texts.items()},
        **{key: struct.pack("<II", GGUF_UINT32, number) for key, number in numbers.items()},
        **{key: struct.pack("<If", GGUF_FLOAT32, number) for key, number in reals.items()},
        "tokenizer.ggml.tokens": _gguf_array(GGUF_STRING, len(words), b"".join(map(_gguf_text, words))),
        "tokenizer.ggml.scores": _gguf_array(GGUF_FLOAT32, len(words), scores),
        "tokenizer.ggml.token_type": _gguf_array(GGUF_INT32, len(words), struct.pack(f"<{len(words)}i", *kinds)),
    }


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _gguf_array(kind: int, count: int, content: bytes) -> bytes:
    return struct.pack("<IIQ", GGUF_ARRAY, kind, count) + content


def _padded(size: int) -> int:
    return -(-size // GGUF_ALIGNMENT) * GGUF_ALIGNMENT


def _gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor."""
    plain = name.removeprefix("model.").removesuffix(".weight")
    outside = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    if plain in outside:
        return f"{outside[plain]}.weight"
    _, layer, *rest = plain.split(".")
    inside = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    return f"blk.{layer}.{inside[rest[-1]]}.weight"


def _for_llama_cpp(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """It rotates neighbours, where `transformers` rotates halves: rows of q and k change places, [out, in]."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return np.ascontiguousarray(tensor, dtype=np.float32)
    num_heads = config["num_attention_heads" if name.endswith("q_proj.weight") else "num_key_value_heads"]
    halves = tensor.reshape(num_heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape), dtype=np.float32)
