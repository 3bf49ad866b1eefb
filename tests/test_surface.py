"""What users may rely on; a change here is a change of their programs."""

from zofftk.cli import build_parser
from zofftk.presets import PRESETS

TRAIN_OPTIONS = [
    "--batch-size",
    "--data",
    "--device",
    "--dtype",
    "--help",
    "--lr",
    "--max-grad-norm",
    "--name",
    "--out",
    "--preset",
    "--resume",
    "--save",
    "--save-every",
    "--seed",
    "--seq-len",
    "--steps",
]


def subparsers(parser):
    (action,) = [action for action in parser._actions if action.dest == "==SUPPRESS==" and action.choices]
    return action.choices


def test_commands():
    assert list(subparsers(build_parser())) == ["train", "doctor", "bench"]


def test_train_options():
    train = subparsers(build_parser())["train"]
    assert sorted(option for option in train._option_string_actions if option.startswith("--")) == TRAIN_OPTIONS


def test_presets():
    paper = ["1b", "2b", "4b", "6b", "8b", "10b", "11b", "12b", "13b", "15b", "20b", "40b", "60b", "70b"]
    assert list(PRESETS) == ["tiny", "demo", "24m", *paper]
