"""Functions of single numbers in the kernel, beside torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ostinato.backends.tape.backend import ACTIVATIONS
from ostinato.backends.torch.ops.activation import gated_torch
from tests.backends.tape.emulator import compiled, constants, words

SOURCE = """
#include "activation.h"
struct Given {
    const float *gate, *up;
    float *gated, *capped;
    u64 n;
};
KERNEL(functions, Given, given, 32) {
    for (u64 i = thread(); i < given.n; i += 32) {
        given.gated[i] = gated(given.gate[i], given.up[i], 0.5f);
        given.capped[i] = soft_capped(given.gate[i], 30.0f);
    }
}
"""


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_functions_and_caps_are_those_of_torch(activation: str) -> None:
    program = compiled(SOURCE, headers={"shape.h": constants(ACTIVATION=ACTIVATIONS.index(activation))})
    gate = np.concatenate([np.linspace(-8, 8, 999), [-1e4, -200, 0, 200, 1e4]]).astype(np.float32)
    up = np.cos(gate).astype(np.float32)
    gated, capped = np.zeros_like(gate), np.zeros_like(gate)
    program.run("functions", words(gate, up, gated, capped, len(gate)))
    both = torch.from_numpy(np.concatenate([gate, up]) * np.float32(0.5))
    expected = gated_torch(both[None].double(), activation)[0]  # type: ignore[arg-type]  # one of them
    torch.testing.assert_close(torch.from_numpy(gated).double(), expected, rtol=2e-6, atol=2e-6)
    cap = torch.tanh(torch.from_numpy(gate).double() / 30) * 30
    torch.testing.assert_close(torch.from_numpy(capped).double(), cap, rtol=0, atol=1e-5)
