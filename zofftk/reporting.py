"""An optimizer's hold on its engine, and what it can be asked about the engine's work."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zofftk.report import StepReport, report_of
from zofftk.trace import Trace

if TYPE_CHECKING:
    from zofftk.engine import Engine
    from zofftk.loss_scale import ScaleKeeper


class Reporting:
    """The part of an optimizer that has an engine, until it is closed, and reports of it."""

    _engine: Engine | None = None
    _steps = 0
    _scale: ScaleKeeper

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this optimizer is closed")
        return self._engine

    @property
    def loss_scale(self) -> float:
        """The factor of the coming step; 1 where the option `loss_scale` was not given."""
        return self._scale.value

    @property
    def skipped_steps(self) -> int:
        """Steps so far whose gradients were not finite; they changed nothing."""
        return self._scale.skipped_steps

    def report(self) -> StepReport:
        """Sizes, bytes moved and where the time of the steps went, so far."""
        engine = self._require_engine()
        return report_of(engine, self._steps)

    @property
    def trace(self) -> Trace:
        """What the streams did; a training loop may add its own spans, such as forward and backward."""
        return self._require_engine().device.trace

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the last 100,000 spans as a Chrome trace; needs the option `trace=True`."""
        if not self.trace.keep_spans:
            raise ValueError("write_trace needs the optimizer to be built with trace=True")
        self._require_engine().device.collect_spans()
        self.trace.write(path)
