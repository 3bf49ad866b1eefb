# make demo      train a small GPT-2-like model on text this machine has (make demo DATA="one.txt two.txt" for yours)
# make test      the tests that need seconds        make test-all   the slow ones as well
# make lint      style and types                    make clean      removes what was built; runs/ stays
# make sanitize  the C++ tests under address, undefined-behaviour and thread sanitizers and on emulated processors

PYTHON ?= python3
PIP_FLAGS ?=
INSTALLED := .venv/.installed
CMAKE_BIN := $(if $(wildcard .venv/bin/cmake),$(CURDIR)/.venv/bin/)

.PHONY: demo test test-all lint sanitize clean

demo: $(INSTALLED)
	.venv/bin/zofftk train --preset demo $(if $(DATA),--data $(DATA))

test: $(INSTALLED)
	.venv/bin/pytest -m "not slow and not gpu"

test-all: $(INSTALLED)
	.venv/bin/pytest -m "not gpu"

lint: $(INSTALLED)
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

sanitize:
	@command -v $(CMAKE_BIN)cmake >/dev/null || { \
		echo "make sanitize needs CMake (Debian: apt install cmake)." >&2; exit 1; }
	$(CMAKE_BIN)cmake --log-level=NOTICE -S csrc -B build/cpp -DZOFFTK_CPP_TESTS=ON -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_RULE_MESSAGES=OFF
	MAKEFLAGS=--no-print-directory $(CMAKE_BIN)cmake --build build/cpp --parallel $$(nproc)
	cd build/cpp && $(CMAKE_BIN)ctest --output-on-failure --timeout 300 --parallel $$(nproc)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt $(wildcard csrc/*.*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "zofftk needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	@echo "Installing into .venv, once; the first time brings PyTorch."
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@
