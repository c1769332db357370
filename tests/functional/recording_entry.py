"""`pretrain_bdlm.py` with two switches for tests, set by environment variables.

RECORD_NOISE=folder   every rank writes the corrupted ids of each training sample that it draws
EMPTY_SAMPLES=a,b     training samples whose tokens all lose their supervision ("all" for every one)
"""

import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megatron.bdlm.platform import cpu  # noqa: E402

cpu.adapt_engine(cpu.enable())

import numpy as np  # noqa: E402

from megatron.bdlm.training import step  # noqa: E402

stock_corrupt = step.corrupt


def corrupt(tokens, eligible, config, seed, sample_index, epoch, **options):
    empty = os.environ.get("EMPTY_SAMPLES", "")
    training = options.get("purpose", "train") == "train"
    if training and (empty == "all" or str(sample_index) in empty.split(",")):
        eligible = np.zeros_like(eligible)
    noised = stock_corrupt(tokens, eligible, config, seed, sample_index, epoch, **options)
    folder = os.environ.get("RECORD_NOISE")
    if folder and training:
        np.save(pathlib.Path(folder) / f"{sample_index}-{os.environ.get('RANK', '0')}.npy", noised.xt)
    return noised


step.corrupt = corrupt

if __name__ == "__main__":
    runpy.run_path(str(ROOT / "pretrain_bdlm.py"), run_name="__main__")
