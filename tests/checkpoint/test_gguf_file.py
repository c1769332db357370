"""GGUF files: values, configuration and tokenizer are those that `transformers` reads from the same file."""

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="reading GGUF needs the extra `gguf`")
pytest.importorskip("accelerate", reason="transformers needs it for GGUF")

from megatron.bdlm.platform import cpu  # noqa: E402

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.checkpoint.architectures import GGUF_NAMES  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.layout import ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import make_model  # noqa: E402

Q8_0, F16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16


def head_size(kind):
    """Head size of the tiny models: `transformers` reads no other one from files of these kinds."""
    return 128 if kind == "qwen3" else 8


def _write(path, kind, name, quantized, extra=(), **changes):
    """A GGUF file of a tiny model, as llama.cpp's converter lays it out; returns the model."""
    model = make_model(name, **changes)
    config = model.config
    writer = gguf.GGUFWriter(str(path), kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_size(kind))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "ab", *(f"t{n}" for n in range(3, config.vocab_size))])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = {
        theirs.format(layer=layer): ours.format(layer=layer)
        for ours, theirs in GGUF_NAMES.items()
        for layer in range(2)
    }
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if kind == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 2 and quantized is not None:
            writer.add_tensor(names[key], gguf.quantize(values, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(names[key], np.ascontiguousarray(values))
    for key in extra:
        writer.add_tensor(key, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize(
    "kind, name, quantized",
    [
        ("llama", "llama", None),
        ("llama", "llama untied, theta 1e4+0.5", F16),
        ("llama", "llama", Q8_0),
        ("qwen2", "qwen2 tied", None),
        ("qwen3", "qwen3 tied", F16),
    ],
)
def test_tensors_are_those_of_transformers(kind, name, quantized, tmp_path):
    from transformers import AutoModelForCausalLM

    model = _write(tmp_path / "tiny.gguf", kind, name, quantized, head_dim=head_size(kind), intermediate_size=64)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    source = huggingface.open_source(tmp_path / "tiny.gguf")
    assert source.architecture.model_type == kind
    parameters = dict(reference.named_parameters())
    assert source.tensors.tensors.keys() == parameters.keys()
    for key, value in parameters.items():
        assert torch.equal(source.tensors.read(key), value), key
        if quantized is None:
            assert torch.equal(value, model.state_dict()[key]), key

    huggingface.import_model(source, tmp_path / "megatron", arguments_of)
    huggingface.export_model(CheckpointFolder(tmp_path / "megatron" / "release"), tmp_path / "exported")
    exported = huggingface.open_source(tmp_path / "exported")
    assert compare_tensors(source.tensors, exported.tensors).identical
    for option in (
        "rope_parameters",
        "rms_norm_eps",
        "head_dim",
        "vocab_size",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
    ):
        assert getattr(exported.config, option, None) == getattr(source.config, option, None), option
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_tensors_without_a_place_are_an_error(tmp_path):
    _write(
        tmp_path / "tiny.gguf",
        "llama",
        "llama",
        None,
        extra=("rope_freqs.weight", "blk.1.ffn_gate_inp.weight"),
        head_dim=8,
    )
    with pytest.raises(ConversionError, match="not known: rope_freqs.weight, blk.1.ffn_gate_inp.weight"):
        huggingface.import_model(huggingface.open_source(tmp_path / "tiny.gguf"), tmp_path / "megatron", arguments_of)


def test_a_broken_file_is_named(tmp_path):
    _write(tmp_path / "tiny.gguf", "llama", "llama", None, head_dim=8)
    whole = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.gguf").write_text("no model at all, but a text that is long enough")
    for name in ("half.gguf", "text.gguf"):
        with pytest.raises(ConversionError, match=f"{name}: not a whole GGUF file"):
            huggingface.open_source(tmp_path / name)
