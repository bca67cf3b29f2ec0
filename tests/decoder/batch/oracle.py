"""The sanitizer and the splitter once more, slow and plain: token by token, straight from the rules.

The fast ones must agree with these in every field, on good batches and on bad ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

MAX_SEQ = 256


@dataclass(frozen=True)
class Refusal:
    """A batch that breaks a rule: the reason, and the token that shows it where there is one."""

    reason: str
    index: int | None = None


@dataclass(frozen=True)
class Case:
    """A batch and everything it is judged by; None stands for an absent field."""

    token: list[int] | None = None
    n_rows: int | None = None  # embedding rows
    pos: list[int] | None = None
    seq_id: list[list[int]] | None = None
    output: list[int] | None = None
    memory: dict[int, tuple[int, int]] | None = None
    n_vocab: int = 128
    n_seq_limit: int = 8
    output_all: bool = False
    n_pos_per_embd: int = 1


@dataclass(frozen=True)
class Clean:
    """A batch that passed, with every field."""

    pos: list[int]
    seq_id: list[list[int]]
    output: list[bool]
    unique: list[int] = field(default_factory=list)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def has_coupling(self) -> bool:
        return any(len(ids) > 1 for ids in self.seq_id)


def sanitize(case: Case) -> Clean | Refusal:
    lengths = [n for n in (None if case.token is None else len(case.token), case.n_rows) if n is not None]
    if not lengths or lengths[0] == 0:  # S-2
        return Refusal("empty")
    n = lengths[0]
    if case.n_seq_limit > MAX_SEQ:  # S-3
        return Refusal("n_seq_max")
    for i, token in enumerate(case.token or []):  # S-4
        if not 0 <= token < case.n_vocab:
            return Refusal("token_range", i)
    n_dims = 1 if case.token is not None else case.n_pos_per_embd
    expected = {"rows": n, "seq_id": n, "output": n, "pos": n * n_dims}  # S-5
    given = {
        "rows": case.n_rows,
        "seq_id": None if case.seq_id is None else len(case.seq_id),
        "output": None if case.output is None else len(case.output),
        "pos": None if case.pos is None else len(case.pos),
    }
    if any(count is not None and count != expected[name] for name, count in given.items()):
        return Refusal("shape")
    for i, ids in enumerate(case.seq_id or []):  # S-6
        if not ids:
            return Refusal("seq_empty", i)
        if any(not 0 <= s < case.n_seq_limit for s in ids):
            return Refusal("seq_range", i)
        if len(set(ids)) < len(ids):
            return Refusal("seq_duplicate", i)
    for i, p in enumerate((case.pos or [])[:n]):  # S-7
        if p < 0:
            return Refusal("pos_negative", i)
    seq_id = [[0] for _ in range(n)] if case.seq_id is None else case.seq_id  # S-8
    pos = generated(seq_id, case.memory or {}) if case.pos is None else case.pos[:n]  # S-9
    unique = sorted({s for ids in seq_id for s in ids})
    spans = {s: span([p for p, ids in zip(pos, seq_id, strict=True) if s in ids]) for s in unique}
    refusal = continuity(case, pos, seq_id, unique) or coupling(case, seq_id) or walk(pos, seq_id)
    return refusal or Clean(pos, seq_id, outputs(case, n), unique, spans)


def span(positions: list[int]) -> tuple[int, int]:
    return min(positions), max(positions)


def generated(seq_id: list[list[int]], memory: dict[int, tuple[int, int]]) -> list[int]:
    """S-9."""
    counter = {s: memory[s][1] + 1 if s in memory else 0 for ids in seq_id for s in ids}
    pos = []
    for ids in seq_id:
        pos.append(counter[ids[0]])
        for s in ids:
            counter[s] = pos[-1] + 1
    return pos


def outputs(case: Case, n: int) -> list[bool]:
    """S-10 and S-11."""
    if case.output_all:
        return [True] * n
    if case.output is None:
        return [False] * (n - 1) + [True]
    return [flag != 0 for flag in case.output]


def continuity(case: Case, pos: list[int], seq_id: list[list[int]], unique: list[int]) -> Refusal | None:
    """S-13 and S-14."""
    memory = case.memory or {}
    for s in unique:
        mine = [(p, i) for i, (p, ids) in enumerate(zip(pos, seq_id, strict=True)) if s in ids]
        low, at = min(mine)
        if s in memory:
            last = memory[s][1]
            if case.n_pos_per_embd > 1:
                gap = low <= last if case.token is not None else low < last
            else:
                gap = low != last + 1
            if gap:
                return Refusal("pos_memory_gap", at)
        if case.n_pos_per_embd > 1:
            continue
        previous = low
        for p, i in sorted(mine):
            if p > previous + 1:
                return Refusal("pos_not_contiguous", i)
            previous = p
    return None


def coupling(case: Case, seq_id: list[list[int]]) -> Refusal | None:
    """S-15."""
    if case.memory is None:
        return None
    for s1, s0 in sorted({(s, ids[0]) for ids in seq_id for s in ids[1:]}):
        if case.memory.get(s1) != case.memory.get(s0):
            shown = (i for i, ids in enumerate(seq_id) if ids[0] == s0 and s1 in ids[1:])
            return Refusal("coupled_diverged", next(shown))
    return None


def walk(pos: list[int], seq_id: list[list[int]]) -> Refusal | None:
    """S-16."""
    previous: dict[int, int] = {}
    for i, ids in enumerate(seq_id):
        for s in ids:
            if s in previous:
                if not set(ids) <= set(seq_id[previous[s]]):
                    return Refusal("subset_diverged", i)
                if pos[i] < pos[previous[s]]:
                    return Refusal("pos_decreasing", i)
            previous[s] = i
    return None


@dataclass(frozen=True)
class Slice:
    """A ubatch: the batch indices in order, and the number of sets."""

    index: list[int]
    n_seqs: int


@dataclass
class Splitter:
    """The splits with one flag per token."""

    clean: Clean
    used: set[int] = field(default_factory=set)
    out_ids: list[int] = field(default_factory=list)

    def unused(self) -> list[int]:
        return [i for i in range(len(self.clean.seq_id)) if i not in self.used]

    def ids(self, i: int) -> frozenset[int]:
        return frozenset(self.clean.seq_id[i])

    def make(self, index: list[int], n_seqs: int) -> Slice | None:
        self.used |= set(index)
        self.out_ids += [i for i in index if self.clean.output[i]]
        return Slice(index, n_seqs) if index else None

    def simple(self, n_ubatch: int) -> Slice | None:
        """SP-4."""
        index = self.unused()[:n_ubatch]
        return self.make(index, len(index))

    def seq(self, n_ubatch: int) -> Slice | None:
        """SP-14."""
        index: list[int] = []
        for i in self.unused():
            if len(index) < n_ubatch and (not index or self.ids(i) <= self.ids(index[-1])):
                index.append(i)
        return self.make(index, 1)

    def equal(self, n_ubatch: int, sequential: bool, n_keep_tail: int) -> Slice | None:
        """SP-5 to SP-13."""
        if sequential and self.clean.has_coupling:
            return None
        chosen = self.choose(n_ubatch, sequential)
        taken: list[list[int]] = [[] for _ in chosen]

        def waiting(place: int) -> list[int]:
            return [i for i in self.unused() if self.ids(i) == chosen[place] and i not in taken[place]]

        while chosen and all(waiting(place) for place in range(len(chosen))):
            for place in range(len(chosen)):
                taken[place].append(waiting(place)[0])
            if (len(taken[0]) + 1) * len(chosen) > n_ubatch:
                break
        if n_keep_tail > 0 and chosen:
            taken = keep_tails(taken, waiting, n_ubatch, n_keep_tail)
        return self.make([i for part in taken for i in part], len(taken))

    def choose(self, n_ubatch: int, sequential: bool) -> list[frozenset[int]]:
        """SP-6 and SP-7."""
        chosen: list[frozenset[int]] = []
        last = None
        for i in self.unused():
            follows = not sequential or last is None or self.clean.seq_id[i][0] == last + 1
            if len(chosen) < n_ubatch and follows and not any(self.ids(i) & other for other in chosen):
                chosen.append(self.ids(i))
                last = self.clean.seq_id[i][0]
        return chosen


def keep_tails(
    taken: list[list[int]], waiting: Callable[[int], list[int]], n_ubatch: int, n_keep_tail: int
) -> list[list[int]]:
    """SP-10 and SP-11."""
    kept = 0
    while kept < len(taken) and (len(waiting(kept)) == 0 or len(waiting(kept)) >= n_keep_tail):
        kept += 1
    if kept > 0:
        return taken[:kept]
    if len(taken[0]) + len(waiting(0)) <= n_ubatch:
        return [taken[0] + waiting(0)]
    while len(waiting(0)) < n_keep_tail:
        taken[0].pop()
    return taken[:1]
