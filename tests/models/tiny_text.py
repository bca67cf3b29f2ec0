"""A vocabulary of 300 tokens for the tiny models: three control tokens, 256 bytes and 41 merges.

The same byte-level BPE is written as `tokenizer.json` with its companions, and as GGUF metadata, so that both
formats of one model must give the same ids.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS, EOS = 1, 2
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    "Ġ t|h e|i n|r e|o n|Ġt he|e r|Ġ a|a t|Ġ s|Ġ w|o u|e n|n d|Ġ o|i s|o r|Ġ b|in g|Ġ f|a n|Ġ m|e d|"
    "Ġ p|a l|Ġ d|a r|i t|e s|Ġa nd|Ġ in|Ġo f|Ġt o|l l|ou n|Ġ h|v e|Ġb e|s t|Ġ l|i c"
)
MERGES = tuple(tuple(pair.split(" ")) for pair in _MERGES.split("|"))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> list[str]:
    """All 300 tokens in the order of their ids."""
    return [
        *CONTROL_TOKENS,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in MERGES),
    ]


def tokenizer() -> Tokenizer:
    """The vocabulary as the `tokenizers` library runs it."""
    ids = {token: number for number, token in enumerate(vocabulary())}
    made = Tokenizer(models.BPE(vocab=ids, merges=[(left, right) for left, right in MERGES]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    return made


def write_files(folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and generation_config.json, as a model's folder has them."""
    tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": CONTROL_TOKENS[BOS],
            "eos_token": CONTROL_TOKENS[EOS],
            "pad_token": CONTROL_TOKENS[0],
            "unk_token": CONTROL_TOKENS[0],
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "GPT2Tokenizer",
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": BOS, "eos_token_id": [EOS, 0], "do_sample": True, "temperature": 0.6, "top_p": 0.95},
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
