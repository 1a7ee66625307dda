"""The demo model's world: drawings, labels and answers must agree."""

import random

import numpy as np
import pytest

from tools.demo import dialogue, world


def nearest_colour(rgb: tuple[int, int, int]) -> str:
    return min(world.COLOURS, key=lambda name: min(
        sum((a - b) ** 2 for a, b in zip(rgb, known)) for known in world.COLOURS[name]))


def scene_of(*things: tuple[str, str]) -> world.Scene:
    """A row of (colour, shape)."""
    wide = 1 / len(things)
    return world.draw_plain((96 * len(things), 96), [
        world.Thing(colour, shape, (wide * (at + 0.1), 0.1, wide * (at + 0.9), 0.9))
        for at, (colour, shape) in enumerate(things)])


def test_every_shape_has_its_colour_in_the_middle_of_its_box():
    for index in range(200):
        rng = random.Random(index)
        scene = world.draw_scene(rng, rng.randint(1, world.SHAPES_MAX))
        for thing in scene.things:
            x0, y0, x1, y1 = thing.box
            middle = (int((x0 + x1) / 2 * scene.image.width),
                      int((y0 + y1) / 2 * scene.image.height))
            assert nearest_colour(scene.image.getpixel(middle)) == thing.colour


def test_shapes_do_not_overlap_and_stay_inside():
    for index in range(200):
        boxes = [thing.box for thing in world.draw_scene(random.Random(index), 4).things]
        for at, (x0, y0, x1, y1) in enumerate(boxes):
            assert 0 <= x0 < x1 <= 1 and 0 <= y0 < y1 <= 1
            for a0, b0, a1, b1 in boxes[:at]:
                assert a1 <= x0 or x1 <= a0 or b1 <= y0 or y1 <= b0


def test_shapes_differ_where_it_matters():
    """The corner of a square is full, that of a circle empty; a cross and a star are thinner."""
    full = {shape: np.mean(np.asarray(scene_of(("black", shape)).image) == 0)
            for shape in world.SHAPES}
    assert full["square"] > full["circle"] > full["cross"] > full["star"]
    assert full["triangle"] == pytest.approx(full["square"] / 2, rel=0.1)


def test_the_same_seed_draws_and_says_the_same():
    def once() -> tuple[bytes, list[dialogue.Message]]:
        rng = world.train_rng("tower", 7)
        scene = world.draw_scene(rng, 3)
        return scene.image.tobytes(), dialogue.single_turn(rng, "describe", [scene]).messages

    assert once() == once()


def test_pictures_of_the_evaluation_are_new():
    def drawn(rngs: list[random.Random]) -> set[bytes]:
        return {world.draw_scene(rng, 1, (64, 64)).image.tobytes() for rng in rngs}

    trained = drawn([world.train_rng(stage, step) for stage in ("tower", "pool", "language")
                     for step in range(300)])
    assert not trained & drawn([world.eval_rng("colour", index) for index in range(300)])


@pytest.mark.parametrize("width, height, tokens", [
    (96, 96, 36), (64, 64, 16), (640, 480, 30), (1920, 1080, 32), (48, 48, 16), (2000, 48, 38)])
def test_sizes_become_what_qwens_smart_resize_makes_of_them(width, height, tokens):
    seen = world.processed_size(width, height)
    assert seen[0] * seen[1] == tokens * world.TOKEN_SIDE ** 2
    assert all(side % world.TOKEN_SIDE == 0 for side in seen)


def test_labels_name_the_shape_where_it_is():
    scene = scene_of(("red", "circle"), ("blue", "star"))
    labels = world.token_labels(scene, columns=8, rows=4)
    names = list(world.COLOURS)
    assert labels[2, 1].tolist() == [1 + world.SHAPES.index("circle"), 1 + names.index("red"), 1]
    assert labels[2, 6].tolist() == [1 + world.SHAPES.index("star"), 1 + names.index("blue"), 2]
    assert not world.token_labels(world.draw_plain((64, 64), []), 4, 4).any()


def test_answers_are_true():
    rng = random.Random(0)
    three = [scene_of(thing) for thing in [("red", "circle"), ("blue", "square"),
                                           ("orange", "star")]]
    crowd = scene_of(("red", "circle"), ("orange", "cross"), ("black", "star"))
    for _ in range(20):
        assert dialogue.ask(rng, "list", three).answer == (
            "1: red circle, 2: blue square, 3: orange star")
        assert dialogue.ask(rng, "images", three).answer == "3"
        assert dialogue.ask(rng, "count", [crowd]).answer == "3"
        assert dialogue.ask(rng, "describe", [crowd]).answer == (
            "a red circle, an orange cross and a black star")
        colour = dialogue.ask(rng, "colour", [crowd])
        shape = next(shape for shape in world.SHAPES if shape in colour.question.lower())
        assert f"{colour.answer} {shape}" in "red circle orange cross black star"
        item = dialogue.ask(rng, "item", three)
        at = next(n for n in range(3) if str(n + 1) in item.question
                  or dialogue.NTH[n] in item.question.lower())
        assert item.answer.endswith(three[at].things[0].name)


def test_nothing_ambiguous_is_asked():
    twice = scene_of(("red", "circle"), ("blue", "circle"))
    assert "colour" not in dialogue.askable([twice])
    assert "shape" not in dialogue.askable([twice])


def test_images_appear_once_each_and_in_order():
    scenes = [scene_of(("red", "circle"))] * 5
    for index in range(100):
        rng = random.Random(index)
        talks = [dialogue.single_turn(rng, "list", scenes), dialogue.growing(rng, scenes)]
        for talk in talks:
            shown = [part["image"] for message in talk.messages for part in message["content"]
                     if isinstance(part, dict) and part["type"] == "image"]
            assert shown == [0, 1, 2, 3, 4]
