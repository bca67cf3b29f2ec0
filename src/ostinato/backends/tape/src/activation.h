// Functions of single numbers: the activation function of the MLP's gate, and soft caps. Twins: activate_torch, tanh.
#pragma once
#include "machine.h"
#include "shape.h"

#define LOG2_E 1.4426950408889634f

// ACTIVATION, in the order of backend.py.
#define ACTIVATION_SILU 0
#define ACTIVATION_GELU_TANH 1
#define ACTIVATION_GELU 2

// What the gate and up of a unit give; their products still lack the norm's factor `scale`. SiLU is x times the sigmoid
// of x, and GELU by tanh is x times the sigmoid of 2 sqrt(2 / pi) (x + 0.044715 x^3).
DEVICE float gated(float gate, float up, float scale) {
    const float given = gate * scale;
    if (ACTIVATION == ACTIVATION_GELU) {
        return 0.5f * given * (1.0f + erf_float(given * 0.7071067811865476f)) * (up * scale);
    }
    const float cubic = given * (1.5957691216057308f + 0.0713548162726f * given * given);
    const float inside = ACTIVATION == ACTIVATION_GELU_TANH ? cubic : given;
    return given / (1.0f + exp2_fast(-LOG2_E * inside)) * (up * scale);
}

// cap * tanh(value / cap), of a cap that is not 0.
DEVICE float soft_capped(float value, float cap) {
    return cap - 2.0f * cap / (1.0f + exp2_fast(value * (2.0f * LOG2_E / cap)));
}
