"""Every refused combination names the flag, its value, the rule and a legal value."""

import math
import sys
from types import SimpleNamespace

import pytest

from megatron.bdlm.platform import cpu

ON_CPU = cpu.enable()

from megatron.training.arguments import parse_args  # noqa: E402

from megatron.bdlm.config import RECIPES, BDLMConfig, BDLMConfigError  # noqa: E402
from megatron.bdlm.data.documents import DataError  # noqa: E402
from megatron.bdlm.data.tokenizers import Vocabulary  # noqa: E402
from megatron.bdlm.training import arguments  # noqa: E402

STOCK = dict(
    attention_dropout=0.0, position_embedding_type="rope", calculate_per_token_loss=True, multi_latent_attention=False,
    mtp_num_layers=None, num_experts=None, heterogeneous_layers_config_path=None, sft=False, dataloader_type="single",
    fp16_lm_cross_entropy=False, multiple_validation_sets=False, use_torch_fsdp2=False, use_megatron_fsdp=False, transformer_impl="local",
    experimental_attention_variant=None, softmax_type="vanilla", use_mup=False, hybrid_context_parallel=False,
    cuda_graph_impl="none", full_validation=False, window_size=None, cp_comm_type=["p2p"], reset_position_ids=False,
    dataloader_inter_document_masking=False, micro_batch_size=1, eval_micro_batch_size=None, dry_run=False,
    save_retain_interval=None, save=None, fp8=None,
)
EXPERTS = dict(
    num_experts=8, tensor_model_parallel_size=1, sequence_parallel=False, moe_expert_capacity_factor=None, moe_input_jitter_eps=None,
    moe_use_upcycling=False, overlap_moe_expert_parallel_comm=False, moe_router_load_balancing_type="aux_loss",
    moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False, moe_router_topk=2,
)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("attention_dropout", 0.1, "--attention-dropout 0.1: .* A legal value: 0.0"),
        ("position_embedding_type", "yarn", "--position-embedding-type yarn: .* A legal value: rope"),
        ("calculate_per_token_loss", False, "--calculate-per-token-loss False: .* A legal value: set"),
        ("multi_latent_attention", True, "--multi-latent-attention True"),
        ("mtp_num_layers", 1, "--mtp-num-layers 1"),
        ("heterogeneous_layers_config_path", "x.json", "--heterogeneous-layers-config-path x.json"),
        ("sft", True, "--sft True: .* finetune_bdlm.py"),
        ("dataloader_type", "cyclic", "--dataloader-type cyclic: .* A legal value: single"),
        ("fp16_lm_cross_entropy", True, "--fp16-lm-cross-entropy True"),
        ("multiple_validation_sets", True, "--multiple-validation-sets True"),
        ("experimental_attention_variant", "gated_delta_net", "--experimental-attention-variant gated_delta_net"),
        ("softmax_type", "learnable", "--softmax-type learnable: .* A legal value: vanilla"),
        ("use_mup", True, "--use-mup True"),
        ("hybrid_context_parallel", True, "--hybrid-context-parallel True"),
        ("cuda_graph_impl", "local", "--cuda-graph-impl local: .* A legal value: none"),
        ("full_validation", True, "--full-validation True"),
        ("window_size", (10, 5), r"--window-size \(10, 5\): .* A legal value: 10,0"),
        ("cp_comm_type", ["a2a"], "--cp-comm-type a2a: --bdlm-transport"),
        ("use_torch_fsdp2", True, "--use-torch-fsdp2/--use-megatron-fsdp True: .* --use-distributed-optimizer"),
        ("use_megatron_fsdp", True, "--use-torch-fsdp2/--use-megatron-fsdp True"),
        ("transformer_impl", "transformer_engine", "--transformer-impl transformer_engine: .* A legal value: local"),
    ],
)
def test_refused_engine_flags(name, value, message):
    """Faults A3 and B2 (without --calculate-per-token-loss) among others."""
    if name in ("use_torch_fsdp2", "use_megatron_fsdp", "transformer_impl") and not ON_CPU:
        pytest.skip("refused on the CPU platform only; CUDA is available")
    with pytest.raises(BDLMConfigError, match=message):
        arguments.check_combination(SimpleNamespace(**{**STOCK, name: value}), BDLMConfig())


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(moe_router_topk=0), "--moe-router-topk 0: .* 1 to --num-experts 8. A legal value: 2"),
        (dict(moe_router_topk=9), "--moe-router-topk 9: .* 1 to --num-experts 8. A legal value: 2"),
        (dict(moe_expert_capacity_factor=1.0), "--moe-expert-capacity-factor 1.0: .* A legal value: unset"),
        (dict(moe_input_jitter_eps=0.1), "--moe-input-jitter-eps 0.1: .* A legal value: unset"),
        (dict(moe_use_upcycling=True), "--moe-use-upcycling True: .* A legal value: unset"),
        (dict(overlap_moe_expert_parallel_comm=True), "--overlap-moe-expert-parallel-comm True: .* A legal value: unset"),
        (dict(moe_router_load_balancing_type="sinkhorn"), "--moe-router-load-balancing-type sinkhorn: .* aux_loss, seq_aux_loss, none"),
        (dict(moe_router_load_balancing_type=["aux_loss", "global_aux_loss"]), "--moe-router-load-balancing-type global_aux_loss"),
        (dict(moe_token_dispatcher_type="allgather"), "--moe-token-dispatcher-type allgather: .* A legal value: alltoall"),
        (dict(tensor_model_parallel_size=2), "--tensor-model-parallel-size 2: experts need --sequence-parallel"),
        (dict(moe_grouped_gemm=True), "--moe-grouped-gemm True: .* A legal value: unset"),
    ],
)
def test_refused_flags_of_experts(values, message):
    """Fault B8: router statistics that would depend on the layout."""
    if "moe_grouped_gemm" in values and not ON_CPU:
        pytest.skip("refused on the CPU platform only; CUDA is available")
    with pytest.raises(BDLMConfigError, match=message):
        arguments.check_combination(SimpleNamespace(**{**STOCK, **EXPERTS, **values}), BDLMConfig())


def test_experts_pass():
    arguments.check_combination(SimpleNamespace(**STOCK | EXPERTS), BDLMConfig())
    tensor_parallel = dict(tensor_model_parallel_size=2, sequence_parallel=True, moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"])
    arguments.check_combination(SimpleNamespace(**STOCK | EXPERTS | tensor_parallel), BDLMConfig())


@pytest.mark.parametrize(
    "gemma, stages, message",
    [
        (None, 1, "--bdlm-self-conditioning 0.5: only a model with --bdlm-diffusion-gemma has it. A legal value: 0"),
        ("{}", 2, "--bdlm-self-conditioning 0.5: the first pass ends on the last pipeline stage, .* A legal value: 0"),
    ],
)
def test_refused_self_conditioning(gemma, stages, message):
    args = SimpleNamespace(**{**STOCK, "pipeline_model_parallel_size": stages})
    with pytest.raises(BDLMConfigError, match=message):
        arguments.check_combination(args, BDLMConfig(bdlm_self_conditioning=0.5, bdlm_diffusion_gemma=gemma))


def test_two_rules_of_deletion_are_refused():
    with pytest.raises(BDLMConfigError, match="--save-retain-interval 100: .* A legal value: unset"):
        arguments.check_combination(SimpleNamespace(**{**STOCK, "save_retain_interval": 100}), BDLMConfig(bdlm_keep_checkpoints=2))


def test_at_least_one_checkpoint_is_kept():
    with pytest.raises(BDLMConfigError, match="--bdlm-keep-checkpoints 0: the newest checkpoint always stays. A legal value: 2"):
        BDLMConfig(bdlm_keep_checkpoints=0).validate()


def test_separate_documents_need_micro_batches_of_one():
    args = SimpleNamespace(**{**STOCK, "dataloader_inter_document_masking": True, "eval_micro_batch_size": 2})
    with pytest.raises(BDLMConfigError, match="--micro-batch-size/--eval-micro-batch-size 2: .* A legal value: 1"):
        arguments.check_combination(args, BDLMConfig())


def test_unknown_kernel_is_refused():
    with pytest.raises(BDLMConfigError, match="--bdlm-attention-kernel nope: legal values: auto, torch"):
        arguments.check_combination(SimpleNamespace(**STOCK), BDLMConfig(bdlm_attention_kernel="nope"))


def test_fp8_needs_a_gpu():
    if not ON_CPU:
        pytest.skip("refused on the CPU platform only; CUDA is available")
    with pytest.raises(BDLMConfigError, match="--fp8-format hybrid: its products need CUDA .* A legal value: unset"):
        arguments.check_combination(SimpleNamespace(**{**STOCK, "fp8": "hybrid"}), BDLMConfig())


def test_checkpoints_to_keep_need_a_folder():
    with pytest.raises(BDLMConfigError, match="--bdlm-keep-checkpoints 2: without --save there is none to keep. A legal value: unset"):
        arguments.check_combination(SimpleNamespace(**STOCK), BDLMConfig(bdlm_keep_checkpoints=2))


def test_stock_combination_passes():
    arguments.check_combination(SimpleNamespace(**STOCK), BDLMConfig())


@pytest.mark.parametrize(
    "values, message",
    [
        (dict(bdlm_block_size=0), "--bdlm-block-size 0: .* A legal value: 32"),
        (dict(bdlm_recipe="nonsense"), "--bdlm-recipe nonsense: known recipes: bd3lm"),
        (dict(bdlm_noise_eps=1.0), "--bdlm-noise-eps 1.0"),
        (dict(bdlm_t_min=0.9, bdlm_t_max=0.5), "--bdlm-t-min/--bdlm-t-max 0.9/0.5"),
        (dict(bdlm_clean_loss_weight=1.0), "--bdlm-clean-loss-weight 1.0: .*token-causal"),
        (dict(bdlm_clean_loss_weight=-1.0, bdlm_clean_attention="token-causal"), "--bdlm-clean-loss-weight -1.0: not negative"),
        (dict(bdlm_diffusion_loss_weight=0.0), "--bdlm-diffusion-loss-weight 0.0"),
        (dict(bdlm_diffusion_loss_weight=math.inf), "--bdlm-diffusion-loss-weight inf: positive, finite"),
        (dict(bdlm_diffusion_loss_weight=math.nan), "--bdlm-diffusion-loss-weight nan: positive, finite"),
        (dict(bdlm_views=2, bdlm_corruption="uniform"), "--bdlm-views 2"),
        (dict(bdlm_views=2, bdlm_force_one_corrupted=True), "--bdlm-force-one-corrupted True: with --bdlm-views 2"),
        (dict(bdlm_corruption="uniform"), "--bdlm-loss-weight nelbo: .* A legal value: unit"),
        (
            dict(bdlm_corruption="uniform", bdlm_loss_weight="unit", bdlm_loss_denominator="masked"),
            "--bdlm-loss-denominator masked: --bdlm-corruption uniform scores every",
        ),
        (dict(bdlm_loss_denominator="block-mean"), "--bdlm-loss-denominator block-mean: a mean of block means"),
        (dict(bdlm_rope_parameters="{x"), "--bdlm-rope-parameters {x: no JSON"),
        (dict(bdlm_rope_parameters='{"rope_type": "dynamic"}'), "rope_type is one of linear, llama3, yarn"),
        (dict(bdlm_rope_parameters='{"rope_type": "linear"}'), "rope_type linear needs positive numbers for factor"),
        (dict(bdlm_rope_parameters='{"rope_type": "linear", "factor": -2}'), "rope_type linear needs positive numbers for factor"),
        (dict(bdlm_force_one_corrupted=True, bdlm_corruption="uniform", bdlm_loss_weight="unit"), "--bdlm-force-one-corrupted True"),
        (dict(bdlm_ranks_per_node=0), "--bdlm-ranks-per-node 0"),
        (dict(bdlm_transport="allgather", bp_grad_dtype="bf16"), "--bp-grad-dtype bf16: .* sums .* A legal value: fp32"),
        (dict(bdlm_cross_entropy_chunk=-1), "--bdlm-cross-entropy-chunk -1"),
        (dict(bdlm_block_size_schedule="0:1,x"), "--bdlm-block-size-schedule 0:1,x: .* A legal value: 0:1,1000:4,5000:32"),
        (dict(bdlm_block_size_schedule="5:1,10:32"), "--bdlm-block-size-schedule 5:1,10:32: iterations ascend from 0"),
        (dict(bdlm_block_size_schedule="0:1,10:16"), "its last size must be --bdlm-block-size 32"),
    ],
)
def test_refused_options(values, message):
    with pytest.raises(BDLMConfigError, match=message):
        BDLMConfig(**values).validate()


@pytest.mark.parametrize(
    "values, ranks, message",
    [
        (dict(block_parallel_size=3), 4, "--block-parallel-size 3: it must divide --context-parallel-size 4. A legal value: 4"),
        (dict(block_parallel_size=2, bdlm_strategy="csbp"), 4, "--bdlm-strategy csbp: .* means hybrid"),
        (dict(block_parallel_size=4, bdlm_strategy="cp"), 4, "--bdlm-strategy cp: .* means csbp"),
        (dict(bdlm_strategy="hybrid"), 4, "--bdlm-strategy hybrid: it needs a --block-parallel-size, .* A legal value: --block-parallel-size 2"),
        (dict(bdlm_strategy="hybrid"), 3, "--bdlm-strategy hybrid: .* A legal value: csbp"),
    ],
)
def test_refused_strategies(values, ranks, message):
    with pytest.raises(BDLMConfigError, match=message):
        BDLMConfig(**values).resolved_strategy(ranks)


@pytest.mark.parametrize(
    "values, ranks, expected",
    [
        ({}, 1, ("csbp", 1)), ({}, 4, ("csbp", 4)), (dict(block_parallel_size=1), 4, ("cp", 1)),
        (dict(block_parallel_size=2), 4, ("hybrid", 2)), (dict(bdlm_strategy="bp"), 4, ("bp", 4)),
        (dict(bdlm_strategy="cp"), 4, ("cp", 1)),
    ],
)
def test_strategy_follows_block_parallel_size(values, ranks, expected):
    assert BDLMConfig(**values).resolved_strategy(ranks) == expected


def test_block_size_follows_its_schedule():
    """Fault D3."""
    config = BDLMConfig(bdlm_block_size=32, bdlm_block_size_schedule="0:1,10:4,30:32")
    assert [config.block_size_at(i) for i in (0, 9, 10, 29, 30, 1000)] == [1, 1, 4, 4, 32, 32]
    assert BDLMConfig(bdlm_block_size=8).block_size_at(123) == 8


def _parsed(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["pretrain_bdlm.py", *flags])
    return parse_args(arguments.add_bdlm_arguments, ignore_unknown_args=True)


def test_recipe_sets_values_and_a_flag_wins(monkeypatch):
    """Fault F1."""
    args = _parsed(monkeypatch, "--bdlm-recipe", "fast-dllm-v2", "--bdlm-block-size", "8")
    assert args.bdlm_block_size == 8
    assert args.bdlm_views == RECIPES["fast-dllm-v2"]["bdlm_views"] == 2
    assert args.bdlm_label_shift == "next"


def test_a_switch_of_a_recipe_can_be_turned_off(monkeypatch):
    assert _parsed(monkeypatch, "--bdlm-recipe", "fast-dllm-v2").bdlm_keep_mask_logit
    assert not _parsed(monkeypatch, "--bdlm-recipe", "fast-dllm-v2", "--no-bdlm-keep-mask-logit").bdlm_keep_mask_logit


def test_engine_defaults(monkeypatch):
    args = _parsed(monkeypatch)
    assert args.calculate_per_token_loss and args.attention_dropout == 0.0
    assert not args.create_attention_mask_in_dataloader and args.eval_interval == 1000
    if ON_CPU:
        assert (args.distributed_backend, args.transformer_impl) == ("gloo", "local")


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--seq-length 30 --context-parallel-size 4", "--seq-length 30: .*4 = 8. Nearest legal values: 24 or 32"),
        (
            "--seq-length 32 --bdlm-block-size 16 --bdlm-block-size-schedule 0:17,5:16",
            "--bdlm-block-size-schedule 0:17,5:16: size 17 must divide --seq-length 32",
        ),
        ("--seq-length 6 --context-parallel-size 4", "Nearest legal values: 8"),
        (
            "--seq-length 32 --context-parallel-size 4 --bdlm-ranks-per-node 3",
            "--bdlm-ranks-per-node 3: it must divide --context-parallel-size 4. A legal value: 1",
        ),
        ("--seq-length 32 --context-parallel-size 4 --bdlm-block-size 16", "--bdlm-block-size 16: .* 2 blocks for 4 .* --bdlm-block-size 8"),
    ],
)
def test_lengths_are_refused_with_the_nearest_legal_ones(monkeypatch, flags, message):
    """Faults A9 and D3 (a scheduled size of 17)."""
    args = _parsed(monkeypatch, *flags.split())
    with pytest.raises(BDLMConfigError, match=message):
        arguments._check_before_engine(args)


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--mock-data --data-path some/prefix", "--mock-data with some/prefix: .* A legal value: one of the two"),
        (
            "--seq-length 1048576 --global-batch-size 2048",
            "--global-batch-size 2048: .* 2147483648 of --seq-length 1048576 pass 2147483647. A legal value: 2047",
        ),
    ],
)
def test_refused_before_the_engine(monkeypatch, flags, message):
    args = _parsed(monkeypatch, *flags.split())
    with pytest.raises(BDLMConfigError, match=message):
        arguments._check_before_engine(args)


def test_the_largest_global_batch_passes(monkeypatch):
    arguments._check_before_engine(_parsed(monkeypatch, *"--seq-length 1048576 --global-batch-size 2047".split()))


def test_padded_vocabulary_as_given():
    """Fault E1: an embedding without a row for the mask token, or one that tensor ranks cannot share, is refused at start."""
    vocabulary = Vocabulary(size=256, mask_token_id=255, eod_token_id=None, tokenizer_size=255)
    args = SimpleNamespace(make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, use_checkpoint_args=False)
    assert arguments._padded_vocab_size(args, vocabulary, 300) == 300
    with pytest.raises(DataError, match="--padded-vocab-size 255: the vocabulary has 256 rows .* a legal value: 256"):
        arguments._padded_vocab_size(args, vocabulary, 255)
    with pytest.raises(BDLMConfigError, match="--padded-vocab-size 301: --tensor-model-parallel-size 2 must divide it. A legal value: 256"):
        arguments._padded_vocab_size(args, vocabulary, 301)


def test_tensor_parallel_ranks_share_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for tensor, context, given, expected in ((1, 8, None, None), (2, 8, None, 4), (2, 2, None, 2), (4, 8, 8, 8)):
        args = SimpleNamespace(tensor_model_parallel_size=tensor, context_parallel_size=context)
        assert arguments.ranks_on_node(args, BDLMConfig(bdlm_ranks_per_node=given)) == expected
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert arguments.ranks_on_node(SimpleNamespace(tensor_model_parallel_size=2, context_parallel_size=8), BDLMConfig()) is None
