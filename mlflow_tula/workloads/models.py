"""Models by name: torchvision's classification models, or your own.

    model = build_model(Job(model="resnet50"), num_classes=100)

No pretrained weights. The architecture is torchvision's own, unchanged but for the size of the
head: VGG11 at 32x32 keeps its adaptive pool and its 129 million parameters. Models that need to
know the image size (vit, maxvit) are told; auxiliary heads (inception_v3, googlenet) are left
out, so that every model returns one tensor of logits.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.workloads.job import Job, is_import_path
from mlflow_tula.workloads.resolve import call_with_known, resolve_callable

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The type of torch.autocast for each precision but fp32."""


def list_models() -> list[str]:
    """Names of torchvision's classification models, sorted."""
    from torchvision import models

    return sorted(models.list_models(module=models))


def build_model(
    job: Job,
    num_classes: int,
    *,
    image_size: int | None = None,
    device: str | torch.device | None = None,
) -> nn.Module:
    """Build the job's model with a head of `num_classes` logits and weights from `job.seed`.

    Your own function may take `num_classes` and `image_size` by name, and returns a module.

    Args:
        job: names the model.
        num_classes: width of the head.
        image_size: pixels a side; None takes the job's.
        device: where to build; `meta` costs no memory.

    Raises:
        UnknownNameError: no such model; suggests the nearest names.
        InvalidInputError: your own function failed, or returned something else.
    """
    size = image_size or job.resolved_image_size
    if torch.device(device or "cpu").type == "meta":
        return _build_on_meta(job, num_classes, size)
    with torch.random.fork_rng(devices=[]), torch.device(device or "cpu"):
        torch.manual_seed(job.seed)
        return _build(job, num_classes, size)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model has batch normalisation: then accuracy depends on the local batch."""
    kind = torch.nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) for module in model.modules())


def num_parameters(model: nn.Module) -> int:
    """Trainable parameters: each one's gradient travels in the all-reduce.

    Raises:
        InvalidInputError: a lazy module has not seen a batch yet.
    """
    if any(isinstance(p, nn.UninitializedParameter) for p in model.parameters()):
        raise InvalidInputError(
            "the model has lazy modules, whose parameters do not exist yet: pass one batch through "
            "it in your function before returning it, or give the sizes"
        )
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters (made by `torch.empty`) go to meta; the arithmetic of builders stays real.

    Under `torch.device("meta")` torchvision's regnets fail: they compute their widths in tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _build_on_meta(job: Job, num_classes: int, image_size: int | None) -> nn.Module:
    try:
        with _EmptyOnMeta():
            return _build(job, num_classes, image_size).to("meta")
    except UnknownNameError:
        raise
    except Exception:  # your own model may need its values while it is built
        return _build(job, num_classes, image_size).to("meta")


def _build(job: Job, num_classes: int, image_size: int | None) -> nn.Module:
    if is_import_path(job.model):
        return _build_own(job, num_classes, image_size)
    return _build_torchvision(job.model, num_classes, image_size)


def _build_torchvision(name: str, num_classes: int, image_size: int | None) -> nn.Module:
    from torchvision import models

    known = list_models()
    if name not in known:
        raise UnknownNameError("model", name, known, "(your own: package.module:function)")
    arguments: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if name.startswith("vit_") and image_size:
        arguments["image_size"] = image_size
    if name.startswith("maxvit") and image_size:
        arguments["input_size"] = (image_size, image_size)
    if name in ("inception_v3", "googlenet"):
        arguments |= {"aux_logits": False, "init_weights": True}
    model = models.get_model(name, **arguments)
    assert isinstance(model, nn.Module)
    return model


def _build_own(job: Job, num_classes: int, image_size: int | None) -> nn.Module:
    function = resolve_callable(job.model)
    known: dict[str, Any] = {"num_classes": num_classes}
    if image_size is not None:
        known["image_size"] = image_size
    try:
        model = call_with_known(function, **known)
    except Exception as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InvalidInputError(
            f"model {job.model!r} failed when called with {sorted(known)}: "
            f"{type(error).__name__}: {reason}"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidInputError(
            f"model {job.model!r} must return a torch.nn.Module, not {type(model).__name__}"
        )
    if not any(p.requires_grad for p in model.parameters()):
        warnings.warn(f"model {job.model!r} has nothing to train", stacklevel=3)
    return model
