"""Ask what training a model of your own costs on a machine you do not have; see docs/plan.md."""

import torch
from torch import nn

from zofftk.plan import Setting, Source, plan


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x.float().square().mean()


def loss(model, setting):
    return model(torch.zeros(setting.micro_batch, 2048, dtype=torch.bfloat16))


answer = plan(Source.of_function(Regressor, loss), "laptop24", Setting(micro_batch=64), searches=False)
print(f"fits: {answer.fits}, {answer.num_params} parameters")
print(f"device: {answer.memory.device.items['parameters']} bytes of parameters")
stages = answer.step.stages.values()
hidden, exposed = sum(stage.hidden_ns for stage in stages), sum(stage.exposed_ns for stage in stages)
print(f"exposed and hidden: {exposed > 0} {hidden > 0}")
