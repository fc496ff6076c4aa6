"""Caches in several threads, in spawned processes and in forked ones."""

import copy
import multiprocessing
import os
import select
import signal
import threading

import attn
import pytest
from conftest import filled, rows


def test_threads_work_on_caches_at_once(rng):
    caches = [filled(rng, tokens=300) for _ in range(4)]
    shared, q = filled(rng, tokens=300), rows(rng, 64, 8, 64)
    wanted = [cache.attend(q) for cache in (*caches, shared)]
    wrong = []

    def work(cache, result):
        for _ in range(20):
            if not (cache.attend(q) == result).all() or not (shared.attend(q) == wanted[-1]).all():
                wrong.append(cache)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(caches, wanted)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not wrong


def _in_child(queue, image):
    cache = attn.Cache(heads=2, dim=64, max_tokens=1024, device="cpu")
    cache.restore(0, image)
    queue.put(cache.save() == image)


def test_a_spawned_process_takes_images(rng):
    cache = filled(rng)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue, cache.save()))
    child.start()
    assert queue.get(timeout=120)
    child.join(60)


def outcome_of_child(work, seconds=20):
    """What `work` says in a process that is forked from this one; fails if it takes longer than a call that is refused at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, str(said).encode())
        os._exit(0)
    os.close(writer)
    try:
        ready, _, _ = select.select([reader], [], [], seconds)
        assert ready, f"the child hangs for {seconds} s"
        return os.read(reader, 4096).decode()
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# Large enough that the threads take part.
LARGE = 600


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, x: cache.attend(x),
        lambda cache, x: cache.attend(x[-1:]),
        lambda cache, x: cache.append(x, x),
        lambda cache, x: cache.append(x[:1], x[:1]),
        lambda cache, x: cache.attend_spans(x[-1:]),
        lambda cache, x: cache.save(),
        lambda cache, x: cache.restore(1, attn.SequenceImage(cache.save())),
        lambda cache, x: cache.export(),
        lambda cache, x: cache.fork(0, 1),
        lambda cache, x: cache.free(0),
        lambda cache, x: cache.lens,
        lambda cache, x: copy.deepcopy(cache),
        lambda cache, x: attn.Cache(heads=2, dim=64, max_tokens=64, device="cpu"),
        lambda cache, x: attn.Cache(heads=2, dim=64, max_tokens=64),
        lambda cache, x: attn.quantize(x, x),
        lambda cache, x: f"UnsupportedError: {attn.devices()[-1].absent}",
    ],
)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_is_told_so_at_once(rng, call):
    cache = filled(rng, tokens=LARGE, sequences=2)
    x = rows(rng, LARGE, 2, 64)
    cache.attend(x)
    said = outcome_of_child(lambda: call(cache, x))
    assert said.startswith("UnsupportedError: this process was forked from one that had opened attn's devices") and "spawn" in said, said
    # The parent goes on.
    assert cache.attend(x).shape == x.shape
