"""Processes that act as ranks: started once, given many functions to run, each with a time limit."""

import atexit
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIME_LIMIT = 120.0  # seconds for one function on all ranks; a hang is a failure


class RankError(AssertionError):
    """A rank raised, died or ran out of time; the message shows its traceback."""


def _serve(rank: int, world_size: int, port: int, connection: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    import deepspeed

    import multiloss  # noqa: F401  # switches the compiled collective off

    deepspeed.logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    while (message := connection.recv()) is not None:
        function, args = message
        try:
            connection.send((True, function(*args)))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class Ranks:
    """``world_size`` processes with a gloo process group.

    Args:
        world_size: How many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, time_limit: float = TIME_LIMIT) -> list[Any]:
        """Call ``function(*args)`` on every rank and return what the ranks returned, in order.

        Args:
            function: A module's own function, so that it can be sent.
            args: Sent, too.
            time_limit: In seconds.

        Raises:
            RankError: If a rank raised, died, or took longer.
        """
        self._start()
        for connection in self._connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections) if rank not in results}
            ready: list[Any] = wait(list(waiting), timeout=time_limit)
            if not ready:
                self.stop()
                raise RankError(f"{function.__name__}: ranks {sorted(waiting.values())} took over {time_limit} s")
            for connection in ready:
                rank = waiting[connection]
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    succeeded, value = False, "the process died"
                if not succeeded:
                    self.stop()
                    raise RankError(f"{function.__name__}, rank {rank} of {self.world_size}:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes; the next :meth:`run` starts new ones."""
        atexit.unregister(self.stop)
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        if self._processes:
            return
        atexit.register(self.stop)  # before multiprocessing waits for them
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            # Not a daemon, which may not have data loader workers.
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
