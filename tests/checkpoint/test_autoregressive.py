"""Autoregressive to block diffusion: the mask token's row, tokenizer and metadata (faults E1, E2, E5)."""

from types import SimpleNamespace

import pytest
import torch

from megatron.bdlm.platform import cpu

cpu.adapt_engine(cpu.enable())

from megatron.bdlm.checkpoint import autoregressive, huggingface  # noqa: E402
from megatron.bdlm.checkpoint.autoregressive import EMBEDDING, OUTPUT, MaskRow, set_mask_row  # noqa: E402
from megatron.bdlm.checkpoint.layout import ConversionError  # noqa: E402
from megatron.bdlm.checkpoint.torch_dist import CheckpointFolder  # noqa: E402
from megatron.bdlm.config import BDLMConfig, BDLMConfigError  # noqa: E402
from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.generation.loading import block_rules  # noqa: E402
from megatron.bdlm.training import conversion, options  # noqa: E402
from megatron.bdlm.training.arguments import arguments_of  # noqa: E402
from tests.checkpoint.tiny import save_model  # noqa: E402

RECIPE = dict(
    bdlm_recipe=None,
    bdlm_block_size=8,
    bdlm_block_size_schedule=None,
    bdlm_label_shift="next",
    bdlm_clean_attention="block-causal",
    bdlm_noisy_attention="bidirectional",
    bdlm_keep_mask_logit=True,
)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Checkpoints of a tied and of an untied model with 100 tokens and 128 stored rows."""
    root = tmp_path_factory.mktemp("imported")
    for name in ("llama", "qwen3, yarn"):
        source = save_model(root / name / "source", name, tokenizer=True)
        huggingface.import_model(huggingface.open_source(source), root / name / "megatron", arguments_of)
    return root


def _convert(imported, save, name="llama", *, mask_token=None, mask_token_id=None, mask_init=None, **chosen):
    wishes = SimpleNamespace(
        mask_token=mask_token,
        mask_token_id=mask_token_id,
        mask_init=mask_init,
        mask_seed=1,
        tokenizer_model=None,
        **{**RECIPE, **chosen},
    )
    plan = conversion.plan_of(wishes, imported / name / "megatron" / "release")
    report = autoregressive.convert(plan, save)
    return CheckpointFolder(save / "release"), report


def test_new_row_behind_the_vocabulary(imported, tmp_path):
    checkpoint, report = _convert(imported, tmp_path / "bdlm", mask_token="<|mask|>")
    before = CheckpointFolder(imported / "llama" / "megatron" / "release")
    assert checkpoint.tensors == before.tensors  # 100 tokens and the new one fit into the 128 rows
    for name in before.tensors:
        ours, theirs = checkpoint.read(name), before.read(name)
        if name == EMBEDDING:
            norms = theirs[:100].norm(dim=1)
            assert 0.5 < ours[100].norm() / norms.mean() < 2.0
            ours[100] = theirs[100]
        assert torch.equal(ours, theirs), name
    assert len(report) == 1 and "row 100 (mean+noise)" in report[0]

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bdlm" / "tokenizer")
    assert (tokenizer.mask_token, tokenizer.mask_token_id, len(tokenizer)) == ("<|mask|>", 100, 101)
    assert tokenizer.chat_template and (tmp_path / "bdlm" / "tokenizer" / "config.json").is_file()
    args = checkpoint.common_state()["args"]
    assert (args.bdlm_mask_token_id, args.bdlm_candidate_tokens, args.bdlm_tokenizer_vocab_size) == (100, 101, 101)
    assert args.tokenizer_model == str(tmp_path / "bdlm" / "tokenizer") and args.padded_vocab_size == 128


def test_more_rows_where_the_old_ones_are_full(imported, tmp_path):
    save_model(tmp_path / "source", "qwen3, yarn", tokenizer=True, vocab_size=128)
    huggingface.import_model(
        huggingface.open_source(tmp_path / "source"), tmp_path / "qwen3, yarn" / "megatron", arguments_of
    )
    checkpoint, report = _convert(tmp_path, tmp_path / "bdlm", "qwen3, yarn", mask_token="<|mask|>", mask_init="mean")
    before = CheckpointFolder(tmp_path / "qwen3, yarn" / "megatron" / "release")
    for name in (EMBEDDING, OUTPUT):
        ours, theirs = checkpoint.read(name), before.read(name)
        assert ours.shape == (256, 32) and torch.equal(ours[:128], theirs) and ours[129:].eq(0).all()
        torch.testing.assert_close(ours[128], theirs.mean(0))
        assert any(line.startswith(f"{name}: warning: the mask row's norm is 0.") for line in report)
    args = checkpoint.common_state()["args"]
    assert args.padded_vocab_size == 256 and '"rope_type": "yarn"' in args.bdlm_rope_parameters


def test_existing_special_token_keeps_its_row(imported, tmp_path):
    checkpoint, _ = _convert(imported, tmp_path / "bdlm", mask_token_id=3)
    before = CheckpointFolder(imported / "llama" / "megatron" / "release")
    assert all(torch.equal(checkpoint.read(name), before.read(name)) for name in before.tensors)
    args = checkpoint.common_state()["args"]
    assert (args.bdlm_mask_token_id, args.bdlm_candidate_tokens) == (3, 100)


@pytest.mark.parametrize(
    "wishes, message",
    [
        (dict(), "has no mask token; give --mask-token"),
        (dict(mask_token_id=101), "--mask-token-id 101: outside the vocabulary of 100 tokens. A legal value: 100"),
        (dict(mask_token_id=127), "--mask-token-id 127: outside the vocabulary"),  # inside the padding rows
        (dict(mask_token_id=-1), "--mask-token-id -1"),
        (dict(mask_token_id=2), "end-of-document token"),
        (dict(mask_token_id=20), "ordinary token"),
        (dict(mask_token="a"), "ordinary token"),
        (dict(mask_token="</s>", mask_token_id=3), "is not the token --mask-token-id 3"),
        (dict(mask_token="<|mask|>", mask_init="keep"), "--mask-init keep: token 100 has no row yet"),
        (dict(mask_token="<|mask|>", mask_init="copy:100"), "--mask-init copy:100: the vocabulary has tokens 0 to 99"),
        (
            dict(mask_token="<|mask|>", mask_init="zeros"),
            "--mask-init zeros: known are mean, mean.noise, copy:ID, keep",
        ),
        (dict(mask_token="<|mask|>", bdlm_block_size=0), "--bdlm-block-size 0"),
    ],
)
def test_what_is_refused(wishes, message, imported, tmp_path):
    with pytest.raises((ConversionError, DataError, BDLMConfigError), match=message):
        _convert(imported, tmp_path / "bdlm", **wishes)
    assert not (tmp_path / "bdlm").exists()


def test_a_converted_checkpoint_is_not_converted_again(imported, tmp_path):
    _convert(imported, tmp_path / "llama" / "megatron", mask_token_id=3)
    with pytest.raises(ConversionError, match="is a block diffusion model already .mask token 3."):
        _convert(tmp_path, tmp_path / "again", mask_token_id=3)


def test_metadata_travel_and_a_conflict_names_both_values(imported, tmp_path):
    checkpoint, _ = _convert(imported, tmp_path / "bdlm", mask_token="<|mask|>")
    saved = checkpoint.common_state()["args"]
    defaults = options.checkpoint_defaults(saved, use_checkpoint_args=True)
    for name, value in {**RECIPE, "bdlm_mask_token_id": 100}.items():
        if name in options.MODEL_OPTIONS:
            assert getattr(saved, name) == value == defaults[name]
    assert defaults["rotary_base"] == 10000.0 and defaults["layernorm_epsilon"] == saved.layernorm_epsilon
    ours = BDLMConfig(**{name: value for name, value in defaults.items() if name.startswith("bdlm_")})
    options.check_against_checkpoint(ours, saved, "x")
    ours.bdlm_label_shift = "none"
    with pytest.raises(BDLMConfigError, match="--bdlm-label-shift none: the checkpoint in x was written with next"):
        options.check_against_checkpoint(ours, saved, "x")
    with pytest.raises(BDLMConfigError, match="--bdlm-block-size 16: the checkpoint was written with 8"):
        block_rules(saved, {"bdlm_block_size": 16})
    assert block_rules(saved).label_shift == "next" and block_rules(saved).keep_mask_logit


def test_an_autoregressive_checkpoint_is_not_trained_as_it_is(imported):
    saved = CheckpointFolder(imported / "llama" / "megatron" / "release").common_state()["args"]
    assert options.checkpoint_defaults(saved, use_checkpoint_args=False) == {}
    with pytest.raises(BDLMConfigError, match="--load x: it holds an autoregressive model.*to-bdlm"):
        options.check_against_checkpoint(BDLMConfig(), saved, "x")


def test_engine_options_that_decide_about_tensors_are_refused(imported):
    saved = CheckpointFolder(imported / "llama" / "megatron" / "release").common_state()["args"]
    args = SimpleNamespace(**vars(saved))
    assert options.check_engine_options(args, saved, "x") == []
    args.rotary_base = 500000
    assert options.check_engine_options(args, saved, "x") == [
        "warning: rotary_base is 500000, the checkpoint in x was written with 10000.0"
    ]
    args.qk_layernorm = True
    with pytest.raises(BDLMConfigError, match="qk_layernorm True: the checkpoint in x was written with False"):
        options.check_engine_options(args, saved, "x")


def test_rows_by_kind():
    table = torch.randn(12, 2000, generator=torch.Generator().manual_seed(0)) + 0.1
    table[10:] = 0
    mean = table[:10].mean(0)

    def row(kind):
        changed = table.clone()
        lines = set_mask_row(changed, MaskRow(10, kind), tokens=10)
        assert torch.equal(changed[:10], table[:10]) and changed[11].eq(0).all()
        return changed[10], len(lines) == 2

    value, warned = row("mean")
    torch.testing.assert_close(value, mean)
    assert warned  # the mean of ten random rows is a third as long as one of them
    value, warned = row("mean+noise")
    assert not warned and torch.equal(value, row("mean+noise")[0]) and not torch.equal(value, mean)
    value, warned = row("copy:4")
    assert not warned and torch.equal(value, table[4])
    assert row("keep")[1]  # a row of zeros is told


def test_the_mask_row_itself_is_left_out_of_the_mean():
    table = torch.ones(4, 3)
    table[1] = 1000.0
    set_mask_row(table, MaskRow(1, "mean"), tokens=4)
    assert table.eq(1).all()
