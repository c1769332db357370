"""Kill training runs at random moments, resume them, and compare what comes out with an undisturbed run, bit for bit.

    python tools/kill_runs.py                          # 20 runs of 2 processes
    python tools/kill_runs.py --first 10 --runs 5      # runs 10 to 14 of the same series
    python tools/kill_runs.py --processes 4 --flags "--tensor-model-parallel-size 2"

A toy model (context-sharded block parallelism by default) trains --steps steps and saves after each, keeping two checkpoints. A
run counts when its processes were killed with SIGKILL (one at a time, up to half a second apart), started again from what
was left on the disk, and went on to the last step. Half of the kills come while a checkpoint is being written, the others at any moment of training.
Run number i of a --seed has the same plan every time; where exactly the kill lands depends on the machine.

Prints one line a run and the count; exit code 1 if any run failed or differs. Every tensor of the last checkpoint is
compared: weights and optimizer state. Processes are forked from one that has imported
everything, so that a start takes seconds less; torchrun is not part of the test.
"""

import argparse
import os
import random
import runpy
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
if __name__ == "__main__":  # before torch is imported
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", TORCH_CPP_LOG_LEVEL="ERROR", PYTHONWARNINGS="ignore")
    warnings.simplefilter("ignore")

import pretrain_bdlm  # noqa: E402, F401  imported here once; the forked ranks find everything loaded
import torch  # noqa: E402

from megatron.bdlm.checkpoint.tracker import LAST_WRITTEN, iteration_folder, newest_checkpoint  # noqa: E402
from megatron.bdlm.testing.topologies import toy_flags  # noqa: E402
from megatron.bdlm.testing.training_run import checkpoint_tensors  # noqa: E402

CSBP = "--context-parallel-size 2 --block-parallel-size 2"


_started: set[int] = set()
"""Every rank, so that none outlives this tool."""


class RunFailure(RuntimeError):
    """A run did not do what it should; the message says what, with the end of its log."""


@dataclass(frozen=True)
class Setting:
    """What all runs of a series share."""

    processes: int
    steps: int
    flags: tuple[str, ...]
    timeout: float  # seconds for one launch

    def command_line(self, checkpoints: Path) -> list[str]:
        folder = ["--load", str(checkpoints), "--save", str(checkpoints), "--save-interval", "1", "--bdlm-keep-checkpoints", "2"]
        return ["pretrain_bdlm.py", *toy_flags(self.steps, *self.flags, *folder)]


@dataclass(frozen=True)
class Plan:
    """When a run is killed: `delay` seconds after the folder of checkpoint `step` appears, or after its first checkpoint."""

    while_saving: bool
    step: int
    delay: float
    gap: float  # seconds between the kills of two ranks

    @staticmethod
    def draw(seed: int, number: int, setting: Setting, save_seconds: float, run_seconds: float) -> "Plan":
        dice = random.Random(f"{seed}-{number}")
        step, share = dice.randint(2, setting.steps - 1), dice.random()
        gap = dice.choice([0.0, dice.uniform(0.0, 0.5)])
        if number % 2:
            return Plan(True, step, share * save_seconds, gap)
        return Plan(False, 1, share * run_seconds, gap)


def start(setting: Setting, checkpoints: Path, log: Path) -> list[int]:
    """Fork the ranks of a run; their process ids."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    sys.stdout.flush()
    pids = [_fork_rank(rank, setting, port, checkpoints, log) for rank in range(setting.processes)]
    _started.update(pids)
    return pids


def _fork_rank(rank: int, setting: Setting, port: str, checkpoints: Path, log: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        size = str(setting.processes)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        sys.argv = setting.command_line(checkpoints)
        runpy.run_path(str(ROOT / "pretrain_bdlm.py"), run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code or 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def kill(pids: list[int], gap: float) -> bool:
    """SIGKILL the ranks, `gap` seconds apart; False if one had ended before."""
    _started.difference_update(pids)
    running = all(_runs(pid) for pid in pids)
    for number, pid in enumerate(pids):
        if number:
            time.sleep(gap)
        try:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
    return running


def _runs(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) == (0, 0)
    except ChildProcessError:  # waited for already
        return False


def finish(pids: list[int], setting: Setting, log: Path) -> None:
    """Wait for a run's end.

    Raises:
        RunFailure: a rank failed, or none came to its end in time.
    """
    deadline, left = time.monotonic() + setting.timeout, set(pids)
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                _started.discard(pid)
                if status:
                    kill(list(left), 0.0)
                    raise RunFailure(f"a rank ended with {os.waitstatus_to_exitcode(status)}:\n{_tail(log)}")
        if time.monotonic() > deadline:
            kill(list(left), 0.0)
            raise RunFailure(f"no end after {setting.timeout:g} s:\n{_tail(log)}")
        time.sleep(0.02)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def wait_for(path: Path, pids: list[int], timeout: float) -> bool:
    """Whether `path` appears before a rank ends or the time is over."""
    deadline = time.monotonic() + timeout
    while not path.exists():
        if time.monotonic() > deadline or any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return False
        time.sleep(0.001)
    return True


@dataclass(frozen=True)
class Undisturbed:
    """The run that the others are held against, and its times in seconds."""

    tensors: dict[str, torch.Tensor]
    save_seconds: float  # of one save, the median
    run_seconds: float  # from the first checkpoint to the end


def undisturbed(setting: Setting, folder: Path) -> Undisturbed:
    """Train without a kill."""
    checkpoints, log = folder / "checkpoints", folder / "log.txt"
    folder.mkdir(parents=True)
    pids = start(setting, checkpoints, log)
    seconds, begun = [], 0.0
    for step in range(1, setting.steps + 1):
        target = iteration_folder(checkpoints, step)
        if not wait_for(target, pids, setting.timeout):
            raise RunFailure(f"no checkpoint was begun:\n{_tail(log)}")
        seconds.append(-time.monotonic())
        begun = begun or time.monotonic()
        wait_for(target / LAST_WRITTEN, pids, setting.timeout)
        seconds[-1] += time.monotonic()
    finish(pids, setting, log)
    return Undisturbed(checkpoint_tensors(target), statistics.median(seconds), time.monotonic() - begun)


def killed_run(plan: Plan, setting: Setting, folder: Path, reference: Undisturbed) -> str:
    """Train, kill, resume, compare; a line about it.

    Raises:
        RunFailure: it could not be killed as planned, found no checkpoint, did not end, or ended with other tensors.
    """
    checkpoints, log = folder / "checkpoints", folder / "log.txt"
    for halved in range(6):  # on a machine with more to do than at the undisturbed run, the end may come first
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pids = start(setting, checkpoints, log)
        if not wait_for(iteration_folder(checkpoints, plan.step), pids, setting.timeout):
            kill(pids, 0.0)
            raise RunFailure(f"checkpoint {plan.step} was not begun:\n{_tail(log)}")
        time.sleep(plan.delay / 2**halved)
        if kill(pids, plan.gap):
            break
    else:
        raise RunFailure("it always ended before the kill")
    begun = sorted(path.name for path in checkpoints.glob("iter_*") if not (path / LAST_WRITTEN).is_file())
    newest = newest_checkpoint(str(checkpoints))
    finish(start(setting, checkpoints, log), setting, log)
    last = iteration_folder(checkpoints, setting.steps)
    ours, theirs = checkpoint_tensors(last), reference.tensors
    different = sorted(name for name in ours.keys() | theirs.keys() if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name]))
    if different:
        raise RunFailure(f"{len(different)} of {len(theirs)} tensors differ, the first is {different[0]}")
    where = f"inside the save of {', '.join(begun)}" if begun else "outside a save"
    return f"killed {where}; resumed from {newest.name if newest else 'the start'}; all {len(theirs)} tensors equal"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="runs to kill")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="training steps of a run, at least 3")
    parser.add_argument("--flags", default=CSBP, help="further flags of pretrain_bdlm.py, in one string")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one launch")
    options = parser.parse_args(argv)
    if options.steps < 3:
        parser.error(f"--steps {options.steps}: a kill needs a step before and one after it. A legal value: 6")
    setting = Setting(options.processes, options.steps, tuple(options.flags.split()), options.timeout)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder, good = Path(tempfile.mkdtemp(prefix="kill_runs_")), 0
    try:
        reference = undisturbed(setting, folder / "undisturbed")
        print(f"undisturbed: {setting.steps} steps, {len(reference.tensors)} tensors, {reference.save_seconds:.2f} s a save", flush=True)
        for number in range(options.first, options.first + options.runs):
            plan = Plan.draw(options.seed, number, setting, reference.save_seconds, 0.9 * reference.run_seconds)
            try:
                print(f"run {number}: {killed_run(plan, setting, folder / str(number), reference)}", flush=True)
                good += 1
                shutil.rmtree(folder / str(number))
            except RunFailure as failure:
                print(f"run {number}: FAILED ({plan}): {failure}", flush=True)
    finally:
        kill(list(_started), 0.0)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{good} of {options.runs} killed runs resumed and ended with the same tensors, bit for bit")
    return 0 if good == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
