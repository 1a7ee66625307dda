"""Real-life model folders: the result of the check for each, and that it reads little."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from epdd import checkpoint as looks
from epdd.checkpoint import headers, identity
from epdd.errors import ModelError
from epdd.families import Defaults
from epdd.worker.vision import preprocess
from epdd.worker.weights import load
from tests.models import checkpoints
from tests.worker.vision.test_preprocess import normalised

SINGLE = "model.safetensors"


@pytest.fixture
def folder(checkpoint: Callable[..., str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3_vl"), tmp_path / "my-model"))


@pytest.fixture
def sharded(checkpoint: Callable[..., str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3_vl", shards=3), tmp_path / "shards"))


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def edit(path: Path, **changes: Any) -> None:
    """Set fields of a JSON file; `section__field` for one below; None: take it out."""
    whole = read(path) if path.is_file() else {}
    for key, value in changes.items():
        *sections, name = key.split("__")
        part = whole
        for section in sections:
            part = part[section]
        part.pop(name, None)
        if value is not None:
            part[name] = value
    path.write_text(json.dumps(whole))


def store(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], file: str = SINGLE) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        looks.look(str(folder))
    assert "\n" not in caught.value.message and str(folder) in caught.value.message
    assert caught.value.exit_code == 78
    return caught.value.message.replace(str(folder), ".")


# --- what is found


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("options", [{}, {"shards": 3}, {"tie": True, "dtype": "bfloat16"}])
def test_the_facts_of_a_whole_folder(checkpoint: Callable[..., str], family: str, options: dict[str, Any]) -> None:
    path = checkpoint(family, **options)
    found = looks.look(path)
    model = checkpoints.whole_model(path)
    vision = sum(p.numel() for p in model.model.visual.parameters())
    assert found.family.model_type == family and found.family.parameters == (
        vision, sum(p.numel() for p in model.parameters()) - vision)
    assert found.dtype == options.get("dtype", "float32") and found.quantization == "none" and not found.warnings
    assert found.vision_bytes == vision * (2 if "dtype" in options else 4)
    assert found.name == family and len(found.files) == len(list(Path(path).glob("*.safetensors")))
    assert found.file_bytes == sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def test_a_hundred_shards_are_judged_by_their_headers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    # Large enough that reading weights would show: a sparse gigabyte.
    edit(folder / "config.json", text_config__vocab_size=4_000_000)
    spread: dict[str, str] = {}
    for i in range(100):
        file = f"model-{i + 1:05d}-of-00100.safetensors"
        part = {name: tensor for j, (name, tensor) in enumerate(sorted(tensors.items())) if j % 100 == i}
        header = {}
        at = 0
        for name, tensor in part.items():
            shape = [4_000_000, 64] if name in ("lm_head.weight", "model.language_model.embed_tokens.weight") else list(
                tensor.shape)
            end = at + 4 * torch.Size(shape).numel()
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
            at = end
        data = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(data).to_bytes(8, "little") + data)
            out.truncate(8 + len(data) + at)
        spread |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": spread}))
    before = _bytes_read()
    found = looks.look(str(folder))
    took = _bytes_read() - before
    assert len(found.files) == 100 and found.file_bytes > 2_000_000_000
    assert took < 1_000_000, took       # JSON files and headers


def _bytes_read() -> int:
    """By this process, from the page cache too."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines()
                if line.startswith("rchar"))


def test_the_name_of_the_folder_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert looks.look(".").name == looks.look(str(folder) + "/").name == "my-model"


def test_links_into_blobs_as_in_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert looks.look(str(snapshot)).family.parameters == looks.look(str(folder)).family.parameters


# --- layouts that are served


def test_the_processors_settings_as_transformers_5_writes_them(folder: Path) -> None:
    before = looks.look(str(folder)).family
    first = identity.digest(str(folder))
    image = read(folder / "preprocessor_config.json")
    (folder / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json" in refused(folder)
    edit(folder / "processor_config.json", image_processor=image, processor_class="Qwen3VLProcessor")
    assert looks.look(str(folder)).family == before
    again = identity.digest(str(folder))
    edit(folder / "processor_config.json", image_processor__image_mean=[0.4, 0.5, 0.6])
    assert len({first, again, identity.digest(str(folder))}) == 3
    assert looks.look(str(folder)).family.mean == (0.4, 0.5, 0.6)


@pytest.mark.parametrize("change, mean, std", [
    ({"rescale_factor": 2 / 255}, (0.25,) * 3, (0.25,) * 3), ({"do_normalize": False}, (0.0,) * 3, (1.0,) * 3),
    ({"do_rescale": False, "do_normalize": False}, (0.0,) * 3, (1 / 255,) * 3),
    ({"image_mean": None, "image_std": None}, (0.48145466, 0.4578275, 0.40821073),
     (0.26862954, 0.26130258, 0.27577711))])
def test_how_pixels_are_scaled(folder: Path, change: dict[str, Any], mean: tuple[float, ...],
                               std: tuple[float, ...]) -> None:
    edit(folder / "preprocessor_config.json", **change)
    family = looks.look(str(folder)).family
    assert family.mean == pytest.approx(mean) and family.std == pytest.approx(std)


def test_scaled_pixels_are_those_of_the_reference_processor(folder: Path) -> None:
    edit(folder / "preprocessor_config.json", rescale_factor=1 / 100, image_mean=[0.1, 0.2, 0.3])
    family, image = looks.look(str(folder)).family, checkpoints.picture(90, 60)
    reference, _ = checkpoints.pixel_values(str(folder), [image])
    found = normalised(preprocess.patches(np.asarray(image), family, family.grid(90, 60)), family)
    assert abs(found - reference.numpy()).max() < 1e-5


def test_a_byte_order_mark_is_no_fault(folder: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert looks.look(str(folder)).name == "my-model"


def test_leftovers_beside_the_model_do_not_count(sharded: Path, folder: Path) -> None:
    before = looks.look(str(sharded))
    shutil.copy(folder / SINGLE, sharded / "consolidated.safetensors")
    edit(sharded / "adapter_config.json", peft_type="LORA")
    save_file({"base_model.lora_A.weight": torch.zeros(8, 64)}, sharded / "adapter_model.safetensors")
    after = looks.look(str(sharded))
    assert replace(after, warnings=()) == before
    assert after.warnings == (f"{sharded}/adapter_config.json: the adapter is not applied; merge it into the model to "
                              "serve both",)


def test_known_harmless_tensors_are_left_alone(folder: Path) -> None:
    store(folder, lambda t: t.update({"mtp.layers.0.weight": torch.zeros(4, 4),
                                      "model.language_model.rotary_emb.inv_freq": torch.zeros(8)}))
    assert looks.look(str(folder))


def test_tied_embeddings_may_be_left_out_once(folder: Path) -> None:
    store(folder, lambda t: t.pop("lm_head.weight"))
    assert "lm_head.weight" in refused(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    assert looks.look(str(folder))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["auto", None])
def test_where_no_type_is_named_it_is_that_of_the_weights(checkpoint: Callable[..., str], tmp_path: Path, key: str,
                                                          value: str | None) -> None:
    for stored in ("bfloat16", "float32"):
        folder = Path(shutil.copytree(checkpoint("qwen3_vl", dtype=stored), tmp_path / stored))
        edit(folder / "config.json", dtype=None, text_config__dtype=None, vision_config__dtype=None)
        if value:
            edit(folder / "config.json", **{key: value, f"text_config__{key}": value, f"vision_config__{key}": value})
        # A few tensors of another type do not decide.
        store(folder, lambda t: t.update({name: tensor.float() for name, tensor in t.items() if "norm" in name}))
        found = looks.look(str(folder))
        assert found.dtype == found.family.stored == stored
        assert load.pick_dtype(str(folder), "auto", "cuda:0") is getattr(torch, stored)
        assert load.load_vision(str(folder), "float32", "cpu").dtype is torch.float32


@pytest.mark.parametrize("limit", [-1, 0, None])
def test_top_k_may_be_off_in_each_spelling(folder: Path, limit: int | None) -> None:
    edit(folder / "generation_config.json", do_sample=True, top_k=limit, temperature=0.7)
    assert looks.look(str(folder)).family.defaults == Defaults(temperature=0.7, top_k=0)


def test_templates_of_other_names_beside_the_default_one(folder: Path) -> None:
    before = looks.look(str(folder)).prompts.template
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{% if %} of another name")
    after = looks.look(str(folder)).prompts.template
    assert (after.source, after.path) == (before.source, str(folder / "chat_template.jinja"))


# --- end tokens


def ends(folder: Path) -> set[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {tokenizer.id_to_token(token) for token in looks.look(str(folder)).family.eos_ids}


def test_all_who_name_an_end_token_are_heard(folder: Path) -> None:
    plain = (folder / "chat_template.jinja").read_text()
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", text_config__eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None, chat_template=None)
    assert ends(folder) == {"<|im_end|>"}           # the template's own
    (folder / "chat_template.jinja").write_text(plain.replace("<|im_end|>", " "))
    found = looks.look(str(folder))
    assert not found.family.eos_ids and "no end token" in found.warnings[0]
    edit(folder / "config.json", eos_token_id=read(folder / "config.json")["image_token_id"])
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|endoftext|>"})
    assert ends(folder) == {"<|endoftext|>", "<|image_pad|>"}


def test_a_temperature_of_zero_is_greedy(folder: Path) -> None:
    edit(folder / "generation_config.json", do_sample=True, temperature=0.0, top_p=0.5)
    assert looks.look(str(folder)).family.defaults.temperature == 0.0


# --- templates


@pytest.mark.parametrize("place", ["chat_template.json", "processor_config.json", "tokenizer_config.json", "list"])
def test_where_a_template_may_be(folder: Path, place: str) -> None:
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", chat_template=None)
    assert "no chat template" in refused(folder)
    if place == "list":
        named = [{"name": "tool_use", "template": source}]
        edit(folder / "tokenizer_config.json", chat_template=named)
        assert "no entry named default (it has tool_use)" in refused(folder)
        edit(folder / "tokenizer_config.json", chat_template=[*named, {"name": "default", "template": source}])
    else:
        edit(folder / place, chat_template=source)
    assert looks.look(str(folder))


def test_a_template_that_demands_a_system_message_is_served_with_a_warning(folder: Path) -> None:
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}" + source)
    assert ["demands a system message" in warning for warning in looks.look(str(folder)).warnings] == [True]


def test_a_template_that_shows_no_image_is_warned_of(folder: Path) -> None:
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(source.replace("<|image_pad|>", ""))
    assert ["shows no image" in warning for warning in looks.look(str(folder)).warnings] == [True]


def test_an_end_token_of_minus_one_or_null_is_none(folder: Path) -> None:
    ids = read(folder / "generation_config.json")["eos_token_id"]
    plain = looks.look(str(folder)).family.eos_ids
    assert set(plain) == set(ids) and len(ids) == 2
    edit(folder / "generation_config.json", eos_token_id=[-1, ids[1]], pad_token_id=-1, bos_token_id=-1)
    assert looks.look(str(folder)).family.eos_ids == (ids[1], ids[0])       # the other is config.json's
    edit(folder / "config.json", eos_token_id=-1, text_config__eos_token_id=-1)
    edit(folder / "generation_config.json", eos_token_id=-1)
    assert looks.look(str(folder)).family.eos_ids == (ids[0],)      # the tokenizer's
    whole = read(folder / "generation_config.json") | {"eos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(whole))
    assert looks.look(str(folder)).family.eos_ids == (ids[0],)
    edit(folder / "generation_config.json", eos_token_id=-2)
    assert "eos_token_id is -2" in refused(folder)


# --- what is refused


def test_what_else_a_folder_may_be(folder: Path, tmp_path: Path) -> None:
    assert "no such folder; name a checkpoint's folder, or a model of the Hub" in refused(tmp_path / "nowhere")
    (folder / "config.json").unlink()
    assert "./config.json: no such file" in refused(folder)
    (folder / "snapshots").mkdir()
    assert "a model of the Hub's cache" in refused(folder)
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-q4.gguf").touch()
    assert "GGUF" in refused(tmp_path / "gguf")


def test_words_in_the_folders_own_name_mislead_nobody(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "my-adapter-GGUF-link")
    (other / "config.json").unlink()
    assert refused(other) == "./config.json: no such file; download it, every checkpoint has it"
    (other / SINGLE).unlink()
    shutil.copytree(folder, other / "inner")
    assert refused(other) == ".: holds no checkpoint, but inner in it has a config.json; name that folder"


@pytest.mark.parametrize("arguments", [[], ["--plan"]])
def test_the_daemon_refuses_before_anything_is_started(folder: Path, arguments: list[str]) -> None:
    os.truncate(folder / SINGLE, 5000)
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "epdd", "--port", "0", "--model", str(folder),
                           *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 78
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1 and said[0].startswith(f"epdd: {folder / SINGLE}: "), said
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in ("torch", "transformers")]


def test_plan_of_epdctl_refuses_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from epdd.ctl.main import main
    os.truncate(folder / SINGLE, 5000)
    assert main(["plan", "--model", str(folder)]) == 78
    assert f"{folder / SINGLE}: " in capsys.readouterr().err


def _lfs(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")


def _more_tokens(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([f"<more {i}>" for i in range(640)])
    tokenizer.save(str(path))


def prefix(folder: Path, text: str) -> None:
    save_file({text + name: tensor for name, tensor in load_file(folder / SINGLE).items()}, folder / SINGLE)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "LFS pointer": (lambda f: _lfs(f / SINGLE), "./model.safetensors: a Git LFS pointer"),
    "LFS pointer of JSON": (lambda f: _lfs(f / "tokenizer_config.json"), "tokenizer_config.json: a Git LFS pointer"),
    "LFS pointer of the tokenizer": (lambda f: _lfs(f / "tokenizer.json"), "tokenizer.json: a Git LFS pointer"),
    "link to nowhere": (lambda f: ((f / SINGLE).unlink(), (f / SINGLE).symlink_to("/nowhere/blob")),
                        "model.safetensors: a link to /nowhere/blob, which is not there"),
    "other name": (lambda f: (f / SINGLE).rename(f / "model.fp16.safetensors"), "only model.fp16.safetensors; if"),
    "cut": (lambda f: os.truncate(f / SINGLE, (f / SINGLE).stat().st_size - 1000), "cut short"),
    "cut header": (lambda f: os.truncate(f / SINGLE, 100), "not a safetensors file, or cut short (100 bytes)"),
    "too long": (lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"?"), "too long"),
    "shape": (lambda f: store(f, lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:, :60].contiguous()})),
              "lm_head.weight has the shape [640, 60], but config.json asks for [640, 64]"),
    "integers": (lambda f: store(f, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)})),
                 "lm_head.weight is stored as I8"),
    "unexpected": (lambda f: store(f, lambda t: t.update({"model.visual.more": torch.zeros(1)})),
                   "model.visual.more is no tensor of a qwen3_vl"),
    "of DDP": (lambda f: prefix(f, "module."), "begins with 'module.', as names are saved by DistributedDataParallel"),
    "of torch.compile": (lambda f: prefix(f, "_orig_mod."), "save what it holds (model._orig_mod.save_pretrained)"),
    "of PEFT": (lambda f: prefix(f, "base_model.model."), "merge the adapter and save that"),
    "bin only": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), "PyTorch .bin"),
    "gguf only": (lambda f: (f / SINGLE).rename(f / "model-q4.gguf"), "GGUF"),
    "adapter only": (lambda f: ((f / SINGLE).unlink(), edit(f / "adapter_config.json", peft_type="LORA")),
                     "holds an adapter"),
    "no tokenizer.json": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
    "other tokenizer": (lambda f: edit(f / "config.json", image_token_id=630), "lacks the image tokens [630]"),
    "small vocabulary": (lambda f: edit(f / "config.json", text_config__vocab_size=300),
                         "config.json asks for [300, 64]"),
    "more tokens than rows": (lambda f: _more_tokens(f / "tokenizer.json"), "vocab_size is 640"),
    "cross-attention": (lambda f: edit(f / "config.json", model_type="mllama"), "'mllama' is not served"),
    "resample": (lambda f: edit(f / "preprocessor_config.json", resample=2), "resample is 2"),
    "no resizing": (lambda f: edit(f / "preprocessor_config.json", do_resize=False), "do_resize is false"),
    "other processor": (lambda f: edit(f / "preprocessor_config.json", image_processor_type="CLIPImageProcessor"),
                        "'CLIPImageProcessor' is not served"),
    "other patches": (lambda f: edit(f / "preprocessor_config.json", patch_size=14),
                      "patch_size is 14, but patch_size is 16 in config.json's vision_config"),
    "no patch size": (lambda f: edit(f / "preprocessor_config.json", patch_size=None),
                      "patch_size is missing, which means 14"),
    "windows": (lambda f: edit(f / "config.json", text_config__layer_types=["sliding_attention"] * 3),
                "sliding_attention is not served"),
    "bad template": (lambda f: (f / "chat_template.jinja").write_text("{% if %}"), "syntax error"),
    "silent template": (lambda f: (f / "chat_template.jinja").write_text("nothing"), "shows no user text"),
    **{fault: (lambda f, text=fault: (f / "chat_template.jinja").write_text(text), "shows no user text") for fault in (
        "{% for i in range(10**9) %}{% endfor %}", "{{ messages|length / 0 }}", "{{ [].pop() }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "{{ 'a' * 10**15 * messages|length }}")},
    "deep template": (lambda f: (f / "chat_template.jinja").write_text("{{" + "(" * 9000), "syntax error"),
    "AWQ": (lambda f: edit(f / "config.json", quantization_config={"quant_method": "awq", "bits": 4}), "awq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(folder: Path, name: str) -> None:
    change, words = REFUSED[name]
    change(folder)
    assert words.lower() in refused(folder).lower()


def test_shards_that_are_not_all_there(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("model-*.safetensors"))
    index = sharded / headers.INDEX
    kept = index.read_text()
    last.rename(sharded / "gone")
    assert f"./{last.name}: no such file" in refused(sharded)
    (sharded / "gone").rename(last)
    index.unlink()
    assert f"{headers.INDEX}: no such file" in refused(sharded)
    names = json.loads(kept)["weight_map"]
    shared = list(names.values())
    lost = next(name for name, file in names.items() if shared.count(file) > 1)
    edit(index, metadata={}, weight_map={name: file for name, file in names.items() if name != lost})
    assert f"leaves out {lost}" in refused(sharded)
    edit(index, weight_map=names | {lost: last.name if names[lost] != last.name else first.name})
    assert f"says that {lost} is in" in refused(sharded)
    index.write_text(kept)
    assert looks.look(str(sharded))


def test_a_file_or_the_folder_above_is_named(folder: Path) -> None:
    for path, words in ((folder / SINGLE, f"a file; name its folder, {folder}"),
                        (folder.parent, "holds no checkpoint, but my-model in it has a config.json")):
        with pytest.raises(ModelError) as caught:
            looks.look(str(path))
        assert words in caught.value.message
