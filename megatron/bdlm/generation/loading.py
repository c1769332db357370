"""From a checkpoint folder to a model that the sampler can call.

The checkpoint holds the arguments of the run that wrote it, so nothing about the model is asked for again: its shape,
block size, mask token, label shift and tokenizer are read there, and a conflicting wish is refused. It may have been
written with any layout; it is read onto `tensor_parallel_size` ranks.

`megatron.bdlm.platform.cpu.enable()` must have run before this module is imported.

Shapes: b sequences, s rows of a forward.
"""

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.training.argument_utils import gpt_config_from_args

from megatron.bdlm.checkpoint.tracker import is_complete, newest_checkpoint
from megatron.bdlm.config import BDLMConfig, BDLMConfigError, config_from_args
from megatron.bdlm.generation.rows import BlockRules, SamplingParams
from megatron.bdlm.model.builder import BlockDiffusionModelBuilder, BlockDiffusionModelConfig
from megatron.bdlm.platform import cpu


class LoadError(ValueError):
    """A checkpoint that cannot be sampled from; the message says why."""


def find_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that `folder` stands for: itself, or the newest complete one in it.

    Raises:
        LoadError: there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise LoadError(f"--load {folder}: no such folder")
    found = folder if is_complete(folder) else newest_checkpoint(str(folder))
    if found is None:
        raise LoadError(f"--load {folder}: no complete checkpoint in it (a folder iter_* with metadata.json)")
    return found


def saved_arguments(checkpoint: Path) -> Any:
    """Argument namespace of the run that wrote a checkpoint.

    Raises:
        LoadError: it was not written by pretrain_bdlm.py or finetune_bdlm.py.
    """
    saved = dist_checkpointing.load_common_state_dict(str(checkpoint)).get("args")
    if saved is None or getattr(saved, "bdlm_mask_token_id", None) is None:
        raise LoadError(f"--load {checkpoint}: it holds no block diffusion options; it is not a checkpoint of this project")
    for option in dataclasses.fields(BDLMConfig):  # an older checkpoint lacks newer options
        if not hasattr(saved, option.name):
            setattr(saved, option.name, option.default)
    return saved


def block_rules(saved: Any, wishes: Optional[Mapping[str, Any]] = None) -> BlockRules:
    """What the checkpoint fixes.

    Args:
        saved: arguments of the checkpoint.
        wishes: values that the user gave, by option name (`bdlm_block_size`, ..); None where not given.

    Raises:
        BDLMConfigError: a wish that differs from the checkpoint, naming both values; a corruption that
            block by block unmasking does not serve.
    """
    for name, value in (wishes or {}).items():
        if value is not None and value != getattr(saved, name):
            raise BDLMConfigError(
                f"--{name.replace('_', '-')} {value}: the checkpoint was written with {getattr(saved, name)}; "
                f"a model keeps this option. A legal value: {getattr(saved, name)}"
            )
    if saved.bdlm_corruption != "absorbing":
        raise BDLMConfigError(
            f"--bdlm-corruption {saved.bdlm_corruption}: the sampler fills masks, which this model never saw. "
            "A legal value: absorbing (in training)"
        )
    return BlockRules(
        block_size=saved.bdlm_block_size,
        mask_token_id=saved.bdlm_mask_token_id,
        vocab_size=saved.bdlm_candidate_tokens,
        label_shift=saved.bdlm_label_shift,
        clean_attention=saved.bdlm_clean_attention,
        noisy_attention=saved.bdlm_noisy_attention,
        keep_mask_logit=saved.bdlm_keep_mask_logit,
    )


@dataclass(frozen=True)
class MegatronSampler:
    """The sampler's `Model` over a Megatron model: full-vocabulary logits, also under tensor parallel."""

    model: torch.nn.Module

    def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """int64 [b, s] twice -> [b, s, padded vocabulary]; see `sampler.Model`."""
        return self.model(input_ids, position_ids, None, packed_seq_params=params)


def initialize_processes(tensor_parallel_size: int, seed: int) -> torch.device:
    """Join the process group (of torchrun, or of this process alone) and make the engine's groups.

    Raises:
        LoadError: the number of processes is not the tensor-parallel size.
    """
    on_cuda = torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    if torch.distributed.is_torchelastic_launched():
        torch.distributed.init_process_group(backend)
    else:
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    world = torch.distributed.get_world_size()
    if world != tensor_parallel_size:
        raise LoadError(
            f"--tensor-model-parallel-size {tensor_parallel_size}: {world} process(es) were started; sampling uses all of them "
            f"for one model. A legal value: {world}"
        )
    device = torch.device("cpu")
    if on_cuda:
        device = torch.device("cuda", torch.distributed.get_node_local_rank(0))
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
    model_parallel_cuda_manual_seed(seed)
    return device


def load_model(checkpoint: Path, saved: Any, tensor_parallel_size: int, device: torch.device) -> MegatronSampler:
    """Build the model of a checkpoint and fill it; every process calls it.

    Raises:
        LoadError: tensors that are missing in the checkpoint, or in the model, or of another shape, by name.
    """
    args = _sampling_arguments(saved, tensor_parallel_size)
    model_config = gpt_config_from_args(args, model_config_cls=BlockDiffusionModelConfig)
    model_config.bdlm = config_from_args(args)
    model_config.candidate_tokens = args.bdlm_candidate_tokens
    model_config.parallel_output = False  # each tensor-parallel rank gets all logits
    model = BlockDiffusionModelBuilder(model_config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    model.to(device=device, dtype=args.params_dtype)
    state = model.sharded_state_dict()
    _check_tensors(state, checkpoint)
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(checkpoint))["model"])
    return MegatronSampler(model.eval())


def _sampling_arguments(saved: Any, tensor_parallel_size: int) -> Any:
    """The saved arguments with the layout of sampling: tensor parallel only, nothing recomputed."""
    args = copy.copy(saved)
    layout = dict(
        tensor_model_parallel_size=tensor_parallel_size, tensor_parallel_num_weight_shards=None, gtp_weight_remat_size=1,
        sequence_parallel=False, context_parallel_size=1,
        hierarchical_context_parallel_sizes=None, block_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None, pipeline_model_parallel_layout=None, variable_seq_lengths=False,
        expert_model_parallel_size=1, expert_tensor_parallel_size=tensor_parallel_size,
        expert_tensor_parallel_num_weight_shards=None, expert_gtp_weight_remat_size=1, recompute_granularity=None,
        recompute_method=None, recompute_num_layers=None, tp_comm_overlap=False, bdlm_strategy="auto",
        bdlm_full_last_layer=True, use_cpu_initialization=True, perform_initialization=False,
    )
    if cpu.is_active():
        layout |= cpu.CPU_DEFAULTS
    for name, value in layout.items():
        setattr(args, name, value)
    return args


def _check_tensors(state: Mapping[str, Any], checkpoint: Path) -> None:
    """Compare the model's tensors with those of the checkpoint, by name and whole shape."""
    stored = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    wanted = {t.key: t for t in _sharded_tensors(state)}
    missing = sorted(set(wanted) - set(stored))
    extra = sorted(key for key in set(stored) - set(wanted) if not key.startswith("optimizer."))
    shapes = [
        f"{key} {tuple(stored[key].global_shape)} instead of {tuple(tensor.global_shape)}"
        for key, tensor in sorted(wanted.items())
        if key in stored and tuple(stored[key].global_shape) != tuple(tensor.global_shape)
    ]
    faults = [("missing", missing), ("not in the model", extra), ("of another shape", shapes)]
    told = "; ".join(f"tensors {fault}: {', '.join(names)}" for fault, names in faults if names)
    if told:
        raise LoadError(f"--load {checkpoint}: {told}")


def _sharded_tensors(state: Any) -> list[ShardedTensor]:
    if isinstance(state, ShardedTensor):
        return [state]
    if isinstance(state, Mapping):
        return [t for value in state.values() for t in _sharded_tensors(value)]
    if isinstance(state, (list, tuple)):
        return [t for value in state for t in _sharded_tensors(value)]
    return _sharded_tensors(state.build()) if hasattr(state, "build") else []
