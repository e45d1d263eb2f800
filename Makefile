# Everything works on a machine that has Python, pip and make: the first target that needs it builds .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
WORKERS ?= 4
# Compiled modules are kept, whatever the environment says: hundreds of processes start here, and each would compile all of stretto.
export PYTHONDONTWRITEBYTECODE :=

# The tests that $(1) selects: most of them side by side in processes of pytest-xdist, a file at a time, in the order of
# tests/conftest.py; then, one by one, those that measure seconds or the machine. The second half runs whatever became of the first;
# the last line and the exit status are of both. Longer than $(2) seconds is said, but no failure: the machine may be busy.
define run_tests
@first=0; second=0; began=$$(date +%s); \
echo "== 1 of 2: tests that may run side by side =="; \
$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "$(1)not alone" || first=$$?; \
middle=$$(date +%s); \
echo "== 2 of 2: tests that run alone =="; \
$(BIN)/python -m pytest -m "$(1)alone" `grep -rl --include='test_*.py' mark.alone tests` || second=$$?; \
if [ $$second -eq 5 ]; then echo "there are none"; second=0; fi; \
ended=$$(date +%s); \
echo "== took $$((middle - began)) s and $$((ended - middle)) s =="; \
if [ $$((ended - began)) -gt $(2) ]; then echo "== WARNING: more than $(2) s. CONTRIBUTING.md says where seconds go =="; fi; \
if [ $$first -ne 0 ]; then echo "== FAILED: 1 of 2, the tests that may run side by side (their summary is above the second half) =="; fi; \
if [ $$second -ne 0 ]; then echo "== FAILED: 2 of 2, the tests that run alone =="; fi; \
if [ $$first -ne 0 ]; then exit $$first; elif [ $$second -ne 0 ]; then exit $$second; fi; \
echo "== passed: both halves =="
endef

.PHONY: demo test test-slow test-all bench lint clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@echo "compiling the kernels of the codecs, once: otherwise every process of the tests would"
	-$(BIN)/python -m pytest -q tests/laws/test_lossy.py -m "not slow" -k "law_3 and all_to_all" > /dev/null
	touch $(READY)

demo: $(READY)
	$(BIN)/python examples/train_demo.py

test: $(READY)
	$(call run_tests,not slow and ,360)

test-slow: $(READY)
	$(call run_tests,slow and ,1020)

test-all: $(READY) lint
	$(call run_tests,,1500)

bench: $(READY)
	$(BIN)/python benchmarks/all_reduce.py

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs
	$(BIN)/mypy src tests

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
