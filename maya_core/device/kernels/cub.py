"""The sizes and launches of the cub algorithms ATen sorts, scans and compacts with (CUDA 13's cub, as built into torch 2.13).

Temporary storage is one allocation of parts aligned to 256 bytes each, and 255 to align the whole. Tile sizes are
cub's tuning per architecture (cub/device/dispatch/tuning); measured on real CUDA torch 2.13 over a fake runtime.
"""

from __future__ import annotations

from maya_core.device.kernels.call import Call, Work

DIGITS = 256  # a pass sorts by 8 bits
ONE_TILE_BYTES = 19 * 4 * 256  # up to here one block sorts everything: 256 threads with 19 items of 4 bytes each

# elements per tile of the one-sweep radix sort, by (bytes of a key, bytes of a value); sm_90's own where it has one
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
    """Bits of keys from 0 to `largest`."""
    return max(1, largest.bit_length())


def _sorts_in_one_tile(n: int, key_bytes: int, value_bytes: int) -> bool:
    items = max(1, 19 * 4 // max(4, key_bytes, value_bytes))
    return n <= 256 * items


def add_radix_sort(work: Work, call: Call, n: int, key_bytes: int, value_bytes: int, key_bits: int) -> Work:
    """Adds a sort of `n` keys with their values by the lowest `key_bits`."""
    if _sorts_in_one_tile(n, key_bytes, value_bytes):
        work.launches += 1
        return work.free(work.temporary(1))
    if call.capability < 90 and key_bytes < 4:
        return _add_spine_sort(work, call, n, key_bytes, value_bytes, key_bits)
    passes = -(-key_bits // 8)
    tiles = SORT_TILE | SORT_TILE_90 if call.capability >= 90 else SORT_TILE
    tile = tiles.get((key_bytes, value_bytes), 3840)
    copies = (n * key_bytes, n * value_bytes) if passes > 1 else (0, 0)  # to go back and forth between
    storage = _storage(passes * 4, passes * DIGITS * 8, -(-n // tile) * DIGITS * 4, *copies)
    work.launches += 4 + 2 * passes  # two memsets, histogram, its prefix sum; a memset and a sweep each pass
    return work.free(work.temporary(storage))


def _add_spine_sort(work: Work, call: Call, n: int, key_bytes: int, value_bytes: int, key_bits: int) -> Work:
    """Keys below 4 bytes before sm_90: blocks count digits into a spine, which is scanned, three kernels a pass."""
    digit_bits = 7 if key_bytes == 2 else 6
    blocks = call.sms * 8 * 5  # as many as fit, five times over
    work.launches += 3 * -(-key_bits // digit_bits)
    return work.free(work.temporary(_storage((blocks * 2**digit_bits + 5632) * 8, n * key_bytes, n * value_bytes)))


def add_segmented_sort(work: Work, n: int, key_bytes: int, value_bytes: int) -> Work:
    """Segments sorted by a block each, 6 bits a pass."""
    work.launches += -(-8 * key_bytes // 6)
    return work.free(work.temporary(_storage(n * key_bytes, n * value_bytes)))


def scan_bytes(n: int, item: int) -> int:
    """Look-back state of a prefix sum; 2-byte floats keep status, partial and inclusive sums apart."""
    states = -(-n // SCAN_TILE.get(item, 896)) + 32
    if item == 2:
        return _storage(states * 4, states * 2, states * 2, 1)
    return _storage(states * (8 if item <= 4 else 16), 1)


def add_scan(work: Work, n: int, item: int) -> Work:
    work.launches += 2
    return work.free(work.temporary(scan_bytes(n, item)))


def add_unique_by_key(work: Work, call: Call, n: int, item: int) -> Work:
    tile = (UNIQUE_TILE_90 if call.capability >= 90 else UNIQUE_TILE).get(item, 1344)
    work.launches += 2
    return work.free(work.temporary(_storage((-(-n // tile) + 32) * 16, 1)))
