# What a person types. CMake does the work: see CMakePresets.json for the other builds (PRESET=debug, asan, tsan, ci).
.DEFAULT_GOAL := help
.PHONY: help setup configure build program train test test-all test-torch test-fresh bench bench-smoke check format install clean

PRESET ?= release
PREFIX ?= /usr/local
TRAIN_FLAGS ?=
# With 2 a file of tests that failed is run once more, and named when it passes then.
TRIES ?= 1
# A compiler process takes up to 2 GB, most of it precompiled headers.
JOBS ?= $(shell awk -v cpus=$$(nproc) '/^MemAvailable/ {j = int($$2 / 2097152); print j < 1 ? 1 : (j < cpus ? j : cpus)}' /proc/meminfo)
# With 2.15.0 another torch than the oldest of scripts/torch-versions.txt, in an environment and a build of its own.
TORCH ?=
export TORCH
BUILD := build/$(PRESET)$(TORCH:%=-torch-%)
OTHER_TORCHES = $(shell sed -n '1,/^[0-9]/ d; /^[0-9]/ p' scripts/torch-versions.txt)
VENV := $(CURDIR)/.venv/bin
CTEST = $(VENV)/ctest --test-dir $(BUILD) --output-on-failure --no-tests=error -j $(JOBS) --repeat until-pass:$(TRIES)
export PATH := $(VENV):$(PATH)

help: ## show this
	@echo "Trireme. The first command installs what is missing and builds; later ones work offline."
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## install what is missing (scripts/setup says how to choose compiler, Python and torch)
	@scripts/setup

configure: setup
	@PRESET=$(PRESET) scripts/build --configure-only

build: setup ## build everything: library, program, tests, benchmarks
	@PRESET=$(PRESET) JOBS=$(JOBS) scripts/build

program: setup
	@PRESET=$(PRESET) JOBS=$(JOBS) scripts/build trireme_program

train: program ## train a Llama with ZeRO-3 on two ranks, on Python sources (TRAIN_FLAGS="--steps 1000")
	@PRESET=$(PRESET) scripts/train $(TRAIN_FLAGS)

test: build ## build, then run the fast tests
	@echo "Running the fast tests."
	@$(CTEST) -LE slow
	@tools/count_tests $(BUILD)

test-all: build ## build, then run all tests
	@echo "Running all tests."
	@$(CTEST)
	@tools/count_tests $(BUILD)

test-torch: ## run the fast tests on the other versions of scripts/torch-versions.txt
	@for torch in $(OTHER_TORCHES); do $(MAKE) --no-print-directory test TORCH=$$torch || exit; done

test-fresh: ## try the README's commands on fresh systems: Debian 12, Ubuntu 22.04 and newer (root; an hour and more)
	@scripts/test-fresh $(FRESH)

bench: build ## run all benchmarks (tools/bench NAME runs one)
	@tools/bench --build $(BUILD)

bench-smoke: build ## run every benchmark briefly, to see that it works
	@tools/bench --build $(BUILD) --smoke

check: setup ## levels, cycles of rooms, figures that may not grow, words and format; reports of sizes and concepts
	@tools/check_budgets
	@tools/count_concepts --check
	@tools/check_layers
	@tools/check_words
	@tools/check_format

format: setup ## apply clang-format, and break prose before column 120
	@tools/check_format --apply

install: program ## install headers, libtrireme.so, the program and the CMake package (PREFIX=/usr/local)
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean: ## remove the builds, not .venv
	rm -rf build
