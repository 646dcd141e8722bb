"""A scheme's maps as serving keeps them: stacked over layers, this process's heads, in the order they are used in.

Shapes as in `docs/schemes.md`, H and G being this process's heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hla_jax.serving.vllm.parallel import Share

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(\w+)\.(\w+)")


class Maps(nn.Module):
    """All maps of a scheme, each a parameter [L, ...]."""

    def __init__(self, config: Any, share: Share):
        super().__init__()
        self.config, self.share = config, share
        for name, shape in config.scheme.map_shapes(config).items():
            mine = arranged(name, torch.empty(shape, device="meta"), config, share).shape
            parameter = nn.Parameter(torch.empty(config.num_hidden_layers, *mine), requires_grad=False)
            self.register_parameter(name, parameter)
        self.missing = {
            f"model.layers.{layer}.self_attn.{config.scheme.name}.{name}"
            for layer in range(config.num_hidden_layers)
            for name, _ in self.named_parameters()
        }

    def load(self, tensor_name: str, tensor: Tensor) -> str:
        """Takes one tensor of a checkpoint; returns the parameter's name.

        Raises:
          ValueError: it is no map of this scheme, or has another shape.
        """
        layer, _, name = _NAME.fullmatch(tensor_name).groups()  # type: ignore[union-attr]
        if tensor_name not in self.missing:
            raise ValueError(f"unknown tensor {tensor_name}: not a map of {self.config.scheme}")
        expected = self.config.scheme.map_shapes(self.config)[name]
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{tensor_name} must be {list(expected)}, found {list(tensor.shape)}")
        getattr(self, name).data[int(layer)].copy_(arranged(name, tensor, self.config, self.share))
        self.missing.remove(tensor_name)
        return name


def is_map(tensor_name: str) -> bool:
    """Whether a tensor is some scheme's rather than the model's: a projection's name has a fourth part, `weight`."""
    found = _NAME.fullmatch(tensor_name)
    return found is not None and not found[2].endswith("_proj")


def arranged(name: str, tensor: Tensor, config: Any, share: Share) -> Tensor:
    """One layer's map from the interchange format."""
    arrange: Callable = _hla if config.scheme.name == "hla" else _lla
    return arrange(name, tensor, config, share)


def _hla(name: str, tensor: Tensor, config: Any, share: Share) -> Tensor:
    if name in ("write_k", "write_v"):
        # [r, (T-1) d]: the sum over loops is inside one product.
        return tensor.transpose(0, 1).flatten(1)
    if name.startswith("write"):
        return tensor
    return share.queries(tensor, 0 if name.endswith("1") else 1)


def _lla(name: str, tensor: Tensor, config: Any, share: Share) -> Tensor:
    """[T, G, dh, r] for what makes latents, [T, G, r, dh] for what rebuilds, [T, G, dh] for means."""
    trajectory = config.num_key_value_heads, config.total_ut_steps, config.head_dim
    if name in ("rope_query", "query_adapter"):
        return share.queries(tensor, 1)
    if name.endswith("mean"):
        return share.keys(tensor.reshape(trajectory), 0).transpose(0, 1)
    if name.endswith("down"):
        return share.keys(tensor.reshape(*trajectory, -1), 0).transpose(0, 1)
    by_head = tensor.reshape(-1, *trajectory).transpose(0, 1) if config.scheme.fold_heads else tensor
    return share.keys(by_head.reshape(trajectory[0], -1, *trajectory[1:]), 0).permute(2, 0, 1, 3)
