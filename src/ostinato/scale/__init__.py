"""Beyond one engine: replicas and files of requests, on this machine or on a Ray cluster.

Code that needs no Ray (a file of requests answered in this process, and the sizing) does not import it: only
`deployment.py`, `router.py`, `cluster.py`, `replicas.py` and `data.py` do, and nothing else of the project does.
docs/scale.md says how to use it.
"""

from __future__ import annotations

from typing import Any


def app(settings: dict[str, Any]) -> Any:
    """The application for `serve deploy`: `import_path: ostinato.scale:app`, with `args` as in docs/scale.md."""
    from ostinato.scale.deployment import application
    from ostinato.scale.settings import from_yaml

    return application(*from_yaml(settings))
