"""Causal depthwise convolution that never crosses a document boundary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_lm.state import Packing

try:
    from kernels import triton_convolution as fused
except ImportError:  # no Triton on this platform
    fused = None


class ShortConvolution(nn.Module):
    """y_t = SiLU(sum_j w_j x_{t-j}), j < width, within the document of t; each channel on its own.

    On a GPU by `kernels.triton_convolution`, summed in float32; elsewhere, and where those kernels fail, by PyTorch.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        # A channel sees `width` inputs: keep their variance (PyTorch's own default for a convolution).
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, packing: Packing | None = None, tail: Tensor | None = None,
                return_tail: bool = True) -> tuple[Tensor, Tensor | None]:
        """Convolve x [B, T, C] (packed: [1, T, C]), continuing from `tail` [N, width - 1, C] (zeros: None).

        Returns y of x's shape and, where asked for, the tail after the last token of each document, [N, width - 1, C]
        of x's dtype.
        """
        tail = None if tail is None else tail.to(x.dtype)
        kind = (x.dtype, self.width, x.shape[-1], packing is not None, tail is not None, x.device)
        whole = fused is not None and fused.takes(*kind)
        y = self._fused(x, packing, tail) if whole else self._plain(x, packing, tail)
        return y, self._tail(x, packing, tail) if return_tail else None

    def _fused(self, x: Tensor, packing: Packing | None, tail: Tensor | None) -> Tensor:
        bounds, document = (None, None) if packing is None else (packing.cu_seqlens, packing.document)
        return fused.convolve(x.flatten(0, 1), self.weight, tail, bounds, document, x.shape[1]).view(x.shape)

    def _plain(self, x: Tensor, packing: Packing | None, tail: Tensor | None) -> Tensor:
        before = self.width - 1
        documents = x.shape[0] if packing is None else packing.documents
        if not x.numel():
            return x  # conv1d refuses it
        if tail is None:
            tail = x.new_zeros(documents, before, x.shape[-1])
        if packing is None:
            return self._convolve(torch.cat((tail, x), dim=1))
        # Every document gets its own width - 1 places before it, so that the convolution cannot see its neighbour.
        starts = packing.cu_seqlens[:-1] + before * torch.arange(documents, device=x.device)
        offsets = torch.arange(before, device=x.device)
        places = torch.arange(x.shape[1], device=x.device) + before * (packing.document + 1)
        padded = x.new_zeros(x.shape[1] + documents * before, x.shape[-1])
        padded = padded.index_copy(0, (starts[:, None] + offsets).flatten(), tail.flatten(0, 1))
        padded = padded.index_copy(0, places, x[0])
        return self._convolve(padded[None])[0].index_select(0, places - before)[None]

    def _convolve(self, padded: Tensor) -> Tensor:
        # [B, T + width - 1, C] -> [B, T, C]
        out = F.conv1d(padded.transpose(1, 2), self.weight.flip(1)[:, None], groups=padded.shape[-1])
        return F.silu(out.transpose(1, 2))

    def _tail(self, x: Tensor, packing: Packing | None, tail: Tensor | None) -> Tensor:
        before = self.width - 1
        if packing is None or not before:
            documents = x.shape[0] if packing is None else packing.documents
            tail = x.new_zeros(documents, before, x.shape[-1]) if tail is None else tail
            return torch.cat((tail, x[:, max(0, x.shape[1] - before):]), 1)[:, -before:] if before else tail
        # The last inputs of each document, and where it is shorter, what was before it.
        start, end = packing.cu_seqlens[:-1, None], packing.cu_seqlens[1:, None]
        t = end - before + torch.arange(before, device=x.device)
        found = x[0].index_select(0, t.clamp(min=0).flatten()).view(*t.shape, -1)
        earlier = 0
        if tail is not None:
            row = (t - start + before).clamp(0, before - 1)[..., None].expand(-1, -1, x.shape[-1])
            earlier = tail.gather(1, row)
        return torch.where((t >= start)[..., None], found, earlier)
