"""Before, around and after `megatron.training.pretrain`: what every entry script does.

    with run.reported():
        container = run.prepare()
        pretrain(container, ...)
        run.finish()

`reported` says how the run ended (`faults`). `prepare` parses and validates, repairs the tracker of an interrupted save,
refuses options that contradict the checkpoint, prints and writes the resolved options, and builds the engine's configuration
container. `finish` closes the process group.
"""

import argparse
import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import traceback
from typing import Any, Iterator

import torch
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args

from megatron.bdlm.checkpoint.tracker import repair_tracker
from megatron.bdlm.model.builder import BlockDiffusionModelConfig
from megatron.bdlm.training import dry_run, faults, hooks, saving, step
from megatron.bdlm.training.arguments import parse_arguments
from megatron.bdlm.training.json_log import JsonLog
from megatron.bdlm.training.liveness import Watch
from megatron.bdlm.training.options import check_start, print_options, write_options

_watch = Watch()


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Say how the run inside ended: a line in the log, `bdlm_exit.txt` in the save folder, the exit code of this process.

    After a fault the process leaves at once: other ranks may hang, and an orderly end would wait for them.
    """
    if os.environ.get("RANK", "0") == "0" and not dry_run.asked(sys.argv):
        faults.forget(_save_folder())
    faulthandler.enable()  # a stack for signals that Python never sees: NCCL's watchdog aborts, a truncated memory map is a bus error
    try:
        yield
    except SystemExit as leaving:
        _tell(leaving.code)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _leave(error)
    else:
        _tell(0)


def _tell(code: Any) -> None:
    """Say that training ended in order, or that the engine left it with `code`; nothing where no training was begun."""
    _watch.stop()
    args = _arguments()
    if args is None or args.rank != 0 or args.skip_train or not args.train_iters:
        return
    done = max(_watch.done, getattr(args, "iteration", 0))  # a finished run that was started again has no step to do
    if not _watch.started and done < args.train_iters:
        return
    ending = faults.of_exit(code, done, args.train_iters)
    print(f"> {ending.state}: {ending.text}", flush=True)
    faults.write(ending, _save_folder())


def _save_folder() -> str | None:
    """--save as it was typed: known also where the rest of the command line is refused."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save")
    return parser.parse_known_args(sys.argv[1:])[0].save


def _arguments() -> Any:
    """The engine's arguments, None where the command line was refused before they stood."""
    try:
        return get_args()
    except AssertionError:
        return None


def _leave(error: BaseException) -> None:
    """Print the fault, write it down for torchrun and for a requeue loop, and end this process."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises here for every data worker that is lost, also while we report the first
    traceback.print_exception(error)
    args = _arguments()
    ending = faults.classify(error, faults.data_prefixes(args) if args else ())
    if ending.state == "peer":
        ending = dataclasses.replace(ending, text=f"{_watch.report(error.__traceback__)} ({ending.text})")
    faults.write(ending, _save_folder())
    handler = get_error_handler()
    handler.initialize()
    handler.record_exception(error)
    rank = os.environ.get("RANK", "0")
    print(f"> rank {rank} ends with {ending.code} ({ending.state}) after step {_watch.done}: {ending.text}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(ending.code)


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
    repair(args)
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
    protect(config.bdlm_keep_checkpoints)
    return pretrain_cfg_container_from_args(args, model_config)


def repair(args: Any) -> None:
    """Let the tracker of the folder to load from name the newest complete checkpoint, on rank 0."""
    if args.rank == 0:
        repaired = repair_tracker(args.load)
        if repaired:
            print(f"> {repaired}", flush=True)


def protect(keep: int | None = None) -> None:
    """Verified saves, the newest `keep` checkpoints kept, signs of life of every rank."""
    saving.install(keep)
    _watch.install()


def finish() -> None:
    """Leave the process group together, so that no rank tears it down under another."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
