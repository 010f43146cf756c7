"""Models of segmentation_models_pytorch, with a small encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import segmentation_models_pytorch as smp
from torch import Tensor

from pipeloom import Job

from . import CLASSES, Classifier, images, job, square


def _made(kind: str, options: dict[str, Any]) -> Classifier:
    make = getattr(smp, kind)
    return Classifier(
        make("timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=CLASSES, **options)
    )


def _loss(outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return square(outputs, batch)


def _model(kind: str, **options: Any) -> Callable[[], Job]:
    return partial(job, partial(_made, kind, options), images(64), name=kind, loss=_loss)


MODELS: dict[str, Callable[[], Job]] = {
    "U-Net": _model("Unet", decoder_channels=(16, 8, 8, 8, 8)),
    "FPN": _model("FPN", decoder_pyramid_channels=8, decoder_segmentation_channels=32, decoder_dropout=0.0),
    "Linknet": _model("Linknet"),
}
