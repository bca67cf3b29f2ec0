"""How texts are written for vectors and for ranking: prompts before a text by their names, and pairs as one text.

Prompts are those of sentence-transformers' `config_sentence_transformers.json`; GGUF files have none. A file may hold
a template for pairs (`tokenizer.chat_template.rerank`); without it a pair is written as the tokenizer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ostinato.errors import BadFile, BadOption, listing
from ostinato.files.checkpoint import Checkpoint
from ostinato.files.json_file import read_json_if_there
from ostinato.text.tokenizer import Tokenizer

PROMPTS_FILE: Final = "config_sentence_transformers.json"
_PAIR_KEY: Final = "tokenizer.chat_template.rerank"


@dataclass(frozen=True, slots=True)
class RetrievalForms:
    """The prompts of a model, the one that it uses unless another is named, and its template for pairs."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pair_template: str | None = None

    def prompt(self, name: str | None) -> str:
        """The text before each text; BadOption, with the known names, for an unknown one.

        >>> RetrievalForms({"query": "search: "}).prompt("query")
        'search: '
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            known = listing(name, self.prompts) if self.prompts else "none, its files have no prompts"
            raise BadOption(f"unknown prompt {name!r}; this model knows: {known}")
        return self.prompts[name]

    def pair(self, tokenizer: Tokenizer, query: str, text: str) -> tuple[list[int], list[int]]:
        """The ids of a query and of a text to rank for it, one behind the other."""
        if self.pair_template is None:
            return tokenizer.encode_pair(query, text)
        before, _, rest = self.pair_template.partition("{query}")
        between, _, after = rest.partition("{document}")
        return [], tokenizer.encode_rendered(f"{before}{query}{between}{text}{after}")


def forms_of(checkpoint: Checkpoint) -> RetrievalForms:
    """What a model's files say of prompts and pairs."""
    if checkpoint.format == "gguf":
        return RetrievalForms(pair_template=_pair_template(checkpoint))
    path = checkpoint.path / PROMPTS_FILE
    stated = read_json_if_there(path)
    prompts, default = stated.get("prompts"), stated.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadFile(f"{path}: prompts must be an object of texts by their names")
    if default is not None and default not in prompts:
        raise BadFile(f"{path}: default_prompt_name is {default!r}, which is not among the prompts")
    return RetrievalForms(prompts, default)


def _pair_template(checkpoint: Checkpoint) -> str | None:
    found: Any = checkpoint.metadata.get(_PAIR_KEY)
    if found is None:
        return None
    if (
        not isinstance(found, str)
        or found.count("{query}") != 1
        or found.partition("{query}")[2].count("{document}") != 1
    ):
        raise BadFile(f"{checkpoint.path}: {_PAIR_KEY} must be a text with {{query}} and, behind it, {{document}}")
    return found
