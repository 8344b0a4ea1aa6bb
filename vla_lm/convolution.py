"""Causal depthwise convolution that never crosses a document boundary."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_lm.state import Packing


class ShortConvolution(nn.Module):
    """y_t = SiLU(sum_j w_j x_{t-j}), j < width, within the document of t; each channel on its own."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.empty(channels, width))
        # A channel sees `width` inputs: keep their variance (PyTorch's own default for a convolution).
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(self, x: Tensor, packing: Packing | None = None, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolve x [B, T, C] (packed: [1, T, C]), continuing from `tail` [N, width - 1, C] (zeros: None).

        Returns y of x's shape and the tail after the last token of each document, [N, width - 1, C] of x's dtype.
        """
        before = self.width - 1
        documents = x.shape[0] if packing is None else packing.documents
        if tail is None:
            tail = x.new_zeros(documents, before, x.shape[-1])
        tail = tail.to(x.dtype)
        if packing is None:
            padded = torch.cat((tail, x), dim=1)
            return self._convolve(padded), padded[:, padded.shape[1] - before :]
        # Every document gets its own width - 1 places before it, so that the convolution cannot see its neighbour.
        starts = packing.cu_seqlens[:-1] + before * torch.arange(documents, device=x.device)
        offsets = torch.arange(before, device=x.device)
        places = torch.arange(x.shape[1], device=x.device) + before * (packing.document + 1)
        padded = x.new_zeros(x.shape[1] + documents * before, x.shape[-1])
        padded = padded.index_copy(0, (starts[:, None] + offsets).flatten(), tail.flatten(0, 1))
        padded = padded.index_copy(0, places, x[0])
        y = self._convolve(padded[None])[0].index_select(0, places - before)
        last = starts + packing.lengths
        return y[None], padded.index_select(0, (last[:, None] + offsets).flatten()).view(documents, before, -1)

    def _convolve(self, padded: Tensor) -> Tensor:
        # [B, T + width - 1, C] -> [B, T, C]
        out = F.conv1d(padded.transpose(1, 2), self.weight.flip(1)[:, None], groups=padded.shape[-1])
        return F.silu(out.transpose(1, 2))
