"""Before and after `megatron.training.pretrain`: what every entry script does.

`prepare` parses and validates, repairs the tracker of an interrupted save, refuses options that
contradict the checkpoint, prints and writes the resolved options, and builds the engine's
configuration container. `finish` closes the process group.
"""

import sys
from typing import Any

import torch
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

from megatron.bdlm.checkpoint.tracker import repair_tracker
from megatron.bdlm.model.builder import BlockDiffusionModelConfig
from megatron.bdlm.training import dry_run, hooks, step
from megatron.bdlm.training.arguments import parse_arguments
from megatron.bdlm.training.json_log import JsonLog
from megatron.bdlm.training.options import check_start, print_options, write_options


def prepare(group: type | None = None) -> Any:
    """Everything up to the engine's `pretrain`; returns its configuration container. A dry run ends the process here.

    Args:
        group: a further dataclass whose fields are flags of the entry script.

    Raises:
        BDLMConfigError: options that cannot run, or that contradict the checkpoint to load.
    """
    if dry_run.asked(sys.argv):
        raise SystemExit(dry_run.main(group))
    args, config = parse_arguments(group)
    if args.rank == 0:
        repaired = repair_tracker(args.load)
        if repaired:
            print(f"> {repaired}", flush=True)
    for line in check_start(args, config):
        if args.rank == 0:
            print(f"> {line}", flush=True)
    if args.rank == 0:
        print_options(config)
        write_options(args, args.save)
    model_config = gpt_config_from_args(args, model_config_cls=BlockDiffusionModelConfig)
    model_config.bdlm = config
    model_config.candidate_tokens = args.bdlm_candidate_tokens
    model_config.tokenizer_tokens = args.bdlm_tokenizer_vocab_size
    hooks.install(step.processed_rows)
    if config.bdlm_json_log and args.rank == args.world_size - 1:  # the rank that has losses and writes TensorBoard's events
        hooks.install_json_log(JsonLog(config.bdlm_json_log))
    return pretrain_cfg_container_from_args(args, model_config)


def finish() -> None:
    """Leave the process group together, so that no rank tears it down under another."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
