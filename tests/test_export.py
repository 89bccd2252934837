"""Folders for other programs: what they hold, that others read the same model, all or nothing.

The judges are transformers, tokenizers, safetensors and compressed-tensors, where installed.
"""

import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import quant
import train
from data import hf
from model import GPT, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
FORMATS = pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
FLAGS = dict(data=__file__, precision="nvfp4", layers=3, dense_layers=1, seq_len=128, batch=4)
FLAGS |= dict(lr=0.01, warmup=1, steps=4, text_share=0.5, eval_rows=4, eval_problems=8)
LOOK = dict(data=__file__, eval_rows=4, eval_problems=8)


def judge(module):
    name = module.replace("_", "-")
    why = f"{name} judges the files, and is no requirement: pip install {name}"
    return pytest.importorskip(module, reason=why)


def call(**flags):
    """train.py's exit code, on a CPU."""
    argv = []
    for name, value in dict(device="cpu", **flags).items():
        argv += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return train.main(argv)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps, with both of its exports."""
    out = tmp_path_factory.mktemp("run")
    assert call(stage="pretrain", out=out, **FLAGS) == 0
    for fmt in ("bf16", "nvfp4"):
        assert call(stage="export", out=out, export_format=fmt) == 0
    return out


def model_in(out):
    """The model of a run, as it is trained."""
    cfg, given, device = train.parse(["--stage", "eval", "--out", str(out)])
    return train.open_run(cfg, given, device)[0].model


def read(folder, recipe=None):
    """The model in a folder, with its codes where they are read."""
    fields = hf.read_config(folder)
    precision = fields.pop("precision")
    model = GPT(ModelConfig(**fields), recipe or precision)
    model.keep_codes(hf.load(folder, model))
    return model


def odd_model(recipe="nvfp4", seed=3, **shape):
    """A model whose norms and biases are not what they start as, and some of whose blocks are so
    small that rounding their decoded numbers again gives other codes."""
    model = GPT(ModelConfig(**dict(layers=3, seq_len=64) | shape), recipe, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += 0.3 * torch.randn(p.shape, generator=generator)
        for block in model.blocks:
            if block.is_moe:
                block.bias += 0.1 * torch.randn(block.bias.shape, generator=generator)
                block.w1[:, ::7, 16:32] *= 3e-5
    return model


def some_bytes(rows=4, length=64, seed=0):
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model, idx):
    return model(idx)


def same_weights(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ----------------------------------------------------------------------- our own way there and back


def test_the_bf16_export_is_the_model_with_its_matrices_in_bf16(trained):
    original = model_in(trained)
    with torch.no_grad():
        for name, p in original.named_parameters():
            if p.dim() > 1 and not name.endswith("router"):
                p.copy_(p.bfloat16())
    again = read(trained / "export-bf16")
    assert same_weights(original, again)
    plain = GPT(original.cfg, "bf16")
    plain.load_state_dict(original.state_dict())
    assert torch.equal(logits(plain, some_bytes()), logits(again, some_bytes()))


def test_the_4_bit_export_has_the_logits_of_the_run_bit_for_bit(trained):
    original, again = model_in(trained), read(trained / "export-nvfp4")
    assert again.recipe.name == "nvfp4" and again.codes
    assert torch.equal(logits(original, some_bytes()), logits(again, some_bytes()))
    again.begin_step(5)                     # other second copies, the same codes
    again.prepare()
    assert all(again.operands[0][name].packed is again.codes[f"blocks.0.{name}"][0]
               for name in ("w1", "w2") if f"blocks.0.{name}" in again.codes) and again.codes


def losses_of(capsys, **flags):
    """What --stage eval prints of the text, to all digits, and the exit code."""
    seen, measure = [], train.text_bpb
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "text_bpb", lambda *a: seen.append(measure(*a)) or seen[-1])
        assert call(stage="eval", **LOOK, **flags) == 0
    assert re.search(r"bits per byte \d\.\d{3}  pass rate \d", capsys.readouterr().out)
    return seen


def test_eval_of_the_4_bit_folder_is_eval_of_the_run(trained, tmp_path, capsys):
    run = losses_of(capsys, out=trained)
    assert losses_of(capsys, init_from=trained / "export-nvfp4", out=tmp_path) == run
    assert losses_of(capsys, init_from=trained, out=tmp_path) == run
    assert losses_of(capsys, init_from=trained / "export-bf16", out=tmp_path) != run
    assert not list(tmp_path.iterdir())


RECIPES_IN_4_BITS = [
    "nvfp4", "nvfp4-original", "nvfp4-tile", "nvfp4-46", "nvfp4-all", "nvfp4-dense", "nvfp4-fp4",
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES_IN_4_BITS)
def test_codes_are_those_of_the_forward_pass_in_every_recipe(recipe, tmp_path):
    original = odd_model(recipe, dense_layers=1)
    hf.export(original, tmp_path / "x", "nvfp4")
    again = read(tmp_path / "x")
    assert again.recipe.name == recipe
    assert torch.equal(logits(original, some_bytes()), logits(again, some_bytes()))


def test_decoded_numbers_rounded_again_would_be_others_so_codes_are_kept(tmp_path):
    original = odd_model()
    hf.export(original, tmp_path / "x", "nvfp4")
    again, rounded = read(tmp_path / "x"), read(tmp_path / "x")
    rounded.weights_changed()
    assert same_weights(again, rounded)
    for model in (original, again, rounded):
        model.prepare()
    wanted, kept, other = (m.operands[0]["w1"].packed for m in (original, again, rounded))
    for mine, theirs in zip(wanted.tensors(), kept.tensors()):
        assert torch.equal(mine, theirs)
    assert not torch.equal(other.dequantize(), wanted.dequantize())


def test_kept_codes_end_when_the_weights_change(tmp_path):
    hf.export(odd_model(), tmp_path / "x", "nvfp4")
    model = read(tmp_path / "x")
    with torch.no_grad():
        model.blocks[0].w1[0] *= 2
    logits(model, some_bytes())
    packed = model.operands[0]["w1"].packed
    assert torch.equal(packed.dequantize()[0, 1], 2 * read(tmp_path / "x").blocks[0].w1[0, 1])
    assert model.operands[1]["w1"].packed is model.codes["blocks.1.w1"][0]


def test_global_scales_that_are_no_powers_of_two_are_decoded_and_no_codes_kept(trained, tmp_path):
    """As other programs write them, and different ones for gate and up."""
    shutil.copytree(trained / "export-nvfp4", tmp_path / "x")
    experts = "model.layers.1.mlp.experts."

    def scale(tensors):
        for name in tensors:
            if name.startswith(experts) and name.endswith("_global_scale"):
                tensors[name] *= 3 if "up" in name else 2 if "gate" in name else 1

    edit_tensors(tmp_path / "x", scale)
    before, after = read(trained / "export-nvfp4"), read(tmp_path / "x")
    assert (list(before.codes) == ["blocks.1.w1", "blocks.1.w2"]
            and list(after.codes) == ["blocks.1.w2"])
    (gate, up), (old_gate, old_up) = (m.blocks[1].w1.chunk(2, 1) for m in (after, before))
    assert torch.equal(gate, old_gate / 2) and torch.allclose(up, old_up / 3, rtol=1e-6, atol=0)


def test_mxfp8_values_are_exact_in_bf16_and_stay_when_rounded_again():
    x = torch.randn(512, 256, generator=torch.Generator().manual_seed(0))
    x *= 2.0 ** torch.arange(-40, 40, 80 / 512)[:, None]
    x[:, :32] = torch.linspace(220, 232, 512)[:, None]  # rounds down to 224, half of the largest
    x[:, 64:96] *= 2.0 ** -torch.arange(32)
    once = quant.cast(x, "mxfp8")
    assert torch.equal(once.bfloat16().float(), once)
    assert torch.equal(quant.cast(once, "mxfp8"), once)


@FORMATS
def test_an_export_of_an_export_is_the_same_file(fmt, tmp_path):
    hf.export(odd_model(dense_layers=1), tmp_path / "x", fmt)
    for out in (tmp_path / "one", tmp_path / "two"):  # the second time it replaces the first
        for _ in range(2):
            assert call(stage="export", init_from=tmp_path / "x", export_format=fmt, out=out) == 0
        assert files_of(out / f"export-{fmt}") == files_of(tmp_path / "x")
        assert [p.name for p in out.iterdir()] == [f"export-{fmt}"]


SHAPES = [
    dict(shared=0),
    dict(shared=2, experts=6, top_k=3, head_dim=32, kv_heads=1, route_scale=2.5),
    dict(rope_theta=5e5, norm_eps=1e-3, expert_dim=96, dense_layers=2, dense_dim=160),
    dict(dense_layers=3),
    dict(experts=2, top_k=1, heads=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_goes_there_and_back(shape, tmp_path):
    original = odd_model("bf16", **shape)
    hf.export(original, tmp_path / "x", "bf16")
    again = read(tmp_path / "x")
    assert again.cfg == original.cfg
    hf.export(again, tmp_path / "y", "bf16")
    assert files_of(tmp_path / "x") == files_of(tmp_path / "y")


@pytest.mark.parametrize("stage", ["pretrain", "rl"])
@FORMATS
def test_training_starts_from_a_folder_and_resumes(fmt, stage, trained, tmp_path):
    flags = dict(batch=4, steps=1, text_share=1, prompts=4, group=2, rl_text_rows=2, rl_steps=1)
    flags |= dict(stage=stage, out=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "train", lambda run: None)  # the checkpoint before the first step
        assert call(init_from=trained / f"export-{fmt}", precision="nvfp4", **LOOK, **flags) == 0
    assert same_weights(model_in(tmp_path), read(trained / f"export-{fmt}"))
    assert call(resume=True, out=tmp_path, stage=stage) == 0
    if stage == "pretrain":  # in RL nothing was right, and no step was made
        assert not same_weights(model_in(tmp_path), read(trained / f"export-{fmt}"))


# ---------------------------------------------------------------------------------------- the files


def parse(path):
    """(header, data) of a safetensors file, by hand."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


@FORMATS
def test_the_file_has_no_holes_and_every_tensor_is_aligned(fmt, trained):
    header, data = parse(trained / f"export-{fmt}" / "model.safetensors")
    assert header.pop("__metadata__")["format"] == "pt"
    sizes, at = dict(F32=4, BF16=2, U8=1, F8_E4M3=1), 0
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert start == at and start % sizes[entry["dtype"]] == 0
        at += int(np.prod(entry["shape"])) * sizes[entry["dtype"]]
        assert end == at
    assert at == len(data)


def test_packed_codes_by_hand(trained):
    """Low nibble first, one E4M3 scale for 16 numbers, divided by the global scale."""
    header, data = parse(trained / "export-nvfp4" / "model.safetensors")
    module = "model.layers.1.mlp.experts.2.up_proj.weight"

    def raw(suffix):
        entry = header[module + suffix]
        bytes_ = data[slice(*entry["data_offsets"])]
        return np.frombuffer(bytes_, np.uint8).reshape(entry["shape"][0], -1)

    assert header[module + "_global_scale"]["shape"] == [1]
    (divisor,) = struct.unpack("<f", raw("_global_scale").tobytes())
    values = np.array(quant.E2M1 + tuple(-v for v in quant.E2M1))
    codes = np.stack([raw("_packed") & 15, raw("_packed") >> 4], -1).reshape(64, 64)
    scales = torch.from_numpy(raw("_scale").copy()).view(torch.float8_e4m3fn).double().numpy()
    decoded = values[codes] * scales.repeat(16, 1) / divisor
    packed = model_in(trained)
    packed.prepare()
    wanted = packed.operands[1]["w1"].forward[2, 64:]
    assert np.array_equal(decoded, wanted.double().numpy())
    gate = header[module.replace("up", "gate") + "_global_scale"]["data_offsets"]
    assert data[slice(*gate)] == struct.pack("<f", divisor)


def test_the_types_and_names_of_the_tensors(trained):
    header, _ = parse(trained / "export-nvfp4" / "model.safetensors")
    types = {name: entry["dtype"] for name, entry in header.items() if name != "__metadata__"}
    layer = "model.layers.1."
    assert types[layer + "mlp.gate.weight"] == "F32"
    assert types[layer + "mlp.gate.e_score_correction_bias"] == "F32"
    assert types[layer + "mlp.experts.3.down_proj.weight_packed"] == "U8"
    assert types[layer + "mlp.experts.3.down_proj.weight_scale"] == "F8_E4M3"
    assert types[layer + "self_attn.q_proj.weight"] == "BF16"
    assert types[layer + "self_attn.k_proj.weight"] == types["lm_head.weight"] == "F32"
    # The last layer's experts stay in MXFP8.
    assert types["model.layers.2.mlp.experts.0.gate_proj.weight"] == "BF16"
    header, _ = parse(trained / "export-bf16" / "model.safetensors")
    kept = {n for n, e in header.items() if n != "__metadata__" and e["dtype"] == "F32"}
    assert all("norm" in name or "mlp.gate." in name for name in kept)
    assert len(kept) == 4 * 3 + 1 + 2 * 2


def test_the_configuration_says_what_is_silently_wrong_by_default(trained):
    config = json.loads((trained / "export-nvfp4" / "config.json").read_text())
    assert config["rope_parameters"] == dict(
        rope_type="default", rope_theta=10000.0, partial_rotary_factor=1.0
    )
    assert config["use_qk_norm"] is True and config["tie_word_embeddings"] is False
    assert config["num_nextn_predict_layers"] == 0 and config["rms_norm_eps"] == 1e-5
    ignored = config["quantization_config"]["ignore"]
    layers = ("0.mlp.down_proj", "1.self_attn.q_proj", "1.mlp.gate", "2.mlp.experts.3.up_proj")
    assert {"lm_head", *(f"model.layers.{layer}" for layer in layers)} <= set(ignored)
    assert not any(name.startswith("model.layers.1.mlp.experts") for name in ignored)


def test_the_size_against_bf16_is_printed(tmp_path, capsys):
    wide = odd_model(layers=2, dim=128, expert_dim=256, experts=16)
    print(said := hf.export(wide, tmp_path / "x", "nvfp4"))
    ratio = float(re.search(r"([\d.]+) of the [\d.]+ MB in bf16", said)[1])
    size = (tmp_path / "x" / "model.safetensors").stat().st_size
    hf.export(wide, tmp_path / "y", "bf16")
    files = size / (tmp_path / "y" / "model.safetensors").stat().st_size
    assert "alone 0.281)" in said  # 4.5 of 16 bits
    assert abs(ratio - files) < 0.02 and ratio < 0.72  # every second layer is in 4 bits
    with capsys.disabled():
        print(f" [{said.split(': ', 1)[1]}]", end="")


# ------------------------------------------------------------------------------------------- judges


def loaded(folder, **kw):
    transformers = judge("transformers")
    kw = dict(dtype=torch.float32) | kw
    auto = transformers.AutoModelForCausalLM
    model, said = auto.from_pretrained(folder, output_loading_info=True, **kw)
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert not any(said.values()), said
    return model


def apart(theirs, ours, idx):
    with torch.no_grad():
        wanted = theirs(idx).logits
    return float((logits(ours, idx) - wanted).abs().max() / wanted.abs().max())


def same_greedy_bytes(theirs, ours, text, new=64):
    prompt = torch.tensor([list(text)])
    greedy = dict(do_sample=False, temperature=None, top_k=None, top_p=None, max_new_tokens=new)
    wanted = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)[0].tolist()
    found, _, _ = ours.generate(prompt, new, temperature=0)
    assert wanted == [*text, *found[0].tolist()]
    return found[0].tolist()


def test_transformers_has_our_logits_and_our_greedy_bytes(trained):
    theirs, ours = loaded(trained / "export-bf16"), read(trained / "export-bf16", "bf16")
    assert apart(theirs, ours, some_bytes(length=128)) < 1e-4
    same_greedy_bytes(theirs, ours, b"\xff\x00\n")


def test_transformers_continues_as_we_do_where_no_two_bytes_are_alike(tmp_path):
    model = odd_model("bf16", seq_len=128, dense_layers=1, route_scale=1.5, rope_theta=5e4)
    hf.export(model, tmp_path / "x", "bf16")
    theirs, ours = loaded(tmp_path / "x"), read(tmp_path / "x")
    assert apart(theirs, ours, some_bytes(length=128)) < 1e-4
    assert len(set(same_greedy_bytes(theirs, ours, b"import "))) > 8


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_transformers_has_our_logits_for_every_shape(shape, tmp_path):
    hf.export(odd_model("bf16", **shape), tmp_path / "x", "bf16")
    assert apart(loaded(tmp_path / "x"), read(tmp_path / "x"), some_bytes()) < 1e-4


def test_the_router_stays_fp32_where_the_rest_is_loaded_in_bf16(trained):
    model = loaded(trained / "export-bf16", dtype="auto")
    types = {name: t.dtype for name, t in model.state_dict().items()}
    assert types["model.layers.1.mlp.gate.weight"] == torch.float32
    assert types["model.layers.1.mlp.gate.e_score_correction_bias"] == torch.float32
    assert types["lm_head.weight"] == torch.bfloat16
    assert model.generation_config.eos_token_id is None and model.generation_config.top_k == 0


def test_safetensors_reads_the_same_numbers(trained):
    judge("safetensors")
    from safetensors.torch import load_file

    for fmt in ("bf16", "nvfp4"):
        path = trained / f"export-{fmt}" / "model.safetensors"
        ours, theirs = hf.read_header(path)[0], load_file(path)
        assert ours.keys() == theirs.keys()
        for name, t in theirs.items():
            mine = ours[name].read()
            assert mine.dtype == t.dtype and mine.shape == t.shape
            assert torch.equal(mine.view(torch.uint8), t.view(torch.uint8))


EDGES = [
    "", "\0", "\n", "\r\n", " ", "  a  ", "'s 123", "\u010a\u0100\u0120", "<|endoftext|>",
    "[PAD]</s>", "e\u0301 \u00e9 \ufb01", "\ufeffx", "\u200b\u2028", "\x1b[0m\x7f\x80\xad",
    "\ud7ff\ue000\uffff\U00010000\U0010ffff", "\u0627\u0644\u0633",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
]  # fmt: skip


def test_the_tokenizer_s_ids_are_the_bytes(trained):
    judge("tokenizers")
    transformers = judge("transformers")
    folder = trained / "export-bf16"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=1 << 30)
    assert len(tokenizer) == 256
    points = [*range(0x3000), *range(0x3000, 0x110000, 37), 0x10FFFF]
    text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)  # surrogates are no UTF-8
    for s in [*EDGES, *(text[i : i + 4096] for i in range(0, len(text), 4096))]:
        ids = tokenizer(s)["input_ids"]
        assert ids == list(s.encode())
        assert tokenizer.decode(ids) == s
    # Bytes that are no UTF-8 go in as ids, and come out as what errors="replace" makes of them.
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"


def foreign(**changes):
    """A random model of transformers."""
    transformers = judge("transformers")
    torch.manual_seed(0)
    shape = dict(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=32,
        num_experts_per_tok=2, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1,
        use_qk_norm=True, max_position_embeddings=256, routed_scaling_factor=1.5,
        rms_norm_eps=1e-6, initializer_range=0.2,
    )  # fmt: skip
    rope = dict(rope_type="default", rope_theta=5000.0, partial_rotary_factor=1.0)
    config = transformers.Glm4MoeConfig(**shape | dict(rope_parameters=rope) | changes)
    return transformers.Glm4MoeForCausalLM(config).eval()


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_a_folder_made_by_transformers_is_imported(shard, tmp_path, capsys):
    theirs = foreign()
    theirs.save_pretrained(tmp_path / "x", max_shard_size=shard)
    assert (tmp_path / "x" / "model.safetensors.index.json").exists() == (shard == "100KB")
    ours = read(tmp_path / "x")
    assert ours.cfg.route_scale == 1.5 and ours.cfg.rope_theta == 5000 and ours.cfg.shared == 2
    assert apart(theirs, ours, some_bytes(length=96)) < 1e-4
    losses_of(capsys, init_from=tmp_path / "x", out=tmp_path / "y", seq_len=64)


def test_half_rotary_heads_are_refused_as_transformers_writes_them(tmp_path, capsys):
    rope = dict(rope_type="default", rope_theta=1e4)
    foreign(rope_parameters=rope).save_pretrained(tmp_path)
    assert call(stage="eval", init_from=tmp_path, out=tmp_path / "y") == 2
    assert "partial_rotary_factor is 0.5" in capsys.readouterr().err


def test_compressed_tensors_decodes_to_our_numbers_bit_for_bit(trained, tmp_path):
    judge("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    hf.export(odd_model(), tmp_path / "x", "nvfp4")
    for folder in (trained / "export-nvfp4", tmp_path / "x"):
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
        compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
        ours, stored, count = read(folder), hf.contents(folder), 0
        ours.prepare()
        for theirs, name, index in hf.layout(ours.cfg):
            if theirs + "_packed" not in stored:
                continue
            parts = compressor.compression_param_names(scheme)
            parts = {p: stored[theirs.removesuffix("weight") + p].read() for p in parts}
            weight = compressor.decompress(parts, scheme)["weight"]
            _, layer, matrix = name.split(".")
            assert torch.equal(weight.float(), ours.operands[int(layer)][matrix].forward[index])
            assert torch.equal(weight.float(), ours.state_dict()[name][index])
            count += 1
        assert count == 12 * sum("w1" in name for name in ours.codes)


@pytest.mark.filterwarnings("ignore")
def test_the_dequantised_folder_of_compressed_tensors_is_our_model(trained, tmp_path):
    judge("compressed_tensors")
    from compressed_tensors.entrypoints import convert

    folder = trained / "export-nvfp4"
    decoder = convert.CompressedTensorsDequantizer(folder)
    convert.convert_checkpoint(folder, tmp_path / "x", decoder, max_workers=1)
    ours = read(folder, "bf16")
    forms = {name: {"": t} for name, t in ours.state_dict().items()}
    config = hf.model_config(ours.cfg, "bf16") | dict(dtype="float32")
    texts = hf.small_files(ours.cfg) | {"config.json": config}
    hf.write_folder(tmp_path / "y", hf.their_tensors(ours, forms), texts)
    idx = some_bytes()
    with torch.no_grad():
        theirs, decoded = (loaded(tmp_path / name)(idx).logits for name in "xy")
    assert torch.equal(theirs, decoded)
    assert apart(loaded(tmp_path / "x"), ours, idx) < 1e-4


# ---------------------------------------------------------------------------------------- bad input


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        place = config["rope_parameters"] if name in config["rope_parameters"] else config
        place[name] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder, change):
    tensors = {name: stored.read() for name, stored in hf.contents(folder).items()}
    change(tensors)
    hf.write_safetensors(folder / "model.safetensors", tensors)


def without(name):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.pop(name))


def of_shape(name, *shape):
    return lambda folder: edit_tensors(folder, lambda t: t.update({name: torch.zeros(shape)}))


def setting(**changes):
    return lambda folder: edit_config(folder, **changes)


def cut(name, size):
    return lambda folder: os.truncate(folder / name, size)


def overwrite(name, text):
    return lambda folder: (folder / name).write_bytes(text)


EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
BAD = [
    (without("model.layers.0.self_attn.q_norm.weight"), "0.self_attn.q_norm.weight is missing"),
    (without(EXPERT + "_packed"), "experts.2.up_proj.weight_packed is missing"),
    (without(EXPERT + "_global_scale"), "experts.2.up_proj.weight_global_scale is missing"),
    (of_shape("lm_head.weight", 255, 64), "lm_head.weight is (255, 64), and must be (256, 64)"),
    (of_shape(EXPERT + "_scale", 64, 8), "weight_scale is (64, 8), and must be (64, 4)"),
    (of_shape("model.layers.0.self_attn.q_proj.bias", 64), "q_proj.bias has no place"),
    (of_shape("model.layers.3.mlp.gate.weight", 4, 64), "layers.3.mlp.gate.weight has no place"),
    (setting(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5, and must be 1.0"),
    (setting(rope_type="yarn"), "rope_type is 'yarn'"),
    (setting(vocab_size=151552), "vocab_size is 151552, and must be 256"),
    (setting(tie_word_embeddings=True), "tie_word_embeddings is True"),
    (setting(attention_bias=True), "attention_bias is True"),
    (setting(use_qk_norm=False), "use_qk_norm is False"),
    (setting(use_qk_norm=None), "use_qk_norm is None"),
    (setting(norm_topk_prob=False), "norm_topk_prob is False"),
    (setting(n_group=2), "n_group is 2"),
    (setting(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (setting(model_type="llama"), "model_type is 'llama', and must be 'glm4_moe'"),
    (setting(hidden_size=None), "hidden_size is None, and must be a whole number"),
    (setting(num_hidden_layers="3"), "num_hidden_layers is '3', and must be a whole number"),
    (setting(num_experts_per_tok=2.0), "num_experts_per_tok is 2.0, and must be a whole number"),
    (setting(n_shared_experts=True), "n_shared_experts is True, and must be a whole number"),
    (setting(routed_scaling_factor="1"), "routed_scaling_factor is '1', and must be a number"),
    (setting(num_hidden_layers=4), "tensor model.layers.3.input_layernorm.weight is missing"),
    (setting(num_key_value_heads=3), "kv_heads 3: must divide heads 4"),
    (setting(num_attention_heads=0), "heads 0: must be at least 1"),
    (setting(rope_theta=None), "rope_theta is None, and must be a number"),
    (setting(forward_recipe="fp3"), "forward_recipe 'fp3'"),
    (setting(quantization_config=dict(quant_method="fp8")), "weights in the format 'fp8'"),
    (cut("model.safetensors", 100000), "are not all there"),
    (cut("model.safetensors", 4), "model.safetensors is damaged"),
    (cut("model.safetensors", 0), "model.safetensors is damaged"),
    (overwrite("model.safetensors", b"\xff" * 64), "model.safetensors is damaged"),
    (overwrite("model.safetensors", b"\2" + bytes(7) + b"[]"), "model.safetensors is damaged"),
    (overwrite("config.json", b"{"), "config.json cannot be read"),
    (overwrite("config.json", b"[]"), "config.json is damaged"),
    (overwrite("model.safetensors.index.json", b'{"weight_map": {"a": "b.safetensors"}}'),
     "file b.safetensors is missing"),
    (overwrite("model.safetensors.index.json", b'{}'), "index.json is damaged"),
    (lambda folder: (folder / "model.safetensors").unlink(), "file model.safetensors is missing"),
    (lambda folder: (folder / "config.json").unlink(), "neither a checkpoint nor a config.json"),
]  # fmt: skip


@pytest.mark.parametrize("spoil, sentence", BAD, ids=[text for _, text in BAD])
def test_a_bad_folder_is_refused_in_one_sentence(spoil, sentence, trained, tmp_path, capsys):
    shutil.copytree(trained / "export-nvfp4", tmp_path / "x")
    spoil(tmp_path / "x")
    assert call(stage="rl", init_from=tmp_path / "x", out=tmp_path / "y", **LOOK) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.startswith("train.py: ") and said.count("\n") == 1
    assert not (tmp_path / "y").exists()


def test_what_has_no_such_export_is_refused(tmp_path, capsys):
    for recipe, shape in (("bf16", {}), ("mxfp8", {}), ("nvfp4", dict(dense_layers=3))):
        with pytest.raises(ValueError, match="no weights in 4 bits"):
            hf.export(odd_model(recipe, **shape), tmp_path / "x", "nvfp4")
    with pytest.raises(ValueError, match="1 expert"):
        hf.export(odd_model("bf16", experts=1, top_k=1), tmp_path / "x", "bf16")
    assert call(stage="export", out=tmp_path / "y") == 2
    assert "--stage export needs a trained model" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_shape_that_is_not_the_folder_s_is_refused(trained, tmp_path, capsys):
    assert call(stage="eval", init_from=trained / "export-bf16", out=tmp_path, experts=8) == 2
    assert "--experts 8: the model in" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- all or nothing


def test_what_is_no_export_is_not_overwritten(trained, tmp_path, capsys):
    model = odd_model("bf16")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    hf.export(model, tmp_path / "x", "bf16")
    (tmp_path / "x" / "notes.txt").write_text("x")
    hf.export(model, tmp_path / "z", "bf16")
    tuned = {name: stored.read() for name, stored in hf.contents(tmp_path / "z").items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "OWNER", dict(format="pt"))  # as if another program had saved there
        hf.write_safetensors(tmp_path / "z" / "model.safetensors", tuned)
    (tmp_path / "file").write_text("")
    (tmp_path / "w.tmp").mkdir()
    (tmp_path / "w.tmp" / "mine").write_text("x")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("mine", "x", "z", "file", "w"):
        with pytest.raises(ValueError, match="is no export of this program"):
            hf.export(model, tmp_path / name, "bf16")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def kill_at(step, write, folder):
    """Export in a child process that is killed before its `step`-th call that changes the disk.
    Whether it was killed."""
    child = os.fork()
    if child == 0:
        left = [step]

        def counted(f):
            def call(*args, **kw):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return f(*args, **kw)

            return call

        try:
            hf.os = Patched(os, fsync=counted(os.fsync), replace=counted(os.replace))
            hf.shutil = Patched(shutil, rmtree=counted(shutil.rmtree))
            hf.open = counted(lambda path, mode: HalfWritten(open(path, mode, 0), counted))
            write(folder)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != 0


class Patched:
    """A module with some of its functions replaced."""

    def __init__(self, module, **changes):
        self.__dict__.update(vars(module) | changes)


class HalfWritten:
    """A file whose writer can be killed in the middle of its first write and of its 30th."""

    def __init__(self, file, counted):
        self.file, self.counted, self.writes = file, counted, 0

    def write(self, data):
        data, self.writes = bytes(data), self.writes + 1
        first = self.counted(self.file.write) if self.writes in (1, 30) else self.file.write
        self.file.write(data[: len(data) // 2])
        first(data[len(data) // 2 :])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def has_config(folder):
    """Without one nothing loads the folder."""
    try:
        return bool(hf.read_json(folder / "config.json"))
    except ValueError:
        return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked child")
@pytest.mark.parametrize("replaces", [False, True])
def test_a_killed_export_leaves_a_whole_folder_or_none(replaces, tmp_path):
    writers, files = [], []
    for seed in (1, 2):
        model = odd_model(seed=seed, dim=32, layers=2, experts=2)
        tensors = hf.their_tensors(model, hf.stored_forms(model, "nvfp4"))
        texts = hf.small_files(model.cfg) | {"config.json": hf.model_config(model.cfg, "nvfp4")}
        writers.append(lambda folder, args=(tensors, texts): hf.write_folder(folder, *args))
        writers[-1](tmp_path / f"{seed}")
        files.append(files_of(tmp_path / f"{seed}"))
    (write_old, write_new), (old, new) = writers, files
    step, killed, ends = 0, True, set()
    while killed:
        step += 1
        folder = tmp_path / f"at-{step}" / "x"
        if replaces:
            write_old(folder)
        killed = kill_at(step, write_new, folder)
        for path in folder.parent.glob("*"):
            assert files_of(path) in (old, new) or not has_config(path)
        ends.add("none" if not folder.exists() else "new" if files_of(folder) == new else "old")
        write_new(folder)  # the next one cleans up
        assert files_of(folder) == new
        assert [path.name for path in folder.parent.iterdir()] == ["x"]
    assert step > 20 and ends == {"none", "new"} | ({"old"} if replaces else set())


@FORMATS
def test_a_full_disk_is_one_sentence_and_leaves_the_export_before(fmt, trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / f"export-{fmt}"
    before = files_of(folder)

    def full(handle):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf.os, "fsync", full)
        assert call(stage="export", export_format=fmt, out=tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "could not be written: [Errno 28] No space left" in said and said.count("\n") == 1
    assert files_of(folder) == before and not folder.with_name(folder.name + ".tmp").exists()


# ----------------------------------------------------------------------------------------- sampling


def sampled(capfdbinary, **flags):
    """(bytes on stdout, text on stderr)."""
    assert call(stage="sample", **flags) == 0
    out, err = capfdbinary.readouterr()
    return out, err.decode()


def test_sampling_writes_the_bytes_that_the_model_draws(trained, tmp_path, capfdbinary):
    folder = trained / "export-nvfp4"
    flags = dict(init_from=folder, out=tmp_path, prompt="caf\u00e9 ", new=24)
    flags |= dict(seed=5, sample_top_k=40)
    out, err = sampled(capfdbinary, **flags)
    prompt = torch.tensor([list("caf\u00e9 ".encode())])
    wanted, _, _ = read(folder).generate(prompt, 24, temperature=0.8, top_k=40, seed=5)
    assert out == "caf\u00e9 ".encode() + bytes(wanted[0].tolist())
    assert re.fullmatch(r"\n\[24 bytes, \d+ bytes/s\]\n", err)
    assert sampled(capfdbinary, **flags)[0] == out
    assert sampled(capfdbinary, **flags | dict(seed=6))[0] != out
    flags.pop("init_from")
    assert sampled(capfdbinary, **flags | dict(out=trained))[0] == out
    greedy = dict(out=trained, prompt="", new=8, temperature=0)
    assert sampled(capfdbinary, **greedy)[0] == sampled(capfdbinary, **greedy, seed=9)[0]
    assert not list(tmp_path.iterdir())


def test_a_prompt_that_is_no_utf_8_goes_in_as_it_was_typed(trained, capfdbinary):
    out, _ = sampled(capfdbinary, out=trained, prompt=os.fsdecode(b"\xff\x80a"), new=3)
    assert out.startswith(b"\xff\x80a") and len(out) == 6


class Terminal(io.TextIOWrapper):
    def isatty(self):
        return True


def shown(pieces, encoding):
    """What a terminal is sent of bytes that come in pieces."""
    out = Terminal(io.BytesIO(), encoding=encoding, newline="")
    write = train.byte_writer(out)
    for i, piece in enumerate(pieces):
        write(piece, final=i == len(pieces) - 1)
    return out.buffer.getvalue().decode(encoding)


def test_a_terminal_gets_text_whatever_the_bytes_are():
    every = [bytes([b]) for b in "h\u00e9\u20ac\U0001f600\n\t".encode()]
    assert shown(every, "utf-8") == "h\u00e9\u20ac\U0001f600\n\t"
    assert shown([b"a\xff", b"\xe2\x82", b"b\x1b[2J\x07\r", b"\xe2\x82"], "utf-8") == (
        "a\ufffd\ufffdb\ufffd[2J\ufffd\ufffd\ufffd"
    )
    assert shown(every, "ascii") == "h???\n\t"
    for seed in range(20):
        shown([np.random.default_rng(seed).bytes(200), b""], "latin-1")


def test_a_reader_that_goes_away_is_no_error(trained):
    command = [sys.executable, "train.py", "--stage", "sample", "--out", trained, "--new", "3000"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert run.stdout.read(4) == b"def "
    run.stdout.close()
    err = run.stderr.read().decode()
    assert run.wait() == 0 and "bytes/s" in err
    assert "Traceback" not in err and "Exception" not in err
