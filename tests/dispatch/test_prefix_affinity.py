"""The assumed cached prefix of a prompt in a worker, against the longest common beginning by comparison."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from epdd.dispatch.prefix_affinity import BLOCK, PrefixAffinity, chain
from epdd.dispatch.request import Image, Placed, Request
from epdd.dispatch.request_record import RequestRecord
from epdd.wire import Sampling

ROWS = 4
PLACEHOLDER = 99


class Channel:
    pass


def worker(kv_tokens=1 << 20, prefix_cache=True):
    return SimpleNamespace(channel=Channel(), ready=SimpleNamespace(kv_tokens=kv_tokens),
                           spec=SimpleNamespace(prefix_cache=prefix_cache))


def prompt(parts):
    """A request: a part is a token id, or the name of an image."""
    tokens, images, spans = [], [], []
    for part in parts:
        if isinstance(part, str):
            spans.append(Placed(len(tokens), len(images)))
            images.append(Image(b"", 32, 32, (1, 4, 4), ROWS, part))
            tokens += [PLACEHOLDER] * ROWS
        else:
            tokens.append(part)
    return Request(RequestRecord("r"), tokens, Sampling(max_tokens=1), images, spans)


def items(parts):
    """Comparable one by one: placeholders by their image."""
    return [item for part in parts for item in ([(part, row) for row in range(ROWS)] if isinstance(part, str)
                                                else [part])]


def common(one, other):
    count = 0
    for a, b in zip(items(one), items(other)):
        if a != b:
            break
        count += 1
    return count


# Long runs of few kinds, so that prompts share beginnings that end anywhere.
runs = st.tuples(st.sampled_from([1, 2, "red", "blue"]), st.integers(1, 60))
prompts = st.lists(runs, max_size=8).map(lambda parts: [part for part, times in parts for _ in range(times)])


@given(st.lists(prompts, min_size=1, max_size=6), prompts)
def test_the_longest_common_beginning_in_whole_blocks(given_before, asked):
    prefixes, one, other = PrefixAffinity(), worker(), worker()
    for parts in given_before:
        prefixes.add(one, chain(prompt(parts)))
    found = prefixes.known(one, chain(prompt(asked)))
    longest = max(common(parts, asked) for parts in given_before)
    assert found == longest // BLOCK * BLOCK
    assert prefixes.known(other, chain(prompt(asked))) == 0


def test_what_was_given_longest_ago_is_forgotten_first_and_its_end_before_its_beginning():
    prefixes, small = PrefixAffinity(), worker(kv_tokens=4 * BLOCK)
    first, second, third = ([kind] * 2 * BLOCK for kind in (1, 2, 3))
    for parts in (first, second, first, third):
        prefixes.add(small, chain(prompt(parts)))
    known = [prefixes.known(small, chain(prompt(parts))) for parts in (first, second, third)]
    assert known == [2 * BLOCK, 0, 2 * BLOCK]
    prefixes.add(small, chain(prompt([4] * BLOCK)))
    assert [prefixes.known(small, chain(prompt(parts))) for parts in (first, third)] == [BLOCK, 2 * BLOCK]


def test_a_worker_without_a_prefix_cache_or_process_knows_nothing():
    prefixes, digests = PrefixAffinity(), chain(prompt([1] * 200))
    without, gone = worker(prefix_cache=False), worker()
    gone.channel = None
    for one in (without, gone):
        prefixes.add(one, digests)
        assert prefixes.known(one, digests) == 0
    assert len(digests) == 200 // BLOCK
