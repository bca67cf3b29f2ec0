"""Random numbers as a function of (seed, position): Philox 4x32 with ten rounds, in whole-number torch ops.

Integers only, so a number has the same bits on every device and in any batch; there is no state to
carry, copy or lose. Checked against the published test vectors.
"""

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def philox_torch(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds over counter [rows, 4] and key [rows, 2]; int64 tensors holding 32-bit words; gives [rows, 4]."""
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        # The product wraps in int64; its upper word is right all the same once the sign is masked off.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((second >> 32) & _LOW) ^ c1 ^ k0,
            second & _LOW,
            ((first >> 32) & _LOW) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return torch.stack((c0, c1, c2, c3), -1)


def uniform_torch(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float32 in [0, 1) per row, from seeds and positions, int64 [rows]: 24 bits, exact in float32."""
    zero = torch.zeros_like(positions)
    counter = torch.stack((positions & _LOW, (positions >> 32) & _LOW, zero, zero), -1)
    key = torch.stack((seeds & _LOW, (seeds >> 32) & _LOW), -1)
    return (philox_torch(counter, key)[:, 0] >> 8).float() * 2.0**-24
