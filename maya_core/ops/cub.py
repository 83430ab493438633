"""The cub algorithms with which ATen sorts, scans and compacts: their launches and temporary storage (CUDA 13's cub, in torch 2.11 and later;
torch 2.10 has that of CUDA 12.8).

Temporary storage is one allocation of parts that are aligned to 256 bytes each, plus 255 bytes to align the whole. Tile sizes are cub's tuning
for each architecture (cub/device/dispatch/tuning), measured with CUDA torch over a fake runtime.
"""

from __future__ import annotations

from maya_core.hardware.platform import Platform
from maya_core.ops.kernel import Streaming, small
from maya_core.ops.work import Work

DIGITS = 256  # a pass sorts by 8 bits
DIGIT_BYTES = DIGITS * 8

# Elements per tile of the one-sweep radix sort, by (bytes of a key, bytes of a value); sm_90 has its own for some.
SORT_TILE = {(4, 4): 6528, (4, 8): 3072, (8, 8): 3840, (8, 0): 3840, (4, 0): 8064}
SORT_TILE_90 = {
    (1, 8): 3456,
    (2, 8): 5632,
    (4, 8): 5376,
    (8, 8): 4608,
    (8, 0): 5760,
    (4, 0): 7296,
    (2, 0): 9728,
    (1, 0): 9728,
}

SCAN_TILE = {2: 3840, 4: 1920, 8: 896}  # by bytes of an element
UNIQUE_TILE = {4: 2816, 8: 1344}
UNIQUE_TILE_90 = {4: 7168, 8: 4928}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _storage(*parts: int) -> int:
    return sum(_aligned(part) for part in parts) + 255


def bits(largest: int) -> int:
    """The number of bits of keys from 0 to `largest`."""
    return max(1, largest.bit_length())


def _sorts_in_one_tile(n: int, key_bytes: int, value_bytes: int) -> bool:
    """Whether one block sorts everything: 256 threads with 19 items of 4 bytes each, or fewer larger ones."""
    return n <= 256 * max(1, 19 * 4 // max(4, key_bytes, value_bytes))


def radix_sort(work: Work, platform: Platform, n: int, key_bytes: int, value_bytes: int, key_bits: int) -> Work:
    """Adds a sort of `n` keys with their values by the lowest `key_bits`."""
    sweep = Streaming("sort", n * (key_bytes + value_bytes), n * (key_bytes + value_bytes), n)
    if _sorts_in_one_tile(n, key_bytes, value_bytes):
        return work.launch(sweep).free(work.temporary(1))
    if platform.capability < 90 and key_bytes < 4:
        return _spine_sort(work, platform, n, key_bytes, value_bytes, key_bits)
    passes = -(-key_bits // 8)
    tiles = SORT_TILE | SORT_TILE_90 if platform.capability >= 90 else SORT_TILE
    tile = tiles.get((key_bytes, value_bytes), 3840)
    copies = (n * key_bytes, n * value_bytes) if passes > 1 else (0, 0)  # double buffers
    storage = _storage(passes * 4, passes * DIGITS * 8, -(-n // tile) * DIGITS * 4, *copies)
    histogram = Streaming("reduction", n * key_bytes, DIGIT_BYTES, n, n)
    work.launch(small(), small(DIGIT_BYTES), histogram, small(DIGIT_BYTES))
    work.launch(*[small(DIGIT_BYTES), sweep] * passes)
    return work.free(work.temporary(storage))


def _spine_sort(work: Work, platform: Platform, n: int, key_bytes: int, value_bytes: int, key_bits: int) -> Work:
    """Sorts keys below 4 bytes before sm_90: blocks count digits into a spine, which is scanned; three kernels for each pass."""
    digit_bits = 7 if key_bytes == 2 else 6
    blocks = platform.sms * 8 * 5  # five times as many as fit at once
    spine = blocks * 2**digit_bits * 8
    count = Streaming("reduction", n * key_bytes, spine, n, n)
    sweep = Streaming("sort", n * (key_bytes + value_bytes), n * (key_bytes + value_bytes), n)
    work.launch(*[count, small(spine), sweep] * -(-key_bits // digit_bits))
    return work.free(work.temporary(_storage((blocks * 2**digit_bits + 5632) * 8, n * key_bytes, n * value_bytes)))


def segmented_sort(work: Work, n: int, key_bytes: int, value_bytes: int, length: int) -> Work:
    """Sorts each segment with one block, 6 bits in each pass."""
    pairs = n * (key_bytes + value_bytes)
    work.launch(*[Streaming("sort", pairs, pairs, n, length)] * -(-8 * key_bytes // 6))
    return work.free(work.temporary(_storage(n * key_bytes, n * value_bytes)))


def _last(platform: Platform) -> list[int]:
    """The last part of the storage of scans, which CUDA 12.8 does not have."""
    return [1] if platform.since(2, 11) else []


def scan_bytes(platform: Platform, n: int, item: int) -> int:
    """The look-back state of a prefix sum; for 2-byte floats, status, partial and inclusive sums are separate."""
    states = -(-n // SCAN_TILE.get(item, 896)) + 32
    if item == 2:
        return _storage(states * 4, states * 2, states * 2, *_last(platform))
    return _storage(states * (8 if item <= 4 else 16), *_last(platform))


def scan(work: Work, platform: Platform, n: int, item: int, kernel: Streaming) -> Work:
    """Adds a prefix sum of `n` elements, with `kernel` as its sweep."""
    work.launch(small(), kernel)
    return work.free(work.temporary(scan_bytes(platform, n, item)))


def unique_by_key(work: Work, platform: Platform, n: int, item: int) -> Work:
    tile = (UNIQUE_TILE_90 if platform.capability >= 90 else UNIQUE_TILE).get(item, 1344)
    work.launch(small(), Streaming("scan", 2 * n * item, 2 * n * item, n))
    return work.free(work.temporary(_storage((-(-n // tile) + 32) * 16, *_last(platform))))
