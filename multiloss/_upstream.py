"""Every private member of DeepSpeed and Lightning that multiloss relies on, with the reason, in one place.

:func:`check` runs when multiloss is imported. A release that renamed one of them then fails with a sentence that
says which, instead of training with wrong gradients.
"""

import importlib
from typing import Any, cast

import deepspeed
import lightning
from torch import Tensor

# class or module -> {member: why}
_MEMBERS: dict[str, dict[str, str]] = {
    "deepspeed": {
        "DeepSpeedEngine": "initialize() looks the engine class up here",
    },
    "deepspeed.comm.torch": {
        "build_shm_op": "compiles a collective with g++ on the CPU; switched off there",
    },
    "deepspeed.runtime.engine": {
        "DeepSpeedZeroOptimizer": "the engine looks the stage 1 and 2 optimizer up here",
        "DeepSpeedZeRoOffload": "the engine looks the offload for stage 3 without an optimizer up here",
        "DummyOptim": "stands for an engine without an optimizer",
        "ZERO_OPTIMIZATION": "answer of _do_optimizer_sanity_check",
        "BFLOAT16": "answer of _do_optimizer_sanity_check",
    },
    "deepspeed.runtime.zero.stage3": {
        "DeepSpeedZeroOptimizer_Stage3": "the engine looks the stage 3 optimizer up here",
    },
    "deepspeed.runtime.engine.DeepSpeedEngine": {
        "_do_sanity_check": "called before anything is built: refuses what cannot work",
        "_do_optimizer_sanity_check": "called with the optimizer before it is wrapped",
        "_forward_prologue": "a root module that calls itself must not end the forward",
        "_forward_epilogue": "as above",
        "_backward_prologue": "called from hooks on the forward's outputs; replaced by the windows",
        "_backward_prologue_per_tensor": "as above",
        "_backward_epilogue": "replaced by the windows",
        "_backward_post_hook": "registered with the ZeRO optimizer; checks that the loss was scaled",
        "_flush_coalesced_reduction_zero12": "end of coalesce_grad_reduction in stages 1 and 2",
        "_flush_coalesced_reduction_zero3": "end of coalesce_grad_reduction in stage 3",
        "_start_timers": "wall_clock_breakdown",
        "_stop_timers": "as above",
        "allreduce_gradients": "reduces at the step in stages 0 and 1",
    },
    "deepspeed.runtime.base_optimizer.BackwardHookStateManager": {
        "should_refresh_expected_hook_count": "first call of every gradient hook",
        "reenter_backward_if_needed": "second call of every gradient hook",
        "update_hook_state_and_maybe_run_epilogue": "last call of every gradient hook",
        "queue_post_backward_callback": "called by the engine",
        "enter_backward": "called by the engine",
        "exit_backward": "called by the engine",
        "reset_for_new_step": "called by the engine's forward",
        "run_grad_acc_post_hooks": "runs what the engine registered",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": {
        "_use_compact_grad_partition_buffer": "whether reductions are added into the flat partition",
        "_get_compact_grad_partition_buffer": "builds the flat partition, as zeros",
        "_link_all_hp_params": "gives parameters their full-gradient methods",
        "_release_ipg_buffers": "frees the buckets",
        "process_gradients": "called by every gradient hook",
        "reduce_ipg_grads": "reduces the bucket",
        "reduce_gradients": "reduces what stage 1 accumulated",
        "setup_buckets": "allocates the buckets",
        "overlapping_partition_gradients_reduce_epilogue": "reduces what is left in the bucket",
        "finalize_gradient_accumulation_boundary": "makes the partitions ready for step()",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        "_get_fp32_grad_state_partition": "where a parameter's gradient partition is read and written",
        "_link_all_hp_params": "tells parameters which optimizer they belong to",
        "_swappable_optimizer_subgroup": "whether NVMe holds the gradients",
        "independent_gradient_partition_epilogue": "reduces what is left in the bucket",
        "initialize_ds_offload": "builds the parameter offload",
        "partition_grads": "copies or adds reduced gradients to the partitions",
        "reduce_ready_partitions_and_remove_grads": "called by every gradient hook",
        "finalize_gradient_accumulation_boundary": "makes the partitions ready for step()",
    },
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": {
        "pre_sub_module_forward_function": "gathers a module before its forward",
        "post_sub_module_forward_function": "releases a module after its forward",
        "pre_sub_module_backward_function": "gathers a module before its backward",
        "post_sub_module_backward_function": "releases a module after its backward",
        "release_backward_leftovers": "releases modules that no hook released",
    },
    "lightning.pytorch.strategies.DeepSpeedStrategy": {
        "_format_batch_size_and_grad_accum_config": "what Lightning puts into the DeepSpeed config",
        "_initialize_deepspeed_train": "builds the engine for fit",
        "_initialize_deepspeed_inference": "builds the engine for validate, test and predict",
        "_init_deepspeed_distributed": "starts the process group",
        "_set_deepspeed_activation_checkpointing": "DeepSpeed's activation checkpointing",
        "_setup_model": "called with the module before it is wrapped",
        "init_deepspeed": "refuses clipping that works here",
    },
    "lightning.pytorch.strategies.deepspeed": {
        "_validate_device_index_selection": "checks CUDA indices; meaningless on the CPU",
    },
    "lightning.pytorch.core.optimizer": {
        "_init_optimizers_and_lr_schedulers": "runs configure_optimizers and checks its answer",
        "_MockOptimizer": "stands for configure_optimizers returning None",
    },
    "torch._C": {
        "_current_graph_task_id": "whether a backward is running",
        "_will_engine_execute_node": "whether a backward will accumulate into a parameter",
    },
}

# method that sets them -> {attribute of the instance: why}
_ATTRIBUTES: dict[str, dict[str, str]] = {
    "deepspeed.runtime.engine.DeepSpeedEngine.__init__": {
        "_running_engine_step": "an exception in step() must not leave it set",
        "_running_engine_backward": "whether engine.backward is running",
        "_unmanaged_backward_count": "micro-batches since the last step",
    },
    "lightning.pytorch.strategies.ParallelStrategy.__init__": {
        "_layer_sync": "converts batch normalization for sync_batchnorm",
    },
    "deepspeed.runtime.base_optimizer.ZeROOptimizer.__init__": {
        "_backward_hook_state": "the object that gradient hooks talk to",
    },
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.__init__": {
        "averaged_gradients": "the gradient partitions",
        "all_grad_tensors": "gradients of earlier micro-batches",
        "ipg_buckets": "gradients that wait for a reduction",
        "extra_large_param_to_reduce": "a gradient larger than the bucket",
        "params_already_reduced": "guards against two reductions in one backward",
        "previous_reduced_grads": "gradients whose reduction is in flight",
        "_offload_accumulated_param_ids": "parameters whose gradient goes to the CPU at the step",
        "_coalesce_grad_reduction": "whether gradient hooks are to do nothing",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.__init__": {
        "averaged_gradients": "the gradient partitions that step() uses",
        "ipg_buckets": "gradients that wait for a reduction",
        "_offload_boundary_param_ids": "parameters whose gradient goes to the CPU at the step",
        "_coalesce_grad_reduction": "whether gradient hooks are to do nothing",
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._setup_for_real_optimizer": {
        "grad_partitions_flat_buffer": "all gradient partitions",
        "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition": "the gradient partition of each parameter",
    },
    "deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator.__init__": {
        "_PartitionedParameterCoordinator__active_backward_submodules": "modules that a backward has gathered",
    },
}


def check() -> None:
    """Raise ``ImportError`` when the installed DeepSpeed or Lightning lacks a member that multiloss relies on."""
    for path, members in _MEMBERS.items():
        owner = _resolve(path)
        for name, why in members.items():
            if not hasattr(owner, name):
                raise _missing(f"{path}.{name}", why)
    for path, attributes in _ATTRIBUTES.items():
        names = _resolve(path).__code__.co_names
        for name, why in attributes.items():
            if name not in names:
                raise _missing(f"{path.rpartition('.')[0]}().{name}", why)


def gradient_partitions(optimizer: Any) -> dict[int, Tensor]:
    """This rank's gradient partition of each parameter of a ZeRO-3 optimizer, by the parameter's ``ds_id``."""
    return cast(dict[int, Tensor], optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition)


def active_backward_modules(coordinator: Any) -> dict[int, Any]:
    """The modules that the running backward has gathered and not yet released, by their ``ds_id``."""
    return cast(dict[int, Any], coordinator._PartitionedParameterCoordinator__active_backward_submodules)


def _resolve(path: str) -> Any:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            owner = getattr(owner, name, None)
            if owner is None:
                raise _missing(path, "multiloss builds on it")
        return owner
    raise _missing(path, "multiloss builds on it")


def _missing(path: str, why: str) -> ImportError:
    return ImportError(
        f"multiloss needs `{path}` ({why}), which the installed deepspeed {deepspeed.__version__} and lightning"
        f" {lightning.__version__} do not have. Install deepspeed>=0.19.8,<0.20 and lightning>=2.6,<2.7."
    )
