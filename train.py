"""Train a mixture-of-experts language model in bf16, MXFP8 or NVFP4, and teach it by reinforcement.

    python train.py --precision nvfp4          # pretraining, then RL: minutes on a laptop's CPU
    torchrun --nproc_per_node 8 train.py --ep 8 ...         # experts spread over eight GPUs

The story, top to bottom: the configuration; a batch of bytes; one optimizer step; pretraining (text
first, then a mixture with a task until a measured pass rate is reached); RL on that task with
rollouts through the same quantised forward; evaluation; the stages; checkpoints; how a run starts;
the command line.
Every draw is a function of (seed, step, row), so a run that was killed and resumed ends with the
weights of the unbroken one.
"""
import argparse
import codecs
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tqdm import tqdm

import quant
from data import hf
from data.prepare import load_corpus
from data.task import task as find_task, task_rows
from model import GPT, NEWLINE, ModelConfig
from moe_comm import Mesh, join, who

# ------------------------------------------------------------------------------------ configuration


def opt(default, text, choices=None):
    return dataclasses.field(default=default, metadata=dict(help=text, choices=choices))


@dataclass
class Config:
    """All settings; each is a flag of its name. The defaults are the preset `tiny`."""
    precision: str = opt("bf16", "recipe of quant.py", tuple(quant.RECIPES))
    stage: str = opt("all", "what to do; all is pretrain, then rl",
                     ("all", "pretrain", "rl", "eval", "sample", "export"))
    preset: str = opt("", "sizes: tiny on a CPU, small on a GPU unless given",
                      ("tiny", "small", "base"))
    data: str = opt("", "text file, folder, prepared folder or enwik8; "
                        "default: Python's own library")
    out: str = opt("out", "folder of the run: log.jsonl and checkpoints")
    resume: bool = opt(False, "go on from the last checkpoint in --out, with its settings")
    init_from: str = opt("", "start from the weights of another run's folder, "
                             "or of an exported one")
    seed: int = opt(0, "seed of everything")
    device: str = opt("auto", "cpu, cuda or auto")
    backend: str = opt("auto", "who computes", ("auto", "native", "emulated", "reference"))
    threads: int = opt(1, "CPU threads; two are slower than one where the machine is shared")
    ep: int = opt(1, "processes that the experts are spread over; torchrun starts them")
    # model
    dim: int = opt(64, "width of the residual stream")
    layers: int = opt(2, "layers")
    heads: int = opt(4, "attention heads")
    kv_heads: int = opt(2, "key/value heads")
    head_dim: int = opt(0, "width of a head; 0: dim / heads")
    experts: int = opt(4, "routed experts in a layer")
    top_k: int = opt(2, "experts for each token")
    expert_dim: int = opt(64, "width of an expert")
    shared: int = opt(1, "shared experts")
    dense_layers: int = opt(0, "leading layers without experts")
    dense_dim: int = opt(0, "width of their feed-forward; 0: 4 * dim")
    seq_len: int = opt(128, "bytes in a row")
    rope_theta: float = opt(1e4, "base of the rotary positions' wavelengths")
    norm_eps: float = opt(1e-5, "added to the mean square that a norm divides by")
    route_scale: float = opt(1.0, "multiplies the gates of the experts")
    # pretraining
    steps: int = opt(900, "pretraining steps, both phases, at most")
    text_share: float = opt(0.33, "share of the steps on text alone; "
                                  "1: no task, and no RL after it")
    batch: int = opt(32, "rows in a step: tokens per step = batch * seq_len")
    micro_batch: int = opt(0, "rows of a process in one forward pass; 0: all. "
                              "Changes the memory, not the result")
    lr: float = opt(4e-3, "peak learning rate")
    mix_lr: float = opt(0.4, "share of lr at which the text phase ends and the mixture goes on")
    warmup: int = opt(20, "steps of linear warmup")
    weight_decay: float = opt(0.1, "of matrices; gains and norms have none")
    clip: float = opt(1.0, "largest norm of the gradient")
    balance_rate: float = opt(1e-3, "step of the router's bias toward an even load")
    # task and RL
    task: str = opt("sort6", "what RL teaches: sort6, sort4, add2, add3, pick")
    gate: float = opt(0.5, "pass rate at which the mixture ends and RL begins")
    gate_every: int = opt(10, "steps between measurements of that pass rate")
    rl_steps: int = opt(200, "RL steps")
    prompts: int = opt(64, "problems in an RL step")
    group: int = opt(8, "answers to each problem")
    rl_micro_batch: int = opt(0, "answers of a process in one forward pass; 0: all")
    rl_lr: float = opt(1.2e-3, "peak learning rate of RL; falls linearly to 0")
    rl_warmup: int = opt(20, "steps of linear warmup in RL")
    rl_text: float = opt(0.2, "weight of the text loss beside the RL loss")
    rl_text_rows: int = opt(8, "text rows in an RL step")
    ratio_max: float = opt(2.0, "truncation of the importance weight")
    # reporting
    log_every: int = opt(10, "steps between log rows")
    eval_every: int = opt(100, "pretraining steps between evaluations")
    rl_eval_every: int = opt(10, "RL steps between evaluations")
    eval_rows: int = opt(128, "validation rows in an evaluation; four times as many at the end")
    eval_problems: int = opt(512, "held-out problems in an evaluation; twice as many at the end")
    save_every: int = opt(100, "steps between checkpoints")
    # sampling and export
    prompt: str = opt("def ", "text to continue (--stage sample)")
    new: int = opt(400, "bytes to sample")
    temperature: float = opt(0.8, "of --stage sample; 0 is greedy. RL always draws at 1")
    sample_top_k: int = opt(0, "keep the k likeliest bytes; 0: all")
    export_format: str = opt("bf16", "weights to train on, or 4-bit codes as they are (data/hf.py)",
                             ("bf16", "nvfp4"))

    def model(self):
        names = {f.name for f in dataclasses.fields(ModelConfig)}
        return ModelConfig(**{k: v for k, v in vars(self).items() if k in names})


PRESETS = {
    "tiny": {},
    "small": dict(dim=512, layers=8, heads=8, kv_heads=2, experts=16, top_k=4, expert_dim=512,
                  seq_len=512, batch=64, steps=2500, lr=1e-3, warmup=100, eval_every=250,
                  save_every=500, rl_lr=1e-4),
    "base": dict(dim=768, layers=12, heads=12, kv_heads=3, experts=32, top_k=4, expert_dim=512,
                 seq_len=1024, batch=32, steps=20000, lr=6e-4, warmup=500, eval_every=1000,
                 save_every=1000, rl_lr=5e-5),
}
# A run that goes on may change these; everything else is what its checkpoint says.
FREE = {"stage", "data", "out", "resume", "device", "backend", "threads", "steps", "rl_steps",
        "log_every", "eval_every", "rl_eval_every", "eval_rows", "eval_problems", "save_every",
        "micro_batch", "rl_micro_batch", "prompt", "new", "temperature", "sample_top_k",
        "export_format", "ep"}
LOOKING = ("eval", "sample", "export")  # stages that change no weight
FREE_TO_LOOK = FREE | {"seed", "task"}      # ... and may change these too
GATE_PROBLEMS = 256                     # in a measurement of the gate: it decides about the run
PRETRAIN, RL, EVAL = 1, 2, 3            # labels that keep the seeds of the stages apart


class Refused(Exception):
    """Input that the program does not take; its text is the one sentence to print."""
    code = 2


class Failed(Refused):
    """What went wrong while a run was at work: a loss that is no number, a full disk."""
    code = 1


# ---------------------------------------------------------------------------------------------- run
class Run:
    """What a stage works on: the model, its optimizer, the data, the log and where it stands. Each
    process has one; that of the first one leads: it speaks and writes. model: one that is there
    already, which needs no corpus: its rows are given to it."""

    def __init__(self, cfg, device, model=None):
        self.cfg, self.device, self.out = cfg, device, Path(cfg.out)
        self.mesh = Mesh(cfg.ep, device.type) if model is None else model.mesh
        self.leads = self.mesh.rank == 0
        self.corpus, self.task = None, find_task(cfg.task)
        if model is None and cfg.stage not in ("sample", "export"):
            self.corpus = load_corpus(cfg.data or None)
        self.model = model or GPT(cfg.model(), cfg.precision, cfg.seed, self.mesh).to(device)
        self.opt = None
        self.pretrain_update = quant.captured(functools.partial(pretrain_update, self), device,
                                              waits=self.mesh.world > 1)
        self.at = dict(stage="pretrain", step=0, done=False, passed=None,
                       text_steps=text_steps(cfg))
        self.rows, self.stop, self.log = [], False, None

    def begin(self, stage, step):
        """Point the model's stochastic rounding at this step."""
        self.model.begin_step(quant.fold(self.cfg.seed, stage, step))

    def write(self, **row):
        """Append a row to log.jsonl and keep it for the summary."""
        row = {k: float(f"{v:.6g}") if isinstance(v, float) else v
               for k, v in row.items() if v is not None}
        self.rows.append(row)
        try:
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()
        except OSError as error:
            raise Failed(f"{self.out}/log.jsonl could not be written: {error}") from None

    def say(self, text):
        if self.leads:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()

    def bar(self, total, name):
        return tqdm(total=total, initial=self.at["step"], desc=name,
                    disable=not (self.leads and sys.stderr.isatty()))

    def share(self, n, size=0, rank=None):
        """Which of n rows process `rank` (this one) works on, in micro-batches of `size`. Together
        all processes' micro-batches hold neighbouring rows, each process's after the one before."""
        rank, world = self.mesh.rank if rank is None else rank, self.mesh.world
        starts = [(s.start * world + rank * (s.stop - s.start), s.stop - s.start)
                  for s in pieces(n // world, size)]
        return np.concatenate([np.arange(first, first + length) for first, length in starts])

    def gather(self, t, n, size=0):
        """All n rows, in order, from each process's share t."""
        order = np.concatenate([self.share(n, size, r) for r in range(self.mesh.world)])
        return self.mesh.gather(t)[torch.from_numpy(np.argsort(order)).to(t.device)]


def owners(model):
    """Parameter -> (rank that keeps its AdamW state and updates it, group of the ranks that hold
    copies): whole tensors, largest first, each to the one of those ranks with the least so far."""
    mesh, found, load = model.mesh, {}, [0] * model.mesh.world
    names = [(not model.is_sharded(n), -p.numel(), n, p) for n, p in model.named_parameters()]
    for dense, size, _, p in sorted(names, key=lambda item: item[:3]):
        of_experts = mesh.ep > 1 and not dense
        ranks = range(mesh.place, mesh.world, mesh.ep) if of_experts else range(mesh.world)
        owner = min(ranks, key=load.__getitem__)
        first = owner - mesh.place
        for rank in range(first, first + mesh.ep) if of_experts else [owner]:   # all places alike
            load[rank] -= size
        found[p] = owner, mesh.copy_group if of_experts else None
    return found


def adamw(model, weight_decay):
    """AdamW of the parameters that this process owns; matrices decay, gains do not."""
    owner = owners(model)
    mine = [p for p in model.parameters() if owner[p][0] == model.mesh.rank]
    groups = [dict(params=[p for p in mine if p.dim() >= 2], weight_decay=weight_decay),
              dict(params=[p for p in mine if p.dim() < 2], weight_decay=0.0)]
    device = model.embed.device
    lr = torch.zeros((), device=device)         # a tensor, which a captured step reads anew
    opt = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True,
                            capturable=device.type == "cuda")
    for p in mine:                      # from the start: every checkpoint holds the same tensors
        opt.state[p] = dict(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p),
                            exp_avg_sq=torch.zeros_like(p))
    opt.mine, opt.owner = mine, owner
    return opt


def set_lr(run, lr):
    for group in run.opt.param_groups:
        group["lr"].fill_(lr)


def to_owners(collective, tensors, mesh, owner):
    """`collective` (reduce to, or broadcast from, the owner) of each parameter's tensor."""
    if mesh.world > 1:
        for work in [collective(t, owner[p][0], group=owner[p][1], async_op=True)
                     for p, t in tensors.items()]:
            work.wait()


@quant.has_kernel
def clipped_step(norm, opt, clip):
    """A step of AdamW for gradients of this norm, scaled so that it is `clip` at most."""
    torch.nn.utils.clip_grads_with_norm_(opt.mine, clip, norm)
    opt.step()


def update(run, losses):
    """One optimizer step: backward through each micro-batch's share of the loss, clip, AdamW.

    losses: yields scalars that add up, over all processes, to the step's loss. So gradients are
    added, never averaged: those of experts over the copies of them (the rows of a whole expert
    group have already met in each), all others over all processes. Returns (loss, gradient norm).
    """
    mesh, opt, total = run.mesh, run.opt, torch.zeros((), device=run.device)
    for loss in losses:
        loss.backward()
        total += loss.detach()
    to_owners(dist.reduce, {p: p.grad for p in opt.owner}, mesh, opt.owner)
    norm = torch.nn.utils.get_total_norm([p.grad for p in opt.mine]).to(run.device)
    if mesh.world > 1:
        norm = mesh.sum(norm.square()).sqrt()       # each gradient counts once, where its owner is
    clipped_step(norm, opt, run.cfg.clip)
    run.model.weights_changed()             # a kernel runs no hooks
    run.model.zero_grad(set_to_none=True)
    to_owners(dist.broadcast, {p: p.data for p in opt.owner}, mesh, opt.owner)
    return mesh.sum(total), norm


def must_be_finite(run, stats):
    """Stop the run at a loss or gradient that is no number, naming the checkpoint to go back to."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(value := float(stats[name])):
            raise Failed(f"{name} of {run.at['stage']} step {run.at['step']} is {value}: "
                         "the run stops; the last good checkpoint is "
                         f"{latest_checkpoint(run.out)}")


def token_losses(model, rows, first_token=0):
    """-log-probability [B, T] (nats, fp32) of each byte of rows [B, T+1] after the first."""
    logits = model(rows[:, :-1], first_token=first_token)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
        rows.shape[0], -1)


def pieces(n, size):
    size = size or n
    return [slice(i, min(i + size, n)) for i in range(0, n, size)]


def to_device(run, rows):
    return torch.from_numpy(np.ascontiguousarray(rows)).to(run.device).long()


# -------------------------------------------------------------------------------------- pretraining
def text_steps(cfg):
    """Steps on text alone; a run keeps its number when it goes on with other --steps."""
    return max(1, round(min(1, cfg.text_share) * cfg.steps))


def pretrain_lr(cfg, step, text_steps):
    """Warmup, a cosine to mix_lr * lr over the text phase, then a line to a tenth of that."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if step < text_steps or cfg.text_share >= 1:
        done = (step - cfg.warmup) / max(1, text_steps - cfg.warmup)
        return cfg.lr * (cfg.mix_lr + (1 - cfg.mix_lr) * 0.5 * (1 + math.cos(math.pi * done)))
    done = (step - text_steps) / max(1, cfg.steps - text_steps)
    return cfg.lr * cfg.mix_lr * (1 - 0.9 * done)


def pretrain_rows(run, step, mixed):
    """(bytes [batch, seq_len + 1], which count [batch, seq_len], which rows are text [batch, 1]) of
    this process's share of the batch.

    In the mixture every second row holds task lines, of which only the answers count.
    """
    cfg, length = run.cfg, run.cfg.seq_len + 1
    ids = run.share(cfg.batch, cfg.micro_batch)
    is_task = (ids % 2 == 1) & mixed
    rows = run.corpus.batch(cfg.seed, "train", step, ids, length)
    mask = np.ones((len(ids), length), bool)
    if mixed:
        rows = rows.copy()
        rows[is_task], mask[is_task] = task_rows(run.task, cfg.seed, step, ids[is_task], length)
    return [to_device(run, t) for t in (rows, mask[:, 1:], ~is_task[:, None])]


def pretrain_losses(run, rows, mask, is_text, sums):
    """Yield each micro-batch's share of the mean loss over the bytes that count; add the losses of
    text and of task to sums [2]."""
    cfg, total = run.cfg, run.mesh.sum(mask.sum())
    ids = run.share(cfg.batch, cfg.micro_batch)
    for s in pieces(len(ids), cfg.micro_batch):
        nll = token_losses(run.model, rows[s], int(ids[s.start]) * cfg.seq_len) * mask[s]
        text = (nll.detach() * is_text[s]).sum()
        sums += torch.stack([text, nll.detach().sum() - text])
        yield nll.sum() / total


def pretrain_update(run, rows, mask, is_text):
    """One step on these rows: what the log says of it, on the device. Static shapes and no wait for
    the device anywhere, so that a GPU can capture it."""
    sums = torch.zeros(2, device=rows.device)
    loss, norm = update(run, pretrain_losses(run, rows, mask, is_text, sums))
    load = run.model.balance(run.cfg.balance_rate)
    text, task = (mask * is_text).sum(), (mask * (1 - is_text)).sum()
    text, task, *sums = run.mesh.sum(torch.stack([text, task, *sums.double()]))
    return dict(loss=loss, text_loss=sums[0] / text, task_loss=sums[1] / task, grad_norm=norm,
                load=load)


def pretrain_step(run, step, mixed, lr):
    """One step on text, or on text and task."""
    run.begin(PRETRAIN, step)
    set_lr(run, lr)
    stats = run.pretrain_update(*pretrain_rows(run, step, mixed))
    run.model.weights_changed()
    return stats if mixed else stats | dict(task_loss=None)


def pretrain(run):
    """Text until the loss is low, then half text, half task until the pass rate is `gate`."""
    cfg, at = run.cfg, run.at
    text = cfg.steps if cfg.text_share >= 1 else at["text_steps"]
    clock, gate_seconds = Clock(run, cfg.batch * cfg.seq_len), 0.0
    bar = run.bar(cfg.steps, "pretrain")
    if at["step"] >= cfg.steps and not at["done"]:      # resumed with no more --steps than it made
        at["done"] = True
        evaluate(run, "pretrain", at["step"], final=True)
    while not at["done"]:
        step, mixed = at["step"], at["step"] >= text
        stats = pretrain_step(run, step, mixed, lr := pretrain_lr(cfg, step, text))
        at["step"] = step = step + 1
        bar.update()
        if mixed and (step - text) % cfg.gate_every == 0:
            # On problems of the training split: when to stop must not depend on held-out ones.
            start = time.perf_counter()
            with clock.paused():
                at["passed"] = pass_rate(run, step, GATE_PROBLEMS, split="train")
            gate_seconds += time.perf_counter() - start
            at["done"] = at["passed"] >= cfg.gate
        at["done"] |= step == cfg.steps
        report, due = (step % n == 0 or at["done"] for n in (cfg.log_every, cfg.save_every))
        if report or due or run.stop or run.device.type == "cpu":   # a GPU would be waited for
            must_be_finite(run, stats)
        if report:
            row = {k: float(v) for k, v in stats.items() if v is not None}
            run.write(stage="pretrain", step=step, phase="mix" if mixed else "text", lr=lr, **row,
                      gate=at["passed"], eval_seconds=gate_seconds or None, **clock.lap(step))
            gate_seconds = 0.0
            bar.set_postfix_str(f"loss {row['loss']:.3f}")
        if step % cfg.eval_every == 0 or at["done"]:
            with clock.paused():
                evaluate(run, "pretrain", step, final=at["done"])
        if not settle(run, due):
            break
    bar.close()


# ----------------------------------------------------------------------------------------------- RL
def rollout(run, step):
    """(prompts [N, P], answers [N, A], log-probabilities, mask, rewards [N]) at temperature 1: the
    `group` answers of a problem lie side by side, and this process has its share of them. What is
    drawn is what is scored."""
    cfg, task = run.cfg, run.task
    problems = task.problems(cfg.seed, "train", step * cfg.prompts + np.arange(cfg.prompts))
    ids = run.share(cfg.prompts * cfg.group, cfg.rl_micro_batch)
    problems = problems.repeat(cfg.group, 0)[ids]
    seed = quant.fold(cfg.seed, RL, step)
    prompts = to_device(run, problems)
    parts = [run.model.generate(prompts[s], task.answer_len, stop=NEWLINE, seed=seed,
                                ids=torch.from_numpy(ids[s]))
             for s in pieces(len(ids), cfg.rl_micro_batch)]
    width = max(part[0].shape[1] for part in parts)     # on a CPU a piece ends with its last answer
    answers, logp, mask = (torch.cat([F.pad(t, (0, width - t.shape[1])) for t in column])
                           for column in zip(*parts))
    rewards = task.rewards(problems, answers.cpu().numpy().astype(np.uint8))
    return prompts, answers, logp, mask, torch.from_numpy(rewards).to(run.device)


def advantages(rewards, group):
    """Leave-one-out: r_i minus the mean of the others in its group; 0 where all are equal."""
    r = rewards.view(-1, group)
    return ((r - r.mean(1, keepdim=True)) * (group / (group - 1))).flatten()


def policy_terms(model, prompts, answers, first_token=0):
    """(log-probability, entropy) [N, A] of each answer byte under the trainer's forward pass."""
    rows = torch.cat([prompts, answers], 1)
    logits = model(rows[:, :-1], first_token=first_token)[:, prompts.shape[1] - 1:]
    logp = F.log_softmax(logits, -1)
    chosen = logp.gather(-1, answers[..., None])[..., 0]
    return chosen, -(logp.detach().exp() * logp.detach()).sum(-1)


def rl_losses(run, step, batch, advantage, seen):
    """Yield -sum(w * A * log pi) / N for each micro-batch, N the tokens of the whole step, then the
    text loss. w = min(pi_train / pi_rollout, ratio_max) without gradient; it is 1 where both
    forward passes agree. `seen` collects each micro-batch's log-probabilities and entropies."""
    cfg, (prompts, answers, rollout_logp, mask, _) = run.cfg, batch
    length, total = prompts.shape[1] + answers.shape[1] - 1, run.mesh.sum(mask.sum())
    n = cfg.prompts * cfg.group
    ids = run.share(n, cfg.rl_micro_batch)
    for s in pieces(len(ids), cfg.rl_micro_batch):
        logp, entropy = policy_terms(run.model, prompts[s], answers[s], int(ids[s.start]) * length)
        w = (logp.detach() - rollout_logp[s]).exp().clamp(max=cfg.ratio_max)
        seen.append((logp.detach(), entropy))
        yield -(w * advantage[s, None] * logp * mask[s]).sum() / total
    if cfg.rl_text:
        ids = run.share(cfg.rl_text_rows)
        rows = run.corpus.batch(cfg.seed, "train", cfg.steps + step, ids, cfg.seq_len + 1)
        first = n * length + int(ids[0]) * cfg.seq_len
        nll = token_losses(run.model, to_device(run, rows), first)
        yield cfg.rl_text * nll.mean() / run.mesh.world


def agreement(rollout_logp, logp, mask):
    """How far the trainer's log-probabilities are from the rollout's, over the masked tokens.
    k1, k3: estimators of KL(rollout || trainer) (Schulman, "Approximating KL divergence")."""
    d = (logp - rollout_logp)[mask]
    return dict(k1=-d.mean(), k3=(d.exp() - 1 - d).mean(), logp_diff=d.abs().mean(),
                logp_diff_median=d.abs().median(), logp_diff_max=d.abs().max(),
                logp_diff_share=(d.abs() > 1e-4).float().mean())


def rl_step(run, step, lr):
    """Rollout, reward, one update. Returns the figures of the step, on the device."""
    cfg = run.cfg
    run.begin(RL, step)
    start = time.perf_counter()
    batch = rollout(run, step)
    prompts, answers, rollout_logp, mask, rewards = batch
    middle, n = time.perf_counter(), cfg.prompts * cfg.group
    rewards = run.gather(rewards, n, cfg.rl_micro_batch)
    advantage, seen = advantages(rewards, cfg.group), []
    if not bool(advantage.any()):
        # No signal. A step would still move the weights, by Adam's momentum and the text loss.
        with torch.no_grad():
            seen = [policy_terms(run.model, prompts[s], answers[s])
                    for s in pieces(len(prompts), cfg.rl_micro_batch)]
        loss = norm = torch.zeros(())
    else:
        set_lr(run, lr)
        ids = torch.from_numpy(run.share(n, cfg.rl_micro_batch)).to(run.device)
        loss, norm = update(run, rl_losses(run, step, batch, advantage[ids], seen))
    logp, entropy, rollout_logp, mask, answers = (
        run.mesh.gather(t) for t in (*(torch.cat(t) for t in zip(*seen)), rollout_logp, mask,
                                     answers))
    groups = rewards.view(-1, cfg.group).mean(1)
    stats = dict(loss=loss, reward=rewards.mean(), reward_std=rewards.std(),
                 all_wrong=(groups == 0).float().mean(), all_right=(groups == 1).float().mean(),
                 entropy=entropy[mask].mean(), **agreement(rollout_logp, logp, mask),
                 truncated=((logp - rollout_logp).exp()[mask] > cfg.ratio_max).float().mean(),
                 grad_norm=norm,
                 no_stop=((answers == NEWLINE) & mask).any(1).logical_not().float().mean(),
                 load=run.model.balance(0.0),        # the routers' bias is frozen in RL
                 rollout_seconds=middle - start, train_seconds=time.perf_counter() - middle)
    return {k: float(v) for k, v in stats.items()}


def reinforce(run):
    """RL from the pretrained weights: fresh optimizer, learning rate falling to 0."""
    cfg, at = run.cfg, run.at
    tokens = cfg.prompts * cfg.group * (run.task.prompt_len + run.task.answer_len - 1)
    clock = Clock(run, tokens)
    bar, apart = run.bar(cfg.rl_steps, "rl"), False
    if at["step"] == 0:
        with clock.paused():
            evaluate(run, "rl", 0, final=True)
    while at["step"] < cfg.rl_steps:
        step = at["step"]
        lr = cfg.rl_lr * min(1, (step + 1) / cfg.rl_warmup) * (1 - step / cfg.rl_steps)
        stats = rl_step(run, step, lr)
        at["step"] = step = step + 1
        at["done"] = step == cfg.rl_steps
        bar.update()
        must_be_finite(run, stats)
        if stats["k3"] > 1e-3 and not apart:
            run.say(f"rl step {step}: k3 {stats['k3']:.2g} between rollout and trainer is above "
                    "1e-3: their probabilities differ (said once; the log has every step's)")
        apart |= stats["k3"] > 1e-3
        run.write(stage="rl", step=step, lr=lr, **stats, **clock.lap(step))
        bar.set_postfix_str(f"reward {stats['reward']:.2f}")
        if step % cfg.rl_eval_every == 0 or at["done"]:
            with clock.paused():
                evaluate(run, "rl", step, final=at["done"])
        if not settle(run, step % cfg.save_every == 0 or at["done"]):
            break
    bar.close()


# --------------------------------------------------------------------------------------- evaluation
@torch.no_grad()
def text_bpb(run, rows):
    """Bits per byte on `rows` fixed windows of the validation text."""
    total = torch.zeros((), dtype=torch.float64)
    for s in pieces(rows, 64):
        ids, real = spread(run, s)
        batch = run.corpus.batch(0, "val", 0, ids, run.cfg.seq_len + 1)
        losses = token_losses(run.model, to_device(run, batch)).double()
        total += losses[:real].sum().cpu()
    return float(run.mesh.sum(total)) / (rows * run.cfg.seq_len) / math.log(2)


def spread(run, s):
    """(numbers of this process's rows of slice s, how many of them are real): every process gets
    as many, the last row again where there are too few."""
    world, n = run.mesh.world, s.stop - s.start
    size = -(-n // world)
    first = run.mesh.rank * size
    ids = s.start + np.minimum(np.arange(first, first + size), n - 1)
    return ids, max(0, min(size, n - first))


def attempt(run, problems, draw, **kw):
    """(answers, rewards) [n] to prompts [n, P]; `draw` names the random numbers."""
    answers, rewards = [], []
    for s in pieces(len(problems), 256):
        ids, _ = spread(run, s)
        out, _, _ = run.model.generate(to_device(run, problems[ids]), run.task.answer_len,
                                       stop=NEWLINE, seed=quant.fold(run.cfg.seed, EVAL, draw),
                                       ids=torch.from_numpy(ids), **kw)
        out = run.mesh.gather(out)[:s.stop - s.start].cpu().numpy().astype(np.uint8)
        out = np.pad(out, ((0, 0), (0, run.task.answer_len - out.shape[1])))
        answers.append(out)
        rewards.append(run.task.rewards(problems[s], out))
    return np.concatenate(answers), np.concatenate(rewards)


def pass_rate(run, draw, n, split="test", **kw):
    """Share of n problems answered right; the training split's are new ones at every draw."""
    ids = np.arange(n) + (0 if split == "test" else (draw << 20))
    return float(attempt(run, run.task.problems(0, split, ids), draw, **kw)[1].mean())


def evaluate(run, stage, step, final=False):
    """Bits per byte, and pass rates on held-out problems; a `final` one with more of everything."""
    cfg, start = run.cfg, time.perf_counter()
    bpb = text_bpb(run, cfg.eval_rows * (4 if final else 1))
    row = dict(val_loss=bpb * math.log(2), bpb=bpb)
    if stage == "rl" or final and cfg.text_share < 1:
        n = cfg.eval_problems * (2 if final else 1)
        problems = run.task.problems(0, "test", np.arange(n))
        answers, rewards = attempt(run, problems, step)
        row |= dict(pass_rate=float(rewards.mean()), problems=n)
        if final:
            row |= dict(greedy=pass_rate(run, step, n, temperature=0),
                        pass_at_8=pass_at(run, step, 8, n // 4))
            show_answers(run, problems, answers, rewards)
    run.write(stage=stage, step=step, **row, eval_seconds=time.perf_counter() - start)
    shown = {"bpb": "bits per byte", "pass_rate": "pass rate", "greedy": "greedy",
             "pass_at_8": "pass@8"}
    run.say(f"{stage:8s} {step:5d}  "
            + "  ".join(f"{shown[k]} {row[k]:.3f}" for k in shown if k in row))


def pass_at(run, draw, k, n):
    """Share of n held-out problems of which at least one of k answers is right."""
    problems = run.task.problems(0, "test", np.arange(n)).repeat(k, 0)
    return float(attempt(run, problems, draw)[1].reshape(n, k).max(1).mean())


def show_answers(run, problems, answers, rewards):
    """A few answers, right and wrong, as they were sampled."""
    for right in (1, 0):
        for i in np.flatnonzero(rewards == right)[:2]:
            text = (problems[i].tobytes() + answers[i].tobytes().rstrip(b"\0")).decode("latin-1")
            run.say(f"           {'right' if right else 'wrong'}: {text!r}")


class Clock:
    """Speed since the last lap: tokens/s, share of the peak, peak memory, seconds. Evaluations in
    between are left out."""
    PEAK = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2.25e15,
            "GB200": 2.5e15, "B300": 2.25e15, "GB300": 2.5e15}                  # bf16, dense

    def __init__(self, run, tokens):
        self.run, self.tokens, self.step = run, tokens, run.at["step"]
        name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else ""
        self.peak = max(((len(k), v) for k, v in self.PEAK.items() if k in name), default=(0, 0))[1]
        self.start = self.now()

    def now(self):
        """The time at which all work so far is done."""
        if self.run.device.type == "cuda":
            torch.cuda.synchronize(self.run.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def paused(self):
        """Leave out the time of what is done meanwhile."""
        before = self.now()
        yield
        self.start += self.now() - before

    def lap(self, step):
        now = self.now()
        seconds = now - self.start
        speed = (step - self.step) * self.tokens / max(seconds, 1e-9)
        self.start, self.step = now, step
        out = dict(seconds=seconds, tokens_per_s=speed)
        if self.peak:
            out["mfu"] = speed * self.run.model.flops_per_token() / self.peak / self.run.mesh.world
        if self.run.device.type == "cuda":
            out["peak_memory"] = torch.cuda.max_memory_allocated(self.run.device)
        return out


# ------------------------------------------------------------------------------------------- stages
def train(run):
    """The stages that change weights, one after the other."""
    cfg, at = run.cfg, run.at
    if at["stage"] == "pretrain" and cfg.stage in ("all", "pretrain"):
        run.opt = run.opt or adamw(run.model, cfg.weight_decay)
        pretrain(run)
        if run.stop:
            return
        summary(run, "pretrain")
    if cfg.stage == "pretrain" or cfg.text_share >= 1 and cfg.stage == "all":
        return
    if at["stage"] == "pretrain":
        if cfg.stage == "all" and (at["passed"] or 0) < cfg.gate:
            run.say(f"the gate of {cfg.gate} was not reached ({at['passed']}): "
                    "RL starts from what is there")
        run.at = dict(at, stage="rl", step=0, done=False)
        run.opt = adamw(run.model, 0.0)
        save(run)       # so that --resume goes on with RL from here on
    reinforce(run)
    if not run.stop:
        summary(run, "rl")


def go(run, state):
    """Do the stage."""
    if run.cfg.stage in ("sample", "export"):
        (sample_text if run.cfg.stage == "sample" else export)(run)
        return 0
    introduce(run)
    if run.cfg.stage == "eval":
        run.log = open(os.devnull, "w")
        evaluate(run, run.at["stage"] if state else "eval", run.at["step"], final=True)
        return 0
    with locked(run), stopped_by_signals(run):
        open_log(run, state)
        if not state:
            run.opt = adamw(run.model, run.cfg.weight_decay)
            save(run)       # so that a run killed at its first step can be resumed
        train(run)
    if run.stop:
        start = f"torchrun --nproc_per_node {run.mesh.world}" if run.mesh.world > 1 else "python"
        run.say(f"saved {latest_checkpoint(run.out)}; go on with: {start} train.py --resume "
                f"--out {run.cfg.out}")
        return 130
    return 0


@contextlib.contextmanager
def locked(run):
    """Hold OUT/lock while this run is at work: two that write there would spoil each other's log
    and checkpoints. The system lets go of it when the process ends, however that is."""
    if not run.leads:
        yield
        return
    try:
        run.out.mkdir(parents=True, exist_ok=True)
        file = open(run.out / "lock", "w")
    except OSError as error:
        raise Refused(f"--out {run.out}: no run can be kept there: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(f"--out {run.out}: another process is at work there") from None
        yield


def introduce(run):
    cfg, (total, active) = run.cfg, run.model.parameters_active()
    run.say(f"{cfg.precision}, {total:,} parameters, {active:,} active, "
            f"{cfg.batch * cfg.seq_len:,} tokens a step, "
            f"text {run.corpus.name} ({len(run.corpus.train) / 1e6:.1f} MB, a byte bigram has "
            f"{run.corpus.bigram_bpb:.3f} bits per byte)")
    many = (f"{run.mesh.world} processes, experts spread over {cfg.ep}, "
            if run.mesh.world > 1 else "")
    run.say(f"{many}{device_name(run)}, backend {backend_sentence(run.device)}")


def summary(run, stage):
    """One line for a finished stage, and its curve."""
    rows = [r for r in run.rows if r.get("stage") == stage]
    evals = [r for r in rows if "bpb" in r]
    steps = [r for r in rows if "loss" in r]
    if not evals or not steps:
        return
    seconds, last = sum(r.get("seconds", 0) + r.get("eval_seconds", 0) for r in rows), evals[-1]
    text = f"{stage}: {run.at['step']} steps in {seconds:.0f} s, {last['bpb']:.3f} bits per byte"
    text += (f" (bigram {run.corpus.bigram_bpb:.3f})" if stage == "pretrain" else
             f" (before {evals[0]['bpb']:.3f})")
    if stage == "pretrain" and run.at.get("passed") is not None:
        reached = run.at["passed"] >= run.cfg.gate
        text += f", pass rate {last['pass_rate']:.3f}" + (
            "" if reached else f": the gate of {run.cfg.gate} was not reached")
    if stage == "rl":
        tail = [r["pass_rate"] for r in evals[1:] or evals][-3:]
        text += (f", pass rate {evals[0]['pass_rate']:.3f} -> {sum(tail) / len(tail):.3f} "
                 f"(mean of the last {len(tail)}){sharpening(evals)}")
    curve = [r["reward"] if stage == "rl" else r["loss"] for r in steps]
    run.say(f"{text}\n{'reward' if stage == 'rl' else 'loss'} "
            f"{curve[0]:.2f} {sparkline(curve)} {curve[-1]:.2f}")


def sharpening(evals):
    """Did RL teach problems that eight tries could not solve, or make sure of those they could?"""
    first, last = evals[0].get("pass_at_8"), evals[-1].get("pass_at_8")
    if first is None or last is None:
        return ""
    word = ": learning" if last - first > 0.05 else ""
    if not word and evals[-1]["pass_rate"] - evals[0]["pass_rate"] > 0.05:
        word = ": sharpening"
    return f", pass@8 {first:.3f} -> {last:.3f}{word}"


def sparkline(values, width=40):
    """Up to `width` block characters for a curve."""
    size = -(-len(values) // width)
    means = [sum(values[i:i + size]) / len(values[i:i + size]) for i in range(0, len(values), size)]
    low, span = min(means), (max(means) - min(means)) or 1
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((v - low) / span * 8))] for v in means)


def sample_text(run):
    """Continue the prompt, writing bytes as they come; the speed goes to stderr."""
    cfg, write, count = run.cfg, byte_writer(sys.stdout) if run.leads else lambda *_, **__: None, 0
    prompt = os.fsencode(cfg.prompt) or b"\n"        # what was typed, also where it is no UTF-8
    start = time.perf_counter()
    try:
        write(prompt)
        for token, _ in run.model.stream(torch.tensor([list(prompt)], device=run.device), cfg.new,
                                         temperature=cfg.temperature, top_k=cfg.sample_top_k,
                                         seed=cfg.seed):
            write(bytes(token.tolist()))
            count += 1
        write(b"", final=True)
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:     # the reader has seen enough; Python would flush again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if run.leads:
        print(f"\n[{count} bytes, {count / (time.perf_counter() - start):.0f} bytes/s]",
              file=sys.stderr)


def byte_writer(out):
    """write(data) for a stream of text: bytes as they are into a file or a pipe. A terminal gets
    what they spell, with U+FFFD for what is no UTF-8 and for control characters, which could
    rewrite the screen."""
    def raw(data, final=False):
        out.buffer.write(data)
        out.buffer.flush()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    encoding = out.encoding or "utf-8"

    def spelled(data, final=False):
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd"
                       for c in decoder.decode(data, final))
        out.write(text.encode(encoding, "replace").decode(encoding))
        out.flush()
    return spelled if out.isatty() else raw


def export(run):
    """Write the model as a folder for other programs, beside the run's checkpoints."""
    form = run.cfg.export_format
    run.say(refusing(hf.export, run.model, run.out / f"export-{form}", form))


# -------------------------------------------------------------------------------------- checkpoints
# DIR/checkpoints/STAGE-STEP/: tensors by torch.distributed.checkpoint, run.json for all the rest,
# and a manifest of sha256 sums, because the library loads a flipped bit without a word. The folder
# is written under another name and renamed when it is whole, so a kill leaves the previous one.
def checkpoints(out):
    """Whole checkpoints below a run's folder, oldest first."""
    found = [p for p in (Path(out) / "checkpoints").glob("*")
             if re.fullmatch(r"(pretrain|rl)-\d+", p.name)]
    return sorted(found, key=lambda p: (p.name.startswith("rl"), int(p.name.split("-")[1])))


def latest_checkpoint(out):
    return next(iter(checkpoints(out)[::-1]), None)


def tensors_of(model, opt):
    """name -> tensor of all that a run must remember: weights, router biases, AdamW's moments of
    the parameters that this process owns. Of the experts' it says which part of the whole each
    is: then any number of processes can read what any number wrote."""
    def whole(name, t):
        if model.mesh.ep == 1 or t.dim() == 0 or not model.is_sharded(name):
            return t
        from torch.distributed.tensor import DTensor, Shard
        return DTensor.from_local(t, model.mesh.devices["expert"], [Shard(0)], run_check=False)
    found = {f"model.{k}": whole(k, v) for k, v in model.state_dict().items()}
    for name, p in model.named_parameters():
        for key, value in opt.state.get(p, {}).items() if opt else ():
            found[f"adamw.{name}.{key}"] = whole(name, value)
    return found


def dcp(verb, tensors, path, mesh):
    """torch.distributed.checkpoint's save or load; alone it warns of that, which is meant."""
    import torch.distributed.checkpoint as library
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(library, verb)(tensors, checkpoint_id=str(path), no_dist=mesh.world == 1)


def reason(error):
    """The last line of an error's text, which says most; its kind where there is none."""
    if lost_a_process(error):
        return "another process of the job has ended"
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def lost_a_process(error):
    return who()[1] > 1 and (isinstance(error, dist.DistBackendError) or "gloo" in str(error))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def save(run):
    """Write a checkpoint, then delete the older ones of this stage. All processes write their
    tensors; the one that leads does the rest."""
    path = run.out / "checkpoints" / f"{run.at['stage']}-{run.at['step']:06d}"
    temporary = path.with_suffix(".tmp")
    try:
        if run.leads:
            shutil.rmtree(temporary, ignore_errors=True)
            os.fsync(run.log.fileno())
        run.mesh.wait()
        dcp("save", tensors_of(run.model, run.opt), temporary, run.mesh)
        if run.leads:
            seal(run, temporary, path)
        run.mesh.wait()
    except BaseException as error:      # the library's own error on a full disk is no Exception
        if run.leads:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Failed(f"the checkpoint of {run.at['stage']} step {run.at['step']} could not be "
                     f"written ({reason(error)}); the last good one is "
                     f"{latest_checkpoint(run.out) or 'none'}") from None
    for old in checkpoints(run.out)[:-1] if run.leads else ():
        if old.name.startswith(run.at["stage"]):
            shutil.rmtree(old)


def seal(run, temporary, path):
    """Add run.json and the manifest to a checkpoint's tensors, and give it its name."""
    state = dict(config=dataclasses.asdict(run.cfg), at=run.at, log_bytes=run.log.tell(),
                 corpus=run.corpus.sha256)
    (temporary / "run.json").write_text(json.dumps(state, indent=1))
    sums = {p.name: digest(p) for p in sorted(temporary.iterdir())}
    (temporary / "manifest.json").write_text(json.dumps(sums, indent=1))
    for p in temporary.iterdir():
        with open(p, "rb") as f:
            os.fsync(f.fileno())
    shutil.rmtree(path, ignore_errors=True)
    os.replace(temporary, path)


def read_checkpoint(path):
    """run.json of a checkpoint whose sums are right; Refused where they are not. Of several
    processes each checks its part of the files, and all hear of a fault."""
    rank, world = who()
    fault = state = None
    try:
        sums = json.loads((path / "manifest.json").read_text())
        fault = next((f"{n} is not what was written" for n, s in sorted(sums.items())[rank::world]
                      if not (path / n).is_file() or digest(path / n) != s), None)
        state = json.loads((path / "run.json").read_text())
    except (OSError, ValueError) as error:
        fault = fault or str(error)
    faults = [fault]
    if world > 1:
        dist.all_gather_object(faults := [None] * world, fault)
    if any(faults):
        raise Refused(f"checkpoint {path} is damaged: {next(filter(None, faults))}; delete that "
                      "folder to go on from an earlier one or to start anew")
    return state


def load_tensors(path, model, opt=None):
    """Fill model (and optimizer) in place from a checkpoint whose sums were checked."""
    try:
        dcp("load", tensors_of(model, opt), path, model.mesh)
    except BaseException as error:      # of many kinds, one no Exception; all mean the same here
        if isinstance(error, KeyboardInterrupt):
            raise
        raise Refused(f"checkpoint {path} is of another model: {reason(error)}") from None
    model.weights_changed()


def settle(run, due):
    """After a step: save where one is due or the user asked to stop; False means stop now."""
    run.stop = run.mesh.any(run.stop)           # a signal reaches processes at different steps
    if due or run.stop:
        save(run)
    return not run.stop


# ----------------------------------------------------------------------------------- starting a run
def goes_on(cfg):
    """Does the run go on from a checkpoint in --out?"""
    return cfg.resume or (cfg.stage in ("rl", *LOOKING) and not cfg.init_from)


def open_run(cfg, given, device):
    """The run that the flags ask for: a new one, or one that goes on from its checkpoint."""
    path = refusing(latest_checkpoint, cfg.out)
    if Path(cfg.out).exists() and not Path(cfg.out).is_dir():
        raise Refused(f"--out {cfg.out}: is a file, and a run needs a folder")
    if goes_on(cfg) and not path:
        raise Refused(f"{cfg.out} holds no checkpoint: " + (
            "--resume has nothing to go on from" if cfg.resume else
            f"--stage {cfg.stage} needs a trained model there, or --init-from"))
    if (cfg.data and not goes_on(cfg) and cfg.stage not in LOOKING
            and Path(cfg.data).resolve() == Path(cfg.out).resolve()):
        raise Refused(f"--out {cfg.out}: is the text itself, which the run's log would change")
    # A log alone is a run that was killed before it had begun.
    if not goes_on(cfg) and path and cfg.stage not in ("eval", "sample"):
        raise Refused(f"{cfg.out} holds another run: use --resume to go on with it, "
                      "or another --out")
    state = None
    if goes_on(cfg):
        cfg, state = continued(cfg, given, path)
    elif cfg.init_from:
        cfg = shape_from(cfg, given)
    check(cfg)
    torch.set_num_threads(cfg.threads)
    keep_freed_memory()
    try:
        choose_backend(cfg.backend, device)
        run = Run(cfg, device)
        for split in ("train", "val") if run.corpus else ():
            run.corpus.batch(0, split, 0, np.arange(1), cfg.seq_len + 1)
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None
    check_world(run)
    if run.corpus and run.task.prompt_len + run.task.answer_len > cfg.seq_len:
        raise Refused(f"--seq-len {cfg.seq_len}: task {cfg.task} needs at least "
                      f"{run.task.prompt_len + run.task.answer_len}")
    if state:
        if cfg.stage not in LOOKING and state["corpus"] != run.corpus.sha256:
            raise Refused(f"the text of {cfg.data or 'the default corpus'} is not the one that the "
                          f"run in {cfg.out} was trained on; its sha256 differs")
        run.at = at = state["at"]
        # More --steps than it made reopen a pretraining that ended without reaching the gate.
        if (at["stage"] == "pretrain" and cfg.stage in ("all", "pretrain")
                and "steps" in given and at["step"] < cfg.steps):
            at["done"] = at["passed"] is not None and at["passed"] >= cfg.gate
        fresh = at["stage"] == "pretrain" and at["done"]             # RL starts with new moments
        run.opt = adamw(run.model, 0.0 if run.at["stage"] == "rl" else cfg.weight_decay)
        load_tensors(path, run.model, None if cfg.stage in LOOKING or fresh else run.opt)
    elif cfg.init_from:
        load_init(run)
        run.at["done"] = cfg.stage == "rl"
    return run, state


def continued(cfg, given, path):
    """The configuration of a run that goes on: its checkpoint's, but for what is given anew."""
    state = read_checkpoint(path)
    known = {f.name for f in dataclasses.fields(Config)}
    old = Config(**{k: v for k, v in state["config"].items() if k in known})
    free = FREE_TO_LOOK if cfg.stage in LOOKING else FREE
    for name in sorted(given - free):
        if getattr(cfg, name) != getattr(old, name):
            raise Refused(f"{flag(name)} {getattr(cfg, name)}: the run in {cfg.out} has "
                          f"{getattr(old, name)}; leave the flag out, or start anew in "
                          "another --out")
    if (state["at"]["stage"] == "rl" and cfg.stage not in LOOKING
            and "steps" in given and cfg.steps != old.steps):
        raise Refused(f"--steps {cfg.steps}: the run in {cfg.out} is past its pretraining of "
                      f"{old.steps} steps; --rl-steps is what can be changed")
    state["at"].setdefault("text_steps", text_steps(old))       # checkpoints of before lack it
    changed = {n: getattr(cfg, n) for n in given & free | {"out", "resume"}}
    if who()[1] % old.ep:               # other processes than before: a mesh that fits any number
        changed.setdefault("ep", 1)
    return dataclasses.replace(old, **changed), state


def shape_from(cfg, given):
    """cfg with the shape of the model in --init-from, a run or an exported folder; and with its
    precision where no weight will change. Only a row's length is free: no weight depends on it."""
    path = refusing(latest_checkpoint, cfg.init_from)
    if hf.is_folder(cfg.init_from):
        old = refusing(hf.read_config, cfg.init_from)
    elif path:
        old = read_checkpoint(path)["config"]
    else:
        raise Refused(f"--init-from {cfg.init_from}: neither a checkpoint nor a config.json there")
    names = {f.name for f in dataclasses.fields(ModelConfig)} & set(old)
    names -= given & {"seq_len"}
    for name in sorted(names & given):
        if getattr(cfg, name) != old[name]:
            raise Refused(f"{flag(name)} {getattr(cfg, name)}: the model in {cfg.init_from} has "
                          f"{old[name]}")
    if cfg.stage in LOOKING and "precision" not in given:
        names.add("precision")
    return dataclasses.replace(cfg, **{n: old[n] for n in names})


def load_init(run):
    """Fill the model from --init-from. The codes of a 4-bit folder stay as they are where no weight
    will change; a run that trains rounds the numbers itself, as it will when it is resumed."""
    folder = run.cfg.init_from
    if not hf.is_folder(folder):
        return load_tensors(latest_checkpoint(folder), run.model)
    codes = refusing(hf.load, folder, run.model)
    if run.cfg.stage in LOOKING:
        run.model.keep_codes(codes)


def refusing(f, *args):
    """f(*args), whose ValueError or OSError refuses the input."""
    try:
        return f(*args)
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from None


def check(cfg):
    """Refuse values outside their range."""
    at_least = dict(steps=1, batch=1, micro_batch=0, rl_steps=0, prompts=1, group=2,
                    rl_micro_batch=0, log_every=1, eval_every=1, rl_eval_every=1, eval_rows=1,
                    eval_problems=8, save_every=1, gate_every=1, threads=1, new=1, warmup=1,
                    rl_warmup=1, rl_text_rows=1, seed=0, sample_top_k=0, lr=0, rl_lr=0,
                    weight_decay=0, temperature=0, balance_rate=0, rl_text=0, ep=1)
    for name, low in at_least.items():
        if not getattr(cfg, name) >= low:
            raise Refused(f"{flag(name)} {getattr(cfg, name)}: must be at least {low}")
    for name in ("clip", "ratio_max", "text_share"):
        if not getattr(cfg, name) > 0:
            raise Refused(f"{flag(name)} {getattr(cfg, name)}: must be above 0")
    if cfg.seed >= 2 ** 63:
        raise Refused(f"--seed {cfg.seed}: must be below 2 ** 63")
    for name in ("gate", "mix_lr"):
        if not 0 <= getattr(cfg, name) <= 1:
            raise Refused(f"{flag(name)} {getattr(cfg, name)}: must be 0 to 1")


def check_world(run):
    """Refuse a step that the processes cannot share evenly."""
    cfg, world = run.cfg, run.mesh.world
    rows = {"--batch": cfg.batch}
    if cfg.stage != "pretrain" and cfg.text_share < 1:
        rows["--prompts times --group"] = cfg.prompts * cfg.group
        rows |= {"--rl-text-rows": cfg.rl_text_rows} if cfg.rl_text else {}
    for name, n in rows.items():
        if n % world and cfg.stage not in LOOKING:
            raise Refused(f"{name} {n}: must be a multiple of the number of processes, {world}")


def open_log(run, state):
    """log.jsonl: cut back to the checkpoint that the run goes on from; one that is new or was moved
    away begins with a header."""
    path = run.out / "log.jsonl"
    if not run.leads:
        run.log = open(os.devnull, "w")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if state and path.exists():
        with open(path, "rb+") as f:
            f.truncate(min(state["log_bytes"], path.stat().st_size))
        try:
            run.rows = [json.loads(line) for line in path.read_text().splitlines()]
        except ValueError:
            raise Refused(f"{path} is damaged: move it away, and --resume writes another") from None
    run.log = open(path, "a" if state else "w")
    if not run.rows:
        total, active = run.model.parameters_active()
        run.write(config=dataclasses.asdict(run.cfg), device=str(run.device),
                  device_name=device_name(run), processes=run.mesh.world,
                  backend=backend_sentence(run.device), python=platform.python_version(),
                  torch=torch.__version__, parameters=total, active=active, corpus=run.corpus.name,
                  corpus_sha256=run.corpus.sha256, bigram_bpb=run.corpus.bigram_bpb)


def device_name(run):
    return (torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else
            platform.machine())


def choose_backend(name, device):
    """Raises ValueError with the reason where the backend asked for cannot run on this device."""
    if device.type == "cuda" or name not in ("auto", "reference"):  # Triton may not be installed
        import kernels
        kernels.use(name, device)


def backend_sentence(device):
    if device.type != "cuda":
        return ("reference: plain PyTorch in fp32, "
                "the numbers that the GPU kernels are checked against")
    import kernels
    return kernels.describe(device)


# ------------------------------------------------------------------------------------- command line
def flag(name):
    return "--" + name.replace("_", "-")


def parse(argv):
    """(Config, names of the flags given). Refused on anything that is not allowed."""
    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise Refused(message)
    p = Parser(description=__doc__.split("\n\n")[0], allow_abbrev=False,
               argument_default=argparse.SUPPRESS)
    for f in dataclasses.fields(Config):
        kw = (dict(action="store_true") if f.type is bool else
              dict(type=f.type, choices=f.metadata["choices"]))
        text = f.metadata["help"] + ("" if f.default in ("", False) else f" ({f.default})")
        p.add_argument(flag(f.name), help=text.replace("%", "%%"), **kw)
    given = vars(p.parse_args(argv))
    device = pick_device(given["device"]) if "device" in given else kept_device(Config(**given))
    preset = given.get("preset") or ("small" if device.type == "cuda" else "tiny")
    cfg = Config(**{**PRESETS[preset], "preset": preset, **given})
    return cfg, set(given), device


def kept_device(cfg):
    """The device of the run that cfg goes on with, where there is such a one here; else auto's."""
    try:
        path = latest_checkpoint(cfg.out) if goes_on(cfg) else None
        name = json.loads((path / "run.json").read_text())["config"]["device"] if path else "auto"
        return pick_device(name)
    except (OSError, ValueError, KeyError, TypeError, Refused):     # faults are named later on
        return pick_device("auto")


def pick_device(name):
    if name == "auto":
        fit = torch.cuda.is_available() and torch.cuda.get_device_capability() >= quant.BF16_CORES
        name = "cuda" if fit else "cpu"
    if not re.fullmatch(r"(cpu|cuda)(:(0|[1-9][0-9]*))?", name, re.ASCII):
        raise Refused(f"--device {name}: allowed are cpu, cuda, cuda:1 and so on, and auto")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise Refused(f"--device {name}: this PyTorch finds no CUDA GPU; use --device cpu")
    kind, _, number = name.partition(":")
    here = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= here:
        raise Refused(f"--device {name}: the last one here is {kind}:{here - 1}")
    if kind == "cuda" and torch.cuda.get_device_capability(int(number or 0)) < quant.BF16_CORES:
        raise Refused(f"--device {name}: has no bf16 tensor cores (compute capability 8.0); "
                      "use --device cpu")
    if kind == "cuda" and number:
        torch.cuda.set_device(int(number))      # where Triton launches its kernels
    return torch.device(name)


@contextlib.contextmanager
def stopped_by_signals(run):
    """Ctrl-C and SIGTERM finish the step, save and stop; a second Ctrl-C stops at once. SIGTERM can
    come more than once, from torchrun or at its death, and means no more by that."""
    def handle(number, _):
        if not run.stop:
            run.say("stopping after this step; Ctrl-C once more stops at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stop = True
    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_freed_memory():
    """Tell glibc not to hand freed memory back to the system: a CPU step frees and takes the same
    tensors again, and the page faults cost a sixth of it."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30)           # M_MMAP_THRESHOLD
        libc.mallopt(-1, (1 << 31) - 1)     # M_TRIM_THRESHOLD
    except (OSError, AttributeError):       # another C library
        pass


def main(argv=None):
    """Returns the exit code: 0, 1 for a run that failed, 2 for refused input, 130 for a run that
    was interrupted."""
    rank = int(os.environ.get("RANK", 0))
    try:
        cfg, given, device = parse(argv)
        if cfg.stage == "export":       # one process can read any checkpoint
            cfg.ep, given = 1, given | {"ep"}
            return 0 if rank else go(*open_run(cfg, given, device))
        return go(*open_run(cfg, given, refusing(join, device)))
    except Refused as refusal:
        if rank:            # most often all say the same: the first one's word ends the others
            time.sleep(3)
        print(f"train.py: {refusal}", file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        print("train.py: stopped at once; --resume goes on from the last checkpoint",
              file=sys.stderr)
        return 130
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        print(f"train.py: process {rank} ends because {reason(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
