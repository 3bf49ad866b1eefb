"""What `optimizer.state[p]` holds: views of the host's memory, which stay where they are whoever assigns to them."""

from __future__ import annotations

from typing import Any

import torch

from zofftk.state_dict import STATES


class HostViews(dict[str, Any]):
    """A parameter's `step`, and the views that show what the host holds of it.

    After a checkpoint was loaded, trainers move the states to where the parameters are (`state[key] = value.cuda()`;
    Lightning does, and many scripts). A view replaced by a copy would show and save old values from then on, and 12
    bytes a parameter would fill the device. So an assignment takes over the values only.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        view = self.get(key)
        if key not in STATES or view is None:
            super().__setitem__(key, value)
        elif value is not view:
            if not isinstance(value, torch.Tensor) or value.shape != view.shape:
                raise ValueError(
                    f"the state {key!r} is a tensor of shape {tuple(view.shape)} and cannot become another"
                )
            view.copy_(value.detach())

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value
