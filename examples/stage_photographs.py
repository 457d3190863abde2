"""Stage batches of photographs as a model server's loader does, and check every byte against NumPy.

The photographs are those that scikit-image ships inside its package; nothing is downloaded. Three ways to
make a batch:

1. equal crops, channels last as decoders give them, stacked into the channels-first batch a model takes;
2. requests of different length (each its own number of tiles), concatenated;
3. a batch made first, whose slots several decoders fill in place, so that nothing is joined afterwards.
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

import accel_ops as ops

NAMES = [
    *("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg"),
    *("motorcycle_left.png", "motorcycle_right.png", "retina.jpg", "rocket.jpg"),
]
ACCELERATOR = None  # plain host memory, which is compared with NumPy's; ops.default_accelerator() would lock it
SIDE, TILE = 512, 224
REQUESTS, BATCHES = 320, 5
DECODED, DECODERS = 64, 4


def photograph_paths() -> list[Path]:
    package = importlib.util.find_spec("skimage")  # found, not imported: only its files are needed
    if package is None or package.origin is None:
        msg = "the photographs come with scikit-image: pip install scikit-image"
        raise SystemExit(msg)
    return [Path(package.origin).parent / "data" / name for name in NAMES]


def decode(path: Path) -> np.ndarray:
    """A photograph as (height, width, 3) bytes, its shorter side somewhat longer than a crop."""
    with Image.open(path) as image:
        scale = (SIDE + 64) / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        return np.asarray(image.convert("RGB").resize(size))


def crop(photograph: np.ndarray, side: int, generator: np.random.Generator) -> np.ndarray:
    top, left = (int(generator.integers(0, length - side + 1)) for length in photograph.shape[:2])
    return photograph[top : top + side, left : left + side].copy()


def compare(what: str, make_requests: Callable[[], list], ours: Callable, numpys: Callable) -> None:
    """Join several batches of fresh requests with accel_ops and with NumPy, in turn."""
    our_seconds, numpy_seconds = [], []
    for _ in range(BATCHES):
        requests = make_requests()
        started = time.perf_counter()
        batch = ours(requests)
        our_seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        expected = numpys(requests)
        numpy_seconds.append(time.perf_counter() - started)
        assert batch.flags.c_contiguous
        assert np.array_equal(batch, expected)
        n_bytes = batch.nbytes
        del batch, expected  # a loader drops a batch once it has been sent
    our_median, numpy_median = statistics.median(our_seconds), statistics.median(numpy_seconds)
    print(f"{what}: {BATCHES} batches, {len(requests)} requests and {n_bytes / 1e6:.0f} MB each, NumPy's bytes")
    print(
        f"    accel_ops {n_bytes / our_median / 1e9:.1f} GB/s, NumPy {n_bytes / numpy_median / 1e9:.1f} GB/s:"
        f" {numpy_median / our_median:.1f} times as fast (medians; first batch {our_seconds[0] * 1e3:.0f} ms)"
    )


def fill_in_place(paths: list[Path]) -> None:
    """Let decoders write where the batch lies."""
    shape = (1, 3, SIDE, SIDE)
    sources = [paths[i % len(paths)] for i in range(DECODED)]
    started = time.perf_counter()
    with ops.batch([shape] * DECODED, np.uint8, accelerator=ACCELERATOR) as batch:

        def fill(i: int) -> None:
            pixels = crop(decode(sources[i]), SIDE, np.random.default_rng(i))
            batch.slots[i][0] = pixels.transpose(2, 0, 1)
            batch.filled(i)

        with ThreadPoolExecutor(DECODERS) as decoders:
            list(decoders.map(fill, range(DECODED)))
    seconds = time.perf_counter() - started
    crops = [crop(decode(path), SIDE, np.random.default_rng(i)) for i, path in enumerate(sources)]
    assert np.array_equal(batch.array, np.stack(crops).transpose(0, 3, 1, 2))
    print(
        f"filled in place: {DECODED} requests by {DECODERS} decoders, {batch.array.nbytes / 1e6:.0f} MB"
        f" in {seconds:.2f} s, decoding included, nothing joined afterwards, NumPy's bytes"
    )


def main() -> None:
    paths = photograph_paths()
    photographs = [decode(path) for path in paths]
    generator = np.random.default_rng(0)

    def channel_first_crops() -> list[np.ndarray]:
        crops = [crop(photographs[i % len(photographs)], SIDE, generator) for i in range(REQUESTS)]
        return [pixels.transpose(2, 0, 1) for pixels in crops]

    def tiled_requests() -> list[np.ndarray]:
        counts = generator.integers(1, 9, REQUESTS)
        pictures = [photographs[i % len(photographs)] for i in range(REQUESTS)]
        return [
            np.stack([crop(picture, TILE, generator) for _ in range(count)])
            for picture, count in zip(pictures, counts, strict=True)
        ]

    print(f"photographs: {', '.join(path.stem for path in paths)}")
    compare(
        "stack, channels last to first",
        channel_first_crops,
        lambda crops: ops.stack(crops, accelerator=ACCELERATOR),
        # np.stack alone would keep the strides of the crops: channels last in memory, as before.
        lambda crops: np.stack(crops, out=np.empty((len(crops), *crops[0].shape), np.uint8)),
    )
    compare(
        "concatenate, requests of 1 to 8 tiles",
        tiled_requests,
        lambda tiles: ops.concatenate(tiles, accelerator=ACCELERATOR),
        np.concatenate,
    )
    fill_in_place(paths)
    threads, memory = ops.thread_info(), ops.host_memory_info()
    print(f"threads: {threads.num_threads} per call ({threads.source}), {threads.pool_size} in the pool")
    print(
        f"memory: plain host memory, page-aligned and recycled: {memory.in_use_bytes / 1e6:.0f} MB in use,"
        f" {memory.cached_bytes / 1e6:.0f} MB ready for the next batch (cap {memory.cap_bytes / 1e6:.0f} MB)"
    )


if __name__ == "__main__":
    main()
