"""Muon for the matrices of layers, AdamW for the rest: two optimizers in one, by the roles of parameters.

    blocks.0.mlp.0.weight [512, 128]   a matrix of a numbered layer          Muon
    embed.weight, head.weight          what stands once: embedding, head     AdamW
    blocks.0.norm.weight [128]         no matrix                             AdamW

Muon's update makes all singular values of a matrix's momentum about equal, which suits maps from layer to
layer. It needs the whole matrix, which the rank of a parameter has; where replicas share out the optimizer's
state, its owner does. Source of Muon: Jordan et al. 2024; its rate is scaled to AdamW's as in Moonlight,
arXiv 2502.16982, so that one learning rate and one weight decay do for both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ..ir.errors import ConfigError


def is_layer_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a module with a number in its name, and with no `embed` in it: an
    embedding of another name counts as a layer.

    >>> names = "h.3.attn.weight", "lm_head.weight", "0.word_embed.weight"
    >>> [is_layer_matrix(name, nn.Linear(2, 2).weight) for name in names]
    [True, False, False]
    """
    *modules, _ = name.split(".")
    numbered = any(part.isdecimal() for part in modules)
    return parameter.ndim == 2 and numbered and not any("embed" in part.lower() for part in modules)


class MuonAndAdamW:
    """What `Job.optimizer` may return. settings: more of AdamW.

    Raises: ConfigError if the model has no matrix for Muon.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        lr: float = 4e-3,
        weight_decay: float = 0.05,
        **settings: Any,
    ) -> None:
        named = list(named_parameters)
        matrices = [p for name, p in named if is_layer_matrix(name, p)]
        rest = [p for name, p in named if not is_layer_matrix(name, p)]
        if not matrices:
            raise ConfigError(
                "muon+adamw finds no matrix in a numbered layer, such as blocks.0.mlp.weight, among "
                f"{len(named)} parameters",
                hint="use adamw; or say in Job.optimizer which parameters are Muon's",
            )
        both: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self.parts: list[Optimizer] = [Muon(matrices, **both, adjust_lr_fn="match_rms_adamw")]
        if rest:
            self.parts.append(AdamW(rest, **both, **settings))

    def step(self) -> None:
        for part in self.parts:
            part.step()
