"""A cluster on one machine: network namespaces as nodes, joined by rate-limited links, with real gloo ranks in them.

    python benchmarks/cluster.py --nodes 4 --rate-mbit 100 -- pretrain_bdlm.py --context-parallel-size 4 ...
    python benchmarks/cluster.py --nodes 2 --ranks-per-node 4 --rate-like h200-node@262144 -- script.py ...

Each node is a network and process namespace of its own with one link (veth pair) to a bridge in a further namespace.
The kernel's token bucket (`tc .. tbf`) limits both directions of every link to the given rate; ranks of one node talk
to each other inside their namespace, without a limit. `torchrun` runs in every node, as on a real cluster.

Nothing stands in the host's namespace, and nothing has a name: a node lives as long as its first process, which the kernel
kills together with this process, however that ends (SIGKILL included); everything in a node dies with that first process,
and links and bridge vanish with the last process in their namespace.

Needs root, `unshare`, `nsenter`, `setpriv` (util-linux) and `ip`, `tc` (iproute2). Otherwise the same ranks run over the
loopback device without any limit, and a note says so.

`--rate-like HARDWARE@CONTEXT` chooses the rate at which a context-parallel ring on these cores communicates as long,
relative to its computation, as it would on that hardware at that context: see `ratio_of_hardware`.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv")
NETWORK = "10.77.0"
BURST_BYTES = 131072  # two of the kernel's largest segments: smaller buckets make it cut every segment
LINKS_VARIABLE = "BDLM_CLUSTER_LINKS"
SOCKET_BUFFER = "4096 65536 262144"  # bytes: what waits in front of a slow link; megabytes would delay every small message


class ClusterError(RuntimeError):
    """A command that set up or ran the cluster failed; names it and its output."""


def missing_for_emulation() -> str | None:
    """Why this machine cannot emulate a network, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"missing commands: {', '.join(missing)}"
    trial = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    return None if trial.returncode == 0 else f"namespaces are refused here: {trial.stderr.strip()}"


# ---- links -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One end of a link: the namespace's file, and the device in it."""

    namespace: str
    device: str

    def run(self, *command: str) -> None:
        run(["nsenter", f"--net={self.namespace}", *command])

    def limit(self, rate_mbit: float | None) -> None:
        """Limit what leaves through the device; None lifts the limit."""
        subprocess.run(
            ["nsenter", f"--net={self.namespace}", "tc", "qdisc", "del", "dev", self.device, "root"], capture_output=True
        )  # fails where there is none yet
        if rate_mbit is not None:
            rate, burst = f"{max(1, round(rate_mbit * 1000))}kbit", str(BURST_BYTES)
            self.run("tc", "qdisc", "add", "dev", self.device, "root", "tbf", "rate", rate, "burst", burst, "latency", "2s")


def set_rate(rate_mbit: float | None, links: list[Link] | None = None) -> bool:
    """Limit every link; without `links`, those of the cluster this process runs in. False: there are none.

    A rank may call it (the namespaces' files are visible to it), so one run can sweep the rate.
    """
    if links is None:
        links = [Link(*link) for link in json.loads(os.environ.get(LINKS_VARIABLE, "[]"))]
    for link in links:
        link.limit(rate_mbit)
    return bool(links)


def run(command: list[str]) -> str:
    """Output of a command.

    Raises:
        ClusterError: it failed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ClusterError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout.strip()}")
    return done.stdout


# ---- nodes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """Nodes that exist; `emulated` False: plain loopback."""

    nodes: int
    ranks_per_node: int
    emulated: bool
    note: str
    first_processes: tuple[int, ...] = ()  # of every node
    links: tuple[Link, ...] = ()

    def torchrun(self, script: str, arguments: list[str], timeout: float = 3600.0, **variables: str) -> str:
        """Run a script on every rank; returns the first node's output.

        Raises:
            ClusterError: a node ended with an error, or the timeout; the message holds the end of its output.
        """
        port = _free_port()
        outputs = [tempfile.TemporaryFile("w+") for _ in range(self.nodes)]  # a pipe that nobody reads would fill and block
        nodes = [
            subprocess.Popen(
                [*self._inside(node), *self._command(node, port), script, *arguments], cwd=REPOSITORY,
                stdout=outputs[node], stderr=subprocess.STDOUT, env=self._environment(variables), start_new_session=True,
            )
            for node in range(self.nodes)
        ]
        try:
            failure = _wait_for(nodes, time.monotonic() + timeout)
        finally:
            for node in nodes:
                if node.poll() is None:
                    os.killpg(node.pid, signal.SIGKILL)
                    node.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read())
            output.close()
        if failure is not None:
            raise ClusterError(f"node {failure[0]} {failure[1]}:\n{texts[failure[0]][-6000:]}")
        return texts[0]

    def _inside(self, node: int) -> list[str]:
        if not self.emulated:
            return []
        folder = f"/proc/{self.first_processes[node]}/ns"
        return ["nsenter", f"--net={folder}/net", f"--pid={folder}/pid"]

    def _address(self, node: int) -> str:
        return f"{NETWORK}.{node + 1}" if self.emulated else "127.0.0.1"

    def _command(self, node: int, port: int) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.nodes), "--node-rank", str(node),
            "--nproc-per-node", str(self.ranks_per_node), "--master-addr", self._address(0), "--master-port", str(port),
            "--local-addr", self._address(node),
        ]

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {
            **os.environ, "GLOO_SOCKET_IFNAME": "eth0" if self.emulated else "lo", "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore",
            LINKS_VARIABLE: json.dumps([(link.namespace, link.device) for link in self.links]), **variables,
        }


@contextmanager
def cluster(nodes: int, ranks_per_node: int = 1, rate_mbit: float | None = None) -> Iterator[Cluster]:
    """A cluster for the duration of the block.

    Args:
        rate_mbit: of every node's link, each direction; None: no limit.
    """
    reason = missing_for_emulation()
    if reason is not None:
        print(f"note: no emulated network ({reason}); ranks run over loopback without a limit", file=sys.stderr)
        yield Cluster(nodes, ranks_per_node, False, f"loopback: {reason}")
        return
    holders: list[subprocess.Popen] = []
    try:
        hub = _new_namespace(holders)
        run(["nsenter", f"--net=/proc/{hub}/ns/net", "ip", "link", "add", "hub", "type", "bridge"])
        run(["nsenter", f"--net=/proc/{hub}/ns/net", "ip", "link", "set", "hub", "up"])
        members, links = [], []
        for node in range(nodes):
            members.append(_new_namespace(holders))
            links += _connect(hub, members[-1], node)
        set_rate(rate_mbit, links)
        yield Cluster(nodes, ranks_per_node, True, "network namespaces, veth, bridge, tbf", tuple(members), tuple(links))
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _new_namespace(holders: list[subprocess.Popen]) -> int:
    """Process id of the first process of a new network and process namespace; its parent is added to `holders`."""
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child=KILL", "sleep", "infinity"]
    )
    holders.append(holder)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
            return int(children[0])
        time.sleep(0.01)
    raise ClusterError("unshare made no namespace within 10 s")


def _connect(hub: int, member: int, node: int) -> list[Link]:
    """A link between a node and the bridge; both ends, the node's first."""
    own, port = Link(f"/proc/{member}/ns/net", "eth0"), Link(f"/proc/{hub}/ns/net", f"node{node}")
    port.run("ip", "link", "add", port.device, "type", "veth", "peer", "name", own.device, "netns", str(member))
    port.run("ip", "link", "set", port.device, "master", "hub", "up")
    own.run("ip", "addr", "add", f"{NETWORK}.{node + 1}/24", "dev", own.device)
    own.run("ip", "link", "set", own.device, "up")
    own.run("ip", "link", "set", "lo", "up")
    own.run("sysctl", "-q", "-w", f"net.ipv4.tcp_wmem={SOCKET_BUFFER}")
    return [own, port]


def _wait_for(nodes: list[subprocess.Popen], deadline: float) -> tuple[int, str] | None:
    """Wait for all nodes; (node, what happened) of the first that fails, whose peers would wait for it for long."""
    while True:
        codes = [node.poll() for node in nodes]
        for index, code in enumerate(codes):
            if code:
                return index, f"ended with {code}"
        if all(code is not None for code in codes):
            return None
        if time.monotonic() > deadline:
            return codes.index(None), "did not end in time"
        time.sleep(0.1)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# ---- rates -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hardware:
    """What the ratio needs: of one GPU, in numbers a second."""

    attention_flops: float  # achieved by the attention kernel
    link_bytes: float  # one direction, per GPU


HARDWARE = {
    # peak 989e12 bfloat16 flop/s, of which attention kernels reach about half; 900e9 B/s NVLink is both directions together
    "h200-nvlink": Hardware(0.5 * 989e12, 450e9),
    "h200-node": Hardware(0.5 * 989e12, 50e9),  # one 400 Gbit/s card per GPU between nodes
    "h200-ethernet": Hardware(0.5 * 989e12, 12.5e9),  # 100 Gbit/s per GPU
}


def ratio_of_hardware(hardware: Hardware, context: int, ranks: int, query_heads: int, key_heads: int, item: int = 2) -> float:
    """Communication over computation of a conventional context-parallel ring, both streams, forward and backward.

    Per rank and layer, with head size d (which cancels):
        computation    area L*L/P pairs, forward 4 flops a pair, query head and d; backward 2.5 times that
        communication  2L/P rows travel P - 1 hops, K and V, forward once, backward again with dK/dV in float32
    Example: 8 GPUs, L = 262144, 32 query and 8 key heads, h200-node: 14*32*L*L/8 = 3.8e12 d flops, 7.8 ms*d/1000;
    (8-1)*(2L/8)*2*8*(2+2+4) = 5.9e7 d bytes, 1.2 ms*d/1000: ratio 0.15.
    """
    flops = 3.5 * 4 * query_heads * context**2 / ranks
    moved = (ranks - 1) * 2 * context / ranks * 2 * key_heads * (2 * item + 4)
    return (moved / hardware.link_bytes) / (flops / hardware.attention_flops)


def rate_for_ratio(ratio: float, seconds_of_computation: float, bytes_of_busiest_link: float) -> float:
    """Link rate in Mbit/s at which that many bytes take `ratio` times the computation (5% of a packet are headers)."""
    return bytes_of_busiest_link * 8 / 0.95 / (ratio * seconds_of_computation) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--rate-mbit", type=float, help="of every node's link, each direction (default: no limit)")
    parser.add_argument("--rate-like", metavar="HARDWARE@CONTEXT", help=f"one of {', '.join(HARDWARE)} at a context length")
    parser.add_argument("--computation", type=float, help="with --rate-like: seconds this script's ring computes per layer")
    parser.add_argument("--link-bytes", type=float, help="with --rate-like: bytes of the busiest link in that time")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--key-heads", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=3600.0)
    parser.add_argument("command", nargs="+", help="script and its arguments, behind --")
    args = parser.parse_args()
    rate = args.rate_mbit
    if args.rate_like:
        kind, _, context = args.rate_like.partition("@")
        if kind not in HARDWARE or not context.isdigit():
            parser.error(f"--rate-like {args.rate_like}: HARDWARE@CONTEXT. A legal value: h200-node@262144")
        if not args.computation or not args.link_bytes:
            parser.error("--rate-like: needs --computation SECONDS and --link-bytes BYTES. A legal value: --computation 1 --link-bytes 1e7")
        ratio = ratio_of_hardware(HARDWARE[kind], int(context), args.nodes * args.ranks_per_node, args.query_heads, args.key_heads)
        rate = rate_for_ratio(ratio, args.computation, args.link_bytes)
        print(
            f"{kind} at {context}: communication {ratio:.3f} of computation; {args.link_bytes:.3g} bytes in "
            f"{ratio:.3f} x {args.computation} s: {rate:.3f} Mbit/s", file=sys.stderr,
        )
    with cluster(args.nodes, args.ranks_per_node, rate) as machines:
        try:
            print(machines.torchrun(args.command[0], args.command[1:], args.timeout), end="")
        except ClusterError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
