"""Pages of prompts that were computed before, found again by their tokens: a trie with one page of tokens per node.

The trie counts as a holder of its pages, so a page stays while a sequence reads it, and after that until it is needed
elsewhere: the least recently used goes first. A prefix that no second prompt has used is evicted earlier, when enough
newer prompts have come: most prompts come once, and a page that was never written costs no memory. Each group of layers
has its own page at a node. A group that sees a window may have given its page back, so a beginning is found where the
windows before its end are complete. Integers only; a page is added when prefill has written all of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.cache.groups import first_page
from ostinato.cache.pages import Pages
from ostinato.cache.window_pages import PageRun


@dataclass(slots=True, eq=False)
class _Node:
    """One page of tokens, the key in its parent's children, and the page of each group. Mutable: they come and go."""

    pages: list[int | None]
    key: tuple[int, ...]
    parent: _Node | None
    reused: bool = False  # by another prompt than the one that added it
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Found:
    """A cached beginning of so many pages of tokens, and each group's pages of it that are still needed."""

    n_pages: int
    runs: tuple[PageRun, ...]


class PrefixCache:
    """The trie over the pools of all groups. In a group without a window, a holder of a page of a path also holds all
    pages before it."""

    def __init__(
        self, pools: Sequence[Pages], windows: Sequence[int | None], kind: Callable[[int], int], *, recent: int
    ) -> None:
        """`windows`: of each group, the positions that its layers see; None for all. `kind` of a prompt's length: pages
        of prompts of two kinds may differ in bits, and are not shared. `recent`: prompts whose pages wait for a second
        one that begins with them."""
        self._pools, self._windows, self._kind = tuple(pools), tuple(windows), kind
        self._page_tokens = pools[0].page_cells
        self._whole = [number for number, window in enumerate(windows) if window is None]
        self._roots: defaultdict[tuple[int, int], _Node] = defaultdict(lambda: _Node([], (), None))
        # Of each group, the nodes with a page, from the least recently used. Without a window, a child comes before its
        # parent, so that leaves go first; with one, a parent comes first, because the last positions are needed.
        self._by_use: list[OrderedDict[_Node, None]] = [OrderedDict() for _ in pools]
        self._n_recent = recent
        self._recent: OrderedDict[_Node, None] = OrderedDict()  # the last node of each prompt, from the oldest

    def __len__(self) -> int:
        """The number of cached pages, of all groups."""
        return sum(map(len, self._by_use))

    def find(self, prompt: Sequence[int], rope_set: int = 0, *, reuse: bool = False, most: int | None = None) -> Found:
        """The prompt's longest cached beginning of this rope set, of `most` positions at most; at least one token is
        left to compute. `reuse`: this prompt reads it, so it stays until it is needed elsewhere."""
        size, path = self._page_tokens, list[_Node]()
        node: _Node | None = self._roots[self._kind(len(prompt)), rope_set]
        most = len(prompt) - 1 if most is None else min(most, len(prompt) - 1)
        for start in range(0, most // size * size, size):
            assert node is not None
            node = node.children.get(tuple(prompt[start : start + size]))
            if node is None:
                break
            path.append(node)
        n = self._n_complete(path)
        for node in path[:n] if reuse else ():
            node.reused = True
        for group in range(len(self._pools)):
            self._use(group, path[self._first(group, n) : n])
        return Found(n, tuple(self._run(path, group, n) for group in range(len(self._pools))))

    def add(self, prompt: Sequence[int], runs: Sequence[PageRun], n_pages: int, rope_set: int = 0) -> None:
        """Cache the first pages of a prompt; where another page with the same tokens is cached, that one stays."""
        size, path, node = self._page_tokens, list[_Node](), self._roots[self._kind(len(prompt)), rope_set]
        for number in range(n_pages):
            key = tuple(prompt[number * size : (number + 1) * size])
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node([None] * len(self._pools), key, node)
            elif any(child.pages[group] != runs[group].at(number) for group in self._whole):
                break  # later pages would follow one that this sequence does not hold
            for group, run in enumerate(runs):
                page = run.at(number)
                if child.pages[group] is None and page is not None:
                    self._pools[group].hold([page])
                    child.pages[group] = page
                    self._by_use[group][child] = None
            path.append(child)
            node = child
        for group in range(len(self._pools)):
            self._use(group, path)
        if path:
            for node in path:  # where earlier chunks of it ended, or shorter prompts
                self._recent.pop(node, None)
            self._recent[path[-1]] = None
            self._prune(path[-1])
            self._evict_oldest()

    def _evict_oldest(self) -> None:
        """Evict what only the oldest prompts have used, unless a sequence still reads it."""
        for node in list(self._recent)[: max(0, len(self._recent) - self._n_recent)]:
            if not self._is_held(node):
                del self._recent[node]
                self._evict_branch(node)

    def _evict_branch(self, node: _Node) -> None:
        while node.parent is not None and not (node.reused or node.children or self._is_held(node)):
            parent = node.parent
            for group in range(len(self._pools)):
                self._drop(node, group)
            if parent.children.get(node.key) is node:
                self._unlink(node)
            node = parent

    def _is_held(self, node: _Node) -> bool:
        """Whether a sequence holds a page of this node."""
        return any(
            page is not None and pool.n_holders(page) > 1 for pool, page in zip(self._pools, node.pages, strict=True)
        )

    def evict(self, group: int, n: int) -> int:
        """Free up to n pages of a group that have no other holder; returns how many were freed."""
        pages, whole = self._pools[group], self._windows[group] is None
        gone: list[_Node] = []
        for node in self._by_use[group]:
            if len(gone) >= n:
                break
            page = node.pages[group]
            assert page is not None
            if pages.n_holders(page) == 1 and not (whole and node.children):
                if whole:  # without it the node is of no use, and its parent may be the next leaf
                    self._unlink(node)
                gone.append(node)
        for node in gone:
            for each in range(len(self._pools)) if whole else (group,):
                self._drop(node, each)
            if not whole:
                self._prune(node)
        return len(gone)

    def _first(self, group: int, n: int) -> int:
        """The first page of n that the group needs to go on after them."""
        return first_page(self._windows[group], n * self._page_tokens, self._page_tokens)

    def _n_complete(self, path: Sequence[_Node]) -> int:
        """The most pages of a path after which every group has what it needs to go on."""
        n, last_missing = 0, [-1] * len(self._pools)
        for index, node in enumerate(path):
            last_missing = [
                index if page is None else last for last, page in zip(last_missing, node.pages, strict=True)
            ]
            if all(last < self._first(group, index + 1) for group, last in enumerate(last_missing)):
                n = index + 1
        return n

    def _run(self, path: Sequence[_Node], group: int, n: int) -> PageRun:
        first = self._first(group, n)
        return PageRun(first, [page for node in path[first:n] if (page := node.pages[group]) is not None])

    def _use(self, group: int, path: Sequence[_Node]) -> None:
        by_use = self._by_use[group]
        for node in path if self._windows[group] is not None else reversed(path):
            if node.pages[group] is not None:
                by_use.move_to_end(node)

    def _drop(self, node: _Node, group: int) -> None:
        page = node.pages[group]
        if page is not None:
            node.pages[group] = None
            del self._by_use[group][node]
            self._pools[group].release([page])

    def _unlink(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]

    def _prune(self, node: _Node) -> None:
        """Remove a node without pages and children, and then its parent if that has none either."""
        while node.parent is not None and not node.children and all(page is None for page in node.pages):
            self._unlink(node)
            node = node.parent
