"""The vision tower on CPUs against the rate of its own matrix products, and against transformers.

    python -m tools.bench.workers.encode --model qwen3-vl-8b --out DIR

Towers of true shape with random float32 weights.  To save memory and time, --layers layers are built (at 1080p
--layers-large).  All layers cost the same, so times of the whole tower are measured on these layers and scaled by
FLOPs. Shares and ratios are of the built layers, except those with preprocessing.

FLOPs: 2 x rows x in x out of each linear layer, 4 x length^2 x width of each attention segment.  The limit is the time
that the products alone would take, each at the rate of its own shape, measured in the same rounds as everything else:
linear layers as plain or prepacked product, whichever is faster; attention's two products in blocks of 256 x 512, which
stay in the cache.  `all linear` takes attention's FLOPs at the linear layers' mean rate instead, which cannot be
reached: a softmax lies between its products.  The limit is that of torch's float32 products.  The backend `amx` may
exceed it; its share of its own products, all linear, is printed beside it.  Times are medians over the rounds.
"""

import argparse
import gc
import io
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

from tools.bench.plots import Panel
from tools.bench.report import Report
from torch import nn

from tools.bench.workers.towers import MODELS, build, family_of, jpeg, module_class, tower_config

from epdd import families
from epdd.worker.kernels import gemm_bf16x3, mkl
from epdd.worker.kernels.onednn import PackedLinear
from epdd.worker.vision import preprocess, segment_attention
from epdd.worker.vision.backends import amx, cosine, cpu, relative_error
from epdd.worker.vision.decode_image import decode
from epdd.worker.vision.tower import ImageAttention, Tower

CLOCK = [time.perf_counter]
TILE = (256, 512)       # queries and keys whose scores stay in a core's second-level cache


@dataclass
class Times:
    """Seconds of each round, for each kind of work."""

    seconds: dict = field(default_factory=dict)

    def take(self, name, run):
        begin = CLOCK[0]()
        made = run()
        self.seconds.setdefault(name, []).append(CLOCK[0]() - begin)
        return made

    def median(self, name):
        return statistics.median(self.seconds[name])


def products(module, tower, grids):
    """[(times, rows, in, out)] of the linear layers, and attention's FLOPs; `module` is an untouched tower."""
    n = sum(math.prod(grid) for grid in grids)
    tables = tower._tables(tuple(grids))
    counts = {}
    embed = module.patch_embed.proj
    counts[n, embed.weight[0].numel() // 2, embed.out_channels] = 1      # folded: one frame
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            rows = n // 4 if "merger" in name else n
            key = rows, part.in_features, part.out_features
            counts[key] = counts.get(key, 0) + 1
    attention = 0
    full = getattr(module, "fullatt_block_indexes", range(len(module.blocks)))
    for i in range(len(module.blocks)):
        segments = tables["cu_seqlens" if i in full else "cu_window_seqlens"]
        attention += sum(4 * length ** 2 * module.config.hidden_size for length in segments.lengths)
    return [(times, *shape) for shape, times in counts.items()], attention


class Limit:
    """The products alone, timed in the same rounds."""

    def __init__(self, module, tower, grids):
        self.linear, self.attention_flops = products(module, tower, grids)
        self.linear_flops = sum(2 * times * n * i * o for times, n, i, o in self.linear)
        self._pairs = {shape: (torch.randn(shape[0], shape[1]), nn.Linear(shape[1], shape[2]))
                       for shape in {item[1:] for item in self.linear}}
        self._packed = {shape: PackedLinear(linear) for shape, (_, linear) in self._pairs.items()}
        self._split = {shape: gemm_bf16x3.ManyRowsLinear(linear) for shape, (_, linear) in self._pairs.items()
                       if not gemm_bf16x3.missing()}
        tables = tower._tables(tuple(grids))
        self._attention = tower.module.blocks[0].attn
        kinds = (("images", "cu_seqlens"), ("windows", "cu_window_seqlens"))
        self._segments = {name: tables[key] for name, key in kinds if key in tables}
        self._joint = torch.randn(sum(tables["cu_seqlens"].lengths), 3, self._attention.heads,
                                  module.config.hidden_size // self._attention.heads)
        longest = tables["cu_seqlens"].longest
        rows, columns = (min(side, longest) for side in TILE)
        heads, dim = tower.module.blocks[0].attn.heads, module.config.hidden_size // tower.module.blocks[0].attn.heads
        # Enough tiles at once to keep all cores busy.
        self._query, self._key = torch.randn(heads, rows, dim), torch.randn(heads, columns, dim)
        self._scores, self._value = torch.randn(heads, rows, columns), torch.randn(heads, columns, dim)
        self._tile_flops = 4 * heads * rows * columns * dim

    @torch.inference_mode()
    def take(self, times):
        for shape, (rows, linear) in self._pairs.items():
            times.take(("plain", shape), lambda: linear(rows))
            times.take(("packed", shape), lambda: self._packed[shape](rows))
            if self._split:
                times.take(("split", shape), lambda: self._split[shape](rows))
        operands = self._joint.unbind(1)
        for name, segments in self._segments.items():
            times.take(("plain", name), lambda: ImageAttention.attend(self._attention, *operands, segments))
            if self._split:
                times.take(("split", name),
                           lambda: segment_attention.attend(self._attention.scaling, *operands, segments))
        for _ in range(4):
            times.take("scores", lambda: torch.bmm(self._query, self._key.transpose(1, 2)))
            times.take("values", lambda: torch.bmm(self._scores, self._value))

    def seconds(self, times):
        """(by own shapes, all at the linear layers' mean rate)."""
        linear = sum(count * min(times.median(("plain", tuple(shape))), times.median(("packed", tuple(shape))))
                     for count, *shape in self.linear)
        tile = times.median("scores") + times.median("values")
        return linear + self.attention_flops / self._tile_flops * tile, self._all_linear(linear)

    def seconds_split(self, times):
        """All at the mean rate of the linear layers by AMX."""
        return self._all_linear(sum(count * times.median(("split", tuple(shape))) for count, *shape in self.linear))

    def rates(self, times):
        """[[product, GFLOP/s of all threads by torch, on prepacked weights, by AMX]]."""
        flops = {shape: (f"{shape[0]} x {shape[1]} x {shape[2]}", 2 * math.prod(shape)) for shape in self._pairs}
        flops |= {name: (f"attention in {name}", sum(4 * length ** 2 * self._joint[0, 0].numel()
                                                     for length in segments.lengths))
                  for name, segments in self._segments.items()}
        return [[name, *(count / times.median((way, what)) / 1e9 if (way, what) in times.seconds else None
                         for way in ("plain", "packed", "split"))] for what, (name, count) in flops.items()]

    def _all_linear(self, linear):
        return linear * (1 + self.attention_flops / self.linear_flops)


class Case:
    """One model and one set of images."""

    def __init__(self, model, layers, sizes, rounds):
        self.model, self.layers, self.rounds = model, layers, rounds
        self.family = family_of(model)
        self.sizes = sizes
        self.files = [jpeg(*size, seed=i) for i, size in enumerate(sizes)]
        self.grids = [self.family.grid(*size) for size in sizes]
        self.theirs = build(model, layers)
        self.processor = transformers.AutoImageProcessor.from_pretrained(families.DEMO, backend="pil")
        for name in ("image_mean", "image_std"):
            setattr(self.processor, name, list(self.family.mean if name == "image_mean" else self.family.std))
        self.processor.patch_size, self.processor.merge_size = self.family.patch, 2
        self.processor.size = transformers.image_utils.SizeDict(shortest_edge=self.family.min_pixels,
                                                                longest_edge=self.family.max_pixels)
        self.runs = {}
        for backend in (cpu.Prepacked(), amx.Amx()):
            tower = Tower(lambda: build(model, layers), self.family)
            if not backend.missing(tower):
                self.runs[backend.name] = backend.prepare(tower)
        self.limit = Limit(self.theirs, self.runs["prepacked"], self.grids)

    def their_pixels(self):
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in self.files]
        out = self.processor(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]

    def our_patches(self):
        return torch.from_numpy(np.concatenate(
            [preprocess.patches(decode(file, size), self.family, grid)
             for file, size, grid in zip(self.files, self.sizes, self.grids)]))

    @torch.inference_mode()
    def measure(self, int8=None):
        """Medians of each backend, and shares and ratios from them."""
        times, planes = Times(), {}
        for i in range(self.rounds + 1):
            if i == 1:
                times = Times()         # the first round warms up
            self.limit.take(times)
            patches = times.take("our pixels", self.our_patches)
            for name, run in self.runs.items():
                planes[name] = times.take(name, lambda: run(patches, self.grids))
            if int8 is not None:
                times.take("int8", lambda: int8(patches, self.grids))
            pixels, grid = times.take("their pixels", self.their_pixels)
            out = times.take("their tower", lambda: self.theirs(pixels, grid_thw=grid, return_dict=True))
        assert grid.tolist() == [list(g) for g in self.grids]
        theirs = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        return [{"backend": name, **self.row(name, times, relative_error(planes[name], theirs)),
                 "int8_ratio": times.median(name) / times.median("int8") if int8 is not None else None}
                for name in self.runs]

    def row(self, name, times, error):
        shapes, linear = self.limit.seconds(times)
        scale = self.whole_flops() / (self.limit.linear_flops + self.limit.attention_flops)
        tower, reference = times.median(name), times.median("their tower")
        ours_whole, theirs_whole = (times.median(f"{who} pixels") + scale * seconds
                                    for who, seconds in (("our", tower), ("their", reference)))
        return {
            "patches": sum(math.prod(grid) for grid in self.grids), "layers": self.layers,
            "tflop_whole": self.whole_flops() / 1e12, "gflops_linear": self.limit.linear_flops / 1e9 / (
                linear / (1 + self.limit.attention_flops / self.limit.linear_flops)),
            "tower_s": scale * tower, "share": shapes / tower, "share_all_linear": linear / tower,
            "share_own": self.limit.seconds_split(times) / tower if name == "amx" else linear / tower,
            "share_transformers": shapes / reference, "tower_ratio": reference / tower,
            "pixels_s": times.median("our pixels"), "pixels_share": times.median("our pixels") / (scale * tower),
            "their_pixels_s": times.median("their pixels"), "jpeg_ratio": theirs_whole / ours_whole, "error": error,
            "rates": self.limit.rates(times), "seconds": {str(name): values for name, values in times.seconds.items()},
        }

    def whole_flops(self):
        """FLOPs of the whole model: blocks scaled, single parts kept."""
        depth = MODELS[self.model][1]["depth"]
        with torch.device("meta"):
            module = module_class(self.model)(tower_config(self.model, depth))
        linear, attention = products(module, self.runs["prepacked"], self.grids)
        return sum(2 * times * n * i * o for times, n, i, o in linear) + attention


@torch.inference_mode()
def int8_cosine(model, layers):
    """Of the whole tower's planes at 448 x 448, int8 against float32; one copy of the weights at a time."""
    family = family_of(model)
    grid = family.grid(448, 448)
    patches = torch.from_numpy(preprocess.patches(decode(jpeg(448, 448), (448, 448)), family, grid))
    tower = Tower(lambda: build(model, layers), family)
    wanted = tower(patches, [grid])
    found = cpu.Int8().prepare(tower)(patches, [grid])
    return cosine(found, wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="may be given again (default: both)")
    parser.add_argument("--case", choices=("448", "1080p", "8x224", "cosine"), action="append", help="(default: all)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--layers-large", type=int, default=1, help="at 1080p")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true",
                        help="CPU seconds of all threads instead of wall time, for a machine that others use too; with "
                             "OMP_WAIT_POLICY=passive, or threads that wait for each other count as working")
    parser.add_argument("--out", type=Path, help="folder for numbers and plots")
    args = parser.parse_args()
    mkl.warm_up_vml()
    torch.set_num_threads(args.threads)
    torch.set_num_interop_threads(1)
    if args.cpu_time:
        CLOCK[0] = time.process_time
    report = Report(args.out)
    cases = {"448": ([(448, 448)], args.layers), "1080p": ([(1920, 1080)], args.layers_large),
             "8x224": ([(224, 224)] * 8, args.layers)}
    rows = {}
    for model in args.model or MODELS:
        for name in args.case or (*cases, "cosine"):
            if name == "cosine":
                continue
            sizes, layers = cases[name]
            case = Case(model, layers, sizes, args.rounds)
            int8 = None
            if name == "448":
                int8 = cpu.Int8().prepare(Tower(lambda: build(model, layers), case.family))
            rows[model, name] = case.measure(int8)
            tell(report, model, name, rows[model, name][0])
            del case, int8
            gc.collect()
    cosines = {model: int8_cosine(model, MODELS[model][1]["depth"]) for model in args.model or MODELS
               if "cosine" in (args.case or ("cosine",))}
    summary(report, rows, cosines)
    report.close(rows=[{"model": model, "case": name, **row} for (model, name), of in rows.items() for row in of],
                 cosines=cosines, threads=args.threads)


def tell(report, model, name, row):
    report.say(f"{model} {name}: {row['patches']} patches, {row['tflop_whole']:.2f} TFLOP in all layers, "
               f"{row['layers']} built; linear products at {row['gflops_linear']:.0f} GFLOP/s; "
               f"{row['tower_s']:.2f} s an image set by FLOPs")


def summary(report, rows, cosines):
    for model, value in cosines.items():
        report.say(f"{model}: int8 in all layers at 448 x 448, cosine {value:.5f} (worst plane, random weights)")
    if not rows:
        return
    for (model, name), (row, *_) in rows.items():
        report.table(f"{model} {name}: GFLOP/s of all threads", ["product", "torch", "prepacked", "amx"], row["rates"])
    header = ["model, images, backend", "share of limit", "all linear", "own products", "transformers'",
              "tower ratio", "JPEG ratio", "pixels ms (theirs)", "pixels %", "error", "int8 ratio"]
    report.table("epdd's tower against its products' limit and transformers (PIL processor, sdpa)", header, [
        [f"{model} {name} {row['backend']}", row["share"], row["share_all_linear"], row["share_own"],
         row["share_transformers"], row["tower_ratio"],
         row["jpeg_ratio"], (1e3 * row["pixels_s"], 1e3 * row["their_pixels_s"]), 1e2 * row["pixels_share"],
         f"{row['error']:.1e}", row["int8_ratio"]] for (model, name), of in rows.items() for row in of])
    report.plot("encode", "Share of the limit of torch's float32 products", "patches", [
        Panel(model, "share", {
            label: sorted((row["patches"], row[key]) for (of, _), found in rows.items() if of == model
                          for row in found if row["backend"] == backend)
            for label, backend, key in (*((f"epdd, {backend}", backend, "share") for backend in ("prepacked", "amx")),
                                        ("transformers", "prepacked", "share_transformers"))
            if any(row["backend"] == backend for found in rows.values() for row in found)})
        for model in dict.fromkeys(model for model, _ in rows)])


if __name__ == "__main__":
    main()
