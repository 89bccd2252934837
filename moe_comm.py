"""The way of a token to its experts and back: route, dispatch, combine.

A mixture-of-experts layer sends each token to its k experts and sums what comes back. With experts
on several GPUs these rows cross the link, which can cost more than the arithmetic, so they travel
in 4 or 8 bits. The rounding belongs to the recipe, not to the number of GPUs: it happens at one
process too, where there is nothing to send.

    direction            what                      format
    dispatch             token x                   what the expert GEMM reads (nvfp4 or mxfp8)
    combine              expert result y           mxfp8; the gate multiplies the decoded result
    combine, backward    gate * dOut               mxfp8
    dispatch, backward   dX of each expert copy    mxfp8; copies are summed at home, in fp32

Letters: T tokens, k experts a token, E experts, R rows of the expert buffer, D width.
"""
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

import quant

ALIGN = 128      # each expert's rows start at a multiple: the GEMM tile, and whole blocks along T


@dataclass
class Plan:
    """Where each token copy goes. Copy t*k + j is token t on its way to its j-th expert.

    The buffer has R = T*k + E*127 rows, rounded up: a static size, so nothing waits for counts.
    A padding row holds token 0's copy; no GEMM reads it.
    """
    counts: torch.Tensor      # int32 [E] real rows of each expert
    slot: torch.Tensor        # int64 [T*k] row of each copy
    copy: torch.Tensor        # int64 [R] copy in each row
    token: torch.Tensor       # int64 [R] token in each row


def route(experts, n_experts):
    """The plan for expert choices [T, k]: copies sorted by expert, in token order within one."""
    T, k = experts.shape
    flat = experts.flatten()                                                     # [T*k]
    device = flat.device
    sorted_, order = flat.to(torch.int16).sort(stable=True)                      # copy at each rank
    ends = torch.searchsorted(sorted_, torch.arange(n_experts, device=device).to(torch.int16),
                              right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    shift = (padded.cumsum(0) - padded) - (ends - counts)                        # from rank to row
    row = torch.arange(T * k, device=device) + shift[sorted_.long()]
    R = -(-(T * k + n_experts * (ALIGN - 1)) // ALIGN) * ALIGN
    slot = torch.empty_like(flat).scatter_(0, order, row)
    copy = torch.zeros(R, dtype=torch.int64, device=device).scatter_(0, row, order)
    return Plan(counts.int(), slot, copy, copy // k)


@quant.fused
def sum_of_copies(rows, slot, gates):
    """out[t] = sum over j of gates[t, j] * rows[slot of copy (t, j)], summed in fp32; [T, D]."""
    T, k = gates.shape
    return (gates[..., None] * rows.index_select(0, slot).view(T, k, -1)).sum(1).to(rows.dtype)


@quant.fused
def dot_of_copies(rows, slot, dout, k):
    """d gates[t, j] = <rows[slot of copy (t, j)], dout[t]> in fp32; [T, k]."""
    copies = rows.index_select(0, slot).view(dout.shape[0], k, -1)
    return (copies.float() * dout[:, None].float()).sum(-1)


@quant.fused
def gated_rows(dout, gates, copy):
    """The gradient of each row: gate of its copy times dout of its token; [R, D]."""
    token = copy // gates.shape[1]
    return (gates.flatten()[copy][:, None] * dout.index_select(0, token)).to(dout.dtype)


def over_the_wire(x, fmt):
    """Rows x [R, D] as they arrive at the other end: rounded to `fmt` in blocks along each row."""
    return x if fmt == "bf16" else quant.backend_for(x).cast(x, fmt)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, wire, back):
        ctx.plan, ctx.back, ctx.tokens = plan, back, x.shape[0]
        if quant.is_fp4(wire):
            q = quant.backend_for(x).quantize(x, wire).select(plan.token)
            # The numbers travel packed. Autograd sees a shape for the gradient to flow through.
            return x.new_zeros(1, 1).expand(plan.token.numel(), x.shape[1]), q
        return over_the_wire(x, wire).index_select(0, plan.token), None          # [R, D]

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, _):
        dx, slot = over_the_wire(dx, ctx.back), ctx.plan.slot                    # [R, D]
        ones = torch.ones(ctx.tokens, slot.numel() // ctx.tokens, device=dx.device)
        return sum_of_copies(dx, slot, ones), None, None, None                   # [T, D]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gates, plan, wire):
        y = over_the_wire(y, wire)                                               # [R, D]
        ctx.save_for_backward(y, gates)
        ctx.plan, ctx.wire = plan, wire
        return sum_of_copies(y, plan.slot, gates)                                # [T, D]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        y, gates = ctx.saved_tensors
        dgates = dot_of_copies(y, ctx.plan.slot, dout, gates.shape[1])           # [T, k]
        dy = over_the_wire(gated_rows(dout, gates, ctx.plan.copy), ctx.wire)     # [R, D]
        return dy, dgates, None, None


def dispatch(x, plan, wire="bf16", back="bf16"):
    """Rows for the experts from tokens x [T, D]: (rows [R, D], the same rows packed or None).

    wire: the format in which they travel; back: the format of the gradient's way home. Where rows
    travel in 4 bits the first result has no storage: it only carries the gradient.
    """
    return _Dispatch.apply(x, plan, wire, back)


def combine(y, gates, plan, wire="bf16"):
    """out[t] = sum over j of gates[t, j] * y[row of copy (t, j)], y [R, D] rounded to `wire`."""
    return _Combine.apply(y, gates, plan, wire)
