// Cosine, sine and logarithm of one number, over doubles.
//
// The C library's own differ in the last bit between libraries, versions and processors, and so would answers. Cosine and
// sine are glibc's on processors with fused multiplication, to the bit, for all floats from 0 to 2^31: the polynomials
// are those of Arm's Optimized Routines, which glibc, musl and others use.
#ifndef OSTINATO_SCALARS_H
#define OSTINATO_SCALARS_H

#include <cmath>
#include <cstdint>

struct CosSin {
    float cosine, sine;
};

// Of an angle from 0 to 2^31.
static inline CosSin cos_sin(float angle) {
    const double x = angle, n = std::floor(x * 0x1.45f306dc9c883p-1 + 0.5);  // n quarter turns, and r within half of one
    double r = std::fma(-n, 0x1.921fb54442d18p0, x);
    if (x >= 120) r = std::fma(-n, 0x1.1a62633145c07p-54, r);  // the next 53 bits of pi / 2
    const double s = r * r, fourth = s * s;
    const double sine_rest = std::fma(s, -0x1.994eb3774cf24p-13, 0x1.1107605230bc4p-7);
    const double sine = std::fma(s * r * s, sine_rest, std::fma(s * r, -0x1.555545995a603p-3, r));
    const double cosine_rest = std::fma(s, 0x1.99343027bf8c3p-16, -0x1.6c087e89a359dp-10);
    const double cosine_first = std::fma(s, -0x1.ffffffd0c621cp-2, 1.0);
    const double cosine = std::fma(fourth * s, cosine_rest, std::fma(fourth, 0x1.55553e1068f19p-5, cosine_first));
    switch (int64_t(n) & 3) {
        case 0: return {float(cosine), float(sine)};
        case 1: return {float(-sine), float(cosine)};
        case 2: return {float(-cosine), float(-sine)};
        default: return {float(sine), float(-cosine)};
    }
}

// The natural logarithm of a positive, finite number, right to 2^-51 of it; NaN stays NaN.
static inline double log_of(double x) {
    int power;
    double part = std::frexp(x, &power);  // x = part * 2^power
    if (part < 0.7071067811865476) part *= 2, power--;
    const double f = part - 1, t = f / (2 + f), s = t * t;  // ln(1 + f) = 2 (t + t^3 / 3 + t^5 / 5 + ...)
    double sum = 0;
    for (int n = 23; n > 1; n -= 2) sum = sum * s + 1.0 / n;
    const double low = power * 1.90821492927058770002e-10 + 2 * t * s * sum;
    return power * 6.93147180369123816490e-01 + (2 * t + low);
}

#endif
