"""Pictures of figures, by matplotlib, which is optional."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from ostinato.cli.output import talk
from ostinato.errors import BadInput
from ostinato.extras import check_extra


def figure_kind(plot: Path) -> Any:
    """matplotlib's `Figure`; refused if it is not installed, or if the picture could not be written."""
    if not plot.parent.is_dir():
        raise BadInput(f"--plot {plot}: there is no folder {plot.parent}")
    check_extra("lab", "--plot")
    return importlib.import_module("matplotlib.figure").Figure


def save(picture: Any, plot: Path) -> None:
    """Write a figure of matplotlib to a file, in the format of its name."""
    try:
        picture.savefig(plot)
    except (OSError, ValueError) as error:
        raise BadInput(f"--plot {plot}: cannot be drawn: {error}") from error
    talk(f"drawn: {plot}")
