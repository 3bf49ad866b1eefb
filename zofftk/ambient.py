"""Code that runs as if nothing around it were going on: no torch function, mode, transform or trace takes part in it.

A parameter lands wherever it is read: inside `torch.func.vmap`, under a fake-tensor or tracing mode, in a dispatch mode
of somebody's own. What lands is real memory, and none of these is to see it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

_C: Any = torch._C


@contextmanager
def undisturbed() -> Iterator[None]:
    """See the module."""
    with ExitStack() as stack:
        stack.enter_context(_C.DisableTorchFunction())
        if _C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if _C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if (tracing := _C._get_tracing_state()) is not None:
            _C._set_tracing_state(None)
            stack.callback(_C._set_tracing_state, tracing)
        yield
