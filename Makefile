# The two commands of the README and what they need.  Python 3.11 or newer; everything lands in .venv.

PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin

.PHONY: serve test check test-numa versions clients lint clean install-system

serve: $(VENV)/.installed
	$(BIN)/python -m epdd

test: $(VENV)/.installed-test
	$(MAKE) check

check: lint
	$(BIN)/python -m pytest

# In an emulated machine with NUMA nodes that this one does not have; needs qemu-system-x86 and cpio.
test-numa: $(VENV)/.installed-test
	$(BIN)/python -m pytest -rs tests/system/test_numa.py

# With the oldest and the newest transformers that setup.cfg allows, into build/versions.
versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions

# What tests/clients run: other people's clients, 2 GB of them, into build/clients or EPDD_CLIENTS.  Without them
# those tests are skipped.
clients: $(VENV)/.installed-test
	$(BIN)/python -m tests.clients.venvs

lint: $(VENV)/.installed-test
	$(BIN)/flake8 epdd tests tools
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/audit.py

# constraints.txt holds the versions that were tested together; setup.cfg holds what may work.
$(VENV)/.installed: setup.cfg setup.py $(wildcard epdd/worker/native/*.cpp epdd/worker/native/*.h) constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .[test]
	touch $@

# As root: the daemon under systemd, from a venv that every user can read.
install-system:
	test -x /opt/epdd/venv/bin/python || $(PYTHON) -m venv /opt/epdd/venv
	/opt/epdd/venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt .
	install -Dm644 systemd/epdd.service /etc/systemd/system/epdd.service
	test -e /etc/epdd/epdd.toml || install -Dm644 etc/epdd.toml /etc/epdd/epdd.toml
	install -Dm644 etc/completion.bash /usr/share/bash-completion/completions/epdctl
	ln -sf /opt/epdd/venv/bin/epdctl /usr/local/bin/epdctl
	systemctl daemon-reload

clean:
	rm -rf $(VENV) build *.egg-info
