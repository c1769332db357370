"""What we add around the engine's saving of checkpoints.

`install` replaces two engine functions with ones that call them:

* `metadata.json`, whose presence makes a checkpoint complete, is written only after every file that the checkpoint's
  index names was found in full length; so the tracker, written later still, never names less than a whole checkpoint;
* a folder that is written again (a run set back to an earlier checkpoint) loses its `metadata.json` first;
* a checkpoint that this run has loaded or saved itself is not written a second time, as the engine would do when a finished
  run is started again: a kill at that moment would take the newest checkpoint away;
* a save that fails says where, and how much space is left there;
* with `--bdlm-keep-checkpoints N` older checkpoints are deleted in the background once the newest stands.
"""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import checkpointing, get_args
from megatron.training import training as engine_training
from torch.distributed.checkpoint import CheckpointException

from megatron.bdlm.checkpoint.retention import delete_surplus
from megatron.bdlm.checkpoint.tracker import LAST_WRITTEN, IncompleteCheckpoint, check_files, iteration_folder
from megatron.bdlm.training.faults import SaveFailed

VISIBLE_WITHIN = 30.0
"""Seconds that a network file system is given to show rank 0 what other nodes have written."""


def install(keep: Optional[int]) -> None:
    """Wrap the engine's functions; see the module docstring.

    Args:
        keep: newest checkpoints to keep, None for all.
    """
    _verify_before_completion()
    stock_save = engine_training.save_checkpoint
    deletion = _Deletion()
    last: list[int] = []  # the iteration that this process saved last

    def save_checkpoint(iteration: int, *args: Any, non_persistent_ckpt: bool = False, **kwargs: Any) -> None:
        if not non_persistent_ckpt:
            # a step that the engine wants to rerun elsewhere has a state of its own, which must be saved
            settled = get_rerun_state_machine().state == RerunState.NOT_RUNNING_YET
            if settled and (iteration in last or (not last and _is_loaded(iteration))):
                _print_first(f"> the checkpoint of iteration {iteration} stands already; it is not written again")
                return
            _begin_again(iteration_folder(Path(get_args().save), iteration))
        try:
            stock_save(iteration, *args, non_persistent_ckpt=non_persistent_ckpt, **kwargs)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            free = shutil.disk_usage(get_args().save).free / 2**20
            raise SaveFailed(
                f"the checkpoint of iteration {iteration} could not be written to {get_args().save}, where {free:.1f} MiB are free"
            ) from error
        if not non_persistent_ckpt:
            last[:] = [iteration]
            if keep is not None and torch.distributed.get_rank() == 0:
                deletion.start(get_args().save, keep)

    engine_training.save_checkpoint = save_checkpoint


def _verify_before_completion() -> None:
    """Let the engine write `metadata.json` only into a folder that holds what its index names."""
    stock_save_config: Callable = serialization.save_config

    def save_config(config: Any, checkpoint_dir: str) -> None:
        deadline = time.monotonic() + VISIBLE_WITHIN
        while True:
            try:
                check_files(Path(checkpoint_dir))
                break
            except IncompleteCheckpoint:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)
        stock_save_config(config, checkpoint_dir)

    serialization.save_config = save_config


def _is_loaded(iteration: int) -> bool:
    """Whether this run started from the checkpoint of `iteration` in its save folder and has nothing to add to it."""
    args = get_args()
    same = bool(args.load) and os.path.realpath(args.load) == os.path.realpath(args.save)
    return same and not args.finetune and checkpointing.get_loaded_iteration() == iteration


def _begin_again(folder: Path) -> None:
    """Make a folder that will be overwritten incomplete, before any rank writes."""
    if torch.distributed.get_rank() == 0:
        (folder / LAST_WRITTEN).unlink(missing_ok=True)
    torch.distributed.barrier()


def _print_first(line: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(line, flush=True)


class _Deletion:
    """Deletes in the background, one deletion at a time; the process waits for the last one before it ends."""

    def __init__(self) -> None:
        self._thread: Optional[threading.Thread] = None

    def start(self, folder: str, keep: int) -> None:
        if self._thread is None or not self._thread.is_alive():  # else the next save takes care
            self._thread = threading.Thread(target=self._run, args=(folder, keep), name="bdlm-delete-checkpoints")
            self._thread.start()

    @staticmethod
    def _run(folder: str, keep: int) -> None:
        try:
            gone = delete_surplus(folder, keep)
        except OSError as error:  # training goes on without the space
            print(f"> warning: --bdlm-keep-checkpoints {keep}: {error}", flush=True)
        else:
            if gone:
                print(f"> --bdlm-keep-checkpoints {keep}: deleted {', '.join(gone)}", flush=True)
