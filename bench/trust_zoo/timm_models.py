"""Models of timm, most of them made narrower and shallower than they are published."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm

from pipeloom import Job

from . import CLASSES, Classifier, cross_entropy, images, job


def _made(name: str, options: dict[str, Any]) -> Classifier:
    return Classifier(timm.create_model(name, pretrained=False, num_classes=CLASSES, **options))


def _model(name: str, size: int = 32, **options: Any) -> Callable[[], Job]:
    return partial(job, partial(_made, name, options), images(size), name=name, loss=cross_entropy)


_VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}

MODELS: dict[str, Callable[[], Job]] = {
    "ResNet-10-T": _model("resnet10t"),
    "ViT": _model("vit_tiny_patch16_224", 16, **_VIT),
    "DeiT III": _model("deit3_small_patch16_224", 16, **_VIT),
    "EVA-02": _model("eva02_tiny_patch14_224", 16, **_VIT),
    "CaiT": _model("cait_xxs24_224", 16, **_VIT),
    "ConvNeXt": _model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "MobileNetV3": _model("mobilenetv3_small_050"),
    "RegNetX": _model("regnetx_002"),
    "ResMLP": _model("resmlp_12_224", 16, img_size=16),
    "EdgeNeXt": _model("edgenext_xx_small", 64),
}
