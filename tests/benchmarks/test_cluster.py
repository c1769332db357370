"""The emulated cluster: the ratio's arithmetic, and nothing left behind when its process is killed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import HARDWARE, cluster, missing_for_emulation, rate_for_ratio, ratio_of_hardware  # noqa: E402

needs_network = pytest.mark.skipif(missing_for_emulation() is not None, reason=f"no emulated network: {missing_for_emulation()}")

HOLDS = """
import sys, time
from benchmarks.cluster import cluster
with cluster(2, rate_mbit=10.0) as machines:
    print(*machines.first_processes, flush=True)
    time.sleep(60)
"""


def test_ratio_and_rate_by_hand():
    # the docstring's example; the head size cancels
    hardware = HARDWARE["h200-node"]
    computation = 14 * 32 * 262144**2 / 8 / hardware.attention_flops
    communication = 7 * 2 * 262144 / 8 * 2 * 8 * 8 / hardware.link_bytes
    assert ratio_of_hardware(hardware, 262144, 8, 32, 8) == pytest.approx(communication / computation)
    assert rate_for_ratio(2.0, 0.5, 1e6) == pytest.approx(8 / 0.95)


def test_without_root_ranks_run_over_loopback_with_a_note(monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.cluster.os.geteuid", lambda: 1000)
    with cluster(2, 2) as machines:
        assert not machines.emulated and "need root" in machines.note
    assert "note: no emulated network (network namespaces need root)" in capsys.readouterr().err


@needs_network
def test_nodes_are_joined_limited_and_gone_when_the_process_is_killed():
    process = subprocess.Popen([sys.executable, "-c", HOLDS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        nodes = [int(pid) for pid in process.stdout.readline().split()]
        assert len(nodes) == 2
        link = subprocess.run(
            ["nsenter", f"--net=/proc/{nodes[0]}/ns/net", "tc", "qdisc", "show", "dev", "eth0"], capture_output=True, text=True
        )
        assert "tbf" in link.stdout and "10Mbit" in link.stdout
    finally:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(Path(f"/proc/{pid}").exists() for pid in nodes):
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in nodes)
