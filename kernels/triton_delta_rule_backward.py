"""Gradient of the delta rule in `triton_delta_rule`, chunk-parallel. The README of this folder derives it with P = β W;
here β stands at E = diag(β) e, as in that file.

With P = tril(D ⊙ Q Wᵀ), E = T(diag(β) V − diag(β e^G) K H₀), O = diag(e^G) Q H₀ + P E and H_C = e^{G_C} H₀ + W_eᵀ E
where W_e = diag(e^{G_C − G}) W, the gradient dE = Pᵀ dO + W_e dH_C and J = Tᵀ dE give dv = β J, dβ = J·E/β and
dH₀ = e^{G_C} dH_C + (diag(e^G) Q)ᵀ dO − Zᵀ dE. With dP = tril(D ⊙ dO Eᵀ) and dN = −tril(D ⊙ β J Eᵀ, −1)

    dQ = e^G dO H₀ᵀ + dP W,   dK = dN W − e^G β J H₀ᵀ,   dW = e^{G_C − G} E dH_Cᵀ + dPᵀ Q + dNᵀ K.

Three kernels: `prepare` (gradient of S q, Pᵀ dO), `carry_back` (dH_C and dE, chunk after chunk, from the end),
`token_gradients`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_common import (CHUNK, Precision, Tables, dot, feature, feature_slope, load, places, scan,
                                   token_places, unit_rows_gradient)
from kernels.triton_delta_rule import (SMALLEST_BETA, Keys, Memory, load_beta, load_decay, load_key, masked_decay,
                                       stages, value_block, warps)


@triton.jit
def prepare_kernel(q, k, w, o, do, scales, g, dread, dE, slopes, query_sums, chunks, H, F: tl.constexpr,
                   UNIT: tl.constexpr, HAS_W: tl.constexpr, HAS_G: tl.constexpr, NORMALIZED: tl.constexpr,
                   DK: tl.constexpr, DV: tl.constexpr, C: tl.constexpr, P: tl.constexpr):
    """Back through the read-out: dread = gradient of S q, slopes = of the denominator; then dE = Pᵀ dread."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base_v, values, mask_v = places(token, end, head, H, DV, C)
    base, offsets, mask = places(token, end, head, H, DK, C)
    line = tl.arange(0, C)
    base_t, per_token, mask_t = token_places(token, end, head, H, C)
    out, dO = load(o + base_v, values, mask_v), load(do + base_v, values, mask_v)
    scale = tl.load(scales + base_t + per_token, mask=mask_t, other=0)
    along = tl.sum(out * dO, 1)
    Q = feature(load(q + base, offsets, mask), mask, F)
    if NORMALIZED:
        slope = tl.where(scale > 0, -along * scale, 0.0)
        dO = dO * tl.abs(scale)[:, None]
        tl.store(slopes + base_t + per_token, slope, mask=mask_t)
        tl.store(query_sums + program * DK + tl.arange(0, DK), tl.sum(Q * slope[:, None], 0))
    else:
        dO = (dO - out * (along / DV)[:, None]) * scale[:, None]
    tl.store(dread + base_v + values, dO.to(dread.dtype.element_ty), mask=mask_v)
    W = load(w + base, offsets, mask) if HAS_W else load_key(k + base, offsets, mask, F, UNIT)
    G, _ = load_decay(g, token, end, head, H, C, HAS_G)
    weights = masked_decay(dot(Q, tl.trans(W), P), G, line[:, None] >= line[None, :], HAS_G)
    tl.store(dE + base_v + values, dot(tl.trans(weights), dO, P).to(dE.dtype.element_ty), mask=mask_v)


@triton.jit
def carry_back_kernel(q, k, w, g, Z, dread, dE, dstates, dfinal, dinitial, sequences, H, F: tl.constexpr,
                      UNIT: tl.constexpr, HAS_W: tl.constexpr, ERASE: tl.constexpr, HAS_G: tl.constexpr,
                      HAS_FINAL: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
                      P: tl.constexpr):
    """Walks a sequence from its end: keeps dH at every chunk's end in `dstates`, adds W_e dH to dE in place."""
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = DV // BV
    column = (program % blocks) * BV + tl.arange(0, BV)
    line = program // blocks
    sequence, head = line // H, line % H
    first, last = tl.load(sequences + sequence * 6), tl.load(sequences + sequence * 6 + 1)
    start, end = tl.load(sequences + sequence * 6 + 4), tl.load(sequences + sequence * 6 + 5)
    square = tl.arange(0, DK)[:, None] * DV + column[None, :]
    dS = tl.zeros([DK, BV], tl.float32)
    if HAS_FINAL:
        dS += tl.load(dfinal + line * DK * DV + square)
    for i in range(0, last - first):
        chunk = last - 1 - i
        token = start + (chunk - first) * C
        base, offsets, mask = places(token, end, head, H, DK, C)
        base_v = (token.to(tl.int64) * H + head) * DV
        values = (tl.arange(0, C) * (H * DV))[:, None] + column[None, :]
        tl.store(dstates + (chunk.to(tl.int64) * H + head) * DK * DV + square, dS.to(dstates.dtype.element_ty))
        W = load(w + base, offsets, mask) if HAS_W else load_key(k + base, offsets, mask, F, UNIT)
        Q = feature(load(q + base, offsets, mask), mask, F)
        G, G_end = load_decay(g, token, end, head, H, C, HAS_G)
        if HAS_G:
            W = W * tl.exp(G_end - G)[:, None]
            Q = Q * tl.exp(G)[:, None]
        gradient = load(dE + base_v, values, mask) + dot(W, dS, P)
        tl.store(dE + base_v + values, gradient.to(dE.dtype.element_ty), mask=mask)
        if HAS_G:
            dS = dS * tl.exp(G_end)
        dS += dot(tl.trans(Q), load(dread + base_v, values, mask), P)
        if ERASE:
            dS -= dot(tl.trans(load(Z + base, offsets, mask)), gradient, P)
    tl.store(dinitial + line * DK * DV + square, dS)


@triton.jit
def block_places(per_token, block: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr):
    """Offsets of a block of columns in the values' rows [C, BV] and in the chunk's state [DK, BV]."""
    column = block * BV + tl.arange(0, BV)
    return per_token[:, None] * DV + column[None, :], tl.arange(0, DK)[:, None] * DV + column[None, :]


@triton.jit
def token_gradients_kernel(q, k, w, beta, g, inverse, E, dE, dread, states, dstates, z, dz, slopes, dq, dk, dw, dv,
                           dbeta, dg, chunks, H, F: tl.constexpr, UNIT: tl.constexpr, HAS_W: tl.constexpr,
                           ERASE: tl.constexpr, HAS_BETA: tl.constexpr, HAS_G: tl.constexpr, NORMALIZED: tl.constexpr,
                           SMALLEST: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
                           C: tl.constexpr, P: tl.constexpr):
    """The gradients of a chunk's tokens, down to the raw q, k and v, and the write keys' where those were given."""
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // H, program % H
    token, end = tl.load(chunks + chunk * 3), tl.load(chunks + chunk * 3 + 1)
    base, offsets, mask = places(token, end, head, H, DK, C)
    line, key = tl.arange(0, C), tl.arange(0, DK)
    base_t, per_token, mask_t = token_places(token, end, head, H, C)
    base_v, base_s = base_t * DV, program * DK * DV
    lower = line[:, None] >= line[None, :]
    G, G_end = load_decay(g, token, end, head, H, C, HAS_G)
    b = load_beta(beta, token, end, head, H, C, HAS_BETA, SMALLEST)
    # One sum [C, DK] at a time, so that registers suffice; tiles read twice come from cache.
    dP = tl.zeros([C, C], tl.float32)
    if ERASE:
        T = tl.load(inverse + program * C * C + line[:, None] * C + line[None, :])
        dN = tl.zeros([C, C], tl.float32)
        dK = tl.zeros([C, DK], tl.float32)
        dbeta_sum = tl.zeros([C], tl.float32)
    for block in tl.static_range(0, DV // BV):
        values, square = block_places(per_token, block, DK, DV, BV)
        written, gradient = load(E + base_v, values, mask), load(dE + base_v, values, mask)
        dP += dot(load(dread + base_v, values, mask), tl.trans(written), P)
        if ERASE:
            gradient = dot(tl.trans(T), gradient, P)
            if HAS_BETA:
                dbeta_sum += tl.sum(gradient * written, 1)
                gradient = gradient * b[:, None]
            dN -= dot(gradient, tl.trans(written), P)
            dK -= dot(gradient, tl.trans(tl.load(states + base_s + square)), P)
        tl.store(dv + base_v + values, gradient.to(dv.dtype.element_ty), mask=mask)
    dP = masked_decay(dP, G, lower, HAS_G)
    K = load_key(k + base, offsets, mask, F, UNIT)
    W = load(w + base, offsets, mask) if HAS_W else K
    dG = tl.zeros([C], tl.float32)
    if ERASE:
        if HAS_BETA:
            tl.store(dbeta + base_t + per_token, (dbeta_sum / b).to(dbeta.dtype.element_ty), mask=mask_t)
        dN = masked_decay(dN, G, line[:, None] > line[None, :], HAS_G)
        if HAS_G:
            dK = dK * tl.exp(G)[:, None]
        dK += dot(dN, W, P)
        if HAS_G:
            dG += tl.sum(dK * K, 1)

    raw_q = load(q + base, offsets, mask)
    Q = feature(raw_q, mask, F)
    dQ = tl.zeros([C, DK], tl.float32)
    for block in tl.static_range(0, DV // BV):
        values, square = block_places(per_token, block, DK, DV, BV)
        dQ += dot(load(dread + base_v, values, mask), tl.trans(tl.load(states + base_s + square)), P)
    if HAS_G:
        dQ = dQ * tl.exp(G)[:, None]
    dQ += dot(dP, W, P)
    if HAS_G:
        dG += tl.sum(dQ * Q, 1)
    raw_k = load(k + base, offsets, mask)
    if NORMALIZED:
        slope = tl.load(slopes + base_t + per_token, mask=mask_t, other=0)
        ones = tl.where(lower, 1.0, 0.0)
        dQ += slope[:, None] * (tl.load(z + program * DK + key)[None, :] + dot(ones, feature(raw_k, mask, F), P))
    tl.store(dq + base + offsets, (dQ * feature_slope(raw_q, F)).to(dq.dtype.element_ty), mask=mask)

    dW = tl.zeros([C, DK], tl.float32)
    dG_end = 0.0
    for block in tl.static_range(0, DV // BV):
        values, square = block_places(per_token, block, DK, DV, BV)
        dstate = tl.load(dstates + base_s + square)
        dW += dot(load(E + base_v, values, mask), tl.trans(dstate), P)
        if HAS_G:
            dG_end += tl.sum(tl.load(states + base_s + square).to(tl.float32) * dstate.to(tl.float32))
    if HAS_G:
        dW = dW * tl.exp(G_end - G)[:, None]
        dG_end = dG_end * tl.exp(G_end) + tl.sum(dW * W)
    dW += dot(tl.trans(dP), Q, P)
    if ERASE:
        dW += dot(tl.trans(dN), K, P)
    if HAS_G:
        dG -= tl.sum(dW * W, 1)
        later = tl.sum(tl.where(lower, dG[:, None], 0.0), 0) + dG_end
        tl.store(dg + base_t + per_token, later.to(dg.dtype.element_ty), mask=mask_t)
    if HAS_W:
        tl.store(dw + base + offsets, dW.to(dw.dtype.element_ty), mask=mask)
    else:
        dK = dK + dW if ERASE else dW
    if UNIT:
        dK = unit_rows_gradient(feature(raw_k, mask, F), dK)
    if NORMALIZED:
        dK += tl.load(dz + program * DK + key)[None, :] + dot(tl.trans(ones), Q * slope[:, None], P)
    tl.store(dk + base + offsets, (dK * feature_slope(raw_k, F)).to(dk.dtype.element_ty), mask=mask)


def memory_backward(do: Tensor, dfinal: Tensor | None, dz_last: Tensor | None, keys: Keys, v: Tensor,
                    beta: Tensor | None, g: Tensor | None, o: Tensor, memory: Memory, table: Tables,
                    precision: Precision):
    """Gradients (dq, dk, dw or None, dv, dbeta, dg, dS0 [N, H, Dk, Dv], dz0 or None); dq and dk down to the raw inputs.

    do like o; dfinal [N, H, Dk, Dv] and dz_last [N, H, Dk] float32 or None for zero.
    """
    tokens, heads, dk_size = keys.k.shape
    dv_size, device, count, store = v.shape[-1], v.device, len(table.chunks), precision.store
    grid, nw, normalized = (count * heads,), warps(dk_size, dv_size), memory.z is not None
    key_options = dict(F=keys.feature_map, UNIT=keys.unit, HAS_W=keys.w is not None, HAS_G=g is not None)
    sizes = dict(DK=dk_size, DV=dv_size, C=CHUNK, P=precision.memory)
    dread = torch.empty(tokens, heads, dv_size, dtype=store, device=device)
    dE = torch.empty_like(dread)
    slopes = query_sums = dz0 = None
    if normalized:
        slopes = torch.empty(tokens, heads, dtype=torch.float32, device=device)
        query_sums = torch.empty_like(memory.z)
    prepare_kernel[grid](keys.q, keys.k, keys.w, o, do, memory.scales, g, dread, dE, slopes, query_sums, table.chunks,
                         heads, **key_options, **sizes, NORMALIZED=normalized, num_warps=nw)
    if normalized:
        dz0 = scan(query_sums, table, 0, dz_last, reverse=True)
    dstates = torch.empty_like(memory.states)
    dinitial = torch.empty(len(table.sequences), heads, dk_size, dv_size, dtype=torch.float32, device=device)
    lines = len(table.sequences) * heads
    block = value_block(dv_size, lines, device)
    carry_back_kernel[(lines * (dv_size // block),)](
        keys.q, keys.k, keys.w, g, memory.Z, dread, dE, dstates, dfinal, dinitial, table.sequences, heads,
        **key_options, **sizes, ERASE=keys.erase, HAS_FINAL=dfinal is not None, BV=block, num_warps=4,
        num_stages=stages(dk_size, dv_size, precision))
    dq, dk, dv = torch.empty_like(keys.q), torch.empty_like(keys.k), torch.empty_like(v)
    dw = None if keys.w is None else torch.empty_like(keys.w)
    dbeta, dg = (None if x is None else torch.empty_like(x) for x in (beta, g))
    token_gradients_kernel[grid](
        keys.q, keys.k, keys.w, beta, g, memory.inverse, memory.E, dE, dread, memory.states, dstates, memory.z,
        query_sums, slopes, dq, dk, dw, dv, dbeta, dg, table.chunks, heads, **key_options, **sizes, ERASE=keys.erase,
        HAS_BETA=beta is not None, NORMALIZED=normalized, SMALLEST=SMALLEST_BETA, BV=min(dv_size, 64), num_warps=nw)
    return dq, dk, dw, dv, dbeta, dg, dinitial, dz0
