"""`ostinato serve`: the model behind OpenAI's API, with a page, until a signal stops it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from ostinato.cli import flags
from ostinato.cli.flags import Flag
from ostinato.cli.input import read_file
from ostinato.cli.output import talk
from ostinato.errors import BadInput
from ostinato.extras import check_extra
from ostinato.files.store import DEFAULT, resolve
from ostinato.options import Talk
from ostinato.processes import check_stderr
from ostinato.serve.script import read_script
from ostinato.serve.settings import DEFAULT_HOST, DEFAULT_PORT, KEPT_S, ServeOptions

_LISTENING, _MODELS, _SCALE = "Listening and access", "Models", "Beyond one engine"


@flags.verb
def serve(
    *,
    model: flags.ModelsAnywhere = (DEFAULT,),
    host: Annotated[str, Flag("Address to listen on.", "ADDRESS", panel=_LISTENING)] = DEFAULT_HOST,
    port: Annotated[int, Flag("Port to listen on; 0 takes a free one.", "N", panel=_LISTENING)] = DEFAULT_PORT,
    alias: Annotated[
        list[str] | None,
        Flag("Another name for the first model, or for MODEL; may be repeated.", "NAME[=MODEL]", panel=_MODELS),
    ] = None,
    any_model: Annotated[bool, Flag("Answer requests for unknown models with the first one.", panel=_MODELS)] = False,
    models_max: Annotated[
        int | None, Flag("Most models in memory at once; by default as many as fit.", "N", panel=_MODELS, min=1)
    ] = None,
    api_key: Annotated[
        list[str] | None,
        Flag("A key that clients must send; may be repeated.", "KEY", panel=_LISTENING, envvar="OSTINATO_API_KEY"),
    ] = None,
    api_key_file: Annotated[
        Path | None, Flag("Keys that clients may send, one per line.", "FILE", panel=_LISTENING)
    ] = None,
    no_api_key: Annotated[bool, Flag("Allow an address other than loopback without a key.", panel=_LISTENING)] = False,
    cors: Annotated[
        list[str] | None, Flag("Allow pages of this origin (* for all); may be repeated.", "ORIGIN", panel=_LISTENING)
    ] = None,
    log_prompts: Annotated[bool, Flag("Write prompts and answers to the log.", panel=_LISTENING)] = False,
    keep_responses: Annotated[
        int | None,
        Flag("Keep N responses, which later requests can refer to; 0 keeps none.", "N", panel=_LISTENING, min=0),
    ] = None,
    keep_responses_s: Annotated[
        float, Flag("Keep a response for this many seconds.", "SECONDS", panel=_LISTENING)
    ] = KEPT_S,
    script: Annotated[
        Path | None,
        Flag("Answer with the texts in FILE, not the model's: for tests of clients.", "FILE", hidden=True),
    ] = None,
    verify: Annotated[
        bool | None,
        Flag(
            "Compare the mode with the reference before the port opens; by default on a GPU where it has not passed.",
            name="--verify/--no-verify",
            panel=_MODELS,
        ),
    ] = None,
    load: flags.ToServe,
    replicas: Annotated[int | None, Flag("Number of engines, on Ray Serve.", "N", panel=_SCALE, min=1)] = None,
    max_replicas: Annotated[
        int | None, Flag("Add engines up to N while requests wait.", "N", panel=_SCALE, min=1)
    ] = None,
    ray_address: Annotated[str | None, Flag("Ray cluster to join.", "ADDRESS", panel=_SCALE)] = None,
    routing: Annotated[
        Literal["prefix", "round_robin"] | None,
        Flag(
            "Send a request to the replica that holds its prompt's prefix (the default), or to each in turn.",
            panel=_SCALE,
        ),
    ] = None,
) -> None:
    """Serve models over OpenAI's, Anthropic's and Ollama's APIs, with a page at /.

    The first model is loaded at the start, each other one when a request names it. When memory is short, the idle model
    that was used longest ago is unloaded.

    SIGTERM and Ctrl-C let running requests end; a second one stops them.
    """
    from ostinato.serve.supervisor import Supervisor

    many = replicas is not None or max_replicas is not None or ray_address is not None
    if many:
        check_extra("scale", "more than one replica")
    check_extra("serve", "the server")
    keys = (*(api_key or ()), *_keys_in(api_key_file))
    options = ServeOptions(
        model=model[0],
        more_models=model[1:],
        load=load,
        host=host,
        port=port,
        alias=tuple(alias or ()),
        any_model=any_model,
        models_max=models_max,
        keys=keys,
        no_key=no_api_key,
        cors=tuple(cors or ()),
        log_prompts=log_prompts,
        keep_responses=keep_responses,
        keep_responses_s=keep_responses_s,
        script=() if script is None else read_script(read_file(script), str(script)),
    )
    say = _checked_once(talk)
    if script is not None:
        say(f"warning: answers are the texts of {script}, not the model's")
    if many and verify:
        raise BadInput("--verify is for this machine; with --replicas, run `ostinato verify` where they run")
    if many and len(model) > 1:
        raise BadInput(f"--replicas serve one model, and {len(model)} were given; give one, or serve without replicas")
    if many:
        from ostinato.scale.replicas import run_replicas

        if _compares(options, verify):
            say(f"note: replicas are not compared with the reference: run `ostinato verify {model[0]}` where they run")
        code = run_replicas(options, replicas or 1, max_replicas, ray_address, say, routing=routing or "prefix")
    elif routing is not None:
        raise BadInput("--routing is between replicas; give --replicas too")
    else:
        code = _verify(options, verify, say)
        if code:
            raise typer.Exit(code)
        supervisor = Supervisor(options, say)
        for one in model:  # before anything starts: an unknown name, or a download
            resolve(one, talk=say)
        code = _check_loadable(options, say) or supervisor.run()
    if code:
        raise typer.Exit(code)


def _compares(options: ServeOptions, verify: bool | None) -> bool:
    """Whether to compare with the reference: as was asked or, by default, where a GPU may run the model."""
    from ostinato.engine.machine import driver_version

    if verify is not None:
        return verify
    return not options.script and options.load.device != "cpu" and driver_version() is not None


def _verify(options: ServeOptions, verify: bool | None, say: Talk) -> int:
    """Compare the first model's mode with the reference, where that is asked for or due; the exit code, 0 to go on."""
    if not _compares(options, verify):
        return 0
    from ostinato.cli.verify_start import verified_start
    from ostinato.serve.supervisor import listen

    listen(options.host, options.port).close()  # a port that is in use is told at once
    found = verified_start(options, verify)
    if found.said:
        say(found.said)
    return found.exit_code


def _check_loadable(options: ServeOptions, say: Talk) -> int:
    """Name all models that cannot be loaded; the exit code, 0 if there are none. A single model is loaded at once, and
    refuses for itself."""
    if len(options.models) == 1:
        return 0
    from ostinato.serve.supervisor import models_that_cannot_load

    found = models_that_cannot_load(options)
    for one in found:
        say(f"error: {options.names[one.number][0]}: {one.why}")
    return found[0].exit_code if found else 0


def _checked_once(talk: Talk) -> Talk:
    """`talk`; a server whose first message cannot be written does not start. Later ones may be lost."""
    is_first = True

    def say(text: str) -> None:
        nonlocal is_first
        talk(text)
        if is_first:
            check_stderr()
        is_first = False

    return say


def _keys_in(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        readable = os.stat(file).st_mode & 0o044
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from error
    keys = [line for line in map(str.strip, lines) if line and not line.startswith("#")]
    if not keys:
        raise BadInput(f"--api-key-file {file}: there is no key in it; put one on a line")
    if readable:
        talk(f"note: others on this machine can read {file}")
    return keys
