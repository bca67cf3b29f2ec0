"""Pages of prompts that were computed before, found again by their tokens: a trie with one page per node.

The trie counts as a holder of its pages, so a page stays while a sequence reads it, and after that until it is needed
elsewhere: the least recently used goes first. Integers only; a page is added when prefill has written all of it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ostinato.cache.pages import Pages


@dataclass(slots=True, eq=False)
class _Node:
    """One page: its tokens are the key in its parent's children. Mutable, because children come and go."""

    page: int
    key: tuple[int, ...]
    parent: _Node | None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class PrefixCache:
    """The trie over a pool of pages. A holder of a page of a path also holds all pages before it."""

    def __init__(self, pages: Pages, kind: Callable[[int], int]) -> None:
        """`kind` of a prompt's length: pages of prompts of two kinds may differ in bits, and are not shared."""
        self._pages, self._kind = pages, kind
        self._roots: defaultdict[int, _Node] = defaultdict(lambda: _Node(-1, (), None))
        # From the least recently used; a child always comes before its parent, so that leaves go first.
        self._by_use: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_use)

    def find(self, prompt: Sequence[int]) -> list[int]:
        """The pages of the prompt's longest cached beginning; at least one token is left to compute."""
        size, path = self._pages.page_cells, list[_Node]()
        node: _Node | None = self._roots[self._kind(len(prompt))]
        for start in range(0, (len(prompt) - 1) // size * size, size):
            assert node is not None
            node = node.children.get(tuple(prompt[start : start + size]))
            if node is None:
                break
            path.append(node)
        self._use(path)
        return [node.page for node in path]

    def add(self, prompt: Sequence[int], pages: Sequence[int]) -> None:
        """Cache these first pages of a prompt; where another page with the same tokens is cached, that one stays."""
        size, path, node = self._pages.page_cells, list[_Node](), self._roots[self._kind(len(prompt))]
        for number, page in enumerate(pages):
            key = tuple(prompt[number * size : (number + 1) * size])
            child = node.children.get(key)
            if child is None:
                self._pages.hold([page])
                child = node.children[key] = _Node(page, key, node)
                self._by_use[child] = None
            elif child.page != page:
                break  # later pages would follow one that this sequence does not hold
            path.append(child)
            node = child
        self._use(path)

    def evict(self, n: int) -> int:
        """Free up to n pages that have no other holder; returns how many were freed."""
        gone: list[_Node] = []
        for node in self._by_use:
            if len(gone) >= n:
                break
            if not node.children and self._pages.n_holders(node.page) == 1:
                assert node.parent is not None
                del node.parent.children[node.key]
                gone.append(node)
        for node in gone:
            del self._by_use[node]
        self._pages.release(node.page for node in gone)
        return len(gone)

    def _use(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._by_use.move_to_end(node)
