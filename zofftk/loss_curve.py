"""The loss curve of a run as a picture."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zofftk.atomic_file import replacing


def draw_loss_curve(path: Path, samples: Sequence[dict[str, Any]]) -> None:
    # Drawing is slow to import, and is wanted once, at the end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([sample["step"] + 1 for sample in samples], [sample["loss"] for sample in samples], linewidth=1)
    axes.set(xlabel="step", ylabel="training loss (nats per token)", title="Loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    with replacing(path) as file:
        file.write(picture.getvalue())
