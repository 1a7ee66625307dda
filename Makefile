# What the README tells to type, and what that needs.  Python 3.11 or newer; everything lands in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: help serve test check test-numa versions clients lint docs site reference clean install-system

help:
	@echo "make serve           set up $(VENV) and serve the demo model at http://127.0.0.1:8765"
	@echo "make test            set up $(VENV) for tests; flake8, mypy, import-linter and pytest"
	@echo "make check, lint     the same in an environment that is there; lint without pytest"
	@echo "make docs            set up $(VENV), build the documentation and show it at http://127.0.0.1:8000"
	@echo "make site            the documentation into build/site, with warnings as errors"
	@echo "make reference       docs/reference anew, from the code"
	@echo "make test-numa       the service on an emulated machine of five NUMA nodes (QEMU)"
	@echo "make versions        the oldest and the newest transformers"
	@echo "make clients         what tests/clients runs: other people's clients, 2 GB"
	@echo "make install-system  as root: the daemon under systemd"
	@echo "make clean           remove $(VENV) and build"

serve: $(VENV)/.installed
	$(BIN)/python -m epdd

test: $(VENV)/.installed-test
	$(MAKE) check

# So many processes share the tests: more than two cores, since most tests wait.  0: this process alone.
TESTERS ?= 4
check: lint
	$(BIN)/python -m pytest -n $(TESTERS) --dist loadfile --no-loadscope-reorder

# In an emulated machine with NUMA nodes that this one does not have; needs qemu-system-x86 and cpio.
test-numa: $(VENV)/.installed-test
	$(BIN)/python -m pytest -rs tests/system/test_numa.py

# With the oldest and the newest transformers that setup.cfg allows, into build/versions.
versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.project.versions

# What tests/clients run: other people's clients, 2 GB of them, into build/clients or EPDD_CLIENTS.  Without them
# those tests are skipped.
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

# Kernels are compiled at the installation: it is done again once there is a compiler that was not there then.
COMPILER := $(firstword $(foreach name,g++ c++,$(shell command -v $(name))))
ifneq ($(COMPILER),)
AGAIN := $(shell test -s $(VENV)/.installed && ! grep -q . $(VENV)/.installed && echo FORCE)
endif
.PHONY: FORCE

# constraints.txt holds the versions that were tested together; setup.cfg holds what may work.
$(VENV)/.installed: setup.cfg setup.py $(wildcard epdd/worker/kernels/source/*.* epdd/worker/kernels/source/isa/*) constraints.txt $(AGAIN)
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
