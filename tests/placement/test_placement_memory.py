"""Workers' use of GPU memory, on fake machines with 1, 2, 5 and 8 GPUs; the sums are made by hand."""

from dataclasses import replace

import pytest

from epdd import placement
from epdd.errors import PlacementError
from epdd.hardware.topology import Link
from epdd.families.layers import full_attention
from epdd.placement.memory import peers
from epdd.settings.config import Config
from tests.placement.machines import FAMILY, GIB, machine

# As Qwen3-VL-8B has them.
LARGE = replace(FAMILY, hidden=4096, planes=4, max_pixels=1 << 24, vision_width=1152, vocab=151936,
                max_model_len=262144, parameters=(576_000_000, 8_190_000_000), layers=full_attention(36, 2 * 8 * 128))
VISION, LANGUAGE = 2 * 576_000_000, 2 * 8_190_000_000
VISION_ACTIVATIONS = 65536 * 1152 * 64
TEXT_ACTIVATIONS = 512 * 4096 * 96 + 64 * 151936 * 16 + 2 * 512 * 4096 * 4 * 2 + (512 << 20)
CONTEXT, READER = 768 << 20, 512 << 20


def gpus(count, memory=141 * GIB, islands=1):
    """A machine whose GPUs reach those of the same island."""
    topology = machine([32, 32], gpu_nodes=[i % 2 for i in range(count)])
    size = count // islands
    linked = [replace(gpu, memory_bytes=memory, links=tuple(
        Link(other.index, "NVLink", gpu.index // size == other.index // size) for other in topology.gpus
        if other is not gpu)) for gpu in topology.gpus]
    return replace(topology, gpus=tuple(linked))


def decide(topology, family=LARGE, encoder="auto", pd="auto", **settings):
    config = Config().with_values("encoder", {"workers": encoder}, "test").with_values("pd", {"workers": pd}, "test")
    for name, value in settings.items():
        section, key = name.split("_", 1)
        config = config.with_values(section, {key: value}, "test")
    plan = placement.decide(topology, config, family, 4 * GIB)
    return {spec.name: spec for spec in plan.specs}, plan.why


def left(memory, *taken):
    return int(memory * 0.94) - sum(taken)


def test_an_only_gpu_is_all_the_prefill_decode_workers():
    specs, why = decide(gpus(1))
    pd = specs["pd/0"]
    assert pd.kv_bytes == left(141 * GIB, LANGUAGE, TEXT_ACTIVATIONS, CONTEXT)
    assert (pd.peers, pd.gpu_bytes, pd.pool_bytes) == (("cuda:0",), 0, 0)
    assert why[-4] == ("GPU 0, 141 GiB: pd/0: weights 15.3 GiB, activations 884.4 MiB, contexts 768 MiB, "
                       "KV cache 115.7 GiB; 8.5 GiB to spare")


def test_two_gpus_read_from_one_another():
    specs, _ = decide(gpus(2))
    assert (specs["encoder/0"].device, specs["encoder/0"].pool_bytes) == ("cuda:0", 4 * GIB)
    assert specs["pd/0"].peers == ("cuda:1", "cuda:0")
    assert all(spec.pool_bytes == 0 for spec in specs.values() if spec.device == "cpu")


def test_one_encoder_of_five_counts_a_context_for_each_reader():
    specs, why = decide(gpus(5))
    assert [spec.device for spec in specs.values() if spec.role == "pd"] == ["cuda:1", "cuda:2", "cuda:3", "cuda:4"]
    rest = 141 * GIB - (VISION + VISION_ACTIVATIONS + CONTEXT + 4 * READER + 4 * GIB)
    told = next(line for line in why if line.startswith("GPU 0"))
    assert told == ("GPU 0, 141 GiB: encoder/0: weights 1.1 GiB, activations 4.5 GiB, contexts 2.8 GiB, "
                    f"embeddings 4 GiB; {rest / GIB:.1f} GiB to spare")


def test_where_one_reader_has_no_access_all_goes_by_the_host():
    specs, _ = decide(gpus(8, islands=2))
    assert specs["encoder/0"].pool_bytes == 0
    assert specs["pd/0"].peers == ("cuda:1", "cuda:0", "cuda:2", "cuda:3")
    apart, _ = decide(gpus(8, islands=2), encoder="gpu:2", pd="gpu:6")
    assert apart["encoder/0"].pool_bytes == apart["encoder/1"].pool_bytes == 0
    mixed, _ = decide(gpus(2), encoder="gpu:1", pd="gpu:1,cpu:1")
    assert mixed["encoder/0"].pool_bytes == 0


def test_a_shared_gpu_is_split():
    specs, why = decide(gpus(1), encoder="gpu:1,cpu:2", pd="gpu:1")
    kv = left(141 * GIB, LANGUAGE, TEXT_ACTIVATIONS, 2 * CONTEXT, VISION, VISION_ACTIVATIONS, 4 * GIB)
    assert (specs["pd/0"].device, specs["pd/0"].kv_bytes) == ("cuda:0", kv)
    assert specs["encoder/0"].gpu_bytes == VISION + VISION_ACTIVATIONS
    assert specs["pd/0"].gpu_bytes == LANGUAGE + TEXT_ACTIVATIONS + kv
    assert [line for line in why if "shared" in line] == [
        "GPU 0 is shared as asked: kernels of two processes take turns on it, unless NVIDIA's MPS runs; "
        "then those of prefill and decode go first"]


def test_settings_are_kept_to():
    specs, _ = decide(gpus(2), pd_kv_bytes=20 * GIB, arena_gpu_bytes=0)
    assert (specs["pd/0"].kv_bytes, specs["encoder/0"].pool_bytes) == (20 * GIB, 0)
    specs, why = decide(gpus(2), pd_kv_tokens=1 << 19, model_dtype="float16", arena_gpu_bytes=GIB)
    assert "KV cache 72 GiB" in str(why)
    assert specs["pd/0"].kv_tokens == 1 << 19 and specs["encoder/0"].pool_bytes == GIB


@pytest.mark.parametrize("settings, words", [
    ({"pd_kv_bytes": 130 * GIB}, r"GPU 1 has 141 GiB, too little by 14.3 GiB for pd/0: weights 15.3 GiB, .* 130 GiB; "
                                 "lower pd.kv_bytes"),
    ({"model_dtype": "float32", "pd_kv_tokens": 400_000}, "KV cache 109.9 GiB"),
    ({"arena_gpu_bytes": 140 * GIB}, "GPU 0 has 141 GiB, too little by"),
])
def test_what_does_not_fit_is_refused_with_the_sums(settings, words):
    with pytest.raises(PlacementError, match=words):
        decide(gpus(2), **settings)


def test_a_small_gpu_is_refused_before_anything_is_started():
    with pytest.raises(PlacementError, match="GPU 0 has 16 GiB, too little by .* weights 15.3 GiB"):
        decide(gpus(1, memory=16 * GIB))


def test_peers_of_what_is_no_gpu():
    assert peers("cpu", gpus(2)) == () and peers("cuda:7", gpus(2)) == ()
