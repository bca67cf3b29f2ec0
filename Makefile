# `make run` and `make serve` to use it, `make test` before a change; `make help` lists the rest. What is installed goes
# into .venv, models into OSTINATO_HOME or your cache folder.
PYTHON ?= python3
PROMPT ?= Tell me a short story about a lighthouse keeper.
MODEL :=
PORT :=
BIN := .venv/bin
# PYTHONDONTWRITEBYTECODE is cleared below, so Python keeps the byte-code of what is imported; pip makes none of the rest.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
# Of this machine; where there is none, `make run` installs zig, which has one.
COMPILER := $(shell if [ -n "$$CXX" ]; then command -v "$$CXX"; else command -v c++ || command -v g++ || command -v clang++; fi)
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
# One stamp for each set of packages. Each set is installed on top of the one before, and pip removes none.
SMALL := .venv/installed$(if $(NVIDIA),-gpu)
SERVE := $(SMALL)-serve
DEV := $(SMALL)-dev
# Where the CPU is what runs and there is a compiler, its loop is compiled while pip installs.
COMPILED := $(if $(NVIDIA),,$(if $(COMPILER),.venv/compiled))
COMPILE := -c "from ostinato.backends.native.library import compile_object; compile_object(print)"
export PYTHONDONTWRITEBYTECODE :=
MAKEFLAGS += $(if $(word 2,$(MAKECMDGOALS)),,--jobs=2)  # several goals, as in `make clean run`, run in order

.PHONY: help run serve test tests quick check bench soak chaos clients docs sanitize test-gpu test-arm test-compilers wheel clean

run: $(SMALL) $(COMPILED)  # streams an answer; PROMPT="..." and MODEL=file.gguf choose
	@$(BIN)/ostinato run $${MODEL:+--model "$$MODEL"} --max-tokens 256 "$$PROMPT"
export PROMPT MODEL PORT

serve: $(SERVE) $(COMPILED)  # a server at http://127.0.0.1:8000; MODEL=file.gguf and PORT=8001 choose
	@exec $(BIN)/ostinato serve $${MODEL:+--model "$$MODEL"} $${PORT:+--port "$$PORT"}

help:  # this list
	@sed -n 's/^\([a-z-]*\):[^=]*  # \(.*\)/make \1\t\2/p' Makefile | expand --tabs=21

# Three processes, since tests of servers and clusters mostly wait; types are checked meanwhile.
test: $(DEV)  # format, lint, types and all tests
	@$(MAKE) --no-print-directory check tests
tests: $(DEV)  # the tests alone
	$(BIN)/pytest --numprocesses 3 --dist loadscope

quick: $(DEV)  # the tests without what takes half a second, servers, Ray and the emulated tape
	$(BIN)/pytest --numprocesses 2 --dist loadscope -m "not slow" --ignore tests/serve --ignore tests/scale --ignore tests/backends/tape \
	  --ignore tests/test_examples.py --ignore tests/test_reference.py --ignore tests/engine/test_longrope.py

check: $(DEV)  # format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(DEV)  # measures this machine
	$(BIN)/python -m bench.cpu
	$(BIN)/python -m bench.start
	$(BIN)/python -m bench.batch
	$(BIN)/python -m bench.kv_planner
	$(BIN)/python -m bench.neighbours

soak: $(DEV)  # tests with their full counts, in the thousands
	OSTINATO_SOAK=1 $(BIN)/pytest --numprocesses 2 -m soak
	$(BIN)/python -m bench.cards --fast --out docs/cards.md

chaos: $(DEV)  # an hour of every fault at random, then what was lost or leaked
	$(BIN)/python -m bench.chaos

clients: $(DEV)  # real clients in environments of their own against a server, as a table
	@$(BIN)/python -m tests.clients

docs: $(DEV)  # the reference of the Python API, as HTML
	@$(BIN)/python -m tests.reference build/docs

test-gpu: $(DEV)  # compares CUDA with the CPU
	for part in exact speed stress tape lab grammar lessons; do $(BIN)/python -m bench.gpu_check --part $$part || exit 1; done

# With objects of the CPU loop for every level of CPU, made by zig for glibc 2.28; OSTINATO_WHEEL_OBJECTS=0 leaves them out.
wheel: $(SMALL)  # builds a wheel for each architecture into dist
	$(PIP) 'setuptools>=77' ziglang
	for arch in x86_64 aarch64; do rm -rf build; OSTINATO_WHEEL_ARCH=$$arch SETUPTOOLS_USE_DISTUTILS=local \
	  $(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist . || exit 1; done

# Wheels of both architectures, and every level's bits: AArch64 runs under Debian's qemu-user, in .venv/arm64.
test-arm: $(DEV)  # compares AArch64 with x86-64, emulated
	$(BIN)/pytest -rs tests/arm/check_arm.py

# NVIDIA's compiler and the runtime of CUDA 12 come from PyPI; hipcc is the system's (on Debian: apt-get install hipcc).
test-compilers: $(DEV) .venv/nvcc  # compiles the laboratory's programs with nvcc and hipcc
	$(BIN)/pytest -rs tests/lab/test_programs.py

# The native CPU loop's tests with every access and every undefined step watched. Compiled first, by itself: the compiler
# need not be watched. What Python and torch never give back is no leak of ours.
SANITIZED := tests/backends/native
sanitize: export OSTINATO_CPU_FLAGS := -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
sanitize: export ASAN_OPTIONS := detect_leaks=0:use_sigaltstack=0
sanitize: export UBSAN_OPTIONS := print_stacktrace=1
sanitize: $(DEV)  # the native loop's tests under the sanitizers
	for level in amx v4 v3 v2 plain; do OSTINATO_CPU_LEVEL=$$level $(BIN)/python $(COMPILE) || true; done
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/pytest -p no:xdist $(SANITIZED)

clean:  # removes .venv and what was built
	rm -rf .venv build dist src/*.egg-info .mypy_cache .ruff_cache .hypothesis

.venv/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	@$(PYTHON) -m venv .venv
	@touch $@

$(SMALL): .venv/python pyproject.toml constraints.txt
	@echo "Installing Ostinato$(if $(NVIDIA), and what an NVIDIA GPU needs) into .venv." >&2
	@$(PIP) --editable '.$(if $(NVIDIA),[gpu])' >&2
	@$(if $(COMPILER),,$(PIP) ziglang >/dev/null 2>&1 || { echo "There is no C++ compiler here, and ziglang, which has \
	one, could not be installed from PyPI: install g++ or clang, then try again." >&2; exit 2; })
	@touch $@

.venv/nvcc: .venv/python
	$(PIP) --target $@ 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-nvvm==13.0.*' \
	  'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime-cu12==12.9.*'

# It needs no package; where it fails, the first answer says why.
.venv/compiled: $(wildcard src/ostinato/backends/native/src/* src/ostinato/loop/*.h)
	@PYTHONPATH=src $(PYTHON) $(COMPILE) 1>&2 2>/dev/null || true
	@mkdir -p .venv && touch $@

$(SERVE): $(SMALL)
	@echo "Installing what the server needs into .venv." >&2
	@$(PIP) --editable '.[serve]' >&2
	@touch $@

$(DEV): $(SERVE)
	@echo "Installing what the tests need into .venv; this takes a minute or more." >&2
	@$(PIP) --editable '.[torch,scale,dev]' >&2
	@touch $@
