"""How texts are written for vectors and for ranking: prompts before a text by their names, and pairs as one text.

Prompts are those of sentence-transformers' `config_sentence_transformers.json`; GGUF files have none. A file may hold
a template for pairs: GGUF's `tokenizer.chat_template.rerank`, or a folder's chat template, which then has the roles
`query` and `document`. Without one a pair is written as the tokenizer does.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ostinato.errors import BadFile, BadInput, BadOption, BadTemplate, Unsupported, listing
from ostinato.files.checkpoint import Checkpoint
from ostinato.files.json_file import read_json_if_there
from ostinato.files.modules import config_of
from ostinato.text.template import ChatTemplate
from ostinato.text.tokenizer import Tokenizer

PROMPTS_FILE: Final = "config_sentence_transformers.json"
CALLS_FILE: Final = "sentence_bert_config.json"
_PAIR_KEY: Final = "tokenizer.chat_template.rerank"
_ROLES: Final = ("query", "document")
# Of what a folder says of calling its chat template: about the length of its result, which must fit as it is.
_OF_SIZE: Final = frozenset({"restore_suffix", "padding", "truncation", "max_length", "return_tensors", "tokenize"})

_NOT_KNOWN: Final = frozenset({"chat_template", "messages", "documents", "tools", "continue_final_message"})


class ChatPairs:
    """Pairs written by a folder's chat template: a message of the role `query` and one of the role `document`, behind
    the prompt as the system's."""

    def __init__(self, template: ChatTemplate, options: Mapping[str, Any]) -> None:
        self._template = template
        self._options = {"add_generation_prompt": False, **options}
        self._in_parts: bool | None = None

    def write(self, prompt: str, query: str, text: str) -> str:
        """A pair as one text; BadFile where the template does not write both."""
        if self._in_parts is None:
            self._in_parts = self._shows_parts(prompt)
        return self._written(prompt, query, text, in_parts=self._in_parts)

    def _shows_parts(self, prompt: str) -> bool:
        """Whether contents must be lists of parts, found out by trying once: texts come first."""
        probes, why = (secrets.token_hex(8), secrets.token_hex(8)), ""
        for in_parts in (False, True):
            try:
                shown = self._written(prompt, *probes, in_parts=in_parts)
            except (BadInput, BadTemplate) as error:
                why = why or f" ({error})"
            else:
                if all(probe in shown for probe in probes):
                    return in_parts
        raise BadFile(
            f"{self._template.name} does not write a query and a document{why}: a reranker's has messages of the "
            "roles query and document; put the one of the published model into the folder, as chat_template.jinja"
        )

    def _written(self, prompt: str, query: str, text: str, *, in_parts: bool) -> str:
        contents = [("system", prompt)] if prompt else []
        contents += zip(_ROLES, (query, text), strict=True)
        return self._template.render(
            [{"role": role, "content": [{"type": "text", "text": c}] if in_parts else c} for role, c in contents],
            **self._options,
        )


@dataclass(frozen=True, slots=True)
class RetrievalForms:
    """The prompts of a model, the one that it uses unless another is named, and its template for pairs."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pair_template: str | ChatPairs | None = None
    pools_prompt: bool = True  # false: a prompt's rows are no part of a text's vector

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

    def n_left_out(self, tokenizer: Tokenizer, prompt: str) -> int:
        """How many tokens, at the beginning of a text behind this prompt, are left out of its vector: those of the
        prompt alone, with what the tokenizer puts before it."""
        if self.pools_prompt or not prompt:
            return 0
        return len(tokenizer.encode(prompt)) - len(tokenizer.suffix)

    def pair(
        self, tokenizer: Tokenizer, query: str, text: str, prompt: str | None = None
    ) -> tuple[list[int], list[int]]:
        """The ids of a query and of a text to rank for it, one behind the other; before them, the prompt of a name."""
        before_all = self.prompt(prompt)
        if self.pair_template is None:
            return tokenizer.encode_pair(before_all + query, text)
        if isinstance(self.pair_template, ChatPairs):
            return [], tokenizer.encode_rendered(self.pair_template.write(before_all, query, text))
        before, _, rest = self.pair_template.partition("{query}")
        between, _, after = rest.partition("{document}")
        return [], tokenizer.encode_rendered(f"{before}{query}{between}{text}{after}")


def forms_of(checkpoint: Checkpoint, template: ChatTemplate | None, *, by_words: bool) -> RetrievalForms:
    """What a model's files say of prompts and pairs. `by_words`: it ranks by the word that its chat template makes it
    answer with."""
    if checkpoint.format == "gguf":
        return RetrievalForms(pair_template=_pair_template(checkpoint))
    path = checkpoint.path / PROMPTS_FILE
    stated = read_json_if_there(path)
    prompts, default = stated.get("prompts"), stated.get("default_prompt_name")
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise BadFile(f"{path}: prompts must be an object of texts by their names")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise BadFile(f"{path}: default_prompt_name is {default!r}, which is not among the prompts")
    pools_prompt = read_json_if_there(config_of(checkpoint.path, "Pooling")).get("include_prompt") is not False
    if by_words and template is None:
        raise BadFile(f"{checkpoint.path}: a reranker that answers with a word needs a chat template, and has none")
    if template is None or not (by_words or all(re.search(f"['\"]{role}['\"]", template.source) for role in _ROLES)):
        return RetrievalForms(prompts, default, pools_prompt=pools_prompt)
    return RetrievalForms(prompts, default, ChatPairs(template, _options_of_calls(checkpoint)), pools_prompt)


def _options_of_calls(checkpoint: Checkpoint) -> dict[str, Any]:
    """What sentence-transformers gives to the chat template of a folder."""
    path = checkpoint.path / CALLS_FILE
    kinds = read_json_if_there(path).get("processing_kwargs") or {}
    options = (kinds.get("chat_template") or {}) if isinstance(kinds, dict) else None
    if not isinstance(options, dict):
        raise BadFile(f"{path}: processing_kwargs must be an object of objects")
    if unknown := sorted(options.keys() & _NOT_KNOWN):
        raise Unsupported(f"{path}: {unknown[0]} in processing_kwargs is not supported")
    return {name: value for name, value in options.items() if name not in _OF_SIZE}


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
