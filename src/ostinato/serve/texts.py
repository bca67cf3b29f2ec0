"""What the model's tokenizer and chat template make of a text: `/tokenize`, `/detokenize`, `/apply-template`, and
`/tokenizer_info`, which is about the tokenizer itself. Nothing is generated here."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ostinato.options import Sampling
from ostinato.serve.conversation import rendered
from ostinato.serve.errors import Refusal
from ostinato.serve.service import Service
from ostinato.serve.shapes import DetokenizeBody, TemplateBody, TokenizeBody
from ostinato.serve.stream import json_response
from ostinato.text.chat import ChatRequest
from ostinato.text.tools import read_tools


async def tokenize(service: Service, body: TokenizeBody, request: Request) -> Response:
    """The token ids of a text."""
    llm = service.llm(body.model)

    def tokens() -> dict[str, Any]:
        ids = llm.tokenize(body.text, bos=body.adds_special, special=body.parse_special)
        pieces = llm.tokenizer.pieces(ids) if body.with_pieces or body.return_token_strs else []
        shown = ({"pieces": pieces} if body.with_pieces else {}) | (
            {"token_strs": pieces} if body.return_token_strs else {}
        )
        return {"tokens": ids, "count": len(ids), "max_model_len": llm.context, **shown}

    return json_response(await service.in_thread(tokens))


async def detokenize(service: Service, body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    llm = service.llm(body.model)
    largest, vocab = max(body.tokens, default=0), llm.tokenizer.vocab_size
    if largest >= vocab:
        message = f"tokens has the token id {largest}; this model has ids from 0 to {vocab - 1}"
        raise Refusal(400, message, param="tokens")
    return json_response({"content": await service.in_thread(llm.detokenize, body.tokens)})


async def apply_template(service: Service, body: TemplateBody, request: Request) -> Response:
    """The prompt of a conversation."""
    llm = service.llm(body.model)
    options = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    messages = [message.for_template() for message in body.messages]
    continues = bool(body.continue_final_message)
    asked = ChatRequest(messages, Sampling(), read_tools(body.tools), continues=continues, template_options=options)
    return json_response({"prompt": await service.in_template_thread(rendered, llm, asked)})


def tokenizer_info(service: Service, model: str | None, request: Request) -> Response:
    """Special tokens and chat template, by the names that `tokenizer_config.json` has for them."""
    llm = service.llm(model)
    request.state.record.model = service.model_id
    tokenizer, template = llm.tokenizer, llm.template
    special = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    return json_response(
        {
            **{name: None if id is None else tokenizer.token_text(id) for name, id in special.items()},
            "add_bos_token": tokenizer.add_bos,
            "add_eos_token": tokenizer.add_eos,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": llm.context,
            "chat_template": None if template is None else template.source,
        }
    )
