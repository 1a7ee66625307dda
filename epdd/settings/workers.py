"""Settings of the model and of what computes it.  `etc/epdd.toml` and the documentation are made from this."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from epdd.settings.values import Count, Factor, Positive, Seconds
from epdd.settings.worker_overrides import WORKERS, Workers

POLICIES = {                                # router.policy, in the words of `epdctl policy`
    "budget": "CPU encoders while they have less in flight than their share of the GPUs' work",
    "earliest": "the encoder that finishes the image first, counting the images ahead of it",
    "least-loaded": "the encoder with the least in flight; for comparison",
    "round-robin": "each encoder in turn; for comparison",
    "gpu-only": "GPU encoders alone, all where there is no GPU; for comparison",
}


class ModelSettings(Struct, frozen=True):
    path: Annotated[str, Meta(description="""
        The model: a folder with a checkpoint of a served family, or the id of a model of the Hugging Face Hub
        as "ORG/NAME". Empty: the small demo model that comes with epdd.""")] = ""
    revision: Annotated[str, Meta(description="""
        Branch, tag or commit of a model of the Hub. Empty: main.""")] = ""
    download: Annotated[bool, Meta(description="""
        Download a model of the Hub at the start if it is not in the local cache (HF_HOME; /var/lib/epdd/.cache for the
        service). HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE in the environment apply. false: the start fails then, and
        `epdd pull ORG/NAME` with the same HF_HOME downloads it.""")] = False
    name: Annotated[str, Meta(description="""
        Name of the model in the API. Empty: the id ORG/NAME, or else the name of the folder.""")] = ""
    aliases: Annotated[tuple[str, ...], Meta(description="""
        Further names under which requests may ask for the model, for clients with a fixed one, for example ["gpt-4o"].
        """)] = ()
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Meta(description="""
        Type of weights and arithmetic. auto: the best one that the device and the checkpoint support. A 16-bit type
        halves the memory of the weights on a GPU; float32 is the most exact.""")] = "auto"
    max_model_len: Annotated[Count, Meta(description="""
        Tokens of prompt and answer together, images included. A longer prompt gets a 400. 0: what the checkpoint
        allows. A lower value saves KV cache.""")] = 0
    reasoning: Annotated[Literal["auto", "off"], Meta(description="""
        Where the text goes that a thinking model writes between <think> and </think>. auto: into reasoning_content.
        off: into content, with the answer.""")] = "auto"


class EncoderSettings(Struct, frozen=True):
    workers: Annotated[Workers, WORKERS, Meta(description="""
        Vision encoders: a number, or how many on which device, like "gpu:1,cpu:4". auto: one on each NUMA node that has
        CPUs and memory, and one on a GPU if there are several GPUs.""")] = Workers("auto")
    threads: Annotated[Count, Meta(description="""
        Threads of each encoder on CPUs, one on each of its cores. 0: all cores that are left on its NUMA node. More
        threads encode one image faster and leave fewer cores to other workers.""")] = 0
    quantize: Annotated[Literal["", "int8"], Meta(description="""
        "int8": an encoder on CPUs computes in 8 bits if that is faster there and its embeddings keep a cosine of 0.99
        to the exact ones. Both are measured at its first start. Empty: never.""")] = ""
    ahead_s: Annotated[Seconds, Meta(description="""
        Seconds before the end of an image at which its encoder gets the next one, to decode and resize it meanwhile. A
        higher value chooses encoders earlier than needed; with a lower one an encoder may wait for its next image.
        """)] = 0.25


class PrefillDecodeSettings(Struct, frozen=True):
    workers: Annotated[Workers, WORKERS, Meta(description="""
        Prefill-decode workers: a number, or how many on which device, like "gpu:2,cpu:1". auto: one on each GPU that
        does not encode; without GPUs, one on CPUs.""")] = Workers("auto")
    threads: Annotated[Count, Meta(description="""
        Threads of each prefill-decode worker on CPUs, one on each of its cores. 0: half the cores of its NUMA node.
        More threads compute faster and leave fewer cores to encoders.""")] = 0
    max_batched_tokens: Annotated[Positive, Meta(description="""
        Tokens in one step, of prefill and decode together. A higher value reads prompts faster; with a lower one
        running answers come more steadily.""")] = 512
    step_s: Annotated[Seconds, Meta(description="""
        Seconds of prompt that a step may add while answers are being written; if the answers' own tokens take longer,
        the prompt may take as long as they do. A lower value lets answers come more steadily, a higher one lets first
        tokens come sooner. 0: no limit but pd.max_batched_tokens.""")] = 0.1
    max_sequences: Annotated[Positive, Meta(description="""
        Answers that one worker decodes together; further ones wait for a place. A higher value gives more throughput
        and slower answers.""")] = 64
    kv_tokens: Annotated[Count, Meta(description="""
        Tokens that each worker's KV cache holds. 0: as many as fit into pd.kv_bytes.""")] = 0
    kv_bytes: Annotated[Count, Meta(description="""
        Bytes of each worker's KV cache. 0: on CPUs an eighth of memory, at most 8 GiB; on a GPU all memory that nothing
        else needs. A higher value lets more requests run together and keeps more of earlier prompts.""")] = 0
    kv_dtype: Annotated[Literal["auto", "float32", "bfloat16"], Meta(description="""
        Type of the KV cache on CPUs. auto: that of the weights. bfloat16 holds twice the tokens of float32, but answers
        then differ in some tokens from those that transformers gives in float32.""")] = "auto"
    prefix_cache: Annotated[bool, Meta(description="""
        Keep prompts and answers of ended requests in KV cache that no request needs. A prompt with the same beginning,
        images included, then computes only the rest. false: every prompt is computed in full.""")] = True


class ArenaSettings(Struct, frozen=True):
    bytes: Annotated[Count, Meta(description="""
        Bytes of the shared memory that holds embeddings. 0: the least of 4 GiB, a quarter of memory, and 1,024 of the
        largest images. If it is full, requests with images wait; a higher value also caches more images.""")] = 0
    gpu_bytes: Annotated[int, Meta(ge=-1, description="""
        Bytes on each encoding GPU for embeddings, which prefill-decode workers read there if they run on the same GPU
        or on one with access to it. -1: a 32nd of the GPU's memory, at most 4 GiB. 0: none, all embeddings go through
        the host's memory.""")] = -1
    cache_bytes: Annotated[int, Meta(ge=-1, description="""
        Bytes of the arena that embeddings may keep after their request, for images that come again. -1: all of it. 0:
        none, every image is encoded anew.""")] = -1
    huge_pages: Annotated[bool, Meta(description="""
        Use huge pages for the arena: reserved ones (vm.nr_hugepages) if every NUMA node has enough of them free, else
        transparent ones. false: ordinary pages. `epdctl status` shows what it got.""")] = True


class RouterSettings(Struct, frozen=True):
    policy: Annotated[Literal["budget", "earliest", "least-loaded", "round-robin", "gpu-only"], Meta(
        description="Which encoder gets an image. " + " ".join(f"{name}: {text}." for name, text in POLICIES.items())
    )] = "earliest"
    unit: Annotated[Literal["request", "image", "patch"], Meta(description="""
        Unit in which work in flight is counted. patch is proportional to an image's real cost; request and image are
        for comparison.""")] = "patch"
    ratio: Annotated[Factor, Meta(description="""
        Capability ratio R: how many times faster a GPU encodes than the CPUs of one NUMA node. 0: measured at the start
        and corrected while running. With the policy budget, a higher
        value leaves less work to CPU encoders.""")] = 0.0
    slack: Annotated[Factor, Meta(description="""
        Order of the encode queue. An image is due at its arrival plus slack times the seconds that all encoders
        together need for its request, and the earliest due goes first. 0: first come, first served. A higher value lets
        small requests pass large ones.""")] = 1.0


class FleetSettings(Struct, frozen=True):
    backoff_s: Annotated[Seconds, Meta(description="""
        Seconds until a dead worker is started again. They double with each further death, up to fleet.max_backoff_s.
        """)] = 0.5
    max_backoff_s: Annotated[Seconds, Meta(description="""
        Longest wait, in seconds, until a dead worker is started again.""")] = 30.0
    max_failures: Annotated[Count, Meta(description="""
        Deaths of a worker in a row, each before it completed any work, after which it is not started again. `epdctl
        resume` starts it once more. A higher value keeps trying for longer.""")] = 5
    min_uptime_s: Annotated[Seconds, Meta(description="""
        Seconds in service after which a worker counts as healthy. If it dies later, it is started again at once and
        its deaths are counted from 0.""")] = 30.0
    poison_s: Annotated[Seconds, Meta(description="""
        Seconds for which an image or prompt is rejected after two workers crashed on it. 0: it is not remembered and
        may crash two workers again.""")] = 600.0
    start_timeout_s: Annotated[Seconds, Meta(description="""
        Seconds from a worker's start until it must be ready. Then it is killed and started again. Large checkpoints on
        slow disks take minutes.""")] = 600.0
    stall_s: Annotated[Seconds, Meta(description="""
        Seconds without a heartbeat after which a worker that does nothing counts as hung and is replaced. A worker that
        still computes gets 20 times what its step should take, and at least a minute. A lower value finds hung workers
        sooner; if it is too low, a busy machine loses healthy ones.""")] = 15.0


class EmulationSettings(Struct, frozen=True):
    profile: Annotated[str, Meta(description="""
        Emulate a fleet instead of using this machine's devices: the name of a shipped profile, or a file. Status,
        metrics and the model list then say so. encoder.workers and pd.workers choose among its workers. Empty: no
        emulation.""")] = ""
    scale: Annotated[Factor, Meta(description="""
        How many times faster than the profile's times the emulated fleet runs. 0: as the profile says.""")] = 0.0
