"""The way of a token to its experts and back: route, dispatch, combine, on one GPU or on many.

A mixture-of-experts layer sends each token to its k experts and sums what comes back. With experts
on several GPUs these rows cross the link, which can cost more than the arithmetic, so they travel
in 4 or 8 bits. The rounding belongs to the recipe, not to the number of GPUs: it happens at one
process too, where there is nothing to send.

    direction            what                      format                              rows a token
    dispatch             token x                   what the expert GEMM reads          one a rank
    combine              expert result y           mxfp8; the gate multiplies at home  k
    combine, backward    gate * dOut               mxfp8                               k
    dispatch, backward   dX of each expert copy    mxfp8; summed at home, in fp32      k

A row on the wire is bytes, codes | scales | outer scale, and each direction is one all-to-all.
Experts are spread over the ranks of an expert group, E/ep neighbours on each. All of them gather
the choices of all tokens first (2 bytes a choice); each then works out alone who sends what to
whom, so only the rows themselves follow. How many is waited for once a layer, where there is a
group; one process never waits.

Letters: T tokens, k experts a token, E experts, L of them here, M tokens that arrive, R rows of the
expert buffer, D width.
`python moe_comm.py` counts the bytes; on GPUs `torchrun --nproc_per_node 2 moe_comm.py` times them.
"""
import ctypes
import math
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import quant

ALIGN = 128      # each expert's rows start at a multiple: the GEMM tile, and whole blocks along T


# --------------------------------------------------------------------------------------- who is who
def join(device):
    """Join the processes that torchrun started, if it did. Returns this one's device."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return device
    place = int(os.environ.get("LOCAL_RANK", 0))
    if device.type == "cuda":
        if place >= torch.cuda.device_count():
            raise ValueError("torchrun started more processes than this machine has GPUs, "
                             f"{torch.cuda.device_count()}; use --nproc_per_node or --device cpu")
        device = torch.device("cuda", place)
        torch.cuda.set_device(device)
    if sys.platform == "linux":     # as at SIGTERM, where torchrun itself is killed outright
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)                               # PR_SET_PDEATHSIG
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def who():
    """(rank of this process, number of processes)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Mesh:
    """world = data x ep processes; rank = data index * ep + expert index, so that an expert group
    are neighbours, inside one host. Experts are sharded over their group and copied over the data
    axis; everything else is copied to all. Without torchrun: one process, and nothing to do."""

    def __init__(self, ep=1, device="cpu"):
        self.rank, self.world = who()
        if ep < 1 or self.world % ep:
            raise ValueError(f"--ep {ep}: must divide the number of processes, {self.world}"
                             + (" (torchrun starts several)" if self.world == 1 else ""))
        self.ep, self.data = ep, self.world // ep
        self.place = self.rank % ep                              # in the expert group
        self.devices = self.expert_group = self.copy_group = None
        if self.world > 1:
            self.devices = dist.device_mesh.init_device_mesh(
                device, (self.data, ep), mesh_dim_names=("data", "expert"))
            self.expert_group = self.devices["expert"].get_group() if ep > 1 else None
            self.copy_group = self.devices["data"].get_group()   # of those with the same experts

    def sum(self, t):
        """t, summed over all processes in place."""
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def any(self, flag):
        """Is `flag` true in any process?"""
        return self.world > 1 and bool(self.sum(torch.tensor(int(flag)))) or bool(flag)

    def gather(self, t):
        """[world * n, ...] from each process's t [n, ...]."""
        return t if self.world == 1 else all_gather(t, None)

    def wait(self):
        if self.world > 1:
            dist.barrier()


def all_gather(t, group):
    """[ranks * n, ...] from each rank's t [n, ...], as bytes: gloo does not know every type."""
    rows = t.contiguous().view(len(t), -1).view(torch.uint8)
    out = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, rows, group=group)
    return torch.cat(out).view(t.dtype).view(-1, *t.shape[1:])


# --------------------------------------------------------------------------------------------- plan
@dataclass
class Exchange:
    """What crosses the link of an expert group, in rows. A pair of splits holds how many rows go to
    each rank and how many come from each."""
    group: object
    tokens: torch.Tensor      # int64 [..] tokens to send, by rank; one that two ranks want is twice
    token_splits: tuple
    copy_splits: tuple
    back: torch.Tensor        # int64 [..] row of each copy that arrived, in the order they came
    place: torch.Tensor       # int64 [R] its inverse: which arrived copy a row is


@dataclass
class Plan:
    """Where each token copy goes. Copy t*k + j is token t on its way to its j-th expert.

    The buffer has R = copies + L*127 rows, rounded up: at one process a static size, so nothing
    waits for counts. A padding row holds the first token that arrived; no GEMM reads it.
    """
    load: torch.Tensor        # int64 [E] how often this process's tokens chose each expert
    counts: torch.Tensor      # int32 [L] real rows of each expert here
    copy: torch.Tensor        # int64 [R] copy in each row, counted from this process's first token
    token: torch.Tensor       # int64 [R] which arrived token is in each row
    slot: torch.Tensor        # int64 [T*k] row of each copy in what comes home
    exchange: Exchange | None = None


def by_expert(choice, n_experts, copies):
    """(counts [L], copies sorted by expert, the row of each, R) for choices [..] in 0 .. L, of
    which `copies` have an expert here; choice L means elsewhere."""
    device = choice.device
    sorted_, order = choice.to(torch.int16).sort(stable=True)
    ends = torch.searchsorted(sorted_, torch.arange(n_experts, device=device).to(torch.int16),
                              right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + ALIGN - 1) // ALIGN * ALIGN
    shift = (padded.cumsum(0) - padded) - (ends - counts)       # from place in the order to row
    row = torch.arange(copies, device=device) + shift[sorted_[:copies].long()]
    R = -(-(copies + n_experts * (ALIGN - 1)) // ALIGN) * ALIGN
    return counts, order[:copies], row, R


def route(experts, n_experts, group=None):
    """The plan for expert choices [T, k]: copies sorted by expert, in token order within one."""
    if group is not None:
        return _route_in_group(experts, n_experts, group)
    T, k = experts.shape
    counts, order, row, R = by_expert(experts.flatten(), n_experts, T * k)
    slot = torch.empty_like(order).scatter_(0, order, row)
    copy = torch.zeros(R, dtype=torch.int64, device=experts.device).scatter_(0, row, order)
    return Plan(counts, counts.int(), copy, copy // k, slot)


def _route_in_group(experts, n_experts, group):
    """route() where the experts are spread over `group`."""
    (T, k), device = experts.shape, experts.device
    size, me, here = group.size(), group.rank(), n_experts // group.size()
    table = all_gather(experts.to(torch.int16), group).long()                    # [size*T, k]
    wants = table[..., None] // here == torch.arange(size, device=device)        # [size*T, k, size]
    goes = wants.any(1)                                                          # [size*T, size]
    # Here the host waits for the device: how many tokens and copies go from each rank to each.
    tokens, copies = torch.stack([t.view(size, -1, size).sum(1) for t in (goes, wants)]).tolist()

    def splits(n):
        return n[me], [row[me] for row in n]
    came = goes[:, me].nonzero()[:, 0]                                           # [M] by token
    choice = torch.where(wants[came, :, me], table[came] - me * here, here)      # [M, k]
    counts, order, row, R = by_expert(choice.flatten(), here, sum(splits(copies)[1]))

    zeros = torch.zeros(R, dtype=torch.int64, device=device)
    arrived = zeros.scatter(0, row, order)                    # copy among those of arrived tokens
    back = torch.zeros_like(choice.flatten()).scatter_(0, order, row)[(choice < here).flatten()]
    token = arrived // k
    # Padding rows are named as at one process, by the group's first copy: an ablation fills them.
    copy = torch.full_like(zeros, -me * T * k).scatter_(
        0, row, (came - me * T)[order // k] * k + order % k)
    own = table[me * T:(me + 1) * T].flatten()
    home = (own // here).sort(stable=True).indices                               # [T*k] by rank
    slot = torch.empty_like(home).scatter_(0, home, torch.arange(T * k, device=device))
    exchange = Exchange(group, goes[me * T:(me + 1) * T].T.nonzero()[:, 1], splits(tokens),
                        splits(copies), back,
                        zeros.scatter(0, back, torch.arange(len(back), device=device)))
    load = torch.zeros(n_experts, dtype=torch.int64, device=device).scatter_add_(
        0, own, torch.ones_like(own))
    return Plan(load, counts.int(), copy, token, slot, exchange)


# --------------------------------------------------------------------------------------------- wire
def all_to_all(rows, splits, group):
    """Send uint8 rows to the ranks of a group; returns those that arrive, at least one."""
    to, of = splits
    out = rows.new_empty(max(1, sum(of)), rows.shape[1])
    if not sum(of):
        out.zero_()                         # padding rows must point somewhere
    dist.all_to_all_single(out[:sum(of)], rows, list(of), list(to), group=group)
    return out


def send(x, fmt, index, splits, group):
    """Rows x[index] in `fmt` to the ranks of a group; returns those that arrive, packed (or as they
    were, "bf16")."""
    rows = all_to_all(quant.backend_for(x).payload(x, fmt, index), splits, group)
    return rows.view(x.dtype) if fmt == "bf16" else quant.from_payload(rows, fmt, x.shape[1])


def outward(x, plan, fmt):
    """Tokens x [T, D] where their experts are, [M, D]: packed, but as they are in "bf16"."""
    e = plan.exchange
    if e is not None:
        return send(x, fmt, e.tokens, e.token_splits, e.group)
    return x if fmt == "bf16" else quant.backend_for(x).quantize(x, fmt)


def homeward(y, plan, fmt):
    """(expert rows y [R, D] where their tokens are, packed or not: row plan.slot[copy] of the
    result, the format to which they are still to be rounded)."""
    e = plan.exchange
    return (y, fmt) if e is None else (send(y, fmt, e.back, e.copy_splits[::-1], e.group), "bf16")


def copies_outward(dy, plan, fmt):
    """Gradients dy [T*k, D] of all copies where their experts are, [R, D]."""
    e = plan.exchange
    came = send(dy, fmt, None, e.copy_splits, e.group)
    if fmt == "bf16":
        return came.index_select(0, e.place)
    return quant.backend_for(dy).operand(came.select(e.place), fmt, dtype=dy.dtype)


# ----------------------------------------------------------------------------- dispatch and combine
@quant.has_kernel
def sum_of_copies(slot, rows, gates, fmt, dtype, keep=False):
    """out[t] = sum over j of gates[t, j] * rows[slot of copy (t, j)], [T, D], summed in fp32. Rows
    are packed, or rounded to `fmt` first. keep: also what copies_backward reads of them."""
    (T, k), packed = gates.shape, isinstance(rows, quant.Quantized)
    rows = rows.dequantize(dtype) if packed else quant.cast(rows, fmt)
    out = (gates[..., None] * rows.index_select(0, slot).view(T, k, -1)).sum(1).to(dtype)
    return (out, (rows,)) if keep else out


@quant.has_kernel
def copies_backward(dout, kept, slot, gates, fmt):
    """(d gates[t, j] = <rows[slot of copy (t, j)], dout[t]> in fp32 [T, k], gradients of the rows:
    each copy's gate times its token's dout, rounded to `fmt`). A row without a copy has none."""
    (rows,), (T, k) = kept, gates.shape
    copies = rows.index_select(0, slot).view(T, k, -1)
    dgates = (copies.float() * dout[:, None].float()).sum(-1)
    drows = (gates[..., None] * dout[:, None]).flatten(0, 1).to(dout.dtype)
    return dgates, quant.cast(torch.zeros_like(rows).index_copy_(0, slot, drows), fmt)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, plan, wire, back):
        ctx.plan, ctx.back, ctx.tokens = plan, back, x.shape[0]
        came = outward(x, plan, wire)
        if torch.is_tensor(came):
            return came.index_select(0, plan.token), None                        # [R, D]
        # The numbers stay packed. Autograd sees a shape for the gradient to flow through.
        return x.new_zeros(1, 1).expand(plan.token.numel(), x.shape[1]), came.select(plan.token)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx, _):
        slot, (rows, fmt) = ctx.plan.slot, homeward(dx, ctx.plan, ctx.back)
        ones = torch.ones(ctx.tokens, slot.numel() // ctx.tokens, device=dx.device)
        return sum_of_copies(slot, rows, ones, fmt, dx.dtype), None, None, None  # [T, D]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, gates, plan, wire):
        rows, fmt = homeward(y, plan, wire)
        out, kept = sum_of_copies(plan.slot, rows, gates, fmt, y.dtype, keep=True)     # [T, D]
        ctx.save_for_backward(gates, *kept)
        ctx.plan, ctx.wire = plan, wire
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        (gates, *kept), e = ctx.saved_tensors, ctx.plan.exchange
        fmt = ctx.wire if e is None else "bf16"                  # the wire rounds what it carries
        dgates, dy = copies_backward(dout, kept, ctx.plan.slot, gates, fmt)      # [T, k], [R, D]
        return dy if e is None else copies_outward(dy, ctx.plan, ctx.wire), dgates, None, None


def dispatch(x, plan, wire="bf16", back="bf16"):
    """Rows for the experts from tokens x [T, D]: (rows [R, D], the same rows packed or None).

    wire: the format in which they travel; back: the format of the gradient's way home. Where rows
    stay packed the first result has no storage: it only carries the gradient.
    """
    return _Dispatch.apply(x, plan, wire, back)


def combine(y, gates, plan, wire="bf16"):
    """out[t] = sum over j of gates[t, j] * y[row of copy (t, j)], y [R, D] rounded to `wire`."""
    return _Combine.apply(y, gates, plan, wire)


# --------------------------------------------------------------------------------------- the lesson
WIRES = {"bf16": ("bf16", "bf16"), "mxfp8": ("mxfp8", "mxfp8"), "nvfp4": ("nvfp4", "mxfp8")}
# name -> (D, F, E, k): model B of data/bench.py, and two shapes of published models.
SHAPES = {"model B": (2048, 1408, 64, 6), "Llama 4 Scout": (5120, 8192, 16, 1),
          "384 experts": (6144, 2048, 384, 8)}
# name -> (operations/s of the expert GEMMs by recipe, bytes/s of the link, each way), datasheets.
MACHINES = {"H200": (dict.fromkeys(WIRES, 989e12), 0.45e12),
            "GB300": (dict(bf16=2.5e15, mxfp8=5e15, nvfp4=15e15), 0.9e12)}


def row_bytes(fmt, D):
    """Bytes of a row on the wire, on a GPU."""
    return 2 * D if fmt == "bf16" else quant.payload_bytes(fmt, D)


def ranks_of_a_token(n_experts, top_k, ep):
    """Expected number of ranks that have one of a token's experts, all choices equally likely."""
    miss = math.comb(n_experts - n_experts // ep, top_k) / math.comb(n_experts, top_k)
    return ep * (1 - miss)


def bytes_of_a_token(shape, ep, wire, back):
    """Bytes that leave a token's home (dispatch; gate * dOut) and that come back (combine; dX): a
    list of four, of which the share (ep - 1) / ep crosses the link."""
    D, _, E, k = shape
    there, copies = row_bytes(wire, D) * ranks_of_a_token(E, k, ep), k * row_bytes(back, D)
    return [n * (ep - 1) / ep for n in (there, copies, copies, copies)]


def lesson():
    """Bytes a token by direction, and what that means beside the arithmetic."""
    print("Bytes of a token that cross the link, experts over 8 ranks, in each direction\n")
    row = "{:<15}{:<7}" + "{:>10}" * 4 + "{:>8}"
    print(row.format("", "", "dispatch", "combine", "its grad", "dX", "sum"))
    for name, shape in SHAPES.items():
        whole = sum(bytes_of_a_token(shape, 8, "bf16", "bf16"))
        for recipe, wires in WIRES.items():
            parts = bytes_of_a_token(shape, 8, *wires)
            print(row.format(name, recipe, *(f"{n:,.0f}" for n in parts),
                             f"{sum(parts) / whole:.2f}x"))
    print("\nOperations of the expert GEMMs for each byte on the link, forward and backward, and "
          "how many\nof them a GPU does while the link carries a byte: above it, arithmetic "
          "decides\n")
    row, spread = "{:<15}{:<7}" + "{:>10}" * 4 + "{:>12}" * 2, (2, 8, 24, 64)
    print(row.format("", "", *(f"{ep} ranks" for ep in spread), *MACHINES))
    for name, (D, F, E, k) in SHAPES.items():
        for recipe, wires in WIRES.items():
            each = [18 * D * F * k / sum(bytes_of_a_token((D, F, E, k), ep, *wires))
                    if E % ep == 0 else None for ep in spread]
            link = [f"{rate[recipe] / link:,.0f}" for rate, link in MACHINES.values()]
            print(row.format(name, recipe, *("-" if n is None else f"{n:,.0f}" for n in each),
                             *link))


# --------------------------------------------------------------------------- measured, on some GPUs
def interleaved(functions, repeats=15):
    """Milliseconds of each function, `repeats` times in turn, on the GPU's clock."""
    times = [[] for _ in functions]
    for i in range(repeats + 3):                                 # the first three warm up
        for f, found in zip(functions, times):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            start.record()
            f()
            end.record()
            end.synchronize()
            if i >= 3:
                found.append(start.elapsed_time(end))
    return [statistics.median(found) for found in times]


def measure(mesh, device):
    """Times of one exchange, and of dispatch, expert GEMM and combine, by tokens and width."""
    size, (E, k, F) = mesh.ep, (16 * mesh.ep, 4, 1024)
    head = mesh.rank == 0
    row = "{:>5}{:>8}" + "{:>9}" * 9
    if head:
        print(f"\n{size} x {torch.cuda.get_device_name(device)}, torch {torch.__version__}, "
              f"n = 15, medians, ms; {E} experts, top-{k}, width {F}\n")
        print(row.format("", "", "bytes", "alone", "", "rounded,", "sent,", "decoded", "dispatch",
                         "+ GEMM +", "combine"))
        print(row.format("D", "tokens", *("bf16", "mxfp8", "nvfp4") * 3))
    for D in (2048, 5120):
        w1 = torch.randn(E // size, F, D, device=device) * D ** -0.5
        w2 = torch.randn(E // size, D, F, device=device) * F ** -0.5
        for T in (1024, 4096, 8192, 16384, 32768, 65536):
            ms = interleaved([*raw_exchanges(T, D, mesh, device), *round_trips(T, D, mesh, device),
                              *layers(T, k, w1, w2, E, mesh)])
            if head:
                print(row.format(D, T, *(f"{t:.3f}" for t in ms)), flush=True)


def raw_exchanges(T, D, mesh, device):
    """An all-to-all of T rows' bytes, by format."""
    even = [T // mesh.ep] * mesh.ep
    for fmt in WIRES:
        rows = torch.zeros(T, row_bytes(fmt, D), dtype=torch.uint8, device=device)
        yield partial(all_to_all, rows, (even, even), mesh.expert_group)


def round_trips(T, D, mesh, device):
    """The same with rounding before and decoding after it."""
    even, index = [T // mesh.ep] * mesh.ep, torch.randperm(T, device=device)
    x = torch.randn(T, D, device=device, dtype=torch.bfloat16)

    def trip(fmt):
        came = send(x, fmt, index, (even, even), mesh.expert_group)
        return came if fmt == "bf16" else quant.backend_for(x).operand(came, fmt, dtype=x.dtype)
    for fmt in WIRES:
        yield partial(trip, fmt)


def layers(T, k, w1, w2, E, mesh):
    """Dispatch, two expert GEMMs and combine, forward, by recipe; the plan is made before."""
    x = torch.randn(T, w1.shape[2], device=w1.device, dtype=torch.bfloat16)
    scores = torch.rand(T, E, device=w1.device)
    gates, experts = scores.topk(k, -1)
    plan = route(experts, E, mesh.expert_group)

    def layer(recipe, first, second):
        g, (wire, back) = quant.RECIPES[recipe].experts, WIRES[recipe]
        rows, q = dispatch(x, plan, wire, back)
        h = quant.grouped_linear(rows, w1, plan.counts, g, weight=first, xq=q)
        y = quant.grouped_linear(h, w2, plan.counts, g, weight=second)
        return combine(y, gates, plan, back)
    for recipe in WIRES:
        g = quant.RECIPES[recipe].experts
        weights = [quant.prepare(w, g, dtype=x.dtype) for w in (w1, w2)]
        yield torch.no_grad()(partial(layer, recipe, *weights))


def main():
    device = join(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    rank, world = who()
    if rank == 0:
        lesson()
        if device.type == "cpu":
            print("\nHow long that takes is measured where there are GPUs.")
        elif world == 1:
            print("\nHow long that takes: torchrun --nproc_per_node N moe_comm.py")
    if device.type == "cuda" and world > 1:
        measure(Mesh(world, "cuda"), device)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
