"""Models of diffusers: denoisers and an autoencoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
from torch import Tensor, nn
from torch.nn import functional as fn

from pipeloom import Job

from . import Batch, job

_BLOCKS: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}


def _noisy(seed: int, rows: int) -> Batch:
    made = torch.Generator().manual_seed(seed)
    return {
        "sample": torch.randn(rows, 3, 8, 8, generator=made),
        "timestep": torch.randint(0, 1000, (rows,), generator=made),
        "states": torch.randn(rows, 4, 8, generator=made),
        "noise": torch.randn(rows, 3, 8, 8, generator=made),
    }


class Denoiser(nn.Module):
    """A network that is to find the noise. inputs: which entries of the batch it takes, by its own names."""

    def __init__(self, net: Callable[[], nn.Module], inputs: dict[str, str]) -> None:
        super().__init__()
        self.net = net()
        self.inputs = inputs

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        out = self.net(**{name: batch[entry] for name, entry in self.inputs.items()})[0]
        out = out.sample if hasattr(out, "sample") and not isinstance(out, Tensor) else out
        return {"loss": fn.mse_loss(out[:, :3], batch["noise"])}


def _model(net: Callable[[], nn.Module], name: str, **inputs: str) -> Callable[[], Job]:
    return partial(
        job, partial(_made, net, {"sample": "sample", "timestep": "timestep"} | inputs), _noisy, name=name
    )


def _made(net: Callable[[], nn.Module], inputs: dict[str, str]) -> nn.Module:
    return Denoiser(lambda: _Tuple(net()), {n: e for n, e in inputs.items() if e})


class _Tuple(nn.Module):
    """A network of diffusers that returns a tuple."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Tensor) -> Any:
        return self.net(**inputs, return_dict=False)


MODELS: dict[str, Callable[[], Job]] = {
    "UNet with conditions": _model(
        lambda: diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            **_BLOCKS,
        ),
        "unet_conditions",
        encoder_hidden_states="states",
    ),
    "DiT": _model(
        lambda: diffusers.PixArtTransformer2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=8,
            norm_num_groups=4,
            use_additional_conditions=False,
        ),
        "pixart",
        hidden_states="sample",
        sample="",
        encoder_hidden_states="states",
    ),
    "autoencoder": _model(
        lambda: diffusers.AutoencoderKL(
            latent_channels=2,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            **_BLOCKS,
        ),
        "autoencoder",
        timestep="",
    ),
}
