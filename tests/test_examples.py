"""The programs in docs/examples run, and say what they should."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
SAYS = {
    "accelerate_loop.py": r"{losses}",
    "compiled_model.py": r"{losses}",
    "cpu_adamw.py": r"bfloat16: {losses}\nfloat32:  {losses}\nits state loads into torch.optim.AdamW",
    "ddp_comm_hook.py": r"step 0: loss {number}\nstep 9: loss {number}\nfinite: True, equal on all ranks: True",
    "hf_trainer.py": r"{losses}",
    "lightning_module.py": r"{losses}",
    "pack_in_a_plain_loop.py": r"{losses}",
    "plan_a_run.py": (
        r"fits: True, 33570816 parameters\ndevice: 67141632 bytes of parameters\nexposed and hidden: True True"
    ),
}
NEEDS = {"accelerate_loop.py": "accelerate", "hf_trainer.py": "transformers", "lightning_module.py": "lightning"}
NUMBER = r"(\d+\.\d+)"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example(name):
    if name in NEEDS and not importlib.util.find_spec(NEEDS[name]):
        pytest.skip(f"{NEEDS[name]} is not installed")
    assert ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    said = SAYS[name].format(losses=rf"loss {NUMBER} -> {NUMBER}", number=NUMBER)
    lines = [line for line in result.stdout.splitlines() if "real_accelerator.py" not in line]  # DeepSpeed, if there
    match = re.fullmatch(said, "\n".join(lines))
    assert match, result.stdout
    numbers = [float(number) for number in match.groups()]
    for first, last in zip(numbers[::2], numbers[1::2], strict=True):
        assert last < 0.8 * first, "it learns"
