"""What DeepSpeed on the CPU must not do."""

import importlib
from typing import Any

from deepspeed.accelerator import get_accelerator

_backend: Any = importlib.import_module("deepspeed.comm.torch")  # as an attribute, this name is PyTorch itself
_build_shm_op = _backend.build_shm_op


def _build_shm_op_unless_cpu() -> Any:
    return None if get_accelerator().device_name() == "cpu" else _build_shm_op()


def disable_shared_memory_collective() -> None:
    """Keep DeepSpeed from compiling its shared-memory collective with g++ on the first CPU run.

    It takes a minute, needs a compiler, and a first run that is killed leaves a lock on which every later one waits.
    gloo does without it.
    """
    _backend.build_shm_op = _build_shm_op_unless_cpu
