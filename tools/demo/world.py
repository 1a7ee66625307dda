"""The demo model's world: pictures of plain coloured shapes, and their labels.

A scene is a pure function of a seeded `random.Random`, so that training is repeatable and the
pictures of the evaluation are new.  Questions and answers are in `dialogue.py`.
"""

import io
import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

RGB = tuple[int, int, int]

# Each colour by its names in Pillow and CSS and by similar ones, so that other people's "green"
# counts as green.
COLOURS: dict[str, list[RGB]] = {
    "red": [(255, 0, 0), (220, 20, 40), (200, 0, 0)],
    "orange": [(255, 165, 0), (255, 140, 0), (255, 128, 0)],
    "yellow": [(255, 255, 0), (255, 225, 0)],
    "green": [(0, 128, 0), (0, 255, 0), (0, 170, 40), (40, 180, 60)],
    "blue": [(0, 0, 255), (30, 60, 220), (0, 0, 180)],
    "purple": [(128, 0, 128), (148, 0, 211), (140, 50, 190)],
    "black": [(0, 0, 0), (20, 20, 20)],
}
SHAPES = ["circle", "square", "triangle", "star", "cross"]
SHAPES_MAX = 4

# The processor's limits: every picture becomes 16 to 36 merged tokens of 16 x 16 pixels.
PATCH, MERGE = 8, 2
TOKEN_SIDE = PATCH * MERGE
PIXELS_MIN, PIXELS_MAX = 64 * 64, 96 * 96

ASPECTS = [1, 1, 1, 4 / 3, 4 / 3, 3 / 2, 16 / 9, 2, 3 / 4, 2 / 3, 9 / 16]
LARGE_SIZES = [(640, 480), (800, 600), (1024, 768), (1280, 720), (1920, 1080), (1080, 1920)]
CELL_MIN = 24        # processed pixels: shapes in smaller cells blur
CELL_DRIFT = 0.12    # share of the cell: so small that rows of cells stay rows
DOUBT = (0.06, 0.28)  # share of a token under a shape that counts as neither background nor shape
IGNORE = -100        # the label that cross_entropy skips


@dataclass(frozen=True)
class Thing:
    """One shape; the box is in shares of the picture: left, top, right, bottom."""

    colour: str
    shape: str
    box: tuple[float, float, float, float]

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture and its things in reading order."""

    image: Image.Image
    things: list[Thing]


def train_rng(stage: str, step: int) -> random.Random:
    return random.Random(f"epdd demo train {stage} {step}")


def eval_rng(kind: str, index: int) -> random.Random:
    """Its seeds differ from those of all training stages, by name."""
    return random.Random(f"epdd demo eval {kind} {index}")


def processed_size(width: int, height: int) -> tuple[int, int]:
    """Qwen2VLImageProcessor's smart_resize, without importing torch."""
    side = TOKEN_SIDE
    w, h = round(width / side) * side, round(height / side) * side
    if w * h > PIXELS_MAX:
        shrink = math.sqrt(width * height / PIXELS_MAX)
        w = max(side, math.floor(width / shrink / side) * side)
        h = max(side, math.floor(height / shrink / side) * side)
    elif w * h < PIXELS_MIN:
        grow = math.sqrt(PIXELS_MIN / (width * height))
        w, h = math.ceil(width * grow / side) * side, math.ceil(height * grow / side) * side
    return w, h


def canvas_size(rng: random.Random) -> tuple[int, int]:
    """Mostly one to four times the processed size, which after resizing looks like a far larger
    picture and is faster to draw; sometimes truly large."""
    dice = rng.random()
    if dice < 0.02:
        return rng.choice(LARGE_SIZES)
    side = rng.uniform(100, 380) if dice < 0.72 else rng.uniform(52, 110)
    aspect = math.sqrt(rng.choice(ASPECTS))
    return max(48, round(side * aspect)), max(48, round(side / aspect))


def draw_scene(rng: random.Random, count: int, size: tuple[int, int] | None = None) -> Scene:
    """`count` shapes without overlap, in reading order."""
    width, height = size or canvas_size(rng)
    smooth = 2 if width * height < 200 * 200 and rng.random() < 0.5 else 1
    canvas = Image.new("RGB", (width * smooth, height * smooth), _background(rng))
    pen = ImageDraw.Draw(canvas)
    shapes = rng.sample(SHAPES, count)
    if rng.random() < 0.2:  # a kind may come twice, so that the model counts shapes and not kinds
        shapes = rng.choices(SHAPES, k=count)
    things = []
    for shape, box in zip(shapes, _boxes(rng, count, width, height)):
        colour = rng.choice(list(COLOURS))
        x0, y0, x1, y1 = box
        thing = Thing(colour, shape, (x0 / width, y0 / height, x1 / width, y1 / height))
        edge = (0, 0, 0) if rng.random() < 0.1 else None
        tilt = rng.uniform(-0.12, 0.12) if rng.random() < 0.4 else 0.0
        _draw_thing(pen, canvas.size, thing, _near(rng, rng.choice(COLOURS[colour])), edge, tilt)
        things.append(thing)
    image = canvas.resize((width, height), Image.Resampling.BOX) if smooth > 1 else canvas
    return Scene(_worn(rng, image), things)


def draw_plain(size: tuple[int, int], things: list[Thing]) -> Scene:
    """The same without randomness, like a picture drawn by hand to try the model."""
    image = Image.new("RGB", size, (255, 255, 255))
    for thing in things:
        _draw_thing(ImageDraw.Draw(image), size, thing, COLOURS[thing.colour][0])
    return Scene(image, things)


def token_labels(scene: Scene, columns: int, rows: int) -> NDArray[np.int64]:
    """Labels of every merged token, [rows, columns, 3]: kind of shape, colour (0 is background), and
    place in reading order from 1; IGNORE if ambiguous."""
    labels = np.zeros((rows, columns, 3), dtype=np.int64)
    share = np.zeros((rows, columns))
    ys, xs = np.arange(rows)[:, None], np.arange(columns)[None, :]
    names = list(COLOURS)
    for place, thing in enumerate(scene.things, 1):
        x0, y0, x1, y1 = thing.box
        across = np.minimum(x1 * columns, xs + 1) - np.maximum(x0 * columns, xs)
        down = np.minimum(y1 * rows, ys + 1) - np.maximum(y0 * rows, ys)
        cover = across.clip(0) * down.clip(0)
        truth = (1 + SHAPES.index(thing.shape), 1 + names.index(thing.colour), place)
        labels[cover > share] = truth
        share = np.maximum(share, cover)
    labels[share <= DOUBT[0]] = 0
    labels[(share > DOUBT[0]) & (share < DOUBT[1])] = IGNORE
    return labels


def _background(rng: random.Random) -> RGB:
    dice = rng.random()
    if dice < 0.65:
        return (255, 255, 255)
    if dice < 0.9:
        grey = rng.randint(205, 250)
        return (grey, grey, grey)
    return (rng.randint(225, 255), rng.randint(225, 255), rng.randint(225, 255))


def _near(rng: random.Random, rgb: RGB) -> RGB:
    """Half of the time exactly the named colour."""
    spread = rng.choice([0, 10])
    r, g, b = (max(0, min(255, part + rng.randint(-spread, spread))) for part in rgb)
    return (r, g, b)


def _boxes(rng: random.Random, count: int, width: int, height: int
           ) -> list[tuple[float, float, float, float]]:
    """Places of the shapes: anywhere for a single one, else cells of a grid, row by row."""
    if count == 1 and rng.random() < 0.75:
        side = rng.uniform(0.35, 0.92) * min(width, height)
        w, h = side * rng.uniform(0.92, 1), side * rng.uniform(0.92, 1)
        x, y = rng.uniform(0, width - w), rng.uniform(0, height - h)
        if rng.random() < 0.4:
            x, y = (width - w) / 2, (height - h) / 2
        return [(x, y, x + w, y + h)]
    seen_width, seen_height = processed_size(width, height)
    columns, rows = rng.choice([
        (c, r) for c in range(1, 5) for r in range(1, 4)
        if c * r >= count and min(seen_width / c, seen_height / r) >= CELL_MIN])
    boxes = []
    for cell in sorted(rng.sample(range(columns * rows), count)):
        cell_width, cell_height = width / columns, height / rows
        side = rng.uniform(0.68, 0.95) * min(cell_width, cell_height)
        w, h = side * rng.uniform(0.92, 1), side * rng.uniform(0.92, 1)
        drift_x = min((cell_width - w) / 2, CELL_DRIFT * cell_width)
        drift_y = min((cell_height - h) / 2, CELL_DRIFT * cell_height)
        x = (cell % columns + 0.5) * cell_width - w / 2 + rng.uniform(-drift_x, drift_x)
        y = (cell // columns + 0.5) * cell_height - h / 2 + rng.uniform(-drift_y, drift_y)
        boxes.append((x, y, x + w, y + h))
    return boxes


def _outline(shape: str) -> list[tuple[float, float]]:
    """A polygon in the square from -1 to 1."""
    if shape == "square":
        return [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    if shape == "triangle":
        return [(0, -1), (1, 1), (-1, 1)]
    if shape == "cross":
        arm = 0.32
        quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
        return [_turn(point, turn * math.pi / 2) for turn in range(4) for point in quarter]
    return [_turn((0, -1.0 if tip % 2 == 0 else -0.42), tip * math.pi / 5) for tip in range(10)]


def _turn(point: tuple[float, float], angle: float) -> tuple[float, float]:
    x, y = point
    return (x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle))


def _draw_thing(pen: ImageDraw.ImageDraw, size: tuple[int, int], thing: Thing, rgb: RGB,
                edge: RGB | None = None, tilt: float = 0.0) -> None:
    x0, y0, x1, y1 = (part * size[axis % 2] for axis, part in enumerate(thing.box))
    if thing.shape == "circle":
        pen.ellipse((x0, y0, x1, y1), fill=rgb, outline=edge)
        return
    shrink = 1 / (math.cos(tilt) + abs(math.sin(tilt)))  # a tilted square still fits its box
    points = []
    for point in _outline(thing.shape):
        x, y = _turn(point, tilt)
        points.append(((x0 + x1) / 2 + x * shrink * (x1 - x0) / 2,
                       (y0 + y1) / 2 + y * shrink * (y1 - y0) / 2))
    pen.polygon(points, fill=rgb, outline=edge)


def _worn(rng: random.Random, image: Image.Image) -> Image.Image:
    """Some pictures are JPEG-compressed, some have a little noise."""
    dice = rng.random()
    if dice < 0.15:
        packed = io.BytesIO()
        image.save(packed, "JPEG", quality=rng.randint(70, 95))
        return Image.open(packed).convert("RGB")
    if dice < 0.2:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0, rng.uniform(2, 6), (image.height, image.width, 3))
        return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    return image
