"""What is not about several losses is as in stock DeepSpeed."""

from __future__ import annotations

import inspect
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

import multiloss
from tests import models
from tests.programs import sgd
from tests.ranks import Ranks
from tests.test_contract import STAGES, TOLERANCE

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.3,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Full weights. Collective."""
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=engine.zero_optimization_partition_weights()):
        return {name: param.detach().float().clone() for name, param in named.items()}


def loss_on(engine: DeepSpeedEngine, key: int) -> Tensor:
    """The sum of the heads' losses."""
    outputs = engine(models.batch(key, torch.distributed.get_rank()))
    return torch.stack([models.loss_of(output, head) for head, output in enumerate(outputs)]).sum()


def managed(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """DeepSpeed's own accumulation, its scheduler, and the counters that it shows."""
    model = models.build(models.MultiHead, 2)
    config = {
        **BASE,
        "gradient_accumulation_steps": 2,
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4}},
        "wall_clock_breakdown": False,
    }
    engine, optimizer, _, scheduler = build(model=model, optimizer=sgd(model), config=config)
    seen: list[Any] = [type(scheduler).__name__]
    for key in range(6):
        loss = loss_on(engine, key)
        returned = engine.backward(loss)
        seen += [
            round(float(returned / loss), 6),
            engine.is_gradient_accumulation_boundary(),
        ]
        engine.step()
        seen += [
            engine.micro_steps,
            engine.global_steps,
            engine.global_samples,
            engine.was_step_applied(),
            [round(lr, 6) for lr in engine.get_lr()],
            [round(group["lr"], 6) for group in optimizer.param_groups],
            round(float(engine.get_global_grad_norm() or 0.0), 5),
        ]
    return seen, weights_of(engine)


def own_boundary(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """``set_gradient_accumulation_boundary``: the caller says which micro-batch is the last."""
    model = models.build(models.MultiHead, 2)
    config = {**BASE, "gradient_accumulation_steps": 3, "zero_optimization": zero}
    engine, *_ = build(model=model, optimizer=sgd(model), config=config)
    for step in range(2):
        for micro in range(3):
            engine.set_gradient_accumulation_boundary(micro == 2)
            engine.backward(loss_on(engine, 3 * step + micro))
        engine.step()
    return [engine.global_steps], weights_of(engine)


def unmanaged(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """``managed_gradient_accumulation: false``: each step is the boundary."""
    model = models.build(models.MultiHead, 2)
    config = {**BASE, "managed_gradient_accumulation": False, "zero_optimization": zero}
    engine, *_ = build(model=model, optimizer=sgd(model), config=config)
    seen = []
    for step in range(3):
        for micro in range(step + 1):
            engine.backward(loss_on(engine, 3 * step + micro))
        engine.step()
        seen.append(engine.global_samples)
    return seen, weights_of(engine)


def coalesced(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """``coalesce_grad_reduction``: several backwards, one reduction."""
    model = models.build(models.MultiHead, 2)
    engine, *_ = build(model=model, optimizer=sgd(model), config={**BASE, "zero_optimization": zero})
    for step in range(2):
        with engine.coalesce_grad_reduction():
            for micro in range(3):
                engine.backward(loss_on(engine, 3 * step + micro))
        engine.step()
    return [], weights_of(engine)


def without_sync(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """``no_sync`` around all but the last backward."""
    model = models.build(models.MultiHead, 2)
    config = {**BASE, "zero_optimization": zero}
    engine, *_ = build(model=model, optimizer=sgd(model), config=config)
    for step in range(2):
        with engine.no_sync():
            engine.backward(loss_on(engine, 2 * step))
        engine.backward(loss_on(engine, 2 * step + 1))
        engine.step()
    return [], weights_of(engine)


def configured(build: Any, zero: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """Optimizer and data loader by the config."""
    model = models.build(models.MultiHead, 2)
    config = {
        **BASE,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": zero,
        "wall_clock_breakdown": True,
    }
    data = torch.utils.data.TensorDataset(models.batch(0, 0).repeat(8, 1))
    engine, optimizer, loader, _ = build(
        model=model, model_parameters=list(model.parameters()), training_data=data, config=config
    )
    for (inputs,) in loader:
        loss = models.loss_of(engine(inputs)[0], 0)
        engine.backward(loss)
        engine.step()
    return [len(loader), len(optimizer.param_groups), optimizer.param_groups[0]["betas"]], weights_of(engine)


def both(script: str, zero: dict[str, Any]) -> list[tuple[list[Any], dict[str, Tensor]]]:
    """On a rank: the script with stock DeepSpeed and with multiloss."""
    run = globals()[script]
    return [run(deepspeed.initialize, zero), run(multiloss.initialize, zero)]


CASES = [
    (script, stage)
    for script, stages in {
        "managed": STAGES,
        "own_boundary": STAGES,
        "unmanaged": [name for name in STAGES if name != "stage 3"],
        "coalesced": [name for name in STAGES if name != "stage 0"],
        "without_sync": ["stage 1"],
        "configured": STAGES,
    }.items()
    for stage in stages
]


@pytest.mark.parametrize(("script", "stage"), CASES)
def test_as_stock_deepspeed(pair: Ranks, script: str, stage: str) -> None:
    """One loss per micro-batch: the same weights, counters, rates and norms as stock DeepSpeed."""
    for (stock_seen, stock), (seen, weights) in pair.run(both, script, STAGES[stage]):
        assert seen == stock_seen
        for name, weight in weights.items():
            assert (weight - stock[name]).abs().max() <= TOLERANCE, name


def test_signature() -> None:
    """``initialize`` takes what ``deepspeed.initialize`` takes."""
    assert inspect.signature(multiloss.initialize) == inspect.signature(deepspeed.initialize)


def stock_is_untouched() -> bool:
    """``deepspeed.initialize`` after ``multiloss.initialize`` builds stock engines."""
    model = models.build(models.MultiHead, 2)
    multiloss.initialize(model=model, optimizer=sgd(model), config={**BASE, "zero_optimization": {"stage": 1}})
    model = models.build(models.MultiHead, 2)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=sgd(model), config={**BASE, "zero_optimization": {"stage": 1}}
    )
    return type(engine) is DeepSpeedEngine and type(optimizer).__module__.startswith("deepspeed.")


def test_other_engines_are_left_alone(pair: Ranks) -> None:
    """The substitution lasts for the call."""
    assert all(pair.run(stock_is_untouched))


def optimizer_facade(zero: dict[str, Any]) -> None:
    """What LR schedulers, monitors and users do with an optimizer."""
    model = models.build(models.MultiHead, 2)
    param_groups: list[dict[str, Any]] = [
        {"params": model.trunk.parameters()},
        {"params": [model.gain, *model.heads.parameters()], "lr": 0.02},
    ]
    inner = torch.optim.Adam(param_groups, lr=0.01)
    engine, optimizer, *_ = multiloss.initialize(
        model=model, optimizer=inner, config={**BASE, "zero_optimization": zero}
    )
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, multiloss.MultiLossOptimizer)
    assert type(optimizer).__name__ == "Adam"
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 5]
    assert {id(param) for group in optimizer.param_groups for param in group["params"]} == {
        id(param) for param in model.parameters()
    }
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02]
    assert dict(optimizer.param_groups[0])["params"][0] is model.trunk[0].weight
    assert isinstance(optimizer.param_groups[0], dict)
    assert "betas" in {**optimizer.param_groups[0]}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_on(engine, 0)
        engine.backward(loss)
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    scheduler.step()
    assert [group["lr"] for group in inner.param_groups] == [0.005, 0.01]
    inner.param_groups[1]["lr"] = 0.5
    optimizer.param_groups[0]["lr"] = 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    assert [group["lr"] for group in inner.param_groups] == [0.25, 0.5]
    assert len(calls) == 1
    assert optimizer.state_dict()
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizer_is_an_ordinary_one(pair: Ranks, stage: str) -> None:
    """``param_groups`` hold the module's parameters and share hyper-parameters; closures and schedulers work."""
    pair.run(optimizer_facade, STAGES[stage])


BF16_HEADS = 2


def bf16(zero: dict[str, Any], accumulation_dtype: str | None) -> tuple[dict[str, Tensor], list[torch.dtype]]:
    """Two losses per step in bf16 with fp32 master weights."""
    model = models.build(models.MultiHead, BF16_HEADS)
    config: dict[str, Any] = {**BASE, "gradient_clipping": 0.0, "bf16": {"enabled": True}, "zero_optimization": zero}
    if accumulation_dtype:
        config["data_types"] = {"grad_accum_dtype": accumulation_dtype}
    engine, *_ = multiloss.initialize(model=model, optimizer=sgd(model), config=config)
    for key in range(4):
        outputs = engine(models.batch(key, torch.distributed.get_rank()).bfloat16())
        engine.backward(models.loss_of(outputs[1], 1), retain_graph=True)
        engine.zero_grad()
        for head, output in enumerate(outputs):
            engine.backward(models.loss_of(output, head), retain_graph=head == 0)
        engine.step()
    dtypes = list({param.dtype for param in model.parameters()})
    if zero["stage"] == 0:
        masters = {name: param.detach().float() for name, param in model.named_parameters()}
    else:
        masters = {name: safe_get_full_fp32_param(param).clone() for name, param in model.named_parameters()}
    engine.destroy()
    return masters, dtypes


def bf16_oracle(world_size: int) -> dict[str, Tensor]:
    """bf16 forward and backward, gradients averaged and stepped in fp32."""
    model = models.build(models.MultiHead, BF16_HEADS)
    masters = {name: param.detach().clone() for name, param in model.named_parameters()}
    low: nn.Module = models.build(models.MultiHead, BF16_HEADS).bfloat16()
    for key in range(4):
        gradients = {name: torch.zeros_like(master) for name, master in masters.items()}
        for name, param in low.named_parameters():
            param.data.copy_(masters[name])
        for rank in range(world_size):
            outputs = low(models.batch(key, rank).bfloat16())
            for head, output in enumerate(outputs):
                low.zero_grad()
                models.loss_of(output, head).backward(retain_graph=head == 0)
                for name, param in low.named_parameters():
                    if param.grad is not None:
                        gradients[name] += param.grad.float() / world_size
        for name, master in masters.items():
            master -= 0.1 * gradients[name]
    return masters


# DeepSpeed refuses bf16 weights with fp32 accumulation in stage 0.
BF16_CASES = [(f"stage {stage}", None) for stage in range(4)] + [(f"stage {stage}", "fp32") for stage in (1, 2, 3)]


@pytest.mark.parametrize(("stage", "accumulation_dtype"), BF16_CASES)
def test_bf16(pair: Ranks, stage: str, accumulation_dtype: str | None) -> None:
    """bf16 with several losses and ``zero_grad`` between follows a bf16 oracle with fp32 master weights.

    The gradients are of size 1 and are summed and averaged in bf16 (8 bits of mantissa: 4e-3 relative), over 2 losses
    and 2 ranks, in 4 steps of size 0.1: at most 4 * 0.1 * 2 * 4e-3 = 3e-3. Stage 0 shows the bf16 weights, which differ
    from the masters by another 4e-3.
    """
    expected = bf16_oracle(2)
    for masters, dtypes in pair.run(bf16, STAGES[stage], accumulation_dtype):
        assert dtypes == [torch.bfloat16]
        for name, master in masters.items():
            tolerance = 8e-3 if stage == "stage 0" else 3e-3
            assert (master - expected[name]).abs().max() <= tolerance, name
