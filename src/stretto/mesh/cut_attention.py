"""nn.MultiheadAttention with some of its heads: what each member computes, and what all of them add up to.

The projections of q, k and v are cut by heads, the output's projection by its inputs, which are the heads' outputs. A member
computes attention for its heads alone. Masks for all heads are whole; of those that differ by head a member takes its own.

Takes what nn.MultiheadAttention takes, but for `add_bias_kv`, `add_zero_attn` and nested tensors. Attention weights that are
asked for are the mean over all heads, or those of all heads, as ever: one more collective.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stretto.mesh.crossings import gather, leave
from stretto.mesh.cut_modules import CutModule
from stretto.mesh.region import Region


class CutAttention(CutModule):
    """A mixin for nn.MultiheadAttention. `num_heads` counts this member's heads."""

    _region: Region

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        with self._region.running():
            return self._forward(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)

    def _forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        mine = cast(nn.MultiheadAttention, self)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # as nn.MultiheadAttention says
        batched, batch_dim = query.dim() == 3, 0 if mine.batch_first else 1
        q, k, v = (self._heads_of(x, batched, batch_dim) for x in self._projected(query, key, value))
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = self._mask(attn_mask, key_padding_mask, q)
        self._region.begin(q.device, training=self.training)
        dropped = mine.dropout if self.training else 0.0
        if need_weights:
            weights = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
            weights = torch.softmax(weights if mask is None else weights + mask, -1)
            weights = F.dropout(weights, dropped) if dropped else weights
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropped)
        self._region.end()
        out = out.transpose(1, 2).flatten(2)  # (batch, length, this member's heads)
        out = leave(F.linear(out, mine.out_proj.weight), self._region.axis)
        out = out if mine.out_proj.bias is None else out + mine.out_proj.bias
        out = out.squeeze(0) if not batched else out.transpose(0, batch_dim)
        return out, self._shown(weights, batched, average_attn_weights) if need_weights else None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        mine = cast(Any, self)
        inside = [self._region.enter(x) for x in (query, key, value)]
        if mine.in_proj_weight is not None:
            if query is key and key is value:
                return list(F.linear(inside[0], mine.in_proj_weight, mine.in_proj_bias).chunk(3, -1))
            weights = mine.in_proj_weight.chunk(3)
        else:
            weights = (mine.q_proj_weight, mine.k_proj_weight, mine.v_proj_weight)
        biases = (None,) * 3 if mine.in_proj_bias is None else mine.in_proj_bias.chunk(3)
        return [F.linear(*each) for each in zip(inside, weights, biases, strict=True)]

    def _heads_of(self, x: Tensor, batched: bool, batch_dim: int) -> Tensor:
        """(batch, this member's heads, length, head_dim)."""
        x = x.transpose(0, batch_dim) if batched else x.unsqueeze(0)
        return torch.unflatten(x, -1, (cast(nn.MultiheadAttention, self).num_heads, -1)).transpose(1, 2)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """What is added to attention scores: shape (batch or 1, heads or 1, target or 1, source)."""
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                axis = self._region.axis
                attn_mask = torch.unflatten(attn_mask, 0, (q.shape[0], -1)).chunk(axis.size, 1)[axis.place]
            attn_mask = _additive(attn_mask, q.dtype)
        if padding is not None:
            padding = _additive(padding[:, None, None, :], q.dtype)
            attn_mask = padding if attn_mask is None else attn_mask + padding
        return attn_mask

    def _shown(self, weights: Tensor, batched: bool, average: bool) -> Tensor:
        axis = self._region.axis
        shown = leave(weights.sum(1), axis) / (weights.shape[1] * axis.size) if average else gather(weights, axis, 1)
        return shown if batched else shown.squeeze(0)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of truth values says what to leave out."""
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
    return mask.to(dtype)
