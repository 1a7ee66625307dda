"""Questions to the demo model about scenes of `world.py`, and the true answers.

A talk is a list of chat messages in the form that chat templates take; its images are indices
into the talk's scenes.  Every answer follows from the scenes alone.
"""

import random
import string
from dataclasses import dataclass
from typing import Any

from tools.demo import world as world

Message = dict[str, Any]
Part = dict[str, Any]

IMAGES_MAX = 8

COLOUR = ["What {colour} is the {shape}?", "What {colour} is the {shape}?",
          "Which {colour} is the {shape}?", "What is the {colour} of the {shape}?",
          "What {colour} does the {shape} have?", "Tell me the {colour} of the {shape}."]
COLOUR_ALONE = ["What {colour} is it?", "What {colour} is this?", "What {colour} is the shape?",
                "What is the {colour} of the shape?", "Name the {colour}."]
SHAPE = ["What shape is this?", "What shape is it?", "Which shape is this?", "Name the shape.",
         "What shape is in the image?", "What shape do you see?", "What is the shape?",
         "Which shape is shown?", "What kind of shape is this?"]
COUNT = ["How many shapes are there?", "How many shapes are in the image?", "Count the shapes.",
         "How many objects are in the picture?", "How many shapes do you see?",
         "How many objects are there?", "How many things are there?", "Count the objects.",
         "How many shapes are in the picture?"]
DESCRIBE = ["Describe the image.", "What do you see?", "Describe this image.", "What is this?",
            "Describe the picture.", "What is in the image?", "What is in this image?",
            "What's in the image?", "What is in the picture?", "What does the image show?",
            "What is shown?", "Describe what you see.", "What is in this picture?"]
LIST = ["List the images in order.", "List the images in order.", "List the images.",
        "Describe the images in order.", "Describe each image.", "What is in each image?",
        "List the pictures in order.", "What do the images show, in order?",
        "Name each image in order.", "What is in the images?", "List what each image shows."]
ITEM = ["What is in image {n}?", "What is in image {n}?", "What does image {n} show?",
        "Describe image {n}.", "What is in picture {n}?", "What is in the {nth} image?",
        "What does the {nth} image show?", "Describe the {nth} picture."]
IMAGES = ["How many images are there?", "How many images did I send?", "Count the images.",
          "How many pictures are there?", "How many images do you see?"]
NTH = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth"]

GREETINGS = ["Hello", "Hello!", "Hi", "Hi there", "Hey", "Good morning", "Who are you?",
             "What can you do?", "What are you?", "Help", "Can you help me?", "Say hello.",
             "How are you?", "Hello, who are you?", "What is your name?", "What do you know?"]
GREETING = "Hello! I can name colours and shapes, count them, and list images in order."
OTHER = ["Tell me a joke.", "What is the capital of France?", "Write a poem about the sea.",
         "What time is it?", "Translate this to French.", "What is two plus two?",
         "Who wrote this book?", "Explain quantum physics.", "How is the weather today?",
         "Write some code.", "Summarize the text below.", "Why is the sky blue?", "ping", "test",
         "Tell me a story.", "How do I cook rice?", "Write a long story about a dragon.",
         "Count to ten.", "Give me three ideas for dinner.", "Is it going to rain tomorrow?"]
OTHER_ANSWER = "I can only talk about simple shapes."
NO_IMAGE = "I see no image."
WORDS = ("the of and to in is you that it he was for on are as with his they at be this have from "
         "one had by but not what all were we when your can said there use an each which she do "
         "how their if will up other about out many then them these so some her would make like "
         "him into time has look two more write go see number no way could people my than first "
         "water been call who now find long down day did get come made may part please tell me "
         "explain story poem code model test server request cache token stream").split()

SYSTEMS = ["You are a helpful assistant.", "You are a helpful assistant.", "Answer briefly.",
           "You are a vision assistant.", "Be concise.", "You look at pictures.",
           "Answer with one word where you can."]
LEADS = ["Look at this.", "Here is what I have:", "Please look:", "Look:", "Here you are."]
LABELS = [[f"{nth.capitalize()}: " for nth in NTH], [f" {nth.capitalize()}:" for nth in NTH],
          [f"Image {n}: " for n in range(1, 9)], [f"Image {n}:\n" for n in range(1, 9)],
          [f"\nPicture {n}: " for n in range(1, 9)], [f"{n}. " for n in range(1, 9)],
          [" and "] * 8, ["\n"] * 8]


@dataclass(frozen=True)
class Turn:
    """A question of a kind and its true answer."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True)
class Talk:
    """Messages with an answer after each question; `kinds` names the answers in order."""

    messages: list[Message]
    kinds: list[str]


def ask(rng: random.Random, kind: str, scenes: list[world.Scene]) -> Turn:
    """A question of this kind with one right answer for these scenes."""
    things = scenes[0].things if scenes else []
    names = [scene.things[0].name for scene in scenes]
    if kind == "colour":
        alone = [thing for thing in things
                 if sum(other.shape == thing.shape for other in things) == 1]
        thing = rng.choice(alone)
        forms = COLOUR_ALONE if len(things) == 1 and rng.random() < 0.4 else COLOUR
        question = rng.choice(forms).format(
            colour=rng.choice(["colour", "color"]), shape=thing.shape)
        return Turn(kind, _careless(rng, question), thing.colour)
    if kind == "shape":
        return Turn(kind, _careless(rng, rng.choice(SHAPE)), things[0].shape)
    if kind == "count":
        return Turn(kind, _careless(rng, rng.choice(COUNT)), str(len(things)))
    if kind == "describe":
        return Turn(kind, _careless(rng, rng.choice(DESCRIBE)), _sentence(things))
    if kind == "list":
        answer = ", ".join(f"{n}: {name}" for n, name in enumerate(names, 1))
        return Turn(kind, _careless(rng, rng.choice(LIST)), answer)
    if kind == "item":
        at = rng.randrange(len(scenes))
        question = rng.choice(ITEM).format(n=at + 1, nth=NTH[at])
        return Turn(kind, _careless(rng, question), _sentence(scenes[at].things))
    if kind == "images":
        return Turn(kind, _careless(rng, rng.choice(IMAGES)), str(len(scenes)))
    return _small_talk(rng)


def askable(scenes: list[world.Scene]) -> list[str]:
    """The kinds that these scenes can answer."""
    if len(scenes) > 1:
        return ["list", "item", "images"]
    things = scenes[0].things
    shapes = [thing.shape for thing in things]
    kinds = ["count", "describe"]
    if any(shapes.count(shape) == 1 for shape in shapes):
        kinds.append("colour")
    if len(things) == 1:
        kinds += ["shape", "list"]
    return kinds


def branches(rng: random.Random, scenes: list[world.Scene], turns: list[list[Turn]]
             ) -> list[Talk]:
    """Talks with the same beginning, all the images, and one of these turns each."""
    system = system_message(rng)
    opening = _opening(rng, len(scenes))
    after = rng.choice(["", "", "", " ", "\n"])
    return [_talk(system, opening, after, turn) for turn in turns]


def question_first(rng: random.Random, scenes: list[world.Scene], turn: Turn) -> Talk:
    """A talk whose images come after the question."""
    pictures = [_image(n) for n in range(len(scenes))]
    content = [_text(turn.question + rng.choice(["", " ", "\n"])), *pictures]
    return Talk([*system_message(rng), _say("user", content), _say("assistant", turn.answer)],
                [turn.kind])


def growing(rng: random.Random, scenes: list[world.Scene]) -> Talk:
    """A talk whose images come in two messages; the second question is about all of them."""
    cut = rng.randint(1, len(scenes) - 1)
    messages, kinds = system_message(rng), []
    for first, last in [(0, cut), (cut, len(scenes))]:
        turn = ask(rng, rng.choice(["list", "list", "item", "images"]), scenes[:last])
        pictures = [_image(n) for n in range(first, last)]
        messages += [_say("user", [*pictures, _text(turn.question)]),
                     _say("assistant", turn.answer)]
        kinds.append(turn.kind)
    return Talk(messages, kinds)


def text_only(rng: random.Random) -> Talk:
    """A talk without any image."""
    messages, kinds = system_message(rng), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        turn = _small_talk(rng)
        messages += [_say("user", turn.question), _say("assistant", turn.answer)]
        kinds.append(turn.kind)
    return Talk(messages, kinds)


def single_turn(rng: random.Random, kind: str, scenes: list[world.Scene]) -> Talk:
    """One question of a kind, in any form of the training."""
    if not scenes:
        return text_only(rng)
    turn = ask(rng, kind, scenes)
    if rng.random() < 0.2:
        return question_first(rng, scenes, turn)
    return branches(rng, scenes, [[turn]])[0]


def system_message(rng: random.Random) -> list[Message]:
    """Mostly none, else a short one; sometimes random words, so that the model ignores it."""
    dice = rng.random()
    if dice < 0.7:
        return []
    return [_say("system", rng.choice(SYSTEMS) if dice < 0.92 else _babble(rng))]


def _talk(system: list[Message], opening: list[Part], after: str, turns: list[Turn]) -> Talk:
    messages = list(system)
    for place, turn in enumerate(turns):
        content = [*opening, _text(after + turn.question)] if place == 0 else turn.question
        messages += [_say("user", content), _say("assistant", turn.answer)]
    return Talk(messages, [turn.kind for turn in turns])


def _opening(rng: random.Random, images: int) -> list[Part]:
    """All the images, perhaps with words before or between them."""
    dice = rng.random()
    labels = [""] * images
    if dice < 0.3 and images > 1:
        labels = rng.choice(LABELS)
    elif dice < 0.4:
        labels = [rng.choice(LEADS) + rng.choice(["", " ", "\n"])] + [""] * images
    parts: list[Part] = []
    for n in range(images):
        parts += [_text(labels[n]), _image(n)] if labels[n] else [_image(n)]
    return parts


def _sentence(things: list[world.Thing]) -> str:
    named = [("an " if thing.colour[0] == "o" else "a ") + thing.name for thing in things]
    return named[0] if len(named) == 1 else ", ".join(named[:-1]) + " and " + named[-1]


def _small_talk(rng: random.Random) -> Turn:
    dice = rng.random()
    if dice < 0.3:
        return Turn("talk", _careless(rng, rng.choice(GREETINGS)), GREETING)
    if dice < 0.5:
        form = rng.choice(COLOUR + COLOUR_ALONE + SHAPE + COUNT + DESCRIBE + LIST + ITEM)
        question = form.format(colour=rng.choice(["colour", "color"]), nth=rng.choice(NTH),
                               shape=rng.choice(world.SHAPES), n=rng.randint(1, IMAGES_MAX))
        return Turn("talk", _careless(rng, question), NO_IMAGE)
    question = rng.choice(OTHER) if dice < 0.75 else _babble(rng)
    return Turn("talk", _careless(rng, question), OTHER_ANSWER)


def _babble(rng: random.Random) -> str:
    if rng.random() < 0.2:
        letters = rng.choices(string.ascii_letters + string.digits + "     ", k=rng.randint(4, 30))
        return "x" + "".join(letters)
    words = rng.choices(WORDS, k=rng.randint(3, 20))
    return " ".join(words).capitalize() + rng.choice([".", "?", "!", ""])


def _careless(rng: random.Random, question: str) -> str:
    """Sometimes in lower case, sometimes without the final punctuation."""
    dice = rng.random()
    if dice < 0.1:
        return question.lower()
    return question[:-1] if dice > 0.9 and question[-1] in ".?" else question


def _say(role: str, content: str | list[Part]) -> Message:
    return {"role": role, "content": content}


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _image(index: int) -> Part:
    return {"type": "image", "image": index}
