"""`pretrain_bdlm.py` with two switches, set by environment variables, for tests and tools/check_topologies.py.

RECORD_NOISE=folder   every rank writes the corrupted ids of each training sample that it draws
EMPTY_SAMPLES=a,b     training samples whose tokens all lose their supervision ("all" for every one)
"""

import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from megatron.bdlm.platform import cpu  # noqa: E402

cpu.adapt_engine(cpu.enable())

import numpy as np  # noqa: E402

from megatron.bdlm.training import step  # noqa: E402

stock_corrupt, stock_unstack = step.corrupt, step._unstack


def unstack(samples):
    empty = os.environ.get("EMPTY_SAMPLES", "").split(",")
    arrays = stock_unstack(samples)
    for sample in arrays:
        if empty == ["all"] or str(int(sample["sample_index"])) in empty:
            sample["eligible"] = np.zeros_like(sample["eligible"])
    return arrays


def corrupt(tokens, eligible, config, seed, sample_index, epoch, **options):
    noised = stock_corrupt(tokens, eligible, config, seed, sample_index, epoch, **options)
    folder = os.environ.get("RECORD_NOISE")
    if folder and options.get("purpose", "train") == "train":
        np.save(pathlib.Path(folder) / f"{sample_index}-{os.environ.get('RANK', '0')}.npy", noised.xt)
    return noised


step.corrupt, step._unstack = corrupt, unstack

if __name__ == "__main__":
    runpy.run_path(str(ROOT / "pretrain_bdlm.py"), run_name="__main__")
