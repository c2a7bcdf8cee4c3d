"""Compute seeded permutations of [0, n) without memory: a Feistel network with cycle walking.

Each round XORs one half of an index's bits with a keyed hash of the other half. That can be undone,
so the network is a bijection of [0, 2**bits). If an image is outside [0, n), the network is applied
to it again until the image is inside (cycle walking). For n > 2, 2**bits is less than 2n, so this
takes fewer than two passes on average.
Guarantees: a bijection for every 1 <= n <= 2**62. The permutation is the same on every platform
and in every release; tests compare it with literal values. It is not cryptographically secure.
Cost: 15 to 30 ns per index.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from wlb.plan import IntArray, IntLike, UserError

_U64 = np.uint64
_Words = npt.NDArray[np.uint64]

_NUM_ROUNDS = 8
# The constants of splitmix64: the golden ratio and the two multipliers of its finaliser.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = _U64(0xBF58476D1CE4E5B9)
_MIX_2 = _U64(0x94D049BB133111EB)
_MASK_64 = (1 << 64) - 1


def permute(index: IntLike, n: int, seed: int, epoch: IntLike | int = 0) -> IntArray:
    """Apply the permutation of [0, n) that belongs to a seed and an epoch.

    Args:
        index: Numbers in [0, n), shape [m].
        n: Size of the permutation.
        seed: Selects the permutation; any integer.
        epoch: Selects the permutation: one epoch for all indices, or one for each, shape [m].

    Returns:
        The image of each index, shape [m].
    """
    positions = _indices(index, n)
    keys = _round_keys(seed, np.atleast_1d(np.asarray(epoch, np.int64)))
    return _walked(_network, positions.astype(_U64), keys, n)


def unpermute(image: IntLike, n: int, seed: int, epoch: IntLike | int = 0) -> IntArray:
    """Apply the inverse of `permute`.

    Args:
        image: Numbers in [0, n), shape [m].
        n: Size of the permutation.
        seed: Any integer.
        epoch: Selects the permutation: one epoch for all images, or one for each, shape [m].

    Returns:
        For each image the number that `permute` maps to it, shape [m].
    """
    positions = _indices(image, n)
    keys = _round_keys(seed, np.atleast_1d(np.asarray(epoch, np.int64)))
    return _walked(_inverse, positions.astype(_U64), keys, n)


def _indices(index: IntLike, n: int) -> IntArray:
    """Return `index` as int64; raise UserError unless all its numbers are in [0, n)."""
    if not 1 <= n <= 1 << 62:
        raise UserError(f"n = {n}, the size of a permutation, must be from 1 to 2**62")
    positions = np.asarray(index, np.int64)
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < n:
        bad = positions[(positions < 0) | (positions >= n)][0]
        raise UserError(f"index {bad} is outside a permutation of {n} numbers; give 0 to {n - 1}")
    return positions


def _walked(
    network: Callable[[_Words, _Words, int], _Words], words: _Words, keys: _Words, n: int
) -> IntArray:
    """Apply `network` to each of `words` until the result is in [0, n) (cycle walking).

    With `_network` the result is a permutation of [0, n). With `_inverse` the result is the inverse
    permutation, because the intermediate values are the same in reverse order.
    """
    bits = max(2, (n - 1).bit_length())
    out = network(words, keys, bits)
    outside = np.flatnonzero(out >= _U64(n))
    while outside.size:
        walked = network(out[outside], keys if len(keys[0]) == 1 else keys[:, outside], bits)
        out[outside] = walked
        outside = outside[walked >= _U64(n)]
    return out.astype(np.int64)


def _round_keys(seed: int, epochs: IntArray) -> _Words:
    """Derive the keys of all Feistel rounds from a seed (modulo 2**64) and the epochs.

    Returns:
        Keys of shape [rounds, number of epochs].
    """
    start = np.full(1, seed & _MASK_64, _U64)
    stream = _mix(_mix(start + _U64(_GOLDEN)) + epochs.astype(_U64))
    rounds = [(i + 1) * _GOLDEN & _MASK_64 for i in range(_NUM_ROUNDS)]
    return _mix(stream[None, :] + np.array(rounds, _U64)[:, None])


def _mix(x: _Words) -> _Words:
    """Apply the finaliser of splitmix64, in which every input bit affects every output bit."""
    x = (x ^ (x >> _U64(30))) * _MIX_1
    x = (x ^ (x >> _U64(27))) * _MIX_2
    return x ^ (x >> _U64(31))


def _network(words: _Words, keys: _Words, bits: int) -> _Words:
    """Permute numbers of `bits` bits by `_NUM_ROUNDS` Feistel rounds; return a new array.

    Args:
        words: The numbers, shape [n].
        keys: Keys of the rounds, shape [rounds, n], or [rounds, 1] for equal keys of all numbers.
        bits: Bits of a number.
    """
    high_bits = bits // 2
    low_bits = bits - high_bits
    high = words >> _U64(low_bits)
    low = words & _U64((1 << low_bits) - 1)
    for i in range(0, _NUM_ROUNDS, 2):
        high ^= _round(low, keys[i], high_bits)
        low ^= _round(high, keys[i + 1], low_bits)
    return (high << _U64(low_bits)) | low


def _inverse(words: _Words, keys: _Words, bits: int) -> _Words:
    """Apply the inverse of `_network`, which has the same arguments: the rounds reversed."""
    high_bits = bits // 2
    low_bits = bits - high_bits
    high = words >> _U64(low_bits)
    low = words & _U64((1 << low_bits) - 1)
    for i in reversed(range(0, _NUM_ROUNDS, 2)):
        low ^= _round(high, keys[i + 1], low_bits)
        high ^= _round(low, keys[i], high_bits)
    return (high << _U64(low_bits)) | low


def _round(half: _Words, key: _Words, bits: int) -> _Words:
    """Return one Feistel round's hash of `half` with `key`: the highest `bits` bits of the hash."""
    x = half ^ key
    x *= _MIX_1
    x ^= x >> _U64(32)
    x *= _MIX_2
    x >>= _U64(64 - bits)
    return x
