"""The sizes of model that the paper prints, in its Table 3 and Figures 7 to 11, as models.

Layers and hidden size are Table 3's where it has the size. Another size has the hidden size of the one nearest to it in
Table 3, and as many layers as bring all parameters, embeddings included, nearest to what is printed: 1.4 or 3.9 is what
one finds by adding layers until memory is full. 80, 90 and 100 billion, which the paper does not print, continue the
ladder, so that something is above its last size.
"""

from __future__ import annotations

from dataclasses import replace

from zofftk.gpt_config import GPTConfig
from zofftk.presets import PRESETS, TABLE_3

_LIKE = PRESETS["1b"].model  # in heads, vocabulary and sequence

# Billions of parameters, and the hidden size.
_OTHERS = {1.4: 2048, 3.9: 2304, 4.5: 2304, 17.0: 4096, 30.0: 8192, 80.0: 9216, 90.0: 9216, 100.0: 9216}


def _layers(billions: float, hidden: int) -> int:
    one, two = (replace(_LIKE, layers=layers, hidden=hidden).num_params for layers in (1, 2))
    return 1 + round((billions * 1e9 - one) / (two - one))


def ladder() -> dict[float, GPTConfig]:
    """Billions of parameters as printed, in rising order, and the model."""
    shapes = {float(name.removesuffix("b")): (layers, hidden) for name, (layers, hidden, _) in TABLE_3.items()}
    shapes |= {billions: (_layers(billions, hidden), hidden) for billions, hidden in _OTHERS.items()}
    return {size: replace(_LIKE, layers=shapes[size][0], hidden=shapes[size][1]) for size in sorted(shapes)}
