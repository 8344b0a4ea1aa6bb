"""The ragged chunk grid: one layout for dense batches and packed documents.

Every batch row or document is a sequence of its own, cut into chunks of C tokens, the last one padded. Chunks lie
step-major: first the first chunk of every sequence, then every second chunk, … with the sequences sorted by falling
length, so that the chunks at step j are one contiguous block that belongs to the first `active[j]` sequences, and the
loop of the memory pass works on whole blocks. A chunk of one head is a row [C, D]; heads follow one another inside a
chunk, so a packed tensor is [chunks * H, C, D] and everything that is not sequential is one batched matmul.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Grid:
    """How the tokens of one call lie on chunks. Fields beyond the layout:

    rows, tokens, heads: B, T, H.  sequences: N.  chunk: C.  chunks: number of chunks of all sequences.
    starts[j]: index of the first chunk at step j.  active[j]: sequences that have a step j.
    order: int64 [N], the sequence at each sorted place; None when sorting changes nothing.
    padding: bool [chunks, C] of places without a token; None when there are none.
    """

    def __init__(self, rows: int, tokens: int, heads: int, chunk: int, bounds: tuple[int, ...] | None,
                 device: torch.device):
        self.rows, self.tokens, self.heads, self.chunk = rows, tokens, heads, chunk
        self.uniform = bounds is None
        if self.uniform:
            steps = -(-tokens // chunk)
            self.sequences, self.active = rows, [rows] * steps
            self.order = self.padding = None
            if steps * chunk != tokens:
                offset = torch.arange(steps * chunk, device=device).view(steps, 1, chunk)
                self.padding = (offset >= tokens).expand(steps, rows, chunk).reshape(-1, chunk)
            self.ends = (torch.arange(1, steps + 1) * chunk).clamp(max=tokens) - 1
            self._last = slice((steps - 1) * rows, None)
        else:
            self._pack_documents(bounds, device)
        self.starts = [0]
        for count in self.active:
            self.starts.append(self.starts[-1] + count)
        self.chunks = self.starts[-1]
        self.ends = self.ends.to(device)

    def _pack_documents(self, bounds: tuple[int, ...], device: torch.device) -> None:
        edges = torch.tensor(bounds)
        start, length = edges[:-1], edges.diff()
        steps = (length + self.chunk - 1) // self.chunk
        self.sequences, longest = len(steps), int(steps.max())
        order = torch.argsort(steps, descending=True, stable=True)
        place = torch.argsort(order)
        active = (steps[None, :] > torch.arange(longest)[:, None]).sum(1)
        start_of = active.cumsum(0) - active
        # In document order: which document and which step of it each chunk is, its tokens, its number on the grid.
        document = torch.repeat_interleave(torch.arange(self.sequences), steps)
        step = torch.arange(len(document)) - (steps.cumsum(0) - steps)[document]
        number = start_of[step] + place[document]
        first = start[document] + step * self.chunk
        ends = torch.minimum(first + self.chunk, (start + length)[document]) - 1
        index = first[:, None] + torch.arange(self.chunk)
        padding = index > ends[:, None]
        home = (number[:, None] * self.chunk + torch.arange(self.chunk))[~padding]
        inverse = torch.argsort(number)
        self.active, self.ends = active.tolist(), ends
        self.order = None if bool((order == torch.arange(self.sequences)).all()) else order.to(device)
        self.padding = padding[inverse].to(device) if bool(padding.any()) else None
        self._place, self._number, self._home = place.to(device), number.to(device), home.to(device)
        self._index = index.masked_fill(padding, 0)[inverse].flatten().to(device)
        self._start_of, self._step = start_of.to(device), step[inverse].to(device)
        self._sequence = place[document][inverse].to(device)
        self._last = (start_of[steps - 1] + place)[order].to(device)
        self._earlier_index = {}

    # Tokens <-> chunks. [B, T, H, D] <-> [chunks * H, C, D] (differentiable); [B, T, H] <-> [chunks * H, C].

    def pack(self, x: Tensor) -> Tensor:
        """Tokens to chunks, zeros in the padding."""
        return _Move.apply(x, self, True)

    def unpack(self, x: Tensor) -> Tensor:
        """Chunks to tokens; what stands in the padding is dropped."""
        return _Move.apply(x, self, False)

    def _pack(self, x: Tensor) -> Tensor:
        tail = x.shape[3:]
        if self.uniform:
            steps = len(self.active)
            missing = steps * self.chunk - self.tokens
            if missing:
                x = torch.cat([x, x.new_zeros(self.rows, missing, *x.shape[2:])], 1)
            x = x.reshape(self.rows, steps, self.chunk, self.heads, *tail).transpose(0, 1)
        else:
            x = x[0].index_select(0, self._index).view(self.chunks, self.chunk, self.heads, *tail)
            if self.padding is not None:
                x = x.masked_fill_(self.padding.view(self.chunks, self.chunk, *[1] * (x.dim() - 2)), 0)
        return x.transpose(-2 - len(tail), -1 - len(tail)).reshape(self.chunks * self.heads, self.chunk, *tail)

    def _unpack(self, x: Tensor) -> Tensor:
        tail = x.shape[2:]
        x = x.view(self.chunks, self.heads, self.chunk, *tail).transpose(1, 2)
        if self.uniform:
            steps = len(self.active)
            x = x.reshape(steps, self.rows, self.chunk, self.heads, *tail).transpose(0, 1)
            x = x.reshape(self.rows, steps * self.chunk, self.heads, *tail)[:, : self.tokens]
            return x.contiguous()
        return x.reshape(self.chunks * self.chunk, self.heads, *tail).index_select(0, self._home)[None]

    # States. [N, H, ...] in the caller's order <-> [N * H, ...] sorted.

    def sort(self, state: Tensor) -> Tensor:
        """States of the sequences, in the order of the grid."""
        return (state if self.order is None else state.index_select(0, self.order)).flatten(0, 1)

    def unsort(self, state: Tensor) -> Tensor:
        """Inverse of `sort`."""
        state = state.view(self.sequences, self.heads, *state.shape[1:])
        return state if self.order is None else state.index_select(0, self._place)

    def by_row(self, x: Tensor) -> Tensor:
        """One number per chunk, [chunks * H], to [B, NC, H] (packed: [1, chunks, H] in document order)."""
        x = x.view(self.chunks, self.heads)
        if self.uniform:
            return x.view(len(self.active), self.rows, self.heads).transpose(0, 1)
        return x.index_select(0, self._number)[None]

    # Sums over the chunks of each sequence, never as differences of sums that cross sequences.

    def sum_before(self, x: Tensor, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Exclusive prefix sums of x [chunks * H, ...] over each sequence, on top of `initial` [N * H, ...].

        Returns them and the totals [N * H, ...].
        """
        if initial is None:
            initial = x.new_zeros(self.sequences * self.heads, *x.shape[1:])
        before, total = self.starts_from_ends(self._scan(x, reverse=False), torch.zeros_like(initial))
        return self.add_states_(before, initial), total + initial

    def sum_after(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Exclusive suffix sums of x [chunks * H, ...] over each sequence, and the totals [N * H, ...]."""
        onwards = self._scan(x, reverse=True)
        zero = x.new_zeros(self.sequences * self.heads, *x.shape[1:])
        return self.ends_from_starts(onwards, zero), onwards[: len(zero)]

    def starts_from_ends(self, ends: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Values at chunk ends [chunks * H, ...], and `first` [N * H, ...] before each sequence: those at chunk
        starts, and those at the ends of the sequences [N * H, ...]."""
        ends = ends.view(self.chunks, self.heads, *ends.shape[1:])
        starts = torch.empty_like(ends)
        starts[: self.sequences] = first.reshape_as(starts[: self.sequences])
        starts[self.starts[1]:] = ends[self._earlier(1)]
        return starts.flatten(0, 1), ends[self._last].flatten(0, 1)

    def ends_from_starts(self, starts: Tensor, last: Tensor) -> Tensor:
        """Values at chunk starts, and `last` [N * H, ...] after each sequence: those at chunk ends."""
        starts = starts.view(self.chunks, self.heads, *starts.shape[1:])
        ends = torch.empty_like(starts)
        ends[self._earlier(1)] = starts[self.starts[1]:]
        ends[self._last] = last.reshape(self.sequences, self.heads, *last.shape[1:])
        return ends.flatten(0, 1)

    def add_states_(self, x: Tensor, states: Tensor, alpha: float = 1) -> Tensor:
        """Add to every chunk in x, [chunks * H, ...], the matrix of its sequence in `states`, [N * H, ...]."""
        if self.uniform:
            x.view(len(self.active), *states.shape).add_(states, alpha=alpha)
        else:
            states = states.view(self.sequences, self.heads, *states.shape[1:])
            x.view(self.chunks, *states.shape[1:]).add_(states.index_select(0, self._sequence), alpha=alpha)
        return x

    def _earlier(self, steps: int):
        """Where, for each chunk from step `steps` on, the chunk lies that is so many steps earlier in its sequence."""
        if self.uniform:
            return slice(0, self.chunks - steps * self.sequences)
        if steps not in self._earlier_index:
            tail = slice(self.starts[steps], None)
            self._earlier_index[steps] = self._start_of[self._step[tail] - steps] + self._sequence[tail]
        return self._earlier_index[steps]

    def _scan(self, x: Tensor, reverse: bool) -> Tensor:
        """Inclusive sums along each sequence, by doubling strides where the sequences differ in length."""
        if self.uniform:
            x = x.view(len(self.active), -1, *x.shape[1:])
            x = x.flip(0).cumsum(0).flip(0) if reverse else x.cumsum(0)
            return x.flatten(0, 1)
        stride, shape = 1, x.shape
        x = x.reshape(self.chunks, self.heads, *shape[1:]).clone()
        while stride < len(self.active):
            source, tail = self._earlier(stride), slice(self.starts[stride], None)
            if reverse:
                x[source] += x[tail]
            else:
                x[tail] += x[source]
            stride *= 2
        return x.view(shape)


class _Move(torch.autograd.Function):
    """Tokens to chunks or back; each is the other's gradient, so no scattered additions."""

    @staticmethod
    def forward(ctx, x, grid, packing):
        ctx.grid, ctx.packing = grid, packing
        return grid._pack(x) if packing else grid._unpack(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        dx = dx.contiguous()
        return (ctx.grid._unpack(dx) if ctx.packing else ctx.grid._pack(dx)), None, None


@lru_cache(maxsize=32)
def make_grid(rows: int, tokens: int, heads: int, chunk: int, bounds: tuple[int, ...] | None,
              device: torch.device) -> Grid:
    """The grid of a call, kept for the other layers of the same step. bounds: cu_seqlens as numbers, None for dense."""
    longest = tokens if bounds is None else max(end - start for start, end in zip(bounds, bounds[1:]))
    with torch.inference_mode(False):  # a grid made during validation serves a training step too
        return Grid(rows, tokens, heads, min(chunk, longest), bounds, device)  # short rows: no chunk of padding
