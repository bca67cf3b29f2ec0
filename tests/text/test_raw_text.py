"""What a completion of plain text begins with: the space of a SentencePiece word belongs to the text."""

from pathlib import Path

from ostinato.files.checkpoint import open_checkpoint
from ostinato.text.stream import TextStream
from ostinato.text.tokenizer import tokenizer_from_gguf


def test_prompt_and_completion_join_without_losing_a_space(vocab_data: Path) -> None:
    file = vocab_data / "llama-spm.gguf"
    tokenizer = tokenizer_from_gguf(open_checkpoint(file).metadata, file)
    ids = tokenizer.encode("Once upon a time", bos=False)
    for cut in range(1, len(ids)):
        stream = TextStream(tokenizer, at_start=False)
        rest = "".join([*map(stream.push, ids[cut:]), stream.finish()])
        assert tokenizer.decode(ids[:cut]) + rest == "Once upon a time"
