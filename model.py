"""The model: a pre-norm transformer with a mixture of experts in each layer, on bytes.

RMSNorm, rotary positions, grouped-query attention with normalised queries and keys, SwiGLU experts,
sigmoid router without auxiliary loss or dropped tokens. The shapes are those of Hugging Face's
Glm4MoeForCausalLM, so that a trained model can be exported. Precision is a recipe (quant.py), not
another set of classes.

Letters: B sequences, T positions, D width, H heads, G key/value heads, C head width, E experts,
k experts a token, F expert width, V vocabulary, N = B*T tokens, R rows of the expert buffer.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import moe_comm
import quant

NEWLINE, PAD = 10, 0


@dataclass(frozen=True)
class ModelConfig:
    """Shapes of a model. head_dim 0 means dim / heads, dense_dim 0 means 4 * dim."""
    dim: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 0
    experts: int = 4
    top_k: int = 2
    expert_dim: int = 64
    shared: int = 1              # shared experts: every token's, one SwiGLU of shared * expert_dim
    dense_layers: int = 0        # leading layers: one dense SwiGLU of dense_dim instead of experts
    dense_dim: int = 0
    seq_len: int = 128
    vocab: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    route_scale: float = 1.0     # multiplies the gates

    def __post_init__(self):
        for name in ("dim", "layers", "heads", "kv_heads",
                     "experts", "top_k", "expert_dim", "seq_len", "vocab"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        object.__setattr__(self, "head_dim", self.head_dim or self.dim // self.heads)
        object.__setattr__(self, "dense_dim", self.dense_dim or 4 * self.dim)
        if self.head_dim < 1 or self.dense_dim < 1:
            raise ValueError(f"head_dim {self.head_dim} and dense_dim {self.dense_dim}: "
                             "must be at least 1")
        if self.top_k > self.experts:
            raise ValueError(f"top_k {self.top_k}: must be at most "
                             f"the number of experts, {self.experts}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads}: must divide heads {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim}: must be even, rotary positions turn pairs")
        if not 0 <= self.dense_layers <= self.layers:
            raise ValueError(f"dense_layers {self.dense_layers}: "
                             f"must be 0 to layers, {self.layers}")
        if self.shared < 0:
            raise ValueError(f"shared {self.shared}: must be at least 0")

    def check_blocks(self, recipe):
        """Raise ValueError where a quantised layer has a dimension that no block divides."""
        dense = recipe.dense.block
        both = max(dense, *(recipe.experts_of(i, self.layers).block for i in range(self.layers)))
        wire = 1 if recipe.combine == "bf16" else quant.FORMATS[recipe.combine].block
        for name, size, block in (("dim", self.dim, max(both, wire)),
                                  ("expert_dim", self.expert_dim, both),
                                  ("dense_dim", self.dense_dim, dense),
                                  ("heads * head_dim", self.heads * self.head_dim, dense)):
            if size % block:
                raise ValueError(f"{name} {size}: must be a multiple of {block} in {recipe.name}, "
                                 "whose blocks run along both sides of a weight")


# -------------------------------------------------------------------------------------- small parts
class _Embed(torch.autograd.Function):
    """Rows of a table; the gradient is a GEMM with one-hot rows, which sums in a fixed order."""

    @staticmethod
    def forward(ctx, table, idx, dtype):
        ctx.save_for_backward(idx)
        ctx.vocab = table.shape[0]
        return table.index_select(0, idx.flatten()).to(dtype).view(*idx.shape, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        idx, = ctx.saved_tensors
        one_hot = torch.zeros(idx.numel(), ctx.vocab, dtype=dy.dtype, device=dy.device)
        one_hot.scatter_(1, idx.reshape(-1, 1), 1.0)
        kw = dict(out_dtype=torch.float32) if dy.is_cuda else {}
        return torch.mm(one_hot.T, dy.flatten(0, -2), **kw), None, None


def rms_norm(x, weight, eps):
    """x / rms(x) * weight, computed in fp32."""
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)


@quant.has_kernel
def add_norm(x, deltas, weight, eps, readers=1):
    """The residual stream x with what layers add to it, and that normalised, `readers` times: a GPU
    adds up the gradients of all readers where it differentiates the norm."""
    for delta in deltas:
        x = x + delta
    return x, *[rms_norm(x, weight, eps)] * readers


@quant.has_kernel
def norm_rope(x, weight, cos, sin, eps):
    """Queries or keys [B, T, H, C] from x [B, T, H * C]: normalised, then turned."""
    return rope(rms_norm(x.unflatten(-1, (-1, weight.shape[0])), weight, eps), cos, sin)


def rope_table(positions, head_dim, theta):
    """cos and sin [T, C] of each position's angles, in the two-halves layout."""
    rate = theta ** (-torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim)
    angle = torch.outer(positions.float(), rate).repeat(1, 2)
    return angle.cos(), angle.sin()


def rope(x, cos, sin):
    """Turn the pairs (i, i + C/2) of x [B, T, H, C] by their position's angles."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return (x * cos + torch.cat((-b, a), -1) * sin).to(x.dtype)


def in_pieces(t, n):
    """fp32 t as n bf16 tensors side by side, [n, *t.shape], that sum to it; 3 hold all 24 bits."""
    found = []
    for _ in range(n):
        found.append(t.bfloat16())
        t = t - found[-1].float()
    return torch.stack(found)


class _RouterLogits(torch.autograd.Function):
    """x W^T [N, E] in fp32, for bf16 x [N, D] and fp32 W [E, D], on bf16 tensor cores: every
    product of a piece of W is exact and the sums are fp32. Backward keeps 16 bits of dY for dW and
    8 of dY and W for dX, which is bf16 in any case."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(x, in_pieces(w, 3).flatten(0, 1).T, out_dtype=torch.float32).view(
            len(x), 3, -1).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dw = torch.mm(in_pieces(dy, 2).transpose(1, 2).flatten(0, 1), x, out_dtype=torch.float32)
        return dy.bfloat16() @ w.bfloat16(), dw.view(2, *w.shape).sum(0)


def router_logits(x, w):
    """x [N, D] times w [E, D] transposed, in fp32 whatever the type of x. On a CPU rows of zeros
    fill N up to whole 32s: neither here nor in the sigmoid may a row's bits depend on N."""
    if x.is_cuda:
        return _RouterLogits.apply(x, w)
    return F.pad(x, (0, 0, 0, -len(x) % 32)) @ w.T


@quant.has_kernel
def choose(logits, bias, top_k, scale):
    """(experts [N, k], gates [N, k] fp32) for router logits [N, E]: sigmoid scores, chosen on
    score + bias, gates from the unbiased scores."""
    scores = torch.sigmoid(logits)                                               # [N, E]
    experts = (scores.detach() + bias).topk(top_k, -1).indices
    gates = scores.gather(1, experts)
    return experts, gates / gates.sum(-1, keepdim=True) * scale


# ------------------------------------------------------------------------------------------- layers
class Layer(nn.Module):
    """Attention and experts; weights are plain fp32 parameters, the GEMMs are quant.py's. Of the
    routed experts it holds those of this process's place in `mesh`."""

    def __init__(self, cfg, index, recipe, mesh):
        super().__init__()
        self.cfg, self.index, self.recipe, self.mesh = cfg, index, recipe, mesh
        self.gemms = recipe.experts_of(index, cfg.layers)
        self.is_moe = index >= cfg.dense_layers
        D, q_dim, kv_dim = cfg.dim, cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim

        def weight(*shape):
            return nn.Parameter(torch.empty(shape))
        self.attn_norm, self.ffn_norm = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.q_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.k_norm = nn.Parameter(torch.ones(cfg.head_dim))
        self.wq, self.wk, self.wv = weight(q_dim, D), weight(kv_dim, D), weight(kv_dim, D)
        self.wo = weight(D, q_dim)
        if self.is_moe:
            self.router = weight(cfg.experts, D)
            here = cfg.experts // mesh.ep
            self.w1 = weight(here, 2 * cfg.expert_dim, D)            # gate rows, then up rows
            self.w2 = weight(here, D, cfg.expert_dim)
            # Not trained by gradient: moved by the sign of the load error (see balance()).
            self.register_buffer("bias", torch.zeros(cfg.experts))
            self.register_buffer("load", torch.zeros(cfg.experts, dtype=torch.int64),
                                 persistent=False)
        width = cfg.shared * cfg.expert_dim if self.is_moe else cfg.dense_dim
        if width:
            self.v1, self.v2 = weight(2 * width, D), weight(D, width)
        self.has_dense = bool(width)

    def linears(self):
        """name -> Gemms of each weight that a GEMM of quant.py reads."""
        dense = self.recipe.dense
        names = dict(wq=dense, wk=quant.IN_BF16, wv=quant.IN_BF16, wo=dense)
        if self.is_moe:
            names |= dict(w1=self.gemms, w2=self.gemms)
        if self.has_dense:
            names |= dict(v1=dense, v2=dense)
        return names

    def attention(self, x, lin, positions, cos, sin, cache):
        """x, [B, T, D] for each of q, k and v -> [B, T, D]. cache: None, or (keys, values [B, G,
        length, C])."""
        B, T, _ = x[0].shape
        q, k, v = (lin(name, t) for name, t in zip(("wq", "wk", "wv"), x))
        q = norm_rope(q, self.q_norm, cos, sin, self.cfg.norm_eps)
        k = norm_rope(k, self.k_norm, cos, sin, self.cfg.norm_eps)
        v = v.view(k.shape)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                         # [B, H, T, C]
        mask = None
        if cache is not None:
            # Always the whole cache and a mask: static shapes, so that a GPU can replay the step.
            (keys, values), at = cache, positions
            k, v = keys.index_copy_(2, at, k), values.index_copy_(2, at, v)
            mask = torch.arange(keys.shape[2], device=q.device) <= at[:, None]   # [T, length]
            if not q.is_cuda and T < 4:     # a CPU rounds products of 1 to 3 rows differently;
                q, mask = q.repeat(1, 1, 4, 1), mask.repeat(4, 1)   # 4 give training's bits
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None,
                                           enable_gqa=self.cfg.heads != self.cfg.kv_heads)
        if y.shape[2] > T:      # never on a GPU, where a slice costs backward a copy
            y = y[:, :, :T]
        return lin("wo", y.transpose(1, 2).reshape(B, T, -1))

    def moe(self, x, to_router, weights, seed, first_token):
        """x [N, D] -> the gated sum of its k experts [N, D]; the router reads the same numbers."""
        g, wire = self.gemms, self.recipe.combine
        experts, gates = choose(router_logits(to_router, self.router), self.bias, self.cfg.top_k,
                                self.cfg.route_scale)
        experts, gates = experts[:len(x)], gates[:len(x)]        # without router_logits' zeros
        plan = moe_comm.route(experts, self.cfg.experts, self.mesh.expert_group)
        if self.training and torch.is_grad_enabled():
            self.load += plan.load
        ids = (plan.copy + first_token * self.cfg.top_k).int()                   # logical rows
        xe, xq = moe_comm.dispatch(x, plan, g.wire, wire)                        # [R, D]
        # What travels is rounded already: X, and dY where its GEMM reads the wire's format.
        y = quant.grouped_mlp(xe, self.w1, self.w2, plan.counts, g, rounded=wire == g.dy, xq=xq,
                              rows=ids, weights=(weights["w1"], weights["w2"]),
                              seeds=(quant.fold(seed, 1), quant.fold(seed, 2)))
        return moe_comm.combine(y, gates, plan, wire)

    def forward(self, x, deltas, weights, positions, cos, sin, cache, seed, first_token):
        """Add `deltas` to the residual stream x [B, T, D]; return it and what this layer adds."""
        tokens = torch.arange(first_token, first_token + x.shape[0] * x.shape[1], dtype=torch.int32,
                              device=x.device)
        gemms = self.linears()
        seeds = {name: quant.fold(seed, 32 + i) for i, name in enumerate(gemms)}

        def lin(name, x):
            return quant.linear(x, getattr(self, name), gemms[name], weight=weights[name],
                                rows=tokens, seed=seeds[name])
        x, *h = add_norm(x, deltas, self.attn_norm, self.cfg.norm_eps, 3)
        shape, deltas = x.shape, [self.attention(h, lin, positions, cos, sin, cache)]
        x, *h = add_norm(x.flatten(0, 1), [d.flatten(0, 1) for d in deltas], self.ffn_norm,
                         self.cfg.norm_eps, 3)                                   # [N, D]
        deltas = []
        if self.has_dense:
            deltas.append(quant.mlp(h[0], self.v1, self.v2, self.recipe.dense, rows=tokens,
                                    weights=(weights["v1"], weights["v2"]),
                                    seeds=(seeds["v1"], seeds["v2"])).view(shape))
        if self.is_moe:
            deltas.append(self.moe(h[1], h[2], weights, seed, first_token).view(shape))
        return x.view(shape), deltas


class GPT(nn.Module):
    """Byte-level language model. Weights are fp32; `operands` are what the GEMMs read of them, made
    again whenever the weights have changed."""

    def __init__(self, cfg, recipe="bf16", seed=0, mesh=None):
        super().__init__()
        self.cfg, self.recipe, self.mesh = cfg, quant.recipe_of(recipe), mesh or moe_comm.Mesh()
        cfg.check_blocks(self.recipe)
        if cfg.experts % self.mesh.ep:
            raise ValueError(f"--ep {self.mesh.ep}: must divide the number of experts, "
                             f"{cfg.experts}")
        self.embed = nn.Parameter(torch.empty(cfg.vocab, cfg.dim))
        self.blocks = nn.ModuleList(Layer(cfg, i, self.recipe, self.mesh)
                                    for i in range(cfg.layers))
        self.norm = nn.Parameter(torch.ones(cfg.dim))
        self.head = nn.Parameter(torch.empty(cfg.vocab, cfg.dim))
        self.seed = seed                        # of this step's stochastic rounding
        self._versions = self.operands = None
        self.decoders, self.codes = {}, {}
        self.init_weights(seed)

    def init_weights(self, seed):
        """Normal with standard deviation 1/sqrt(inputs); less where the residual stream adds up."""
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                continue
            std = 1.0 if name == "embed" else p.shape[-1] ** -0.5
            if name.endswith(("wo", "w2", "v2")):
                std /= (2 * self.cfg.layers) ** 0.5
            if not self.is_sharded(name):
                nn.init.normal_(p, std=std, generator=generator)
                continue
            whole = torch.empty(self.cfg.experts, *p.shape[1:])      # the same draws at any --ep
            p.data.copy_(self.here(nn.init.normal_(whole, std=std, generator=generator)))

    @staticmethod
    def is_sharded(name):
        """Is this the name of a weight of routed experts, of which each rank holds some?"""
        return name.endswith((".w1", ".w2"))

    def here(self, t):
        """The part of t [E, ...] that belongs to the experts of this process."""
        size = t.shape[0] // self.mesh.ep
        return t[self.mesh.place * size:(self.mesh.place + 1) * size]

    @property
    def dtype(self):
        """Type of the activations."""
        return torch.bfloat16 if self.embed.is_cuda else torch.float32

    def begin_step(self, seed):
        """Set the seed of this step's stochastic rounding. On a GPU its bits are written where a
        captured step reads them; on a CPU they are the same."""
        bits = quant.seed_bits(seed)
        if not self.embed.is_cuda:
            self.seed = bits
        elif torch.is_tensor(self.seed):
            self.seed.fill_(bits)
        else:
            self.seed = torch.full((), bits, dtype=torch.int32, device=self.embed.device)
        self._versions = None           # the second copies are drawn anew; kept codes stay right

    def weights_changed(self):
        """Make the operands anew before they are read. Fused AdamW and checkpoint loading write
        behind autograd's version counter, by which forward() sees other changes."""
        self._versions, self.codes = None, {}

    def keep_codes(self, codes):
        """Let the GEMMs read these codes of the weights, name -> Quantized, until those change:
        decoded numbers rounded again can differ, in blocks whose scale is subnormal."""
        self.codes = {name: (q, self.get_parameter(name)._version) for name, q in codes.items()}

    def codes_of(self, name, gemms):
        """The kept codes of a weight that are still right, or None."""
        if name not in self.codes or not quant.is_fp4(gemms.w):
            return None
        q, version = self.codes[name]
        return q if version == self.get_parameter(name)._version else None

    def stale(self):
        return self._versions != [p._version for p in self.parameters()]

    def prepare(self):
        """Make the GEMM operands of all weights: once per optimizer step. On a GPU their storage
        stays, because captured graphs read it."""
        old = self.operands if self.embed.is_cuda else None

        def one(i, j, name, w, g):
            w = w if w.dim() == 3 else w[None]
            rows = None                                     # by default 0, 1, 2 ...
            if self.is_sharded("." + name) and self.mesh.ep > 1:
                rows = torch.arange(self.cfg.experts * w.shape[1], dtype=torch.int32,
                                    device=w.device)
                rows = self.here(rows.view(-1, w.shape[1]))
            return quant.prepare(w, g, quant.fold(self.seed, i, 16 + j), self.dtype, rows=rows,
                                 packed=self.codes_of(f"blocks.{i}.{name}", g),
                                 into=old[i][name] if old else None)
        operands = [{name: one(i, j, name, getattr(block, name), g)
                     for j, (name, g) in enumerate(block.linears().items())}
                    for i, block in enumerate(self.blocks)]
        operands.append({"head": one(len(self.blocks), 0, "head", self.head, quant.IN_BF16)})
        self.operands, self._versions = operands, [p._version for p in self.parameters()]

    def forward(self, idx, cache=None, first_token=0):
        """Logits [B, T, V] (fp32) of bytes idx [B, T]. first_token: this micro-batch's first token
        in the whole batch; it names the tokens for stochastic rounding."""
        if self.stale():
            self.prepare()
        positions = torch.arange(idx.shape[1], device=idx.device)
        if cache:
            positions += cache.position
            cache.position += idx.shape[1]
        cos, sin = rope_table(positions, self.cfg.head_dim, self.cfg.rope_theta)
        x, deltas = _Embed.apply(self.embed, idx, self.dtype), []                # [B, T, D]
        for i, block in enumerate(self.blocks):
            kv = (cache.keys[i], cache.values[i]) if cache else None
            x, deltas = block(x, deltas, self.operands[i], positions, cos, sin, kv,
                              quant.fold(self.seed, i), first_token)
        _, x = add_norm(x, deltas, self.norm, self.cfg.norm_eps)
        return quant.linear(x, self.head, quant.IN_BF16, weight=self.operands[-1]["head"]).float()

    @torch.no_grad()
    def balance(self, rate):
        """Move each router's bias by `rate` toward an even load of all processes together, then
        forget the load. Returns the largest load over the mean, the worst layer's."""
        worst = [torch.ones((), device=self.embed.device)]
        for block in self.blocks:
            if block.is_moe:
                load = self.mesh.sum(block.load).float()
                worst.append(load.max() / load.mean().clamp(min=1))
                block.bias += rate * (load.mean() - load).sign()
                block.load.zero_()
        return torch.stack(worst).max()

    # ----------------------------------------------------------------------------------- generation
    @torch.no_grad()
    def stream(self, prompt, new, *, temperature=1.0, top_k=0, seed=0, ids=None):
        """Yield (byte [B], log-probability [B]) for each of `new` positions after prompt [B, P].

        temperature 0 is greedy; top_k 0 keeps all bytes. The draw for sequence ids[b] at a position
        depends on (seed, id, position) alone, not on the batch. The log-probability is that of the
        distribution drawn from. Past seq_len the window slides by half.
        """
        if not prompt.numel():
            raise ValueError(f"prompts of shape {tuple(prompt.shape)}: there must be some, of a "
                             "byte at least")
        ids = torch.arange(len(prompt)) if ids is None else ids
        text, limit, decoder = prompt, self.cfg.seq_len, None
        try:
            for n in range(new):
                if decoder is None or decoder.filled == limit:
                    window = text[:, -(limit if decoder is None else -(-limit // 2)):]
                    self.release(decoder)
                    decoder = self.decoder(len(prompt), min(limit, window.shape[1] + new - n),
                                           temperature, top_k)
                    token, logp = decoder.start(window, ids, seed, n)
                else:
                    token, logp = decoder.step()
                text = torch.cat([text, token[:, None]], 1)
                yield token, logp
        finally:
            self.release(decoder)

    def decoder(self, *key):
        """A Decoder for (batch, length, temperature, top_k): a released one, or new."""
        return self.decoders.pop(key, None) or Decoder(self, *key)

    def release(self, decoder):
        """Keep a Decoder for the next batch of its shape: on a GPU its captured step is worth its
        memory. The last ones used are kept."""
        if decoder is not None and self.embed.is_cuda:
            self.decoders[decoder.key] = decoder
            if len(self.decoders) > 8:
                del self.decoders[next(iter(self.decoders))]

    def generate(self, prompt, new, *, stop=None, **kw):
        """(bytes [B, n], log-probabilities [B, n], mask [B, n]) after prompt [B, P], n <= new.

        With `stop` a sequence ends at that byte, which is the last one in its mask; what follows is
        PAD. A CPU then stops early, n < new; a GPU does not wait to ask. Options as in stream().
        """
        if new < 1:
            raise ValueError(f"{new} new bytes: must be at least 1")
        tokens, logps, masks = [], [], []
        alive = torch.ones(prompt.shape[0], dtype=torch.bool, device=prompt.device)
        for token, logp in self.stream(prompt, new, **kw):
            tokens.append(token.where(alive, PAD))
            logps.append(logp.where(alive, 0.0))
            masks.append(alive)
            if stop is not None:
                alive = alive & (token != stop)
                if not alive.is_cuda and not self.mesh.any(alive.any()):
                    break
        return torch.stack(tokens, 1), torch.stack(logps, 1), torch.stack(masks, 1)

    # ----------------------------------------------------------------------------------- accounting
    def parameters_active(self):
        """(all parameters, those that one token uses)."""
        routed = sum(b.w1.numel() + b.w2.numel() for b in self.blocks if b.is_moe)
        others = sum(p.numel() for p in self.parameters()) - routed
        routed *= self.mesh.ep
        return others + routed, others + routed * self.cfg.top_k // self.cfg.experts

    def flops_per_token(self, length=None):
        """Floating-point operations of a training step for each token, forward and backward: 6 for
        each active weight of a matrix, 12 * H * C for each of the length/2 positions it sees on
        average. The same number for every precision."""
        cfg, length = self.cfg, length or self.cfg.seq_len
        active = self.parameters_active()[1] - self.embed.numel()
        return 6 * active + 12 * cfg.layers * cfg.heads * cfg.head_dim * length // 2


class Cache:
    """Keys and values [B, G, length, C] of each layer; how many positions are filled (a tensor)."""

    def __init__(self, model, batch, length):
        cfg, device = model.cfg, model.embed.device
        shape = (batch, cfg.kv_heads, length, cfg.head_dim)
        self.keys = [torch.zeros(shape, dtype=model.dtype, device=device) for _ in model.blocks]
        self.values = [torch.zeros_like(k) for k in self.keys]
        self.position = torch.zeros((), dtype=torch.int64, device=device)


class Decoder:
    """Generation of one batch: all that changes from byte to byte lies on the device, so that a
    GPU can replay the step as one captured graph."""

    def __init__(self, model, batch, length, temperature, top_k):
        self.key = batch, length, temperature, top_k
        self.model, self.temperature, self.top_k = model, temperature, top_k
        self.cache, device = Cache(model, batch, length), model.embed.device
        self.feed = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.ids, self.column = self.feed.int(), torch.zeros(1, dtype=torch.int32, device=device)
        self.seed = torch.zeros((), dtype=torch.int32, device=device)
        # Routing among several processes waits for counts.
        self.replay = quant.captured(self.advance, device, waits=model.mesh.ep > 1)

    def start(self, prompt, ids, seed, column):
        """Read prompts [B, P] and draw the first byte, which is number `column` of its sequence."""
        self.cache.position.zero_()
        self.ids.copy_(ids[:, None])
        self.column.fill_(column)
        self.seed.fill_(quant.seed_bits(seed))
        self.filled = prompt.shape[1]
        return self.advance(prompt)

    def advance(self, feed):
        """Feed bytes [B, T]: (next byte [B], its log-probability [B])."""
        logits = self.model(feed, self.cache)[:, -1]
        token, logp = sample(logits, self.temperature, self.top_k, self.seed, self.ids, self.column)
        self.feed.copy_(token[:, None])
        self.column += 1
        return token, logp

    def step(self):
        self.filled += 1
        if self.model.stale():              # operands are made outside of the graph
            self.model.prepare()
        return tuple(t.clone() for t in self.replay(self.feed))


def sample(logits, temperature, top_k, seed, ids, column):
    """Draw a byte from logits [B, V]: (byte [B], log-probability [B]). ids [B, 1] and column [1]
    name the draw."""
    if temperature == 0:
        logp, token = F.log_softmax(logits, -1).max(-1)
        return token, logp
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, -1).values[:, -1:], -torch.inf)
    logp = F.log_softmax(logits, -1)
    total = logp.exp().cumsum(-1)                                                # [B, V]
    u = quant.uniform(seed, ids, column) * total[:, -1:]                         # [B, 1]
    token = (total <= u).sum(-1).clamp_(max=logits.shape[-1] - 1)
    return token, logp.gather(1, token[:, None])[:, 0]


# --------------------------------------------------------------------------------------- the lesson
def lesson_parameters(model):
    """Where the parameters are, how many a token uses, and what it costs."""
    parts = {"embedding, head": ("embed", "head"), "attention": ("wq", "wk", "wv", "wo"),
             "routed experts": ("w1", "w2"), "shared expert": ("v1", "v2"), "router": ("router",)}
    total, active = model.parameters_active()
    print(f"The model of `python train.py`: {total:,} parameters, of which a token uses {active:,}")
    for part, names in parts.items():
        n = sum(p.numel() for name, p in model.named_parameters() if name.split(".")[-1] in names)
        print(f"  {part:<16}{n:>9,}")
    flops = model.flops_per_token()
    print(f"A training step costs {flops:,} operations a token, "
          f"{flops - 6 * (active - model.embed.numel()):,} of them for attention's scores and sums")


def watch_gemms(model, idx):
    """One forward pass: name -> (shapes of X and Y) for the weights of the first layer."""
    names = {p.data_ptr(): name for name, p in model.blocks[0].named_parameters()}
    found, grouped_linear = {}, quant.grouped_linear

    def watched(x, w, *args, **kw):
        y = grouped_linear(x, w, *args, **kw)
        found[names.get(w.data_ptr())] = x.shape, y.shape
        return y
    quant.grouped_linear = watched
    try:
        model(idx)
    finally:
        quant.grouped_linear = grouped_linear
    return found


def lesson_layer(model, idx):
    """Shapes through one layer, and the format in which a GEMM reads each weight."""
    cfg = model.cfg
    print(f"\nOne layer, {idx.shape[0]} rows of {idx.shape[1]} bytes: {idx.numel()} tokens, each a "
          f"row of X for every weight but\nw1 and w2: there a row is a copy of a token on its way "
          f"to one of its {cfg.top_k} experts, or padding")
    row = "{:<8}{:<16}{:<13}{:<13}{:<7}{:<7}{:<9}{}".format
    print(row("weight", "shape", "X", "Y", "bf16", "mxfp8", "nvfp4", "nvfp4, last layer"))
    gemms = [GPT(cfg, recipe).blocks[0].linears() for recipe in ("bf16", "mxfp8", "nvfp4")]
    gemms.append(GPT(cfg, "nvfp4").blocks[-1].linears())
    for name, shapes in watch_gemms(model, idx).items():
        if name:
            w = getattr(model.blocks[0], name)
            print(row(name, *(" x ".join(map(str, s)) for s in (w.shape, *shapes)),
                      *(g[name].w for g in gemms)))
    print("router, norms, embedding: fp32 throughout; the head as wk")


def lesson_router(model, idx):
    """How the first layer's tokens spread over its experts, before and after balancing."""
    cfg, block = model.cfg, model.blocks[0]
    print(f"\nTokens of each expert ({cfg.top_k} experts a token), the bias that the choice adds")
    for steps in (0, 40):
        for _ in range(steps):
            model(idx)
            model.balance(0.005)
        model.balance(0.0)                              # forgets the load
        model(idx)
        load = block.load.tolist()
        print(f"after {steps} steps of balance(0.005): "
              f"largest over mean {max(load) * len(load) / sum(load):.2f}")
        for e, (n, b) in enumerate(zip(load, block.bias.tolist())):
            bar = "█" * round(40 * n / idx.numel())
            print(f"  expert {e} {n:>4} {bar:<40} bias {b:+.3f}")


def lesson():
    model = GPT(ModelConfig(), "nvfp4")
    idx = torch.tensor(list(__doc__.encode()[:512])).view(4, 128)
    lesson_parameters(model)
    lesson_layer(model, idx)
    lesson_router(model, idx)


if __name__ == "__main__":
    lesson()
