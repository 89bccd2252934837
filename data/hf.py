"""A trained model as a folder that other programs load, and such a folder as a model to start from.

    python train.py --stage export --export-format bf16      # writes OUT/export-bf16
    python train.py --stage export --export-format nvfp4     # writes OUT/export-nvfp4
    python train.py --stage rl --init-from FOLDER            # starts from it; or eval, sample ...

The folder is one of Hugging Face's: a Glm4MoeForCausalLM with a tokenizer whose ids are bytes. No
library is needed to write or to read it. What its tensors are:

    weight                            bf16 export       nvfp4 export
    4 bits in the forward pass        bf16, rounded     the codes that training multiplied by
    MXFP8 in the forward pass         bf16, rounded     bf16: their decoded values, exactly
    unrounded (k, v, embedding, head) bf16, rounded     fp32
    router, its bias, norms           fp32              fp32

So the bf16 export is the weights to train on, and the nvfp4 export is the forward pass itself: in
our own loader its loss is the loss of the run, bit for bit. It needs no calibration, but it says
nothing of activations: other programs leave them in 16 bits, where training rounds them too, so
elsewhere the loss is close, not equal. Its layout is compressed-tensors' `nvfp4-pack-quantized`.

A model whose answers end with a newline stops there if told to: generate(..., eos_token_id=10).
"""
import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

import quant

# --------------------------------------------------------------------------- names: theirs and ours
# Fields of ModelConfig and what config.json calls them.
FIELDS = dict(
    dim="hidden_size", layers="num_hidden_layers", heads="num_attention_heads",
    kv_heads="num_key_value_heads", head_dim="head_dim", experts="n_routed_experts",
    top_k="num_experts_per_tok", expert_dim="moe_intermediate_size", shared="n_shared_experts",
    dense_layers="first_k_dense_replace", dense_dim="intermediate_size",
    seq_len="max_position_embeddings", norm_eps="rms_norm_eps", route_scale="routed_scaling_factor")
# What our model is and cannot be otherwise. Written out in full, because some defaults of theirs
# are other models: half of each head rotary, no normalised queries and keys.
FIXED = dict(
    model_type="glm4_moe", vocab_size=256, hidden_act="silu", attention_bias=False,
    tie_word_embeddings=False, use_qk_norm=True, norm_topk_prob=True, n_group=1, topk_group=1)
FIXED_ROPE = dict(rope_type="default", partial_rotary_factor=1.0)
PACKED = "nvfp4-pack-quantized"


def layout(cfg):
    """(their tensor, our tensor, index of theirs in ours) for every tensor of a model."""
    yield "model.embed_tokens.weight", "embed", ()
    for layer in range(cfg.layers):
        for theirs, ours, index in layer_layout(cfg, is_moe=layer >= cfg.dense_layers):
            yield f"model.layers.{layer}.{theirs}", f"blocks.{layer}.{ours}", index
    yield "model.norm.weight", "norm", ()
    yield "lm_head.weight", "head", ()


def layer_layout(cfg, is_moe):
    yield "input_layernorm.weight", "attn_norm", ()
    for name in "qkvo":
        yield f"self_attn.{name}_proj.weight", f"w{name}", ()
    yield "self_attn.q_norm.weight", "q_norm", ()
    yield "self_attn.k_norm.weight", "k_norm", ()
    yield "post_attention_layernorm.weight", "ffn_norm", ()
    if not is_moe:
        yield from swiglu_layout("mlp", "v1", "v2", cfg.dense_dim)
        return
    yield "mlp.gate.weight", "router", ()
    yield "mlp.gate.e_score_correction_bias", "bias", ()
    for e in range(cfg.experts):
        yield from swiglu_layout(f"mlp.experts.{e}", "w1", "w2", cfg.expert_dim, (e,))
    if cfg.shared:
        width = cfg.shared * cfg.expert_dim
        yield from swiglu_layout("mlp.shared_experts", "v1", "v2", width)


def swiglu_layout(module, first, second, width, expert=()):
    """Our first matrix is [gate rows, up rows]."""
    yield f"{module}.gate_proj.weight", first, (*expert, slice(0, width))
    yield f"{module}.up_proj.weight", first, (*expert, slice(width, 2 * width))
    yield f"{module}.down_proj.weight", second, expert


def packed_parts(q, like):
    """What follows the name of a packed weight -> tensor, with as many axes as the weight `like`.

    Our outer scales are one number for each row, all equal in an expert; theirs is one, inverted.
    """
    parts = dict(_packed=q.codes, _scale=q.scales, _global_scale=q.outer)
    return parts if like.dim() == 3 else {name: t[0] for name, t in parts.items()}


# ------------------------------------------------------------------------------------------- export
def stored_forms(model, fmt):
    """Our tensor's name -> {what follows their name: tensor}: the table at the top."""
    linears = {}
    if fmt == "nvfp4":
        model.prepare()
        for i, block in enumerate(model.blocks):
            for name, gemms in block.linears().items():
                linears[f"blocks.{i}.{name}"] = gemms.w, model.operands[i][name].packed
    forms = {}
    for name, w in model.state_dict().items():
        read_as, packed = linears.get(name, ("bf16", None))
        if w.dim() < 2 or name.endswith("router"):
            forms[name] = {"": w}
        elif fmt == "bf16":
            forms[name] = {"": w.bfloat16()}
        elif quant.is_fp4(read_as):
            forms[name] = packed_parts(packed or pack(w, read_as), like=w)
        else:
            forms[name] = {"": w if read_as == "bf16" else quant.cast(w, read_as).bfloat16()}
    return forms


def pack(w, fmt):
    """The codes of a weight whose recipe decodes them at once and keeps none."""
    w = w if w.dim() == 3 else w[None]
    return quant.quantize(w, fmt, outer=quant.weight_outer(w, fmt))


def their_tensors(model, forms):
    tensors = {}
    for theirs, ours, index in layout(model.cfg):
        for suffix, t in forms[ours].items():
            t = t[index]
            tensors[theirs + suffix] = 1 / t[:1] if suffix == "_global_scale" else t
    return tensors | empty_tensors(model.cfg)


def empty_tensors(cfg):
    """Without shared experts, theirs has some of width 0 all the same."""
    shapes = dict(gate_proj=(0, cfg.dim), up_proj=(0, cfg.dim), down_proj=(cfg.dim, 0))
    layers = () if cfg.shared else range(cfg.dense_layers, cfg.layers)
    return {f"model.layers.{layer}.mlp.shared_experts.{name}.weight": torch.empty(shape)
            for layer in layers for name, shape in shapes.items()}


def model_config(cfg, recipe):
    """config.json. `forward_recipe` is ours: in which precision its numbers are to be read."""
    rope = FIXED_ROPE | dict(rope_theta=cfg.rope_theta)
    return dict(
        architectures=["Glm4MoeForCausalLM"], **FIXED,
        **{theirs: getattr(cfg, ours) for ours, theirs in FIELDS.items()},
        rope_parameters=rope,
        # The same for transformers 4, which looks for them here.
        rope_theta=rope["rope_theta"], partial_rotary_factor=rope["partial_rotary_factor"],
        num_nextn_predict_layers=0, attention_dropout=0.0,
        # A padding byte named here would freeze its row of the embedding in fine-tuning.
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
        use_cache=True, dtype="bfloat16", forward_recipe=recipe)


def quantization_config(tensors):
    """compressed-tensors' description of a file with packed weights."""
    matrices = [name for name, t in tensors.items() if name.endswith(".weight") and t.dim() == 2]
    ignore = [name.removesuffix(".weight") for name in matrices if "embed_tokens" not in name]
    weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
                   dynamic=False, scale_dtype="torch.float8_e4m3fn")
    group = dict(targets=["Linear"], weights=weights, format=PACKED)
    group |= dict(input_activations=None, output_activations=None)
    return dict(
        quant_method="compressed-tensors", format=PACKED, quantization_status="compressed",
        config_groups=dict(group_0=group), ignore=ignore, kv_cache_scheme=None,
        global_compression_ratio=None)


def byte_letters():
    """The letter that a ByteLevel tokenizer writes for each byte: itself where it can be seen, else
    the next letter from U+0100 on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {b: chr(b) if b in seen else chr(256 + hidden.index(b)) for b in range(256)}


def tokenizer():
    """tokenizer.json: a BPE without merges, so that every byte is its own token and id = byte.

    No special tokens: text that happens to hold one's letters would become its id.
    """
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    model = dict(
        type="BPE", vocab={letter: byte for byte, letter in byte_letters().items()}, merges=[],
        dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None,
        fuse_unk=False, byte_fallback=False, ignore_merges=False)
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None,
        pre_tokenizer=byte_level, post_processor=None, decoder=byte_level, model=model)


def small_files(cfg):
    """name -> JSON of all files but config.json. Sampling is as in training: temperature 1, all
    bytes."""
    return {
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast",
                                      clean_up_tokenization_spaces=False,
                                      model_max_length=cfg.seq_len),
        "generation_config.json": dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                                       pad_token_id=0)}


def export(model, folder, fmt):
    """Write the folder, all of it or nothing; return a sentence for the user.

    ValueError where the model has no such form, or something else is in the way.
    """
    cfg, folder = model.cfg, Path(folder)
    if cfg.experts < 2:
        raise ValueError("a model of 1 expert: Glm4Moe routes between at least 2")
    forms = stored_forms(model, fmt)
    tensors = their_tensors(model, forms)
    config = model_config(cfg, recipe="bf16" if fmt == "bf16" else model.recipe.name)
    if fmt == "nvfp4":
        if not any(name.endswith("_packed") for name in tensors):
            raise ValueError(f"--export-format nvfp4: the recipe {model.recipe.name} has no "
                             "weights in 4 bits; use bf16, or train with --precision nvfp4")
        config["quantization_config"] = quantization_config(tensors)
    try:
        write_folder(folder, tensors, small_files(cfg) | {"config.json": config})
    except OSError as error:
        shutil.rmtree(beside(folder, ".tmp"), ignore_errors=True)
        raise ValueError(f"{folder} could not be written: {error}") from None
    return describe(folder, model, tensors, fmt)


def describe(folder, model, tensors, fmt):
    """How large the export is, and what other programs do not do with it."""
    size, bf16 = nbytes(tensors), nbytes(their_tensors(model, stored_forms(model, "bf16")))
    if fmt == "bf16":
        return f"{folder}: {size / 1e6:.2f} MB"
    packed = {name: t for name, t in tensors.items() if not name.endswith(("weight", "bias"))}
    numbers = 2 * sum(t.numel() for name, t in packed.items() if name.endswith("_packed"))
    return (f"{folder}: {size / 1e6:.2f} MB, {size / bf16:.3f} of the {bf16 / 1e6:.2f} MB in bf16 "
            f"(the weights in 4 bits alone {nbytes(packed) / numbers / 2:.3f}); other programs do "
            "not round activations")


def nbytes(tensors):
    """Of all tensors of a folder, name -> tensor."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


# ------------------------------------------------------------------------------------------ writing
OWNER = dict(format="pt", written_by="train.py --stage export")  # transformers asks for the first


def write_folder(folder, tensors, texts):
    """Write beside the folder and rename. config.json comes last, and nothing loads without it: a
    kill at any moment leaves a whole folder or none that looks whole."""
    temporary, old = beside(folder, ".tmp"), beside(folder, ".old")
    for path in (folder, temporary, old):
        if path.exists() and not is_ours(path, texts, whole=path == folder):
            raise ValueError(f"{path} is no export of this program: move it away, or use another "
                             "--out")
    for path in (temporary, old):
        shutil.rmtree(path, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_safetensors(temporary / "model.safetensors", tensors)
    for name, content in texts.items():
        write_synced(temporary / name, [json.dumps(content, indent=1).encode()])
    sync_folder(temporary)
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def beside(folder, ending):
    return folder.with_name(folder.name + ending)


def is_ours(folder, texts, whole):
    """Did an export write the folder, and has nobody put anything else into it?"""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if not names <= {"model.safetensors", *texts}:
        return False
    if not whole and "config.json" not in names:
        return True                     # what a killed export left
    try:
        return read_header(folder / "model.safetensors")[1] == OWNER
    except (OSError, ValueError):
        return False


def write_safetensors(path, tensors):
    """8 bytes with the header's length, the header as JSON, the numbers. Types with more bytes come
    first, so that every tensor is aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, at = {"__metadata__": OWNER}, 0
    for name in names:
        t = tensors[name]
        end = at + t.numel() * t.element_size()
        header[name] = dict(dtype=TYPE_NAMES[t.dtype], shape=list(t.shape), data_offsets=[at, end])
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = (tensors[name].cpu().contiguous().view(torch.uint8).numpy() for name in names)
    write_synced(path, [len(text).to_bytes(8, "little") + text, *data])


def write_synced(path, pieces):
    with open(path, "wb") as f:
        for piece in pieces:
            f.write(piece)
        f.flush()
        os.fsync(f.fileno())


def sync_folder(path):
    """So that the names of its files survive a power cut too. Windows opens no folders."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# ------------------------------------------------------------------------------------------ reading
TYPES = dict(F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16, F8_E4M3=torch.float8_e4m3fn,
             U8=torch.uint8)
TYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass
class Stored:
    """Where a tensor lies."""
    path: Path
    dtype: torch.dtype
    shape: tuple
    start: int
    size: int

    def read(self):
        if not self.size:
            return torch.empty(self.shape, dtype=self.dtype)
        buffer = bytearray(self.size)
        with open(self.path, "rb") as f:
            f.seek(self.start)
            f.readinto(buffer)
        return torch.frombuffer(buffer, dtype=self.dtype).view(self.shape)


def read_header(path):
    """({name: Stored}, metadata) of a safetensors file; ValueError where it is none."""
    size, found = path.stat().st_size, {}
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        text = f.read(length) if length < size else b""
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        for name, entry in header.items():
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            if dtype not in TYPES:
                raise ValueError(f"{name} is of type {dtype}; allowed are {', '.join(TYPES)}")
            start, end = (8 + length + at for at in entry["data_offsets"])
            if end > size or end - start != math.prod(shape) * TYPES[dtype].itemsize:
                raise ValueError(f"the bytes of {name} are not all there")
            found[name] = Stored(path, TYPES[dtype], shape, start, end - start)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    return found, metadata


def contents(folder):
    """name -> Stored of all tensors of a folder, whose file may be split as an index says."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{index} is damaged: it has no weight_map")
        names = sorted({Path(str(name)).name for name in places.values()})
    found = {}
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: file {name} is missing")
        found |= read_header(folder / name)[0]
    return found


def read_json(path):
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content


def is_folder(path):
    return (Path(path) / "config.json").is_file()


def read_config(folder):
    """The shape of the model in a folder, as fields of ModelConfig, and the `precision` in which to
    read it; ValueError, in one sentence, for a model that ours cannot be."""
    path = Path(folder) / "config.json"
    config = read_json(path)
    rope = config.get("rope_parameters") or config
    given = {name: config.get(name) for name in FIXED}
    given |= {name: rope.get(name) for name in FIXED_ROPE}
    given["rope_type"] = given["rope_type"] or "default"
    for name, wanted in (FIXED | FIXED_ROPE).items():
        if given[name] != wanted:
            raise ValueError(f"{path}: {name} is {given[name]!r}, and must be {wanted!r}")
    fields = {ours: config.get(theirs) for ours, theirs in FIELDS.items()}
    fields |= dict(rope_theta=rope.get("rope_theta"), head_dim=fields["head_dim"] or 0)
    for ours, value in fields.items():
        kinds = (int, float) if ours in ("rope_theta", "norm_eps", "route_scale") else (int,)
        if type(value) not in kinds:
            kind = "a number" if float in kinds else "a whole number"
            raise ValueError(f"{path}: {FIELDS.get(ours, ours)} is {value!r}, and must be {kind}")
    quantization = config.get("quantization_config") or dict(format=PACKED)
    if quantization.get("format") != PACKED:
        kind = quantization.get("format") or quantization.get("quant_method")
        raise ValueError(f"{path}: weights in the format {kind!r}; allowed is {PACKED!r}, or none")
    recipe = config.get("forward_recipe", "bf16")
    if recipe not in quant.RECIPES:
        raise ValueError(f"{path}: forward_recipe {recipe!r}; there are {', '.join(quant.RECIPES)}")
    return fields | dict(precision=recipe)


@torch.no_grad()
def load(folder, model):
    """Fill the model in place and return the codes of packed weights, our name -> Quantized, for
    GPT.keep_codes. ValueError, in one sentence, on a tensor that is missing, of the wrong shape, or
    has no place in the model."""
    folder, packed, is_packed = Path(folder), {}, {}
    there, state = contents(folder), model.state_dict()
    parts_here = {n: t for n, t in state.items() if model.is_sharded(n) and model.mesh.ep > 1}
    for name, t in parts_here.items():              # experts spread over ranks: read all, keep ours
        state[name] = torch.empty(model.cfg.experts, *t.shape[1:])

    def take(name, shape):
        if name not in there:
            raise ValueError(f"{folder}: tensor {name} is missing")
        stored = there.pop(name)
        if stored.shape != shape:
            raise ValueError(f"{folder}: tensor {name} is {stored.shape}, and must be "
                             f"{tuple(shape)}")
        return stored.read()

    for theirs, ours, index in layout(model.cfg):
        w = state[ours]
        if not is_packed.setdefault(ours, theirs + "_packed" in there):
            w[index].copy_(take(theirs, w[index].shape))
            continue
        parts = packed_parts(packed.setdefault(ours, empty_codes(w)), like=w)
        parts["_global_scale"][index] = 1 / take(theirs + "_global_scale", (1,))
        for suffix in ("_packed", "_scale"):
            parts[suffix][index] = take(theirs + suffix, parts[suffix][index].shape)
    refuse_the_rest(folder, there, model.cfg.layers)
    for ours, q in packed.items():
        state[ours].copy_(q.dequantize().view(state[ours].shape))
    for name, t in parts_here.items():
        t.copy_(model.here(state[name]))
    model.weights_changed()
    # Outer scales of other programs may be no powers of two: those numbers, not their codes.
    return {ours: codes_here(q, model, ours in parts_here) for ours, q in packed.items()
            if bool((torch.frexp(q.outer).mantissa == 0.5).all())}


def codes_here(q, model, sharded):
    """A packed weight on the model's device, of a sharded one the experts of this process."""
    parts = (model.here(t) if sharded else t for t in q.tensors())
    return quant.Quantized(q.fmt, *(t.to(model.embed.device) for t in parts))


def empty_codes(w):
    """Room for the codes of a weight w [E, N, K], or of one matrix."""
    *rows, columns = w.shape if w.dim() == 3 else (1, *w.shape)
    codes = torch.empty(*rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(*rows, columns // 16, dtype=torch.float8_e4m3fn)
    return quant.Quantized("nvfp4", codes, scales, torch.empty(rows))


def refuse_the_rest(folder, there, layers):
    """Layers that guess more than the next byte may lie behind ours, no part of the model."""
    guesses = read_json(folder / "config.json").get("num_nextn_predict_layers") or 0
    known = tuple(f"model.layers.{layers + i}." for i in range(guesses))
    rest = sorted(n for n, stored in there.items() if stored.size and not n.startswith(known))
    if rest:
        raise ValueError(f"{folder}: tensor {rest[0]} has no place in this model")
