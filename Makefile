# The commands of README.md.  Needs Python 3.11 or newer; everything is installed into .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: help serve test check test-numa versions clients lint docs site reference clean install-system

help:
	@echo "make serve           set up $(VENV) and serve the demo model at http://127.0.0.1:8765"
	@echo "make test            set up $(VENV) for tests; flake8, mypy, import-linter and pytest"
	@echo "make check, lint     the same in an existing environment; lint without pytest"
	@echo "make docs            set up $(VENV), build the documentation and show it at http://127.0.0.1:8000"
	@echo "make site            build the documentation into build/site, with warnings as errors"
	@echo "make reference       make docs/reference from the code"
	@echo "make test-numa       test the service on an emulated machine of five NUMA nodes (QEMU)"
	@echo "make versions        test with the oldest and the newest transformers"
	@echo "make clients         install the clients that tests/clients runs (2 GB)"
	@echo "make install-system  as root: install the daemon under systemd"
	@echo "make clean           remove $(VENV) and build"

serve: $(VENV)/.installed
	$(BIN)/python -m epdd

test: $(VENV)/.installed-test
	$(MAKE) check

# Processes that share the tests: more than the cores, since most tests wait.  0: this process alone.
TESTERS ?= 4
check: lint
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

# Needs qemu-system-x86 and cpio.
test-numa: $(VENV)/.installed-test
	$(BIN)/python -m pytest -rs tests/system/test_numa.py

# The oldest and the newest transformers that setup.cfg allows are installed into build/versions.
versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.project.versions

# Into build/clients or EPDD_CLIENTS.  Without them tests/clients are skipped.
clients: $(VENV)/.installed-test
	$(BIN)/python -m tests.clients.venvs

lint: $(VENV)/.installed-test site
	$(BIN)/flake8 epdd tests tools docs
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.audit

docs: site
	@echo "the documentation is at http://127.0.0.1:8000"
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8000

site: $(VENV)/.installed-test
	$(BIN)/python -m tools.reference --check
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/site-cache docs build/site

reference: $(VENV)/.installed-test
	$(BIN)/python -m tools.reference

# Kernels are compiled at installation: if a compiler appears later, the installation is repeated.
COMPILER := $(firstword $(foreach name,g++ c++,$(shell command -v $(name))))
ifneq ($(COMPILER),)
AGAIN := $(shell test -s $(VENV)/.installed && ! grep -q . $(VENV)/.installed && echo FORCE)
endif
.PHONY: FORCE

# constraints.txt holds the versions that were tested together; setup.cfg holds what may work.
$(VENV)/.installed: setup.cfg setup.py $(wildcard epdd/worker/kernels/source/*.* epdd/worker/kernels/source/*/*) constraints.txt $(AGAIN)
	@tools/venv.sh $(VENV) $(PYTHON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@echo "$(COMPILER)" >$@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[test,docs]
	touch $@

# As root: the daemon under systemd, from a venv that every user can read.
install-system:
	tools/venv.sh /opt/epdd/venv $(PYTHON)
	/opt/epdd/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt .
	install -Dm644 systemd/epdd.service /etc/systemd/system/epdd.service
	test -e /etc/epdd/epdd.toml || install -Dm644 etc/epdd.toml /etc/epdd/epdd.toml
	install -Dm644 etc/completion.bash /usr/share/bash-completion/completions/epdctl
	ln -sf epdctl /usr/share/bash-completion/completions/epdd
	ln -sf /opt/epdd/venv/bin/epdctl /opt/epdd/venv/bin/epdd /usr/local/bin/
	systemctl daemon-reload

clean:
	rm -rf $(VENV) build *.egg-info
