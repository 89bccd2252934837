"""RL: the loss against enumeration, what gets a gradient, rollout and trainer agree, learning."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from data.task import Task, as_row, task_rows
from moe_comm import Mesh

TEXT = str(Path(__file__).resolve().parent.parent / "LICENSE")    # a text that does not change
TINY = dict(data=TEXT, dim=32, heads=2, kv_heads=1, expert_dim=32, seq_len=32, batch=4,
            task="sort4", prompts=4, group=4, rl_text_rows=2, eval_problems=8, eval_rows=4)
RECIPES = pytest.mark.parametrize("precision", ["bf16", "mxfp8", "nvfp4"])


def new_run(precision="nvfp4", **changes):
    """A run in memory: a small model on this file's text, nothing written."""
    run = train.Run(train.Config(precision=precision, **TINY | changes), torch.device("cpu"))
    run.opt = train.adamw(run.model, 0.0)
    return run


def gradients(run, losses):
    run.model.zero_grad(set_to_none=True)
    for loss in losses:
        loss.backward()
    return {n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None}


def some_batch(run, step=0):
    """A rollout whose rewards are made up, so that every group has a signal."""
    run.begin(train.RL, step)
    prompts, answers, logp, mask, rewards = train.rollout(run, step)
    return prompts, answers, logp, mask, (torch.arange(len(rewards)) % 3 == 0).float()


def same_to_summation(a, b):
    """Equal but for the order in which fp32 sums were formed, and for blocks along T that hold
    other tokens: numbers far below a block's largest are rounded on its grid."""
    return all(torch.allclose(a[n], b[n], rtol=1e-4, atol=1e-5 * float(a[n].abs().max()))
               for n in a)


# --------------------------------------------------------------------------------------- advantages


def test_advantages_are_leave_one_out():
    third = pytest.approx(-1 / 3)
    assert train.advantages(torch.tensor([1.0, 0, 0, 0]), 4).tolist() == [1, third, third, third]


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("group", [2, 3, 7, 8])
def test_a_constant_group_has_advantage_exactly_0(value, group):
    assert train.advantages(torch.full((3 * group,), value), group).eq(0).all()


def test_groups_are_neighbours():
    a = train.advantages(torch.tensor([1.0, 0, 1, 1, 0, 0]), 2)
    assert a.tolist() == [1, -1, 0, 0, 0, 0]
    run = new_run()
    prompts = train.rollout(run, 0)[0]
    assert len(prompts) == 16
    for group in prompts.view(4, 4, -1):
        assert (group == group[0]).all()
    assert len({tuple(p) for p in prompts.tolist()}) == 4


# ----------------------------------------------------------------------------------------- the loss


class Policy(torch.nn.Module):
    """A policy of V logits, the same at every position of every row."""

    def __init__(self, logits):
        super().__init__()
        self.table, self.mesh = torch.nn.Parameter(logits), Mesh()

    def forward(self, rows, first_token=0):
        return self.table.expand(*rows.shape, -1)


def policy_gradient(policy, answers, rewards, rollout_logp, **config):
    """Gradient of the RL loss for a group of one-byte answers to a one-byte prompt."""
    policy.zero_grad()
    n = len(answers)
    batch = (torch.zeros(n, 1).long(), answers[:, None], rollout_logp[:, None],
             torch.ones(n, 1).bool(), rewards)
    cfg = train.Config(rl_text=0.0, prompts=1, group=n, **config)
    run = train.Run(cfg, torch.device("cpu"), policy)
    for loss in train.rl_losses(run, 0, batch, train.advantages(rewards, n), []):
        loss.backward()
    return policy.table.grad.clone()


def test_on_average_the_gradient_is_that_of_the_expected_reward():
    policy = Policy(torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64))
    reward = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    logp = F.log_softmax(policy.table, -1).detach()
    mean = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=3):  # every group that could be drawn
        answers = torch.tensor(group)
        mean += logp[answers].sum().exp() * policy_gradient(policy, answers, reward[answers],
                                                              logp[answers])
    policy.zero_grad()
    (-(policy.table.softmax(-1) * reward).sum()).backward()
    assert torch.allclose(mean, policy.table.grad, rtol=1e-12)


def test_the_weight_is_the_ratio_truncated_at_ratio_max():
    policy, answers = Policy(torch.zeros(4)), torch.tensor([0, 1])
    rewards, logp = torch.tensor([1.0, 0.0]), torch.full((2,), 0.25).log()
    base = policy_gradient(policy, answers, rewards, logp)
    assert torch.allclose(policy_gradient(policy, answers, rewards, logp - np.log(1.5)), 1.5 * base)
    assert torch.allclose(policy_gradient(policy, answers, rewards, logp - np.log(9.0)), 2 * base)
    assert torch.allclose(policy_gradient(policy, answers, rewards, logp + np.log(4.0)), base / 4)
    assert torch.allclose(policy_gradient(policy, answers, rewards, logp - np.log(9.0),
                                          ratio_max=5.0), 5 * base)


def test_k1_and_k3_and_the_differences_follow_their_formulas():
    rollout, trainer = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.2, -1.9, -1.0]])
    mask, d = torch.tensor([[True, True, False]]), np.array([-0.2, 0.1])
    got = {k: float(v) for k, v in train.agreement(rollout, trainer, mask).items()}
    expected = dict(k1=-d.mean(), k3=(np.exp(d) - 1 - d).mean(), logp_diff=0.15, logp_diff_max=0.2,
                    logp_diff_share=1.0)
    assert {k: got[k] for k in expected} == pytest.approx(expected, rel=1e-5)


def position_gradients(run, batch):
    """Whether the logits at each position [N, P + A - 1] get a gradient from the RL loss."""
    kept, forward = [], run.model.forward

    def keep(*args, **kw):
        kept.append(forward(*args, **kw))
        kept[-1].retain_grad()
        return kept[-1]

    run.model.forward = keep
    advantage = train.advantages(batch[4], run.cfg.group)
    gradients(run, train.rl_losses(run, 0, batch, advantage, []))
    del run.model.forward
    return kept[0].grad.abs().sum(-1) > 0


def test_the_answer_gets_a_gradient_up_to_its_stop_and_nothing_else_does():
    run = new_run("bf16", rl_text=0.0)
    prompts, answers, logp, _, rewards = some_batch(run)
    width, length = answers.shape[1], prompts.shape[1]
    stops = torch.arange(len(answers)) % width  # the answer of row i ends at byte i % width
    answers = answers.clamp(min=11)
    answers[torch.arange(len(answers)), stops] = train.NEWLINE
    mask = torch.arange(width) <= stops[:, None]
    got = position_gradients(run, (prompts, answers, logp, mask, rewards))
    assert not got[:, : length - 1].any()
    assert torch.equal(got[:, length - 1 :], mask)


def test_what_follows_the_stop_changes_no_gradient():
    run = new_run(rl_text=0.0)
    prompts, answers, logp, mask, rewards = some_batch(run)
    mask = torch.arange(answers.shape[1]).expand_as(mask) < 3
    advantage = train.advantages(rewards, 4)
    a = gradients(run, train.rl_losses(run, 0, (prompts, answers, logp, mask, rewards),
                                       advantage, []))
    other = torch.where(mask, answers, (answers + 1) % 256)
    b = gradients(run, train.rl_losses(run, 0, (prompts, other, logp, mask, rewards),
                                       advantage, []))
    assert same_to_summation(a, b)


# ------------------------------------------------------------------------------------ micro-batches


@pytest.mark.parametrize("size", [1, 4])
@RECIPES
def test_micro_batches_change_the_rl_gradient_by_no_more_than_summation(precision, size):
    run = new_run(precision)
    batch = some_batch(run)
    advantage = train.advantages(batch[4], 4)
    whole = gradients(run, train.rl_losses(run, 0, batch, advantage, []))
    run.cfg.rl_micro_batch = size
    assert same_to_summation(whole, gradients(run, train.rl_losses(run, 0, batch, advantage, [])))


@pytest.mark.parametrize("mixed", [False, True], ids=["text", "mixture"])
@RECIPES
def test_micro_batches_change_the_pretraining_gradient_by_no_more_than_summation(
        precision, mixed, monkeypatch):
    found = {}

    def only_gradients(run, losses):
        found[run.cfg.micro_batch] = gradients(run, losses)
        return torch.zeros(()), torch.zeros(())

    monkeypatch.setattr(train, "update", only_gradients)
    run = new_run(precision, balance_rate=0.0)  # the three passes route alike
    for size in (0, 1, 3):
        run.cfg.micro_batch = size
        train.pretrain_step(run, 5, mixed, 1e-3)
    assert same_to_summation(found[0], found[1]) and same_to_summation(found[0], found[3])


def test_stochastic_rounding_of_another_step_would_not_pass_as_summation():
    run = new_run()
    batch = some_batch(run)
    advantage = train.advantages(batch[4], 4)
    a = gradients(run, train.rl_losses(run, 0, batch, advantage, []))
    run.begin(train.RL, 1)
    assert not same_to_summation(a, gradients(run, train.rl_losses(run, 0, batch, advantage, [])))


@RECIPES
def test_micro_batches_change_no_bit_of_a_rollout_and_bound_its_memory(precision, monkeypatch):
    run, sizes = new_run(precision), []
    whole = train.rollout(run, 3)
    run.cfg.rl_micro_batch = 4
    forward = run.model.forward
    monkeypatch.setattr(run.model, "forward", lambda rows, *args, **kw: (
        sizes.append(len(rows)), forward(rows, *args, **kw))[1])
    assert all(torch.equal(a, b) for a, b in zip(whole, train.rollout(run, 3)))
    with_rewards(monkeypatch, np.zeros)
    train.rl_step(run, 3, 1e-3)         # without signal, so that nothing is learned
    assert set(sizes) == {4}


def test_pieces_of_a_rollout_that_end_at_different_bytes_are_padded(monkeypatch):
    run = new_run()
    bias = torch.zeros(256)
    bias[train.NEWLINE] = 6.0           # about two of three answers end at each byte
    forward = run.model.forward
    monkeypatch.setattr(run.model, "forward",
                        lambda rows, *args, **kw: forward(rows, *args, **kw) + bias)
    whole = train.rollout(run, 0)
    run.cfg.rl_micro_batch = 1
    lengths = [int(mask.sum()) for mask in train.rollout(run, 0)[3]]
    assert len(set(lengths)) > 1
    assert all(torch.equal(a, b) for a, b in zip(whole, train.rollout(run, 0)))


# -------------------------------------------------------------------------------------------- steps


def state(run):
    return {k: v.clone() for k, v in run.model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def with_rewards(monkeypatch, rule):
    monkeypatch.setattr(Task, "rewards", lambda self, prompts, completions:
                        rule(len(prompts)).astype(np.float32))


@pytest.mark.parametrize("reward", [0, 1])
def test_a_step_without_signal_leaves_every_parameter_as_it_was(monkeypatch, reward):
    run = new_run()
    with_rewards(monkeypatch, lambda n: np.arange(n) % 2)
    train.rl_step(run, 0, 1e-3)  # gives AdamW some momentum
    before = state(run)
    with_rewards(monkeypatch, lambda n: np.full(n, reward))
    stats = train.rl_step(run, 1, 1e-3)
    assert same(before, state(run))
    assert stats["loss"] == 0 and stats["all_right"] == reward and stats["all_wrong"] == 1 - reward


def test_a_step_with_signal_moves_the_weights_but_not_the_balance_bias(monkeypatch):
    run, before = (run := new_run()), state(run)
    with_rewards(monkeypatch, lambda n: np.arange(n) % 2)
    train.rl_step(run, 0, 1e-3)
    moved = {k for k, v in state(run).items() if not torch.equal(v, before[k])}
    assert moved == {k for k in before if not k.endswith(".bias")}


def test_a_step_reports_what_happened(monkeypatch):
    run = new_run()
    with_rewards(monkeypatch, lambda n: np.array([0, 1, 0, 1] + [0] * 4 + [1] * 8))
    stats = train.rl_step(run, 0, 1e-3)
    assert (stats["reward"] == 10 / 16
            and stats["all_wrong"] == 1 / 4 and stats["all_right"] == 2 / 4)
    assert stats["reward_std"] == pytest.approx(np.std([0] * 6 + [1] * 10, ddof=1))
    assert 0 < stats["entropy"] < np.log(256) and stats["load"] >= 1 and stats["grad_norm"] > 0
    assert stats["truncated"] == 0 and 0 <= stats["no_stop"] <= 1


def test_rollouts_are_equal_for_equal_steps_and_differ_between_steps():
    run = new_run()
    a, b, c = (train.rollout(run, step) for step in (3, 3, 4))
    assert all(torch.equal(x, y) for x, y in zip(a, b))
    assert not torch.equal(a[0], c[0]) and not torch.equal(a[1], c[1])


def test_rl_and_its_gate_see_training_problems_and_evaluation_sees_held_out_ones(monkeypatch):
    run, asked = new_run(), []
    original = type(run.task).problems
    monkeypatch.setattr(type(run.task), "problems",
                        lambda self, seed, split, ids:
                        (asked.append(split), original(self, seed, split, ids))[1])
    train.rollout(run, 0)
    train.pass_rate(run, 0, 8, split="train")
    train.pass_rate(run, 0, 8)
    train.pass_at(run, 0, 2, 8)
    assert asked == ["train", "train", "test", "test"]


# ------------------------------------------------------------------------------ rollout and trainer


@RECIPES
def test_rollout_and_trainer_compute_the_same_probabilities(precision):
    run = new_run(precision, prompts=32, group=8)
    stats = train.rl_step(run, 0, 0.0)
    assert stats["logp_diff_max"] == stats["k3"] == stats["truncated"] == 0     # bit for bit


def test_with_one_scale_for_all_tokens_they_do_not():
    stats = train.rl_step(new_run("nvfp4-tensor", prompts=32, group=8), 0, 0.0)
    assert 0.01 < stats["logp_diff"] < 0.1 and stats["logp_diff_share"] > 0.9 and stats["k3"] > 1e-4


# ----------------------------------------------------------------------------------------- learning


def task_loss(run, step):
    """Loss of the answers in rows of task lines."""
    rows, mask = task_rows(run.task, run.cfg.seed, step, np.arange(run.cfg.batch),
                           run.cfg.seq_len + 1)
    mask = train.to_device(run, mask[:, 1:])
    yield (train.token_losses(run.model, train.to_device(run, rows)) * mask).sum() / mask.sum()


def taught(gate=0.35, **changes):
    """A small model that answers about a third of the problems: where RL starts."""
    run = new_run(batch=64, prompts=64, group=8, rl_text=0.0, seq_len=40, **changes)
    for step in range(300):
        run.begin(train.PRETRAIN, step)
        train.set_lr(run, 4e-3 * min(1, (step + 1) / 20))
        train.update(run, task_loss(run, step))
        run.model.balance(1e-3)
        if step % 5 == 4 and train.pass_rate(run, step, 256, split="train") >= gate:
            return run
    pytest.fail("pretraining did not reach the gate")


def after_rl(run, steps=60, lr=3e-3):
    """Held-out pass rate (n = 1024) after RL."""
    run.opt = train.adamw(run.model, 0.0)
    for step in range(steps):
        train.rl_step(run, step, lr * min(1, (step + 1) / 10) * (1 - step / steps))
    return train.pass_rate(run, 0, 1024)


def test_reward_teaches_and_shuffled_reward_does_not(monkeypatch):
    run = taught(seed=2)
    start, before = state(run), train.pass_rate(run, 0, 1024)
    final = after_rl(run)
    print(f"pass rate {before:.3f} -> {final:.3f}")
    assert final >= 0.55 and final - before >= 0.20

    original, order = train.advantages, torch.Generator().manual_seed(0)
    monkeypatch.setattr(train, "advantages",
                        lambda r, g: original(r, g)[torch.randperm(len(r), generator=order)])
    run.model.load_state_dict(start)
    control = after_rl(run, steps=25)
    print(f"shuffled: {control:.3f}")
    assert control < before


def test_the_checker_wants_the_answer_its_stop_and_nothing_more():
    task = new_run().task
    prompts = np.repeat(as_row(b"3142>"), 5, 0)
    tries = [b"1234\n\0", b"1234\n5", b"12345\n", b"1234\0\0", b"3142\n\0"]
    assert task.rewards(prompts, np.concatenate([as_row(t) for t in tries])
                        ).tolist() == [1, 0, 0, 0, 0]
