import json

import pytest

from services.engine.weights.config import Llama3RopeScaling, load_config, parse_config
from services.runtime.errors import ModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def test_every_variant_is_parsed_as_transformers_means_it(checkpoint, reference, variant):
    config, theirs = load_config(checkpoint(variant)), reference(variant).config
    assert config.architecture == type(reference(variant)).__name__
    assert config.num_layers == theirs.num_hidden_layers
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or 64 // theirs.num_attention_heads)
    assert config.has_tied_embeddings == theirs.tie_word_embeddings
    names = {name for name, _ in reference(variant).named_parameters()}
    assert config.has_qkv_bias == ("model.layers.0.self_attn.q_proj.bias" in names)
    assert config.has_output_bias == ("model.layers.0.self_attn.o_proj.bias" in names)
    assert config.has_mlp_bias == ("model.layers.0.mlp.up_proj.bias" in names)
    assert config.has_qk_norm == ("model.layers.0.self_attn.q_norm.weight" in names)
    assert config.num_weights == reference(variant).num_parameters()


def test_older_spelling_is_understood():
    config = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": None})
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (5e5, None, "bfloat16")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert parse_config({**LLAMA, "rope_scaling": scaling}).rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 8192)


def test_defaults_of_absent_keys():
    config = parse_config({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert not config.has_tied_embeddings


@pytest.mark.parametrize(
    ("own", "generation", "expected"),
    [
        (2, {}, {2}),
        ([2, 3], {}, {2, 3}),
        (2, {"eos_token_id": [7, 8]}, {7, 8}),
        (None, {"eos_token_id": 9}, {9}),
        (None, {}, set()),
    ],
)
def test_end_tokens_come_from_generation_config_first(own, generation, expected):
    assert parse_config({**LLAMA, "eos_token_id": own}, generation=generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, 128),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 512),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 8192}, 4096),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": False}, 512),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, 128),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 128,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            512,
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            64,
        ),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 64, "layer_types": ["full_attention"]}, 512),
    ],
)
def test_context_ends_where_a_sliding_window_would_begin_to_matter(extra, expected):
    assert parse_config({**LLAMA, **extra}).context_length_tokens == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture GPT2LMHeadModel is not supported"),
        ({"architectures": []}, "names no architectures"),
        ({"architectures": None}, "names no architectures"),
        ({"architectures": ["MixtralForCausalLM"], "auto_map": {"AutoModel": "evil.py"}}, "MixtralForCausalLM"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"hidden_size": "64"}, "hidden_size is '64', it must be a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "there is no head_dim"),
        ({"head_dim": 15}, "is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "the rope type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "the rope type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "has no low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer type 'linear_attention'"),
        ({"torch_dtype": "float8_e4m3fn"}, "the dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_what_would_not_be_computed_exactly_is_refused(change, message):
    with pytest.raises(ModelError, match=message):
        parse_config({**LLAMA, **change})


def test_a_checkpoints_own_code_is_ignored(caplog):
    assert parse_config({**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}).num_layers == 3
    assert "own code is ignored" in caplog.text


def test_missing_folder_and_file_in_its_place(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="is not a folder"):
        load_config(tmp_path / "config.json")


def test_folder_without_config_or_weights(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ModelError, match=r"has no \*\.safetensors file"):
        load_config(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=f"only pickled weights .{name}.*convert the checkpoint to safetensors"):
        load_config(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_config_that_is_not_a_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)
