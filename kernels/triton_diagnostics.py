"""`Diagnostics` of a pass of the Triton kernels, from what it leaves for the backward pass."""

import torch
from torch import Tensor

from kernels.features import features, unit
from kernels.state import Diagnostics, jacobian_norm
from kernels.triton_common import CHUNK, Tables
from kernels.triton_delta_rule import SMALLEST_BETA
from kernels.write_direction import extreme_eigenvalues, spd_inverse


@torch.no_grad()
def diagnostics(call, table: Tables, kept: dict[str, Tensor | None], S_last: Tensor,
                M_last: Tensor | None) -> Diagnostics:
    """What a call of `triton_backend.forward_op` measures at ends of chunks of call.chunk_size, a multiple of CHUNK.

    kept: by name, what the backward pass reads, on the line of tokens; S_last [N, H, Dk, Dv], M_last [N, H, Dk, Dk].
    S and A are those that were computed with, so S is rounded to bfloat16 in that path.
    """
    first, end = table.sequences[:, 0].long(), table.sequences[:, 1].long()
    chunk = torch.arange(len(table.chunks), device=first.device)
    owner = table.chunks[:, 2].long()
    every = call.chunk_size // CHUNK
    chosen = chunk[((chunk - first[owner] + 1) % every == 0) | (chunk == end[owner] - 1)]
    rows, tokens, heads = call.q.shape[:3]

    def at_ends(of_starts: Tensor, of_last: Tensor) -> Tensor:
        # The state at a chunk's end is that at the next one's start, but for the last of a sequence.
        found = of_starts[(chosen + 1) % len(of_starts)].to(of_last.dtype)
        last = chosen == end[owner[chosen]] - 1
        return torch.where(last[:, None, None, None], of_last[owner[chosen]], found)

    def by_row(x: Tensor) -> Tensor:
        return x.float().view(rows, -1, heads)

    penalty_norm = condition = None
    if M_last is not None:
        A = at_ends(kept["starts"], spd_inverse(M_last))
        least, largest = extreme_eigenvalues(A)
        penalty_norm, condition = by_row(torch.linalg.matrix_norm(A)), by_row(largest / least)
    state_norm = by_row(torch.linalg.matrix_norm(at_ends(kept["states"], S_last)))

    key = features(call.k.float(), call.feature_map)
    write = key if kept["w"] is None else kept["w"].float().view_as(key)
    if call.write_rule == "linear":
        erase, beta, residual = torch.zeros_like(key), None, call.v.float()
    else:
        erase, beta = (key if call.erase_key == "raw" else unit(key)), call.beta
        residual = kept["E"].float().view(call.v.shape)
        if call.write_rule == "fixed":
            write = erase
        if beta is not None:
            beta = beta.float()
            residual = residual / torch.where(beta.abs() < SMALLEST_BETA, SMALLEST_BETA, beta)[..., None]
    g = None if call.g is None else call.g.float()
    ends = (table.chunks[chosen, 1].long() - 1)[: len(chosen) // rows]  # one row's; packed: all documents'
    return Diagnostics(ends, state_norm, penalty_norm, condition, (erase * write).sum(-1),
                       jacobian_norm(erase, write, beta, g), torch.linalg.vector_norm(residual, dim=-1))
