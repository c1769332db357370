"""Run a function on several gloo ranks of this machine and collect what every rank returns.

Every rank is a fresh process (spawned, so nothing is inherited but what is passed) with one
compute thread and no visible GPU. The ranks meet through a file, so no port has to be free.
An exception of any rank ends the others and is raised again here with that rank's traceback.

    def rank_main(factor):                       # at module level: it is pickled by name
        return dist.get_rank() * factor

    run_distributed(rank_main, 4, 10)            # [0, 10, 20, 30]
"""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

GRACE_SECONDS = 5.0  # a rank that has answered may take this long to leave


class RankFailure(RuntimeError):
    """A rank raised, died or did not answer in time; the message holds its traceback."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600.0,
    ranks_per_node: int | None = None,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` gloo ranks; return the ranks' results in rank order.

    Args:
        fn: a module-level function; the default process group exists when it is called.
        timeout: seconds for all of it, start included.
        ranks_per_node: value of LOCAL_WORLD_SIZE (default: all ranks on one node).
        environment: further environment variables of the ranks.

    Raises:
        RankFailure: with the traceback of the first rank that failed.
    """
    payload = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = _start(payload, world_size, os.path.join(folder, "store"), timeout, ranks_per_node, environment or {})
        grace = 0.0
        try:
            results = _collect(ranks, timeout)
            grace = GRACE_SECONDS
            return results
        finally:
            _end(ranks, grace)


def _start(payload, world_size, store_path, timeout, ranks_per_node, environment):
    """Start the ranks; return [(process, connection)]."""
    context = multiprocessing.get_context("spawn")
    local = ranks_per_node or world_size
    ranks = []
    for rank in range(world_size):
        here, there = context.Pipe(duplex=False)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % local),
            "LOCAL_WORLD_SIZE": str(local),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **environment,
        }
        process = context.Process(
            target=_rank_main, args=(there, payload, rank, world_size, store_path, timeout), daemon=True
        )
        with _environment(variables):  # set before the child exists: it imports torch before our code runs
            process.start()
        there.close()
        ranks.append((process, here))
    return ranks


def _rank_main(answer: Connection, payload: bytes, rank: int, world_size: int, store_path: str, timeout: float) -> None:
    """Body of one rank: join the group, call the function, answer ("ok", result) or ("error", traceback)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(store_path, world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        fn, args = pickle.loads(payload)
        result = pickle.dumps(("ok", fn(*args)))  # plain pickle: tensors travel as bytes and outlive this process
        dist.barrier()  # a rank that is done must not close its connections under another
        dist.destroy_process_group()
    except BaseException:  # whatever it was, the parent raises it again
        result = pickle.dumps(("error", traceback.format_exc()))
    answer.send_bytes(result)
    answer.close()


def _collect(ranks: list[tuple[Any, Connection]], timeout: float) -> list[Any]:
    """Wait for every rank's answer; raise the first failure."""
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(ranks)
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise RankFailure(f"no answer from rank {missing} within {timeout:g} s")
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                state, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                process = ranks[rank][0]
                process.join(GRACE_SECONDS)
                raise RankFailure(f"rank {rank} died with exit code {process.exitcode}") from None
            if state == "error":
                raise RankFailure(f"rank {rank} of {len(ranks)} failed:\n{value}")
            results[rank] = value
    return results


def _end(ranks: list[tuple[Any, Connection]], grace: float) -> None:
    """Leave no process behind: wait `grace` seconds for all of them, then kill the rest."""
    until = time.monotonic() + grace
    for process, connection in ranks:
        connection.close()
        process.join(max(0.0, until - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            process.join()


@contextmanager
def _environment(variables: dict[str, str]):
    """Set environment variables for the duration of the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
