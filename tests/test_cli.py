import json
import os
import subprocess
import sys
import time

import pytest

from zofftk.cli import main


def error_of(capsys, *arguments: str) -> str:
    """The one line that a refused command leaves."""
    try:
        code = main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr()
    assert code == 2
    assert printed.out == ""
    assert printed.err.startswith("zofftk: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["tarin"], ["tarin", "train"]),
        (["train", "--warp"], ["--warp"]),
        (["train", "--preset", "3b"], ["3b", "tiny", "70b"]),
        (["train", "--steps", "many"], ["--steps", "many"]),
        (["train", "--steps", "0"], ["--steps", "at least 1", "0"]),
        (["train", "--lr", "-1"], ["--lr", "above 0", "-1"]),
        (["train", "--dtype", "int8"], ["--dtype", "bf16", "int8"]),
        (["train", "--data"], ["--data"]),
        (["train", "--data", "/no/such/file"], ["/no/such/file", "No such file"]),
        (["train", "--resume", "/no/such/file"], ["/no/such/file", "No such file"]),
        (["train", "--name", ""], ["--name"]),
        (["train", "--name", "a/b"], ["--name", "a/b"]),
        (["train", "--name", "a\nb"], ["--name", "printable"]),
        (["train", "--name", "n" * 300], ["--out", "255 bytes"]),
        (["train", "--save", "/dev/null"], ["--save", "/dev/null", "device"]),
        (["train", "--seed", "9" * 23], ["--seed", "2**64"]),
        (["train", "--batch-size", "100000000", "--device", "cpu"], ["--batch-size", "GiB"]),
        (["bench", "cpu-adam", "--json", "."], ["--json", "folder"]),
        (["bench", "cpu-adam", "--json", "/no/such/folder/x"], ["--json", "/no/such/folder/x"]),
        (["bench", "cpu-adam", "--json", "/dev/null"], ["--json", "device"]),
        *((["bench", "cpu-adam", "--numel", bad], ["--numel"]) for bad in ("nan", "inf", "-5", "0", "5e11")),
        (["bench", "cpu-adam", "--repeats", "0"], ["--repeats", "0"]),
        (["bench", "cpu-adam", "--threads", "-3"], ["--threads", "-3"]),
        (["bench", "cpu-adam", "--threads", str(2**40)], ["--threads", "1024"]),
    ],
)
def test_wrong_arguments_get_one_line(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    message = error_of(capsys, *arguments)
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["doctor", "--help"], ["dataflow", "--help"], ["bench", "--help"]]
)
def test_help_names_every_command_and_option(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    expected = {
        "--help": ["train", "doctor", "dataflow", "bench"],
        "train": ["--preset", "--resume", "70b"],
        "doctor": ["advice"],
        "dataflow": ["--optimizer", "--split", "--on-cpu", "--draw", "--json"],
        "bench": ["cpu-adam"],
    }
    for word in expected[arguments[0]]:
        assert word in shown


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("zofftk 0.")


def test_help_loads_no_torch():
    code = """if True:
        import sys
        from zofftk.cli import main
        try:
            main(["train", "--help"])
        except SystemExit:
            print("torch" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(options):
        raise OSError(28, "No space left on device", "runs/x/checkpoint.pt")

    monkeypatch.setattr("zofftk.cli.run_doctor", full)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().err == ("zofftk: error: [Errno 28] No space left on device: 'runs/x/checkpoint.pt'\n")


@pytest.mark.parametrize("command", [["train"], ["bench", "cpu-adam"]])
def test_an_instruction_set_that_does_not_exist_gets_one_line(capsys, monkeypatch, tmp_path, command):
    def unknown():
        raise ValueError("unknown instruction set 'bogus'")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zofftk._cpu_adam.isa", unknown)
    assert error_of(capsys, *command) == "zofftk: error: ZOFFTK_ISA: unknown instruction set 'bogus'\n"
    assert list(tmp_path.iterdir()) == []


def test_the_instruction_set_is_read_from_the_environment(tmp_path):
    env = os.environ | {"ZOFFTK_ISA": "bogus"}
    command = [sys.executable, "-m", "zofftk", "train"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("zofftk: error: ZOFFTK_ISA: unknown instruction set 'bogus'; expected one of")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["train"], ["bench", "cpu-adam"]])
def test_a_missing_kernel_gets_one_line(tmp_path, command):
    hidden = "import sys; sys.modules['zofftk._cpu_adam'] = None"
    code = f"{hidden}; from zofftk.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *command]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("zofftk: error: zofftk's compiled CPU Adam (zofftk._cpu_adam) is missing")
    assert done.stderr.count("\n") == 1


def test_train_takes_all_its_options_to_the_run(capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 20)
    began = time.time()
    options = ["--preset", "tiny", "--data", str(text), "--steps", "2", "--batch-size", "2", "--seq-len", "8"]
    options += ["--lr", "0.01", "--dtype", "fp32", "--device", "cpu", "--max-grad-norm", "0.5", "--seed", "7"]
    options += ["--update", "delayed", "--delay-after", "1"]
    keep = ["--out", str(tmp_path), "--name", "run", "--save", str(tmp_path / "end.pt"), "--save-every", "1"]
    assert main(["train", *options, *keep]) == 0
    config = json.loads((tmp_path / "run" / "record.json").read_text())["config"]
    assert config == {
        "preset": "tiny",
        "data": [str(text)],
        "steps": 2,
        "batch_size": 2,
        "seq_len": 8,
        "lr": 0.01,
        "dtype": "fp32",
        "device": "cpu",
        "max_grad_norm": 0.5,
        "seed": 7,
        "update": "delayed",
        "delay_after": 1,
    }
    assert (tmp_path / "end.pt").stat().st_mtime >= began - 2
    assert "step 2/2" in capsys.readouterr().out
    more = ["--steps", "3", "--out", str(tmp_path), "--name", "on"]
    assert main(["train", "--resume", str(tmp_path / "end.pt"), *more]) == 0
    assert len(json.loads((tmp_path / "on" / "record.json").read_text())["samples"]) == 3
