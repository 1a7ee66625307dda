"""The daemon counts an image's tokens from its header alone; the encoder must write just as many rows."""

import io
import random

from PIL import Image

from epdd import families
from epdd.arena import Mapping, create
from epdd.errors import MediaError
from epdd.frontend.images import image_header
from epdd.wire import Encode, Encoded, Lease, WorkerSpec

SIZES = 2000
ARENA = 1 << 22


def file(width, height, rng):
    """A picture file in one of the formats, cheap to write; some are turned by EXIF."""
    image = Image.new(rng.choice(["RGB", "L"]), (width, height), rng.randrange(256))
    buffer, exif = io.BytesIO(), Image.Exif()
    form = rng.choice(["BMP", "GIF", "JPEG", "PNG"])
    if form == "JPEG" and rng.random() < 0.3:
        exif[0x0112] = rng.randint(1, 8)
        image.save(buffer, form, exif=exif)
    else:
        image.save(buffer, form)
    return buffer.getvalue()


def test_counts_of_2000_sizes_are_the_rows_encoded(checkpoint):
    from epdd.worker.vision.encoder import Encoder
    model = checkpoint("qwen3_vl")
    family, replies = families.load(model), []
    spec = WorkerSpec("encoder/0", "encoder", "cpu", (), None, 1, model, arena_bytes=ARENA)
    encoder = Encoder(spec, Mapping(create(ARENA), ARENA), replies.append)
    rng, wanted = random.Random(7), {}
    while len(wanted) < SIZES:
        width, height = (int(2 ** rng.uniform(0, 9)) for _ in range(2))
        data = file(width, height, rng)
        try:
            header = image_header.read(data)
            grid = family.grid(*header.upright)
        except MediaError:
            assert max(width, height) > 200 * min(width, height)
            continue
        name = str(len(wanted))
        wanted[name] = family.rows(grid)
        encoder.submit(Encode(name, Lease(0, ARENA), grid, wanted[name],
                              (header.width, header.height), header.orientation), data)
        while encoder.busy:
            encoder.step()
    assert all(isinstance(reply, Encoded) for reply in replies), [r for r in replies if not isinstance(r, Encoded)][:3]
    assert {reply.id: reply.bytes for reply in replies} == {
        name: family.embedding_bytes(rows) for name, rows in wanted.items()}
