"""Several processes (gloo, CPU) against one: numbers, meshes, elastic checkpoints, deaths.

The file is its own worker: `python tests/test_distributed.py FOLDER RANK WORLD EP NAME` joins the
group through a file, runs everything of `worker` and saves what it saw for the tests.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import moe_comm  # noqa: E402
import quant  # noqa: E402
import train  # noqa: E402

T, K, E, D = 24, 3, 8, 64           # tokens of all processes together, experts a token, experts
TINY = dict(data=str(ROOT / "LICENSE"), dim=32, heads=2, kv_heads=1, expert_dim=32, experts=8,
            top_k=3, layers=3, seq_len=32, batch=8, task="sort4", prompts=4, group=4,
            rl_text_rows=4, eval_problems=10, eval_rows=10, steps=4, rl_steps=2, device="cpu")
RECIPES = ("bf16", "mxfp8", "nvfp4", "nvfp4-fp4")
MESHES = {"two": (2, 2), "four": (4, 4), "two by two": (4, 2)}      # name -> processes, --ep
FORMATS = (("bf16", "bf16"), ("mxfp8", "mxfp8"), ("nvfp4", "mxfp8"))


# ----------------------------------------------------------------------- what each process computes
def choices(case):
    """Expert choices [T, K] of all tokens."""
    g = torch.Generator().manual_seed(1)
    if case == "uneven":
        return torch.stack([torch.multinomial(torch.arange(1.0, E + 1).square(), K, generator=g)
                            for _ in range(T)])
    if case == "one rank gets nothing":                 # experts 0 .. 3, whatever the mesh
        return torch.stack([torch.randperm(E // 2, generator=g)[:K] for _ in range(T)])
    return torch.arange(K).expand(T, K).clone()         # every token to the same experts


def there_and_back(case, wire, back, mesh):
    """Dispatch, a made-up expert, combine and backward, for this process's tokens."""
    g = torch.Generator().manual_seed(2)
    x, dout = torch.randn(T, D, generator=g), torch.randn(T, D, generator=g)
    gates, mine = torch.rand(T, K, generator=g), slice(0, T)
    if mesh.ep > 1:
        mine = slice(mesh.place * T // mesh.ep, (mesh.place + 1) * T // mesh.ep)
    x, gates = x[mine].requires_grad_(), gates[mine].requires_grad_()
    plan = moe_comm.route(choices(case)[mine], E, mesh.expert_group)
    rows, q = moe_comm.dispatch(x, plan, wire, back)
    values = rows if q is None else rows + q.dequantize()
    first = mesh.place * E // mesh.ep
    factor = torch.zeros(len(values), 1)
    for e, (start, n, _) in enumerate(quant.spans(plan.counts, len(values))):
        factor[start:start + n] = 1 + 0.37 * (first + e)
    out = moe_comm.combine(values.tanh() * factor, gates, plan, back)
    out.backward(dout[mine])
    real = factor[:, 0] > 0
    seen = dict(copy=plan.copy[real] + mine.start * K, values=values[real].detach(), load=plan.load,
                out=out.detach(), dx=x.grad, dgates=gates.grad)
    return {name: t.clone() for name, t in seen.items()}


def new_run(mesh_ep, precision, **changes):
    run = train.Run(train.Config(precision=precision, ep=mesh_ep, **TINY | changes),
                    torch.device("cpu"))
    run.opt = train.adamw(run.model, 0.1)
    return run


def some_step(precision, ep, micro_batch):
    """The loss of one step, the gradients that this process owns, and its experts' operands."""
    run = new_run(ep, precision, micro_batch=micro_batch)
    run.begin(train.PRETRAIN, 0)
    kept, mine = {}, set(run.opt.mine)

    def keep():
        kept.update({n: p.grad.clone() for n, p in run.model.named_parameters() if p in mine})
    run.opt.step = keep                 # instead of moving the weights
    stats = run.pretrain_update(*train.pretrain_rows(run, 0, True))
    run.model.prepare()
    weight = run.model.operands[0]["w1"]
    return dict(loss=stats["loss"], norm=stats["grad_norm"], load=stats["load"], grads=kept,
                forward=weight.forward, backward=weight.backward)


def exact_updates(ep):
    """Two AdamW steps on gradients whose sums over the processes are exact."""
    run = new_run(ep, "bf16", clip=1e9)
    train.set_lr(run, 0.01)
    for step in range(2):
        loss = 0.0
        for name, p in run.model.named_parameters():
            sharded = run.model.is_sharded(name) and ep > 1
            numel = p.numel() * (ep if sharded else 1)
            pattern = ((torch.arange(numel) * 7 + step) % 13 - 5.0).view(-1, *p.shape[1:])
            pattern = run.model.here(pattern) if sharded else pattern
            loss = loss + (p * pattern).sum() / (run.mesh.data if sharded else run.mesh.world)
        train.update(run, [loss])
    return whole_state(run)


def whole_state(run):
    """name -> this process's tensors of model and optimizer, with where its experts begin."""
    found = {f"model.{k}": v.clone() for k, v in run.model.state_dict().items()}
    for name, p in run.model.named_parameters():
        for key, value in run.opt.state.get(p, {}).items():
            found[f"adamw.{name}.{key}"] = value.clone()
    return found


def rollout_of(ep):
    run = new_run(ep, "nvfp4")
    run.begin(train.RL, 0)
    prompts, answers, logp, mask, rewards = train.rollout(run, 0)
    text = train.text_bpb(run, 10)
    problems = run.task.problems(0, "test", train.np.arange(10))
    evaluated, _ = train.attempt(run, problems, 3)
    return dict(ids=torch.from_numpy(run.share(16)), answers=answers, logp=logp, mask=mask,
                bpb=text, evaluated=torch.from_numpy(evaluated))


def payloads(ep):
    """(format, rows, bytes) of every tensor that one step hands to the collective."""
    seen, real = [], dist.all_to_all_single

    def spy(out, rows, *args, **kw):
        seen.append((rows.dtype, *rows.shape))
        return real(out, rows, *args, **kw)
    dist.all_to_all_single = spy
    try:
        g = torch.Generator().manual_seed(3)
        mesh, sizes = moe_comm.Mesh(ep), {}
        for wire, back in FORMATS:
            seen.clear()
            x = torch.randn(T, D, generator=g).requires_grad_()
            plan = moe_comm.route(choices("uneven"), E, mesh.expert_group)
            rows, q = moe_comm.dispatch(x, plan, wire, back)
            values = rows if q is None else rows + q.dequantize()
            moe_comm.combine(values, torch.rand(T, K, generator=g), plan, back).sum().backward()
            sizes[wire] = list(seen)
        owner = choices("uneven") // (E // ep)
        wanted = sum(len(set(row)) for row in owner.tolist())
        return dict(sizes=sizes, wanted=wanted)
    finally:
        dist.all_to_all_single = real


def refusals(world):
    """What a mesh or a model that does not fit says."""
    found = {}
    cases = dict(mesh=lambda: moe_comm.Mesh(3), experts=lambda: new_run(world, "bf16", experts=7),
                 batch=lambda: train.check_world(new_run(world, "bf16", batch=7)))
    for name, make in cases.items():
        try:
            make()
        except (ValueError, train.Refused) as error:
            found[name] = str(error)
    return found


def worker(folder, rank, world, ep, name):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}.join", rank=rank,
                            world_size=world)
    mesh = moe_comm.Mesh(ep)
    seen = dict(trips={(case, *formats): there_and_back(case, *formats, mesh)
                       for case in CASES for formats in FORMATS},
                steps={p: some_step(p, ep, 0) for p in RECIPES},
                micro=some_step("nvfp4", ep, 1), updates=exact_updates(ep),
                one_scale=some_step("nvfp4-tensor", ep, 0)["loss"], rollout=rollout_of(ep),
                payloads=payloads(ep) if ep == world else None, refusals=refusals(world))
    run = new_run(ep, "nvfp4")          # a checkpoint of the mesh before, read and written again
    before = Path(folder) / BEFORE[name]
    state = train.read_checkpoint(before)
    train.load_tensors(before, run.model, run.opt)
    run.at = state["at"]
    run.out, run.log = Path(folder) / name, open(os.devnull, "w")
    if rank == 0:
        run.out.mkdir()
        run.log = open(run.out / "log.jsonl", "w")
    train.save(run)
    torch.save(seen, f"{folder}/{name}-{rank}.pt")
    dist.destroy_process_group()


CASES = ("uneven", "one rank gets nothing", "all to the same")
LAST = "checkpoints/pretrain-000001"
BEFORE = {"two": f"one/{LAST}", "four": f"two/{LAST}", "two by two": f"four/{LAST}"}


# ----------------------------------------------------------------------------------------- fixtures
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where one process has saved a checkpoint after a step, and then each mesh what it saw."""
    folder = tmp_path_factory.mktemp("meshes")
    run = new_run(1, "nvfp4", out=str(folder / "one"))
    train.set_lr(run, 1e-3)
    train.pretrain_step(run, 0, True, 1e-3)
    run.at["step"] = 1
    run.out.mkdir()
    run.log = open(run.out / "log.jsonl", "w")
    train.save(run)
    torch.save(whole_state(run), folder / "one.pt")
    for name, (world, ep) in MESHES.items():
        launch(folder, name, world, ep)
    return folder


def launch(folder, name, world, ep):
    command = [sys.executable, __file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(r), str(world), str(ep), name], cwd=ROOT,
                              env=os.environ | dict(OMP_NUM_THREADS="1"),
                              stderr=open(folder / f"{name}-{r}.err", "w")) for r in range(world)]
    for r, process in enumerate(ranks):
        assert process.wait(300) == 0, (folder / f"{name}-{r}.err").read_text()[-2000:]


@pytest.fixture(scope="module", params=list(MESHES))
def seen(request, folder):
    """(processes, --ep, what each process saw) of a mesh."""
    world, ep = MESHES[request.param]
    return world, ep, [torch.load(folder / f"{request.param}-{r}.pt") for r in range(world)]


ALONE = {}


def alone(f, *args):
    """f(*args) at one process, computed once."""
    if (f, *args) not in ALONE:
        ALONE[f, *args] = f(*args)
    return ALONE[f, *args]


def group(seen):
    """What the processes of the first expert group saw, by place."""
    _, ep, ranks = seen
    return ranks[:ep]


# -------------------------------------------------------------------------------------------- tests
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f[0])
@pytest.mark.parametrize("case", CASES)
def test_numbers_do_not_depend_on_where_an_expert_lives(seen, case, formats):
    one = alone(there_and_back, case, *formats, moe_comm.Mesh())
    parts = [rank["trips"][case, *formats] for rank in group(seen)]
    for name in ("out", "dx", "dgates"):
        assert torch.equal(torch.cat([p[name] for p in parts]), one[name]), name
    assert torch.equal(sum(p["load"] for p in parts), one["load"])
    assert len(one["copy"]) == T * K
    # Rows sorted by expert hold the same copies in the same order, in the same numbers.
    for name in ("copy", "values"):
        assert torch.equal(torch.cat([p[name] for p in parts]), one[name]), name


@pytest.mark.parametrize("precision", RECIPES)
def test_loss_and_gradients_are_those_of_one_process(seen, precision):
    same_step(seen, [rank["steps"][precision] for rank in seen[2]],
              alone(some_step, precision, 1, 0),
              1e-5 if precision == "bf16" or seen[0] == seen[1] else
              0.3 if precision == "nvfp4-fp4" else 0.03)


def test_one_scale_for_all_tokens_is_one_for_those_of_a_process(seen):
    """The ablation's amax is not sent around: the same up to its rounding, which is the lesson."""
    one = alone(some_step, "nvfp4-tensor", 1, 0)["loss"]
    assert all(torch.allclose(rank["one_scale"], one, rtol=1e-2) for rank in seen[2])


def test_micro_batches_of_several_processes_are_those_of_one(seen):
    world, ep, ranks = seen
    same_step(seen, [rank["micro"] for rank in ranks], alone(some_step, "nvfp4", 1, world),
              1e-5 if world == ep else 0.03)


def same_step(seen, parts, one, tolerance):
    """Expert groups that see different tokens have other blocks along T, a few percent of dW."""
    world, ep, _ = seen
    owned = {n: [r for r in range(world) if n in parts[r]["grads"]] for n in one["grads"]}
    for part in parts:
        assert torch.allclose(part["loss"], one["loss"], rtol=1e-6)
        assert torch.allclose(part["norm"], one["norm"], rtol=tolerance)
        assert torch.equal(part["load"], one["load"])
    for name, whole in one["grads"].items():
        ranks = owned[name]
        sharded = name.endswith((".w1", ".w2"))
        assert len(ranks) == (ep if sharded else 1), name           # each part has one owner
        got = torch.cat([parts[r]["grads"][name] for r in ranks]) if sharded else (
            parts[ranks[0]]["grads"][name])
        error = (got - whole).norm() / whole.norm()
        assert error < tolerance, f"{name}: {error:.2g}"


@pytest.mark.parametrize("precision", RECIPES)
def test_weights_are_rounded_alike_on_any_rank(seen, precision):
    one = alone(some_step, precision, 1, 0)
    for name in ("forward", "backward"):
        got = torch.cat([rank["steps"][precision][name] for rank in group(seen)])
        assert torch.equal(got, one[name]), name


def test_sharded_adamw_is_adamw_bit_for_bit(seen):
    world, ep, ranks = seen
    one = alone(exact_updates, 1)
    found = {name: [r for r in range(world) if name in ranks[r]["updates"]] for name in one}
    for name, whole in one.items():
        where = found[name]
        if ".w1" in name or ".w2" in name:
            parts = [ranks[r]["updates"][name] for r in where]
            if whole.dim() == 0:
                assert all(torch.equal(p, whole) for p in parts), name
                continue
            if name.startswith("model."):                           # every data copy has it
                assert len(parts) == world
                assert all(torch.equal(parts[r], parts[r % ep]) for r in range(world))
                parts = parts[:ep]
            assert torch.equal(torch.cat(parts), whole), name
        else:
            assert len(where) == (1 if name.startswith("adamw.") else world), name
            assert all(torch.equal(ranks[r]["updates"][name], whole) for r in where), name


def test_optimizer_state_is_spread_evenly(seen):
    world, ep, ranks = seen
    sizes = [sum(t.numel() for n, t in rank["updates"].items() if n.startswith("adamw"))
             for rank in ranks]
    assert max(sizes) < 1.3 * sum(sizes) / world


def test_rollout_and_evaluation_are_those_of_one_process(seen):
    one = alone(rollout_of, 1)
    for rank in seen[2]:
        mine, ids = rank["rollout"], rank["rollout"]["ids"]
        for name in ("answers", "logp", "mask"):
            assert torch.equal(mine[name], one[name][ids][:, :mine[name].shape[1]]), name
        assert mine["bpb"] == pytest.approx(one["bpb"], rel=1e-12)
        assert torch.equal(mine["evaluated"], one["evaluated"])
    assert sorted(torch.cat([r["rollout"]["ids"] for r in seen[2]]).tolist()) == list(range(16))


def test_bytes_on_the_wire(seen):
    world, ep, ranks = seen
    if world != ep:
        pytest.skip("counted where the world is one expert group")
    bits = dict(bf16=32, mxfp8=8.25, nvfp4=4.5)          # on a CPU the compute type is fp32
    for rank in ranks:
        for (wire, back) in FORMATS:
            there, home, home_grad, there_grad = rank["payloads"]["sizes"][wire]
            assert {t[0] for t in (there, home, home_grad, there_grad)} == {torch.uint8}
            outer = 4 if wire == "nvfp4" else 0
            # A token goes once to each rank that has one of its experts, and a result per expert.
            assert there[1:] == (rank["payloads"]["wanted"], D * bits[wire] // 8 + outer)
            assert home[2] == home_grad[2] == there_grad[2] == D * bits[back] // 8
            assert home_grad[1] == T * K                 # gate * dOut of each copy
    # Every copy's result and gradient goes home, from all ranks together.
    for (wire, _) in FORMATS:
        sent = [rank["payloads"]["sizes"][wire] for rank in ranks]
        assert sum(s[1][1] for s in sent) == sum(s[3][1] for s in sent) == world * T * K


def test_a_mesh_that_does_not_fit_is_one_sentence(seen):
    world = seen[0]
    for rank in seen[2]:
        assert rank["refusals"] == dict(
            mesh=f"--ep 3: must divide the number of processes, {world}",
            experts=f"--ep {world}: must divide the number of experts, 7",
            batch=f"--batch 7: must be a multiple of the number of processes, {world}")


def test_experts_cannot_be_spread_without_torchrun(tmp_path, capsys):
    assert train.main(["--ep", "2", "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == ("train.py: --ep 2: must divide the number of processes, 1 "
                                       "(torchrun starts several)\n")


@pytest.mark.parametrize("name", MESHES)
def test_a_checkpoint_passes_through_every_mesh_unchanged(folder, name):
    """1 -> 2 -> 4 -> 2 x 2 processes, and each of them -> 1."""
    run = new_run(1, "nvfp4")
    path = folder / name / LAST
    assert train.read_checkpoint(path)["at"]["step"] == 1
    for p in run.model.parameters():
        p.data.fill_(torch.nan)
    train.load_tensors(path, run.model, run.opt)
    state, before = whole_state(run), torch.load(folder / "one.pt")
    assert state.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(state[key], value), key


def test_the_export_of_a_sharded_run_is_that_of_one_process(folder):
    files = {}
    for name in ("one", "four"):
        assert train.main(["--stage", "export", "--export-format", "nvfp4", "--device", "cpu",
                           "--out", str(folder / name)]) == 0
        files[name] = {p.name: p.read_bytes()
                       for p in (folder / name / "export-nvfp4").iterdir()}
    assert files["one"] == files["four"]


# ----------------------------------------------------------------------------------------- torchrun
FLAGS = ["--device", "cpu", *(f"--{k.replace('_', '-')}={v}" for k, v in TINY.items()
                              if k not in ("device", "steps", "rl_steps")),
         "--steps", "6", "--rl-steps", "2", "--gate-every", "2", "--eval-every", "4",
         "--log-every", "1", "--save-every", "2", "--precision", "nvfp4", "--ep", "2"]


def torchrun(out, *flags, script="train.py"):
    """(exit code, output) of two processes."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port",
         str(20000 + os.getpid() % 20000), str(script), *flags, "--out", str(out)], cwd=ROOT,
        env=os.environ | dict(OMP_NUM_THREADS="1"), text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


DYING = """
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import train
step = train.pretrain_step
def dying(run, i, *args):
    if i == 3 and run.mesh.rank == 1:
        pathlib.Path(__file__).with_suffix(".died").write_text(str(time.time()))
        {death}
    return step(run, i, *args)
train.pretrain_step = dying
sys.exit(train.main())
"""
DEATHS = dict(raises="raise RuntimeError('rank 1 is out of luck')",
              killed="os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize("death", DEATHS)
def test_a_rank_that_dies_ends_the_job_and_the_next_start_resumes(tmp_path, death):
    script = tmp_path / "dying.py"
    script.write_text(DYING.format(root=str(ROOT), death=DEATHS[death]))
    code, text = torchrun(tmp_path / "out", *FLAGS, script=script)
    assert code != 0
    assert time.time() - float(script.with_suffix(".died").read_text()) < 60        # no hang
    assert ("out of luck" if death == "raises" else "Signal 9 (SIGKILL)") in text
    assert train.latest_checkpoint(tmp_path / "out").name == "pretrain-000002"
    if death == "killed":
        assert "another process of the job has ended" in text
        # Go on with one process, as the unbroken two would have.
        assert train.main(["--resume", "--device", "cpu", "--ep", "1", "--out",
                           str(tmp_path / "out")]) == 0
    else:
        code, text = torchrun(tmp_path / "out", "--resume", "--device", "cpu")
        assert code == 0, text
    rows = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in rows if r.get("stage") == "pretrain" and "loss" in r]
    assert steps == [1, 2, 3, 4, 5, 6] and rows[0]["processes"] == 2
    assert train.latest_checkpoint(tmp_path / "out").name == "rl-000002"


def test_ranks_stop_where_torchrun_itself_is_killed(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
               "--master_port", str(20000 + os.getpid() % 20000), "train.py", *FLAGS, "--steps",
               "100000", "--out", str(out)]
    agent = subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"),
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = out / "log.jsonl", time.monotonic() + 180

    def steps():
        rows = log.read_text().splitlines(True) if log.exists() else []
        return [json.loads(row).get("step", 0) for row in rows if row.endswith("\n")]
    while len(steps()) < 6:
        assert agent.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    agent.kill()
    agent.wait()
    before = None
    while before != steps() or train.latest_checkpoint(out).name != f"pretrain-{before[-1]:06d}":
        assert time.monotonic() < deadline              # until the last step is saved, and no more
        before = steps()
        time.sleep(3)


if __name__ == "__main__":
    folder_, rank_, world_, ep_, name_ = sys.argv[1:]
    worker(folder_, int(rank_), int(world_), int(ep_), name_)
