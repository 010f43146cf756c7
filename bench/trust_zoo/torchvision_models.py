"""Models of torchvision. Its compiled operators, which detection needs, may be built for another PyTorch than
the one that is here; the models below do without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as fn

from pipeloom import Job

from . import CLASSES, Classifier, cross_entropy, images, import_torchvision, job

import_torchvision()
from torchvision import models  # noqa: E402


def _made(make: Callable[..., Any], options: dict[str, Any]) -> Classifier:
    return Classifier(make(weights=None, num_classes=CLASSES, **options))


def _model(name: str, size: int = 32, **options: Any) -> Callable[[], Job]:
    loss = options.pop("loss", cross_entropy)
    return partial(
        job,
        partial(_made, models.get_model_builder(name.rpartition(".")[2]), options),
        images(size),
        name=name,
        loss=loss,
    )


def _dense(**options: Any) -> Classifier:
    return Classifier(models.DenseNet(4, (1, 1, 1, 1), 8, num_classes=CLASSES, **options))


def _auxiliary(outputs: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """GoogLeNet's loss in training has two auxiliary classifiers; in evaluation there is one output."""
    if isinstance(outputs, Tensor):
        return fn.cross_entropy(outputs, batch["y"])
    main, second, first = (fn.cross_entropy(part, batch["y"]) for part in outputs)
    return main + 0.3 * (first + second)


MODELS: dict[str, Callable[[], Job]] = {
    "ResNet-18": _model("resnet18"),
    "SqueezeNet": _model("squeezenet1_1", dropout=0.0),
    "ShuffleNetV2": _model("shufflenet_v2_x0_5"),
    "MobileNetV2": _model("mobilenet_v2", width_mult=0.25, dropout=0.0),
    "GoogLeNet": _model("googlenet", 64, loss=_auxiliary, init_weights=False, dropout=0.0, dropout_aux=0.0),
    "DenseNet": partial(job, _dense, images(32), name="densenet", loss=cross_entropy),
    "DenseNet, checkpointed": partial(
        job, partial(_dense, memory_efficient=True), images(32), name="densenet", loss=cross_entropy
    ),
    "R3D": partial(
        job,
        partial(_made, models.get_model_builder("r3d_18"), {}),
        lambda seed, rows: {
            name: t.unsqueeze(2).expand(-1, -1, 4, -1, -1).contiguous() if t.ndim == 4 else t
            for name, t in images(16)(seed, rows).items()
        },
        name="r3d_18",
        loss=cross_entropy,
    ),
}
