"""`ostinato run`: one prompt in, one text out, streamed, with a line of timings at the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ostinato.cli import flags
from ostinato.cli.conversation import Conversation, check_file
from ostinato.cli.flags import Flag
from ostinato.cli.input import holds_unread_text, read_text, without_last_newline
from ostinato.cli.loading import opened
from ostinato.cli.output import AnswerWriter, talk, write, write_json
from ostinato.errors import BadInput, BadOption
from ostinato.files.store import DEFAULT, is_model
from ostinato.options import Sampling

if TYPE_CHECKING:
    from ostinato.llm import LLM, Completion, Piece


@flags.verb
def run(
    *,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt; by default --file or standard input.")
    ] = None,
    model: flags.Model = DEFAULT,
    file: Annotated[
        Path | None, Flag("Read the prompt from FILE (- is standard input); after PROMPT, if both are given.", "FILE")
    ] = None,
    system: Annotated[str | None, Flag("A system message before the prompt.", "TEXT")] = None,
    state: Annotated[
        Path | None, Flag("Continue the conversation in FILE, if it exists; save it afterwards.", "FILE")
    ] = None,
    raw: Annotated[bool, Flag("Pass the prompt unchanged, without the chat template.")] = False,
    sampling: flags.ChoosingOrFollowing,
    load: flags.ToGenerate,
    as_json: flags.Json = False,
) -> None:
    """Generate text from a prompt, streaming.

    An instruct model gets its chat template, unless --raw. Sampling options that are left out are the model's own.
    Without --max-tokens an
    answer ends where the model ends it, or when the context is full; one that follows a schema, a regex, a choice or a
    grammar ends with it.

    With a PROMPT, standard input is read only if --file - says so: `ostinato run "Summarise:" --file - < report.txt`
    puts the report after the prompt and a blank line. A prompt that begins with - comes after `--`.
    """
    if raw and system is not None:
        raise BadOption("--system needs the chat template, and --raw leaves it out; give one of them")
    text = _prompt(prompt, file, raw)
    check_file(state)
    with opened(model, load, chats=not raw) as llm:
        conversation = Conversation.at(state, llm, raw)
        pieces = conversation.ask(llm, text, system, sampling)
        if not as_json:
            completion = _answer(llm, pieces, sampling)
        else:
            completion = next(piece.completion for piece in pieces if piece.completion is not None)
            write_json(as_record(llm, completion))
        if completion is not None:
            conversation.save(llm, completion)


def _prompt(argument: str | None, file: Path | None, raw: bool) -> str:
    """The argument, the file, or both with a blank line between."""
    first = None if argument is None else read_text(argument, None, "the prompt")
    rest = None if first is not None and file is None else without_last_newline(read_text(None, file, "the prompt"))
    text = "\n\n".join(part for part in (first, rest) if part)
    if not text:
        raise BadInput("the prompt is empty; give some text to go on from")
    if not raw and not text.strip():
        raise BadInput("the prompt is blank; give some text to go on from, or --raw to go on from blanks")
    if first and is_model(first):
        talk(f"note: {first} is a model, and taken as the prompt here; --model {first} runs it")
    if first is not None and file is None and holds_unread_text():
        talk("note: the text on standard input is not read; --file - puts it after the prompt")
    return text


def _answer(llm: LLM, pieces: Iterator[Piece], sampling: Sampling) -> Completion | None:
    completion: Completion | None = None
    n_tokens, writer = 0, AnswerWriter()
    try:
        for piece in pieces:
            writer.write(piece)
            n_tokens += piece.token_id is not None
            completion = piece.completion or completion
    except KeyboardInterrupt:
        write("\n")
        talk(f"interrupted after {n_tokens} tokens")
        raise typer.Exit(130) from None
    writer.end()
    if completion is not None:
        sampled = sampling.seed is not None or bool(sampling.over(llm.defaults).temperature)
        talk(timings_line(llm, completion, with_seed=sampled))
    return completion


def as_record(llm: LLM, completion: Completion) -> dict[str, Any]:
    """A completion as the JSON object that scripts read."""
    return {
        "text": completion.text,
        "reasoning": completion.reasoning,
        "token_ids": list(completion.token_ids),
        "prompt_ids": list(completion.prompt_ids),
        "finish_reason": completion.finish_reason,
        "cached_tokens": completion.cached_tokens,
        "timings": asdict(completion.timings),
        "model": llm.name,
        "device": str(llm.device),
        "mode": llm.mode,
        "seed": completion.seed,
        "digest": completion.digest,
    }


def timings_line(llm: LLM, completion: Completion, *, with_seed: bool) -> str:
    """The summary of a run in one line; the seed repeats a run whose tokens were sampled."""
    timings = completion.timings
    n_prompt, n_new = len(completion.prompt_ids), len(completion.token_ids)
    n_computed = n_prompt - completion.cached_tokens
    prefill_rate = f" at {n_computed / timings.prefill_s:.0f} tok/s" if timings.prefill_s else ""
    cached = f" ({completion.cached_tokens} cached)" if completion.cached_tokens else ""
    decode_rate = f" at {timings.decode_tok_s:.1f} tok/s" if timings.decode_tok_s else ""
    seed = f"seed {completion.seed}, " if with_seed else ""
    return (
        f"[{llm.name} on {llm.device}, {llm.mode}: prompt {n_prompt} tokens{cached}{prefill_rate}, "
        f"first token after {timings.first_token_s:.2f} s, {n_new} tokens{decode_rate}, "
        f"ended by {completion.finish_reason}; {seed}loaded in {timings.load_s:.1f} s]"
    )
