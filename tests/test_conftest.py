"""What the fixtures shared by all tests do themselves."""

import shutil
import subprocess
import sys
from pathlib import Path

LEAVES_A_THREAD = """
import threading

def leave_a_thread():
    threading.Thread(target=threading.Event().wait, name="zofftk-left", daemon=True).start()

def test_failed(no_threads_left):
    leave_a_thread()
    assert False, "the one report"
"""


def test_a_failed_test_is_not_reported_twice(tmp_path):
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_it.py").write_text(LEAVES_A_THREAD)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert "1 failed in" in done.stdout, done.stdout
