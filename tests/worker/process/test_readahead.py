"""Reading ahead: every byte of a half and no more, right progress, and no failure of a worker."""

import json
import struct
import threading

import pytest

from epdd import families
from epdd.worker.process import readahead
from epdd.worker.process.readahead import GAP_BYTES, FileRange


def checkpoint(path, tensors):
    """A file of these (name, bytes), in order, without their content, beside a config.json; where its data begins."""
    (path.parent / "config.json").write_text('{"model_type": "qwen3_vl"}')
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, size in tensors:
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        begin = file.tell()
        file.truncate(begin + at)
    return begin


def test_each_role_gets_its_own_tensors_over_all_shards(tmp_path):
    one = checkpoint(tmp_path / "a.safetensors", [("model.visual.a", 100), ("lm_head", 2 * GAP_BYTES),
                                                  ("model.visual.b", 50), ("norm", 10), ("model.visual.c", 7)])
    two = checkpoint(tmp_path / "b.safetensors", [("model.language_model.a", 30)])
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    names = {a.name: ["model.visual.a", "lm_head", "model.visual.b", "norm", "model.visual.c"],
             b.name: ["model.language_model.a"]}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({
        "metadata": {}, "weight_map": {name: file for file, those in names.items() for name in those}}))
    checkpoint(tmp_path / "consolidated.safetensors", [("model.visual.a", 100)])       # nobody loads it
    far = one + 100 + 2 * GAP_BYTES
    assert readahead.parts(tmp_path, "encoder") == [
        FileRange(a, one, one + 100), FileRange(a, far, far + 67)]      # a small gap
    assert readahead.parts(tmp_path, "pd") == [FileRange(a, one + 100, far + 60), FileRange(b, two, two + 30)]


def test_all_of_the_demo_is_read_and_told():
    folder = families.DEMO
    size = (folder / "model.safetensors").stat().st_size
    for role in ("encoder", "pd"):
        told, whole = [], threading.Event()

        def tell(share):
            told.append(share)
            if share == 1.0:
                whole.set()

        with readahead.read_ahead(str(folder), role, tell):
            assert whole.wait(60)
        assert told == sorted(told) and all(0 <= share <= 1 for share in told)
        assert not [thread for thread in threading.enumerate() if thread.name == "weights"]
        assert 0 < sum(part.end - part.start for part in readahead.parts(folder, role)) < size


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, struct.pack("<Q", 5) + b"hello", struct.pack("<Q", 2) + b"[]",
                                     struct.pack("<Q", 8) + b'{"a": 1}'])
def test_what_is_no_checkpoint_is_left_to_the_loader(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with readahead.read_ahead(str(tmp_path), "pd", pytest.fail):
        pass


def test_a_file_cut_short_ends_the_reading(tmp_path):
    path = tmp_path / "model.safetensors"
    begin = checkpoint(path, [("a", 1 << 20)])
    reading = readahead._ReadAhead(str(tmp_path), "pd")
    with open(path, "r+b") as file:
        file.truncate(begin + 1000)
    reading.run(threading.Event())
    assert (reading.done, reading.total) == (1000, 1 << 20)
