"""tools/show_plan.py: what it prints, draws and refuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.bdlm.parallel import picture
from tests.parallel.plans import plans_of
from tools import show_plan

TOOL = Path(__file__).resolve().parents[2] / "tools" / "show_plan.py"
SAMPLE = ("--seq-length", 64, "--bdlm-block-size", 8, "--context-parallel-size", 2)


def run_tool(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)


def test_the_command_prints_and_draws(tmp_path):
    output = tmp_path / "new" / "plan.png"
    result = run_tool(*SAMPLE, "--output", output)
    assert result.returncode == 0, result.stderr
    assert "csbp  L=64  S=8  B=8  P=2  K=2  V=1  block-causal" in result.stdout
    assert "0" * 16 + "1" * 32 + "0" * 16 in result.stdout
    assert "heaviest over mean attention area: 1.0000" in result.stdout
    assert "direct 48, ring or allgather 64 (0.75 and 1.00 per token)" in result.stdout
    assert output.read_bytes()[:4] == b"\x89PNG"


def test_the_command_refuses_with_the_plan_s_message(tmp_path):
    result = run_tool("--seq-length", 8, "--bdlm-block-size", 8, "--context-parallel-size", 2)
    assert result.returncode == 1 and "--bdlm-strategy hybrid --block-parallel-size 1" in result.stderr


@pytest.mark.parametrize(
    "flag, value, legal", [("--context-parallel-size", "0", "4"), ("--context-parallel-size", "-2", "4"), ("--output", "a.txt", "plan.png"),
                           ("--documents", "64,", "64,64")],
)
def test_the_command_refuses_a_value(capsys, flag, value, legal):
    with pytest.raises(SystemExit):
        show_plan.parse([*map(str, SAMPLE), flag, value])
    assert f"{flag}: {value}: " in (error := capsys.readouterr().err) and f"A legal value: {legal}" in error


def test_conventional_context_parallelism_moves_both_copies():
    text = picture.describe(plans_of(seq_length=64, block_size=8, context_parallel_size=2, strategy="cp"))
    assert "direct 48, ring or allgather 128" in text


@pytest.mark.parametrize(
    "arguments, window",
    [
        (dict(strategy="hybrid", block_parallel_size=2, views=2), None),
        (dict(strategy="bp", target_blocks=[1, 5]), None),
        (dict(documents=[30, 50], clean_attention="token-causal", noisy_attention="causal"), 9),
    ],
)
def test_every_strategy_can_be_drawn(tmp_path, arguments, window):
    plans = plans_of(seq_length=80, block_size=8, context_parallel_size=4, **arguments)
    assert len(picture.describe(plans, window).splitlines()) == 4 + 1 + 4 + 3
    picture.draw(plans, tmp_path / "plan.png", window)
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_a_picture_of_too_many_rectangles_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(picture, "LARGEST_PICTURE", 10)
    with pytest.raises(picture.PictureError, match="at most 10. Draw a shorter --seq-length"):
        picture.draw(plans_of(seq_length=64, block_size=8, context_parallel_size=2), tmp_path / "plan.png")
