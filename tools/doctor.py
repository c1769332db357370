#!/usr/bin/env python3
"""Would a run start on this machine? Versions, GPUs, communication, attention kernels, environment, folders, and the run's own flags.

    python tools/doctor.py
    python tools/doctor.py --folder runs data -- --num-layers 36 ... --save runs/checkpoints     # and: would this run start?
    python tools/doctor.py --json -- finetune_bdlm.py --data-path conversations.jsonl ...
    torchrun --nnodes 2 --nproc-per-node 1 ... tools/doctor.py --shared runs                     # is it the same folder on both?

Behind -- stand an entry script (pretrain_bdlm.py where none is named) and the flags of a run; --dry-run-world-size says how many processes it has.

Exit code 0: nothing stands in the way; 1: a fault, which would stop a run.
"""

import argparse
import dataclasses
import json
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore")  # of optional packages, which are checked one by one

MARKS = {"ok": "ok   ", "note": "note ", "fault": "FAULT"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", nargs="+", default=[], help="folders to be written to")
    parser.add_argument("--shared", nargs="+", default=[], help="folders that every node must see as the same one; start the doctor with torchrun")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("run", nargs="*", help="an entry script and a run's flags, behind --")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    import torch.distributed as dist

    from megatron.bdlm.training import doctor

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    checks = doctor.examine(args.folder, args.shared, args.run, ROOT)
    faults = sum(check.status == "fault" for check in checks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        if args.json:
            print(json.dumps({"faults": faults, "checks": [dataclasses.asdict(check) for check in checks]}, indent=1))
        else:
            for check in checks:
                print(f"{MARKS[check.status]} {check.topic}: {check.message}")
            print(f"{faults} faults" if faults else "nothing stands in the way")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
