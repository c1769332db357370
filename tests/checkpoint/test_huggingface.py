"""Import and export of every architecture: the same tensors and options come back; faults E3 and E4."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.checkpoint import huggingface  # noqa: E402
from megatron.bdlm.checkpoint.comparison import compare_tensors  # noqa: E402
from megatron.bdlm.checkpoint.layout import ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import EXPERTS, LENGTH, MODELS, logits, make_model, save_model  # noqa: E402


def _round(folder, **options):
    """Import `folder`/source, export it again; the checkpoint and the exported source."""
    source = huggingface.open_source(folder / "source")
    huggingface.import_model(source, folder / "megatron", arguments_of, **options)
    checkpoint = CheckpointFolder(folder / "megatron" / "release")
    huggingface.export_model(checkpoint, folder / "exported", shard_bytes=30_000)
    return source, checkpoint, huggingface.open_source(folder / "exported")


@pytest.mark.parametrize("name", [*MODELS, *EXPERTS])
def test_tensors_and_options_come_back(name, tmp_path):
    from transformers import AutoModelForCausalLM

    save_model(tmp_path / "source", name, tokenizer=True)
    source, checkpoint, exported = _round(tmp_path)
    result = compare_tensors(source.tensors, exported.tensors)
    assert result.identical and len(result.same) > 15, result.text()
    assert checkpoint.tensors["embedding.word_embeddings.weight"].shape == (128, 32)

    ours, theirs = exported.config.to_dict(), source.config.to_dict()
    for key in ("_name_or_path", "transformers_version", "architectures"):
        ours.pop(key, None), theirs.pop(key, None)
    assert ours == theirs
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "exported" / file).read_bytes() == (tmp_path / "source" / file).read_bytes()
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 1

    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(loading.values()), loading
    tokens = torch.randint(100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    assert torch.equal(logits(model, tokens), logits(make_model(name), tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_kept(dtype, tmp_path):
    save_model(tmp_path / "source", "qwen3 tied", dtype)
    source, checkpoint, exported = _round(tmp_path)
    assert {info.dtype for info in checkpoint.tensors.values()} == {dtype}
    assert compare_tensors(source.tensors, exported.tensors).identical
    args = checkpoint.common_state()["args"]
    assert (args.params_dtype, args.bf16, args.fp16) == (dtype, dtype == torch.bfloat16, dtype == torch.float16)


def test_another_type_on_request(tmp_path):
    save_model(tmp_path / "source", "llama")
    source, checkpoint, exported = _round(tmp_path, dtype=torch.bfloat16)
    assert exported.config.dtype == torch.bfloat16
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(exported.tensors.read(name), source.tensors.read(name).bfloat16())


def test_arguments_are_complete_and_the_engines(tmp_path):
    save_model(tmp_path / "source", "mistral, window 7")
    _, checkpoint, _ = _round(tmp_path)
    state = checkpoint.common_state()
    args = state["args"]
    shape = (
        args.num_layers,
        args.hidden_size,
        args.ffn_hidden_size,
        args.num_attention_heads,
        args.num_query_groups,
        args.kv_channels,
    )
    assert shape == (2, 32, 48, 4, 2, 16)
    assert (
        args.window_size == (6, 0)
        and args.swiglu
        and not args.add_bias_linear
        and args.position_embedding_type == "rope"
    )
    assert args.untie_embeddings_and_output_weights and args.padded_vocab_size == 128
    assert args.tokenizer_model == str(tmp_path / "megatron" / "tokenizer")
    assert getattr(args, "bdlm_mask_token_id") is None and state["iteration"] == 0
    assert len(vars(args)) > 400  # a whole namespace, as a run would save it


def test_tied_source_that_stores_the_head_too(tmp_path):
    save_model(tmp_path / "source", "llama")
    path = _one_file(tmp_path / "source")
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    source, checkpoint, exported = _round(tmp_path)
    assert "output_layer.weight" not in checkpoint.tensors
    result = compare_tensors(source.tensors, exported.tensors)
    assert result.missing == ["lm_head.weight"] and not result.different
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path)
    with pytest.raises(ConversionError, match="lm_head.weight differs from model.embed_tokens.weight"):
        huggingface.import_model(huggingface.open_source(tmp_path / "source"), tmp_path / "other", arguments_of)


def _one_file(folder):
    """Replace the shards of a folder by one file; returns its path."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_wrong_tensors_are_listed_and_nothing_is_written(tmp_path):
    save_model(tmp_path / "source", "llama untied, llama3")
    path = _one_file(tmp_path / "source")
    tensors = load_file(path)
    del tensors["model.layers.0.self_attn.k_proj.weight"], tensors["lm_head.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(48, 31)
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)  # old files hold it, no model reads it
    save_file(tensors, path)
    with pytest.raises(ConversionError) as caught:
        huggingface.import_model(huggingface.open_source(tmp_path / "source"), tmp_path / "megatron", arguments_of)
    message = str(caught.value)
    assert "tensors missing: model.layers.0.self_attn.k_proj.weight, lm_head.weight" in message
    assert "tensors not known: model.layers.2.mlp.up_proj.weight" in message
    assert "model.layers.1.mlp.up_proj.weight (48, 31) instead of (48, 32)" in message and "inv_freq" not in message
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_wrong_tensors_of_a_checkpoint_are_listed(tmp_path):
    save_model(tmp_path / "source", "qwen3 tied")
    _, checkpoint, _ = _round(tmp_path)
    checkpoint.tensors["decoder.layers.adapter.weight"] = checkpoint.tensors.pop(
        "decoder.layers.self_attention.q_layernorm.weight"
    )
    with pytest.raises(
        ConversionError,
        match="missing: decoder.layers.self_attention.q_layernorm.weight; .*decoder.layers.adapter.weight",
    ):
        huggingface.export_model(checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(hidden_act="gelu"), "hidden_act 'gelu' .it must be 'silu'."),
        (dict(attention_bias=True), "attention_bias True"),
        (
            dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)),
            "rope_type dynamic: not supported",
        ),
        (dict(model_type="gpt2"), "model_type gpt2: no mapping; those that can be converted are llama, mistral"),
        (dict(quantization_config=dict(quant_method="fp8")), "quantised"),
    ],
)
def test_what_cannot_be_converted_is_refused(change, message, tmp_path):
    save_model(tmp_path / "source", "llama")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConversionError, match=message):
        huggingface.import_model(huggingface.open_source(tmp_path / "source"), tmp_path / "megatron", arguments_of)


def test_no_model_at_all(tmp_path):
    with pytest.raises(ConversionError, match="no such folder"):
        huggingface.open_source(tmp_path / "nothing")
    with pytest.raises(ConversionError, match="no config.json"):
        huggingface.open_source(tmp_path)
