# The commands people and CI run. What they need beyond Rust, a C compiler, make and Python 3 they fetch themselves;
# what they cannot, scripts/check-machine names before anything is built.

# Where cargo builds.
BUILT      := $(or $(CARGO_TARGET_DIR),target)
AGENT      ?= $(BUILT)/release/pilot-agent
DENY_VER   := 0.20.2
# Where fetched tools and Envoy go.
PA_TOOLS   ?= $(CURDIR)/.tools
PA_ENVOY   ?= $(CURDIR)/.envoy
export PA_TOOLS PA_ENVOY
TOOLS      := $(PA_TOOLS)
DENY       := $(shell command -v cargo-deny 2>/dev/null || echo $(TOOLS)/bin/cargo-deny)

# A gate gives the same commit the same answer, so property tests draw the same cases each time; another seed
# searches further (PROPTEST_RNG_SEED=7 make test), and fuzz-smoke does so without end.
export PROPTEST_RNG_SEED ?= 20261121

# One after the other: built together, the agent would get every library feature that only the double needs.
RELEASE := export $$(scripts/revision) && cargo build --release --locked -p pilot-agent && cargo build --release --locked -p mock-istiod

.PHONY: release-fips demo test test-page lint check-lint bare-machine dist packages image test-packages test-image reproducible release conformance record bench numbers herd scale seccomp soak attack faults fuzz-check fuzz-smoke envoy-matrix docs descriptors clean help

# Targets share dist/, what cargo builds and the machine: with -j4 two of them would build one binary at once.
.NOTPARALLEL:

# Run first by each target that builds or fetches something.
CHECK = @scripts/check-machine $@
# Before the minutes that a build takes: where no Envoy can be had, that is told at once.
ENVOY_FIRST = @scripts/get-envoy >/dev/null
PINNED_FIRST = @scripts/get-envoy pinned >/dev/null
# What is made of dist/ takes the binary that is there, and makes it when there is none.
DIST_BINARY = @ls dist/pilot-agent-*-linux-$$(uname -m) >/dev/null 2>&1 || scripts/dist

# In Turkish, for one, i is no letter from a to z.
help:  ## list the targets
	@LC_ALL=C grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# In a folder of its own, so that it never passes for the other one.
release-fips:  ## the agent with the crypto library's FIPS module (needs cmake, Go and Perl): target/fips/release/pilot-agent
	$(CHECK)
	export $$(scripts/revision) && cargo build --release --locked -p pilot-agent --features fips --target-dir "$(BUILT)/fips"
	@"$(BUILT)/fips/release/pilot-agent" --version

demo:  ## two real Envoys, two agents, mutual TLS, rotation under traffic (about 30 s after the build)
	$(CHECK)
	$(ENVOY_FIRST)
	$(RELEASE)
	@envoy=$$(scripts/get-envoy) && "$(BUILT)/release/demo" --agent "$(AGENT)" --envoy "$$envoy"

test:  ## every test; gets Envoy the way the demo does
	$(CHECK)
	@scripts/get-netfilter
	@envoy=$$(scripts/get-envoy) && promtool=$$(scripts/get-promtool) && \
	  ENVOY_BIN="$$envoy" PROMTOOL="$$promtool" scripts/run-tests --locked --workspace

lint: check-lint  ## format, clippy, dependency policy, documentation
	@# Unoptimised: its build takes longer than its work.
	@test -x "$(DENY)" || cargo install --locked --debug --root "$(TOOLS)" --version $(DENY_VER) cargo-deny
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	@# As released, without src/testing.rs: what only tests use is dead code there.
	cargo clippy --locked -p pilot-agent --lib --bins --config 'profile.dev.package.pilot-agent.debug-assertions=false' -- -D warnings
	"$(DENY)" --log-level error check bans licenses sources
	@scripts/check-advisories "$(DENY)"
	RUSTDOCFLAGS="-D warnings" cargo doc --locked --workspace --no-deps --document-private-items
	@$(MAKE) --no-print-directory fuzz-check

check-lint:
	@scripts/check-machine lint

bare-machine:  ## demo and test in a Debian with just what README.md names, as root and as a plain user (an hour)
	$(CHECK)
	scripts/bare-machine

conformance:  ## replay what the Go agent did against AGENT (default: the debug build); ends with `N of M equal`
	$(CHECK)
	@scripts/get-netfilter
	$(if $(filter file,$(origin AGENT)),cargo build --locked -p pilot-agent)
	@conformance/all "$(if $(filter file,$(origin AGENT)),$(BUILT)/debug/pilot-agent,$(AGENT))" $(SUITES) -- $(if $(ONLY),--only "$(ONLY)")

record:  ## make the recordings anew from a Go agent: PEER_AGENT=<binary> [SUITES=...] [ONLY=<text>]
	$(CHECK)
	@scripts/get-netfilter
	@test -n "$(PEER_AGENT)" || { echo "record: name a Go agent with PEER_AGENT=<binary>" >&2; exit 1; }
	@conformance/all "$(PEER_AGENT)" $(SUITES) -- --record $(if $(ONLY),--only "$(ONLY)")
	@git diff --stat -- conformance

dist:  ## everything that is released, into dist/: portable binaries, packages, images, man pages, SBOM, checksums
	$(CHECK)
	$(PINNED_FIRST)
	scripts/dist
	scripts/packages
	@if [ "$$(id -u)" = 0 ] && command -v mmdebstrap >/dev/null; then scripts/image; else echo "dist: images are left out: they need root and mmdebstrap"; fi

packages:  ## deb and rpm, into dist/
	$(CHECK)
	$(PINNED_FIRST)
	$(DIST_BINARY)
	scripts/packages

image:  ## OCI archives (default, -debug, -distroless), into dist/; no daemon, no registry
	$(CHECK)
	@scripts/get-envoy $$(uname -m) >/dev/null
	$(DIST_BINARY)
	scripts/image

test-packages:  ## the packages in dist/ in fresh root file systems; lintian (root)
	$(CHECK)
	scripts/test-packages

test-image:  ## the images in dist/, run as the injection template does (root)
	$(CHECK)
	@ls dist/*.oci.tar >/dev/null 2>&1 || { echo "test-image: there are no images in dist/: make image first" >&2; exit 1; }
	cargo build --locked -p mock-istiod
	for archive in dist/*.oci.tar; do scripts/test-image "$$archive" "$(BUILT)/debug/mock-istiod" || exit 1; done

reproducible:  ## the released binary built again in another folder: the same bytes?
	$(CHECK)
	scripts/check-reproducible

release:  ## everything above, tested, in a dist/ that can be uploaded: make release VERSION=x.y.z
	$(CHECK)
	scripts/release "$(VERSION)"

bench:  ## sizes, start times, memory, relay: a table; PEER_AGENT=<path> compares another agent
	$(CHECK)
	$(ENVOY_FIRST)
	$(RELEASE)
	@envoy=$$(scripts/get-envoy) && "$(BUILT)/release/bench" --agent "$(AGENT)" --envoy "$$envoy" $(if $(PEER_AGENT),--peer "$(PEER_AGENT)")

numbers:  ## docs/NUMBERS.md and its charts from a run of the bench on this machine; PEER_AGENT=<path> beside another agent
	$(CHECK)
	$(ENVOY_FIRST)
	$(RELEASE)
	@envoy=$$(scripts/get-envoy) && scripts/numbers --bench "$(BUILT)/release/bench" --agent "$(AGENT)" --envoy "$$envoy" $(if $(PEER_AGENT),--peer "$(PEER_AGENT)")

herd:  ## istiod is taken from 200 real agents, several times: benches/herd.json, which `make scale` compares its model with (5 minutes)
	$(CHECK)
	$(RELEASE)
	"$(BUILT)/release/bench" --agent "$(AGENT)" --only herd --json benches/herd.json

scale:  ## simulate herds of 1,000 to 100,000 agents; writes docs/SCALE.md
	$(CHECK)
	cargo bench --locked --profile dev --bench herd -- "$(CURDIR)/docs" "$(CURDIR)/benches/herd.json"

test-page:  ## /debug/ in a real Chromium (of its own: no other test needs one, and it is 400 MB); PICTURES=<folder> keeps what it saw
	$(CHECK)
	BROWSER=required cargo test --locked --test conformance page::

seccomp:  ## the demo with agents and Envoys under deploy/seccomp.json (needs libseccomp2)
	$(CHECK)
	$(ENVOY_FIRST)
	$(RELEASE)
	scripts/test-seccomp "$(AGENT)" "$(BUILT)/release/demo"

soak:  ## HOURS=8 of everyday trouble (default 20 minutes; root): samples, a plot, a verdict, in ./soak
	$(CHECK)
	$(ENVOY_FIRST)
	$(RELEASE)
	@envoy=$$(scripts/get-envoy) && python3 -m tests.soak --agent "$(AGENT)" --istiod "$(BUILT)/release/mock-istiod" --envoy "$$envoy" \
	  --minutes $$(python3 -c "print($(if $(HOURS),60*$(HOURS),20))")

attack:  ## floods and hostile neighbours, a line each (root); SHORT=1: the debug build, seconds each; PEER_AGENT=<path> beside another agent
	$(CHECK)
	$(if $(SHORT),cargo build --locked --workspace,$(RELEASE))
	python3 -m tests.attack --agent "$(if $(SHORT),$(BUILT)/debug/pilot-agent,$(AGENT))" --istiod "$(BUILT)/$(if $(SHORT),debug,release)/mock-istiod" $(if $(SHORT),--short) $(if $(ONLY),--only "$(ONLY)") $(if $(PEER_AGENT),--peer "$(PEER_AGENT)")

faults:  ## every file, socket and process call of a day fails once (10 minutes); ONLY=<text> chooses
	$(CHECK)
	cargo build --locked --workspace
	python3 -m tests.faults --agent "$(BUILT)/debug/pilot-agent" --istiod "$(BUILT)/debug/mock-istiod" $(if $(ONLY),--only "$(ONLY)")

# Nothing is linked, so libFuzzer need not be there.
fuzz-check:  ## whether every fuzz target compiles
	$(CHECK)
	CUSTOM_LIBFUZZER_PATH="$(CURDIR)/libfuzzer.a" cargo check --locked --manifest-path fuzz/Cargo.toml --target-dir "$(BUILT)"

fuzz-smoke:  ## each fuzz target for a few seconds, FUZZ_SECONDS=600 for longer (needs a C++ compiler)
	$(CHECK)
	scripts/fuzz-smoke

envoy-matrix:  ## the oldest and the newest supported Envoy judge the bootstraps we write (VERSIONS= for others)
	$(CHECK)
	cargo build --locked -q
	scripts/envoy-matrix "$(BUILT)/debug/pilot-agent" $(or $(VERSIONS),1.36.4 newest)

docs:  ## regenerate docs/CONFIG.md and docs/OPERATIONS.md from the tables in src/config and src/trouble
	$(CHECK)
	UPDATE_DOCS=1 cargo test --locked --lib _md_is_current

descriptors:  ## compile mock-istiod's protobuf descriptors anew (after a change of the crate envoy-types or of mock-istiod/proto)
	$(CHECK)
	@touch mock-istiod/proto/descriptors.bin
	UPDATE_DESCRIPTORS=1 cargo test --locked -p mock-istiod --test descriptors

# In this folder only: one that PA_TOOLS or PA_ENVOY names may have more in it, and others may use it.
clean:  ## take away what was built and fetched in this folder: target, fuzz/target, dist, .envoy, .tools
	rm -rf target fuzz/target dist .envoy .tools
