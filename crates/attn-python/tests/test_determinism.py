"""A request has the same log-probabilities to the bit in every batch, cut, page size and process: a small model over `attn.Cache`, in numpy on the CPU.

Attention does that by itself. The rest of a model does where each row of activations is computed by itself, which BLAS does not promise of a product of several rows:
`Model.product` is the one place that an engine must see to.
"""

import multiprocessing
import pickle

import attn
import numpy as np
import pytest

LAYERS, WIDTH, HEADS, KV_HEADS, DIM, WORDS = 2, 96, 6, 2, 64, 50
# Beside sequences of these lengths, in batches.
OTHERS = [1, 63, 64, 200, 17, 130]
PROMPT, NEW = 150, 8
FORMATS = ["int8", "int8/int4", "int4", "bf16"]


def product(x, weights):
    """Rows one by one: a product of several rows adds up in an order that depends on how many they are."""
    return np.stack([row @ weights for row in x]) if len(x) else np.zeros((0, weights.shape[1]), "f")


def normed(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


class Model:
    """Embeddings, layers of attention and of a gated product, and log-probabilities of words; weights are the same in every process."""

    def __init__(self, product=product):
        random = np.random.default_rng(11)
        made = lambda *shape: (random.standard_normal(shape) / np.sqrt(shape[0])).astype("f")
        self.product, self.embeddings = product, made(WORDS, WIDTH) * 7
        self.layers = [{"qkv": made(WIDTH, (HEADS + 2 * KV_HEADS) * DIM), "out": made(HEADS * DIM, WIDTH), "up": made(WIDTH, 2 * WIDTH), "down": made(WIDTH, WIDTH)} for _ in range(LAYERS)]

    def cache(self, format, sequences=1, page_size=64, **options):
        return attn.Cache(format, heads=KV_HEADS, dim=DIM, layers=LAYERS, max_tokens=256, sequences=sequences, page_size=page_size, device="cpu", **options)

    def step(self, cache, pieces):
        """New words `{sequence: [words]}` of a batch; log-probabilities of the word behind each, `{sequence: [words, WORDS]}`."""
        sequences, counts = list(pieces), [len(words) for words in pieces.values()]
        x = self.embeddings[np.concatenate([np.asarray(words) for words in pieces.values()])]
        cache.reserve(sequences, counts)
        for i, layer in enumerate(self.layers):
            rows = self.product(normed(x), layer["qkv"]).reshape(len(x), -1, DIM)
            q, k, v = rows[:, :HEADS], rows[:, HEADS : HEADS + KV_HEADS], rows[:, HEADS + KV_HEADS :]
            cache.write(i, k, v)
            out = cache.attend(q, layer=i, sequences=sequences, q_lens=counts)
            x = x + self.product(np.ascontiguousarray(out).reshape(len(x), -1), layer["out"])
            gate, up = np.split(self.product(normed(x), layer["up"]), 2, axis=-1)
            x = x + self.product(np.maximum(gate, 0) * up, layer["down"])
        scores = self.product(normed(x), np.ascontiguousarray(self.embeddings.T)).astype("d")
        scores -= scores.max(-1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        ends = np.cumsum(counts)
        return {sequence: logs[end - count : end] for sequence, count, end in zip(sequences, counts, ends)}


def prompt(seed, words=PROMPT):
    return np.random.default_rng(seed).integers(0, WORDS, words).tolist()


def answer(model, cache, sequence, words, piece=64, beside=None):
    """Log-probabilities behind every word of a prompt and of `NEW` likeliest words. `beside`: words that other sequences get in the same steps, `{sequence: [words]}`."""
    beside, logs, new = {s: list(w) for s, w in (beside or {}).items()}, [], list(words)
    while len(logs) < len(words) + NEW:
        taken, new = new[:piece], new[piece:]
        others = {s: w[: 1 + 7 * s % 20] for s, w in beside.items() if w}
        beside = {s: w[len(others.get(s, ())) :] for s, w in beside.items()}
        # The request is neither the first nor the last of its batch.
        batch = dict(sorted({**others, sequence: taken}.items()))
        logs += list(model.step(cache, batch)[sequence])
        new = new or [int(logs[-1].argmax())]
    return np.stack(logs)


@pytest.fixture(scope="module")
def alone():
    """What each format answers, alone, its prompt at most 64 words at a time, on pages of 64."""
    model = Model()
    return {format: answer(model, model.cache(format), 0, prompt(1)) for format in FORMATS}


@pytest.mark.parametrize("format", FORMATS)
def test_the_words_of_a_prompt_matter(alone, format):
    """The comparisons below compare something: other words, and formats, have other log-probabilities."""
    model, other = Model(), prompt(1)
    other[0] = (other[0] + 1) % WORDS
    given = answer(model, model.cache(format), 0, other)
    assert (np.abs(given - alone[format]).max(-1)[1:] > 0).all() and np.isfinite(given).all()
    assert all((alone[format] != alone[name]).any() for name in FORMATS if name != format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("others", [1, 3, 6])
def test_a_request_is_the_same_in_batches_of_any_size(alone, format, others):
    model = Model()
    cache = model.cache(format, sequences=7)
    beside = {s: prompt(100 + s, OTHERS[s]) for s in range(others)}
    # Behind the others, and before them.
    for sequence in (6, 0):
        own = {s + (sequence == 0): words for s, words in beside.items()}
        assert np.array_equal(answer(model, cache, sequence, prompt(1), beside=own), alone[format])
        for s in range(7):
            cache.free(s)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("piece", [1, 5, 17, 63])
def test_a_request_is_the_same_in_pieces_of_any_size(alone, format, piece):
    model = Model()
    assert np.array_equal(answer(model, model.cache(format), 0, prompt(1), piece), alone[format])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size", [16, 32, 128])
def test_a_request_is_the_same_on_pages_of_any_size(alone, format, page_size):
    model = Model()
    assert np.array_equal(answer(model, model.cache(format, page_size=page_size), 0, prompt(1)), alone[format])


@pytest.mark.parametrize("format", FORMATS)
def test_a_request_is_the_same_behind_a_cached_prefix_and_behind_drafts(alone, format):
    model, words = Model(), prompt(1)
    cache = model.cache(format, sequences=2, checkpoints=64)
    for at in range(0, 64, 16):
        model.step(cache, {0: words[at : at + 16]})
    cache.fork(0, 1)
    model.step(cache, {0: prompt(5, 30)})
    logs = []
    for at in range(64, PROMPT, 6):
        taken = words[at : at + 6]
        # Drafts that are rejected: words that nobody wrote, behind those of the text.
        logs += list(model.step(cache, {1: taken + [3, 1, 4]})[1][: len(taken)])
        cache.truncate(1, at + len(taken))
    assert np.array_equal(np.stack(logs), alone[format][64:PROMPT])


def go_on(program):
    """In a process of its own: a request from its image, in another slot of another cache."""
    format, image, words = pickle.loads(program)
    model = Model()
    cache = model.cache(format, sequences=3)
    model.step(cache, {0: prompt(8, 40)})
    cache.restore(2, image)
    return np.stack([model.step(cache, {2: [word], 0: [word]})[2][0] for word in words])


@pytest.mark.parametrize("format", FORMATS)
def test_a_request_is_the_same_after_a_restart(alone, format):
    model, words, cut = Model(), prompt(1), 101
    cache = model.cache(format)
    for at in range(0, cut, 40):
        model.step(cache, {0: words[at : min(at + 40, cut)]})
    program = pickle.dumps((format, cache.save(0), words[cut:]))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        given = pool.apply(go_on, (program,))
    assert np.array_equal(given, alone[format][cut:PROMPT])


def test_attention_alone_keeps_its_bits_where_products_do_not():
    """Products of whole batches may have other last bits than those of rows; attention over equal rows still has equal bits in every batch."""
    random = np.random.default_rng(2)
    k, v, q = (random.standard_normal((100, heads, DIM)).astype("f") for heads in (KV_HEADS, KV_HEADS, HEADS))
    for format in FORMATS:
        cache = attn.Cache(format, heads=KV_HEADS, dim=DIM, max_tokens=128, sequences=5, max_q_len=100, device="cpu")
        for s in range(5):
            cache.append(k[: 100 - s], v[: 100 - s], sequences=s)
        together = cache.attend(np.concatenate([q[99 - s : 100 - s] for s in range(5)]), sequences=[0, 1, 2, 3, 4], q_lens=[1] * 5)
        one_by_one = np.concatenate([cache.attend(q[99 - s : 100 - s], sequences=s) for s in range(5)])
        assert np.array_equal(together, one_by_one)
