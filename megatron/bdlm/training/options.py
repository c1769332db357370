"""The resolved options of a run: printed at start, written beside the checkpoint, checked on resume.

A checkpoint holds every argument of the run that wrote it (the engine saves them). The options
that define what a model *is* - block size, mask token, label shift, attention of the clean
stream - must not change silently when it is loaded.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Optional

from megatron.bdlm.config import BDLMConfig, BDLMConfigError

MODEL_OPTIONS = (
    "bdlm_block_size",
    "bdlm_block_size_schedule",
    "bdlm_mask_token_id",
    "bdlm_label_shift",
    "bdlm_clean_attention",
    "bdlm_noisy_attention",
    "bdlm_keep_mask_logit",
)
"""Options that belong to the model; a checkpoint's value wins over a default and refuses another flag value."""

FILE_NAME = "bdlm_options.json"


def resolved_options(args: Any) -> dict[str, Any]:
    """Every argument of the run as plain JSON values, sorted by name."""
    return {name: _plain(value) for name, value in sorted(vars(args).items())}


def print_options(config: BDLMConfig) -> None:
    """Print the block diffusion options, one a line, as Megatron prints its arguments."""
    print("------------------------ block diffusion options ------------------------", flush=True)
    for field in dataclasses.fields(config):
        name = field.name
        print(f"  {name} {'.' * (48 - len(name))} {getattr(config, name)}", flush=True)
    print("-------------------------------------------------------------------------", flush=True)


def write_options(args: Any, folder: Optional[str]) -> None:
    """Write the resolved options to `folder`/bdlm_options.json; whole or not at all."""
    if not folder:
        return
    path = Path(folder) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(resolved_options(args), indent=1) + "\n")
    os.replace(temporary, path)


def checkpoint_arguments(load: Optional[str]) -> Optional[Any]:
    """The argument namespace inside the newest complete checkpoint of folder `load`, or None if there is none."""
    from megatron.core import dist_checkpointing

    from megatron.bdlm.checkpoint.tracker import newest_checkpoint

    folder = newest_checkpoint(load)
    if folder is None:
        return None
    return dist_checkpointing.load_common_state_dict(str(folder)).get("args")


def check_against_checkpoint(config: BDLMConfig, saved: Any, load: str) -> None:
    """Refuse a run whose model options differ from those of the checkpoint that it loads.

    Raises:
        BDLMConfigError: naming the flag and both values.
    """
    for name in MODEL_OPTIONS:
        if not hasattr(saved, name):
            continue
        ours, theirs = getattr(config, name), getattr(saved, name)
        if ours != theirs:
            flag = "--" + name.replace("_", "-")
            raise BDLMConfigError(
                f"{flag} {ours}: the checkpoint in {load} was written with {theirs}; a model keeps this option. "
                f"A legal value: {theirs}"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return str(value)
