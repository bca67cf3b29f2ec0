"""RoPE of a family: the base, how far each frequency is stretched, and by how much to amplify.

Every scaling scheme (linear, llama3, yarn, longrope, a tensor of factors) comes down to one divisor per
frequency and one amplitude, so that is all `Rope` keeps. Which two elements of a head make a pair is how a file stored
its query and key rows: `halves` pairs element i with i + width/2, `neighbours` pairs 2i with 2i + 1; the two are the
same model with rows permuted. A backend computes the angles from `frequencies_of` and rotates.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ostinato.errors import BadFile, Unsupported
from ostinato.files.unpack import Floats
from ostinato.models.fields import Fields

Pairing = Literal["halves", "neighbours"]
WIDEST = 65_536  # rotated elements of a head; no model comes near, and a list of that length is made from it


@dataclass(frozen=True, slots=True)
class Rope:
    """Angles of one kind of layer; `width` is how many elements of a head are rotated."""

    base: float
    width: int
    pairing: Pairing
    divisors: tuple[float, ...] | None = None
    amplitude: float = 1.0
    # longrope keeps two sets of divisors: `divisors` for sequences up to original_context, these for longer ones
    long_divisors: tuple[float, ...] | None = None
    original_context: int | None = None
    # How many pairs turn by each dimension of a position: time, height, width. Empty: a position is one number.
    sections: tuple[int, ...] = ()

    @property
    def n_dimensions(self) -> int:
        """Of a position: in a text they are equal, in a picture they are not."""
        return len(self.sections) or 1

    @property
    def dimensions(self) -> tuple[int, ...]:
        """By which dimension of a position each pair turns. Sections are interleaved; what is left over goes by time.

        >>> Rope(1e4, 16, "halves", sections=(4, 2, 2)).dimensions
        (0, 1, 2, 0, 1, 2, 0, 0)
        """
        taken = [pair % len(self.sections) if self.sections else 0 for pair in range(self.width // 2)]
        return tuple(d if d and pair < len(self.sections) * self.sections[d] else 0 for pair, d in enumerate(taken))


def frequencies_of(rope: Rope, n_sets: int = 1) -> Floats:
    """The angle each pair is rotated by per position, float32 [n_sets, width / 2] (`Shape.rope_set`).

    The power is taken in double and rounded once: a float's power differs by a bit from library to library, and every
    backend must rotate by the same angles.
    """
    powers = np.arange(0, rope.width, 2).astype(np.float32) / np.float32(rope.width)
    plain = np.float32(1) / np.power(np.float64(rope.base), powers.astype(np.float64)).astype(np.float32)
    sets = (rope.divisors, rope.long_divisors or rope.divisors)
    return np.stack([plain if each is None else plain / np.array(each, np.float32) for each in sets[:n_sets]])


def settings_of(c: Fields) -> Fields:
    """What config.json states of its rope: rope_parameters, or rope_scaling in older files. Where both are there,
    rope_parameters must repeat rope_scaling: one that was added for a longer context would otherwise be passed over."""
    new, old = c.inside("rope_parameters"), c.inside("rope_scaling")
    if not new.values:
        return old
    for key, value in old.values.items():
        stated = new.values.get("rope_type" if key == "type" else key)
        if stated != value:
            raise BadFile(
                f"{c.path}: rope_scaling says {key} {value!r} and rope_parameters {stated!r}; state the rope in "
                "rope_parameters alone"
            )
    return new


def with_sections(rope: Rope, f: Fields) -> Rope:
    """The rope with the sections that a file states: config.json in its rope, GGUF with a fourth that is not used."""
    settings = settings_of(f)
    stated = settings.counts("mrope_section") or f.counts("rope.dimension_sections")
    if stated and (len(stated) not in (3, 4) or any(stated[3:])):
        raise BadFile(f"{f.path}: rotary positions have sections {list(stated)}; known: time, height and width")
    return replace(rope, sections=stated[:3])


def linear(width: int, factor: float) -> tuple[float, ...]:
    return (factor,) * (width // 2)


def proportional(width: int, share: float, factor: float = 1.0) -> tuple[float, ...]:
    """Pairs of the whole head, of which only the first `share` turn, by frequencies of the whole width."""
    n_turned = min(int(share * width // 2), width // 2)
    return (factor,) * n_turned + (math.inf,) * (width // 2 - n_turned)


def llama3(width: int, base: float, s: Fields) -> tuple[float, ...]:
    """Long waves are stretched by the factor, short ones not at all, those between by a blend."""
    factor = s.positive("factor")
    low, high = s.positive("low_freq_factor"), s.positive("high_freq_factor")
    original = s.integer("original_max_position_embeddings")
    if high <= low:
        raise BadFile(f"{s.path}: rope scaling llama3 has high_freq_factor {high} <= low_freq_factor {low}")

    def divisor(i: int) -> float:
        wavelength = 2 * math.pi * math.pow(base, 2 * i / width)
        blend = min(1.0, max(0.0, (original / wavelength - low) / (high - low)))
        return 1.0 / ((1 - blend) / factor + blend)

    return tuple(divisor(i) for i in range(width // 2))


def yarn(
    width: int,
    base: float,
    factor: float,
    original: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> tuple[float, ...]:
    """Pairs that rotate more than beta_fast times within the original context are unscaled; slow ones are stretched."""

    def pair_that_rotates(times: float) -> float:
        return width * math.log(original / (times * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_that_rotates(beta_fast), pair_that_rotates(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)

    def divisor(i: int) -> float:
        stretched = min(1.0, max(0.0, (i - low) / max(high - low, 0.001)))
        return 1.0 / (stretched / factor + (1 - stretched))

    return tuple(divisor(i) for i in range(width // 2))


def yarn_amplitude(factor: float, share: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * share * math.log(factor) + 1.0


def longrope_amplitude(factor: float, original: int) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def from_config(
    c: Fields,
    width: int,
    pairing: Pairing = "halves",
    *,
    kind: str | None = None,
    default_base: float = 10_000.0,
    rotary_share: float = 1.0,
) -> Rope:
    """The rope that config.json states; `kind` picks one layer type where the file keeps a rope for each. Of a head,
    `rotary_share` is rotated where the file does not say."""
    settings = settings_of(c)
    if kind is not None and settings.has(kind):
        settings = settings.inside(kind)
    base = settings.positive("rope_theta", c.positive("rope_theta", default_base))
    scheme = settings.word("rope_type", settings.word("type", "default"))
    share = settings.positive("partial_rotary_factor", c.positive("partial_rotary_factor", rotary_share))
    if scheme == "proportional":
        if share > 1:
            raise BadFile(f"{c.path}: partial_rotary_factor is {share}; no more than the whole head can turn")
        still = proportional(_within(width, width, c), share, settings.positive("factor", 1.0))
        return Rope(_above_one(base, c), width, pairing, still)
    width = _within(int(width * share), width, c)
    rope = Rope(_above_one(base, c), width, pairing)
    match scheme:
        case "default":
            return rope
        case "linear":
            return replace(rope, divisors=linear(width, settings.positive("factor")))
        case "llama3":
            return replace(rope, divisors=llama3(width, base, settings))
        case "yarn":
            return _yarn_from_config(rope, settings, c)
        case "longrope" | "su":
            return _longrope_from_config(rope, settings, c)
        case "dynamic" if settings.has("alpha") and width > 2:
            # A larger base for every position, which hunyuan calls dynamic.
            return replace(rope, base=base * settings.positive("alpha") ** (width / (width - 2)))
    raise Unsupported(
        f"{c.path}: rope scaling {scheme!r} is not supported; known: default, linear, llama3, yarn, longrope, "
        "proportional, dynamic by alpha"
    )


def of_windows(c: Fields, width: int, usual: Rope) -> Rope:
    """The rope of layers that see a window: all that config.json states for them, else the family's usual one."""
    if not settings_of(c).has("sliding_attention"):
        return usual
    return from_config(c, width, usual.pairing, kind="sliding_attention", default_base=usual.base)


def _within(n_rotary: int, width: int, f: Fields) -> int:
    if n_rotary % 2 or not 2 <= n_rotary <= min(width, WIDEST):
        raise BadFile(
            f"{f.path}: {n_rotary} of a head's {width} elements turn by rotary positions; it must be an even number "
            f"no larger than the head or {WIDEST}"
        )
    return n_rotary


def check(rope: Rope, width: int, f: Fields) -> None:
    """Refuse a rope that heads of this width cannot have, whatever keys it was read from."""
    _within(rope.width, width, f)
    _above_one(rope.base, f)


def _above_one(base: float, f: Fields) -> float:
    if base <= 1:
        raise BadFile(f"{f.path}: the rope base is {base}; it must be greater than 1")
    return base


def _yarn_from_config(rope: Rope, s: Fields, c: Fields) -> Rope:
    factor = s.positive("factor")
    original = s.integer("original_max_position_embeddings", c.integer("max_position_embeddings"))
    fast, slow = s.positive("beta_fast", 32.0), s.positive("beta_slow", 1.0)
    amplitude = yarn_amplitude(factor)
    share, whole = s.number("mscale", 0.0), s.number("mscale_all_dim", 0.0)
    if share and whole:
        amplitude = yarn_amplitude(factor, share) / yarn_amplitude(factor, whole)
    divisors = yarn(rope.width, rope.base, factor, original, fast, slow, s.flag("truncate", True))
    return replace(rope, divisors=divisors, amplitude=s.positive("attention_factor", amplitude))


def _longrope_from_config(rope: Rope, s: Fields, c: Fields) -> Rope:
    n = rope.width // 2
    trained = c.integer("max_position_embeddings")
    original = s.integer(
        "original_max_position_embeddings", c.integer("original_max_position_embeddings", trained), least=2
    )
    factor = s.positive("factor", trained / original)
    amplitude = s.positive("attention_factor", longrope_amplitude(factor, original))
    short, long = s.numbers("short_factor", n), s.numbers("long_factor", n)
    return replace(rope, divisors=short, amplitude=amplitude, long_divisors=long, original_context=original)


def from_gguf(f: Fields, width: int, pairing: Pairing, *, default_base: float = 10_000.0) -> Rope:
    """The rope that GGUF metadata states, tensors of factors apart (`with_factors`)."""
    n_rotary = _within(f.integer("rope.dimension_count", width), width, f)
    base = _above_one(f.positive("rope.freq_base", default_base), f)
    amplitude = f.positive("rope.scaling.attn_factor", 1.0)
    rope = Rope(base, n_rotary, pairing, amplitude=amplitude)
    # Without a type a factor is that of linear scaling, which old files state by rope.scale_linear alone.
    scheme = f.word("rope.scaling.type", "linear")
    factor = f.positive("rope.scaling.factor", f.positive("rope.scale_linear", 1.0))
    match scheme:
        case "none":
            return rope
        case "linear":
            return rope if factor == 1 else replace(rope, divisors=linear(n_rotary, factor))
        case "yarn":
            original = f.integer("rope.scaling.original_context_length", f.integer("context_length"))
            fast = f.positive("rope.scaling.yarn_beta_fast", 32.0)
            slow = f.positive("rope.scaling.yarn_beta_slow", 1.0)
            divisors = yarn(n_rotary, base, factor, original, fast, slow)
            return replace(rope, divisors=divisors, amplitude=amplitude * yarn_amplitude(factor))
        case "longrope":
            return rope  # its two sets of factors are tensors
    raise Unsupported(f"{f.path}: rope scaling {scheme!r} is not supported; known: none, linear, yarn, longrope")
