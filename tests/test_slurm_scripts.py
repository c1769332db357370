"""The batch scripts under stand-ins for srun, scontrol and torchrun: ranks, addresses, flags, what goes back into the queue; the planner and
the engine's own groups say whether their comments about placement are true.
"""

import dataclasses
import importlib.util
import re

import pytest
from tests.stand_ins import ROOT, TORCHRUN, flag_value, parsed, run_script  # first: it readies the platform

from megatron.core.parallel_state import RankGenerator

from megatron.bdlm.config import config_from_args
from megatron.bdlm.planner.costs import predict
from megatron.bdlm.planner.models import from_flags
from megatron.bdlm.planner.search import layouts
from megatron.bdlm.planner.work import Layout, Workload
from megatron.bdlm.training import arguments

NODE = 8
SLURM = ROOT / "examples" / "slurm"

JOBS = {
    "qwen3_8b_128k_1x8.sbatch": (1, 131072, 8, 1),
    "qwen3_8b_256k_2x8.sbatch": (2, 262144, 8, 1),
    "qwen3_8b_1m_8x8.sbatch": (8, 1048576, 16, 1),
    "qwen3_30b_a3b_256k_2x8.sbatch": (2, 262144, 8, 8),
    "qwen3_30b_a3b_1m_8x8.sbatch": (8, 1048576, 16, 8),
}
"""Nodes, clean tokens, context-parallel size, expert-parallel size."""

STAND_INS = {
    "scontrol": """case $1 in
        show) for node in $(seq "$SLURM_JOB_NUM_NODES"); do printf 'gpu%03d\\n' "$node"; done ;;
        requeue) echo "$2" >>"$STAND_IN_LOG/requeued" ;;
    esac""",
    "srun": """while [[ $1 == --* ]]; do shift; done
    for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$node "$@" || exit; done""",
    "torchrun": f"""{TORCHRUN}
    mkdir -p "$RUN_DIR/checkpoints"; echo "$STAND_IN_REACHED" >"$RUN_DIR/checkpoints/latest_checkpointed_iteration.txt"
    [[ -z ${{STAND_IN_ENDING:-}} ]] || {{ echo "$STAND_IN_ENDING" >"$RUN_DIR/checkpoints/bdlm_exit.txt"; [[ $STAND_IN_ENDING == 75* ]]; }}""",
}

PREDICTED = re.compile(
    r"^# Predicted by tools/plan_run.py (?P<command>.*):\n# (?P<gb>\d+) GB a GPU of (?P<capacity>\d+), "
    r"(?:no attention traffic between nodes|(?P<between>\d+) GB of attention between nodes a rank and step)\.$", re.M,
)


def submit(script, folder, reached, nodes=2, **environment):
    """Run a batch script as Slurm would; the finished process."""
    job = dict(
        SLURM_SUBMIT_DIR=ROOT, SLURM_JOB_ID=70123, SLURM_JOB_NODELIST="gpu[001-008]", SLURM_JOB_NUM_NODES=nodes,
        STAND_IN_REACHED=reached, RUN_DIR=folder / "run",
    )
    return run_script(SLURM / script, folder, STAND_INS, **job, **environment)


@pytest.fixture(scope="module", params=JOBS)
def job(request, tmp_path_factory):
    """A batch script's name and the torchrun flags of each of its nodes."""
    nodes = JOBS[request.param][0]
    folder = tmp_path_factory.mktemp("job")
    done = submit(request.param, folder, reached=1000, nodes=nodes)
    assert done.returncode == 0, done.stderr
    assert "done: step 1000" in done.stdout and not (folder / "requeued").exists()
    return request.param, folder, [(folder / f"node{node}").read_text().splitlines() for node in range(nodes)]


def test_every_node_starts_its_ranks(job):
    script, folder, flags_of_nodes = job
    for node, flags in enumerate(flags_of_nodes):
        names = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")
        placed = [flag_value(flags, name) for name in names]
        assert placed == [str(len(flags_of_nodes)), str(node), str(NODE), "gpu001", str(20000 + 70123 % 20000)]
        assert flag_value(flags, "--exit-signal") == "SIGUSR2" and "--exit-signal-handler" in flags
        assert flag_value(flags, "--load") == flag_value(flags, "--save") == str(folder / "run" / "checkpoints")


def test_the_parser_takes_the_flags(job, monkeypatch):
    """The engine's parser and our rules."""
    script, _, flags_of_nodes = job
    nodes, length, ranks, experts = JOBS[script]
    args = parsed(flags_of_nodes[-1], "pretrain_bdlm.py", NODE * nodes, monkeypatch)
    assert args.moe_grouped_gemm == (args.num_experts is not None)
    args.moe_grouped_gemm = False  # needs CUDA, and this is a CPU; the other rules are checked
    arguments.check_combination(args, config_from_args(args))
    assert (args.seq_length, args.context_parallel_size, args.block_parallel_size) == (length, ranks, ranks)
    assert (args.expert_model_parallel_size, args.bdlm_block_size) == (experts, 32)
    assert NODE * nodes % ranks == 0 and args.global_batch_size % (NODE * nodes // ranks) == 0


def crossing(groups):
    """Groups of ranks that stand on more than one node."""
    return [group for group in groups if len({rank // NODE for rank in group}) > 1]


def test_groups_stand_where_the_comments_say(job):
    """By the engine's own generator: a context-parallel group is one node or neighbouring ones, an expert-parallel group is inside a node."""
    nodes, _, ranks, experts = JOBS[job[0]]
    world, order = NODE * nodes, "tp-cp-ep-dp-pp"
    groups = RankGenerator(tp=1, ep=1, dp=world // ranks, pp=1, cp=ranks, order=order).get_ranks("cp")
    assert all(group == list(range(group[0], group[0] + ranks)) and group[0] % ranks == 0 for group in groups)
    assert bool(crossing(groups)) == (ranks > NODE)
    assert not crossing(RankGenerator(tp=1, ep=experts, dp=world // experts, pp=1, cp=1, order=order).get_ranks("ep"))


@pytest.fixture(scope="module")
def plan_run():
    spec = importlib.util.spec_from_file_location("plan_run", ROOT / "tools" / "plan_run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_planner_predicts_what_the_comments_say(job, plan_run):
    """Model, legality of the layout, memory and bytes between nodes; the table in the README says the same."""
    script, _, flags_of_nodes = job
    nodes, length, ranks, experts = JOBS[script]
    said = PREDICTED.search((SLURM / script).read_text())
    args = plan_run.parse(said["command"].split())
    model, machine = plan_run.model_of(args), plan_run.machine_of(args)
    workload = Workload(args.seq_length, args.bdlm_block_size, args.global_batch_size)
    flags = flags_of_nodes[0]
    assert (machine.count, workload) == (NODE * nodes, Workload(length, 32, int(flag_value(flags, "--global-batch-size"))))
    read = from_flags(flags)
    assert dataclasses.replace(read, name=model.name, vocabulary=model.vocabulary) == model
    layout = Layout(
        cp=ranks, bp=ranks, ep=experts, dp=NODE * nodes // ranks, transport="hierarchical" if ranks > NODE else "direct", recompute=True,
    )
    assert layout in layouts(model, machine, workload)
    prediction = predict(model, machine, workload, layout)
    assert prediction.fits and round(machine.gpu.memory / 1e9) == int(said["capacity"])
    assert prediction.memory_total / 1e9 == pytest.approx(int(said["gb"]), rel=0.05)
    assert prediction.bytes["attention between nodes"] / 1e9 == pytest.approx(int(said["between"] or 0), rel=0.05)
    listed = next(line for line in (SLURM.parent / "README.md").read_text().splitlines() if line.startswith(f"| [{script.removesuffix('.sbatch')}]"))
    between = f"{said['between']} GB a rank and step" if said["between"] else "none"
    assert listed.endswith(f"| {nodes} x {NODE} | 1 | {ranks} | {experts if experts > 1 else '-'} | {layout.dp} | {said['gb']} | {between} |")


def test_directives():
    """Nodes, GPUs and the signal that the scripts' text and the run rely on."""
    assert {path.name for path in SLURM.glob("*.sbatch")} == set(JOBS)
    for script, (nodes, *_) in JOBS.items():
        directives = re.findall(r"^#SBATCH (\S+)$", (SLURM / script).read_text(), re.M)
        assert {f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=8", "--signal=SIGUSR2@600", "--requeue"} <= set(directives)


def test_an_unfinished_job_goes_back_into_the_queue_and_a_stuck_one_does_not(tmp_path):
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=40)
    assert done.returncode == 0 and "step 40 of 1000: back into the queue" in done.stdout, done.stderr
    assert (tmp_path / "requeued").read_text() == "70123\n"
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=40)
    assert done.returncode == 1 and "no step was added to 40" in done.stderr
    assert (tmp_path / "requeued").read_text() == "70123\n"


def test_a_job_trains_with_the_recipe_of_a_script(tmp_path):
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=1000, SCRIPT="examples/recipes/sdar.sh")
    assert done.returncode == 0, done.stderr
    assert flag_value((tmp_path / "node1").read_text().splitlines(), "--bdlm-noise-level-per") == "document"


@pytest.mark.parametrize(
    "ending, requeued, code",
    [
        ("75 saved step 40 of 1000 is done", True, 0),
        ("76 peer no sign of life from rank 3", True, 0),
        ("74 disk no space is left", False, 74),
        ("16 rerun a result of step 41 was refused twice", False, 16),
    ],
)
def test_how_a_launch_ended_decides(ending, requeued, code, tmp_path):
    done = submit("qwen3_8b_256k_2x8.sbatch", tmp_path, reached=40, STAND_IN_ENDING=ending)
    assert done.returncode == code and f"=== ended: {ending}" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "requeued").exists() == requeued
