"""The checks that a prompt must pass before anything else."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import BadInput, PromptTooLong


def check_prompt(ids: Sequence[int], *, vocab: int, context: int, room: int = 0) -> None:
    """Refuse ids that are no tokens of this model, or too many for the context with `room` to spare."""
    if not ids:
        raise BadInput("the prompt is empty; give it at least one token")
    for index, token in enumerate(ids):
        if not isinstance(token, int) or not 0 <= token < vocab:
            raise BadInput(
                f"the prompt has the token id {token!r} at index {index}; this model has ids from 0 to {vocab - 1}"
            )
    if len(ids) + room > context:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens and the context holds {context}"
            + (f", of which {room} must be left for the answer" if room else "")
            + "; shorten it, or give a larger --context (`ostinato inspect` tells what the model was trained for)"
        )
