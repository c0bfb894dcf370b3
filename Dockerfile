# syntax=docker/dockerfile:1
# The same images as `make image`, for machines that have a daemon: user 1337, working directory /, agent and Envoy in
# /usr/local/bin.
#   docker build --build-arg REVISION=$(git rev-parse HEAD) -t pilot-agent .
#   docker build --target debug -t pilot-agent:debug .
#   docker build --target distroless -t pilot-agent:distroless .
# Envoy comes from Istio's own image, because a stock Envoy does not know Istio's extensions. With another one
# (--build-arg ENVOY_IMAGE=docker.io/envoyproxy/envoy:v1.40-latest) istiod must not send them: set
# PILOT_ENABLE_METADATA_EXCHANGE=false and PILOT_ENABLE_ALPN_FILTER=false on it, and no metrics providers.
# The three images are named by tag here, and what a tag means may change (scripts/pin-images --check says which are).
# scripts/pin-images writes their digests of the day into this file, where their registries can be asked; `make release`
# does so into dist/Dockerfile: docker build -f dist/Dockerfile .
# --build-arg PROXY_SHA=<what `envoy --version` names> becomes ISTIO_META_ISTIO_PROXY_SHA, as `make image` reads it itself.

ARG RUST_IMAGE=docker.io/library/rust:1.95-bookworm
ARG BASE_IMAGE=docker.io/library/debian:bookworm-slim
# Envoy and agent of one release: the one that the agent names to istiod by default (its variable ISTIO_VERSION). For a
# mesh of 1.30: --build-arg ENVOY_IMAGE=docker.io/istio/proxyv2:1.30.3, and ISTIO_COMPAT_VERSION=1.30 in the pods.
ARG ENVOY_IMAGE=docker.io/istio/proxyv2:1.31.0
# The agent's own; what Cargo.toml says, or the build ends.
ARG VERSION=0.1.0

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY . .
ARG REVISION=unknown
ARG VERSION
ENV PILOT_AGENT_REVISION=${REVISION}
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --release --locked -p pilot-agent && cp target/release/pilot-agent /pilot-agent
# What the licences ask for: their texts go with the binaries.
RUN --mount=type=cache,target=/usr/local/cargo/registry \
    apt-get update && apt-get install -y --no-install-recommends python3 && install -d /doc/pilot-agent /doc/envoy \
 && cp LICENSE NOTICE /doc/pilot-agent/ && scripts/licences >/doc/pilot-agent/third-party-licences.txt \
 && cp LICENSE /doc/envoy/ && cp packaging/envoy-copyright /doc/envoy/copyright \
 && sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml | grep -x "${VERSION}"

FROM ${ENVOY_IMAGE} AS envoy

FROM ${BASE_IMAGE} AS base
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates iptables nftables iproute2 \
 && rm -rf /var/lib/apt/lists/* \
 && update-alternatives --set iptables /usr/sbin/iptables-legacy \
 && update-alternatives --set ip6tables /usr/sbin/ip6tables-legacy \
 && groupadd --gid 1337 istio-proxy && useradd --uid 1337 --gid 1337 --no-create-home --shell /usr/sbin/nologin istio-proxy \
 && install -d -o 1337 -g 1337 -m 0755 /etc/istio/proxy /etc/istio/config /var/lib/istio/envoy /var/lib/istio/data \
      /var/run/secrets/workload-spiffe-uds /var/run/secrets/credential-uds /var/run/secrets/workload-spiffe-credentials \
      /var/run/secrets/tokens /var/run/secrets/istio
COPY --from=envoy /usr/local/bin/envoy /usr/local/bin/envoy
COPY --from=build /pilot-agent /usr/local/bin/pilot-agent
COPY --from=build /doc/ /usr/share/doc/
ARG BASE_IMAGE
ARG VERSION
ARG REVISION=unknown
ARG PROXY_SHA=unknown
ENV ISTIO_META_ISTIO_PROXY_SHA=${PROXY_SHA}
LABEL org.opencontainers.image.title="pilot-agent" \
      org.opencontainers.image.description="pilot-agent and Envoy in the shape of istio/proxyv2" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
WORKDIR /
ENTRYPOINT ["/usr/local/bin/pilot-agent"]

FROM base AS debug
RUN apt-get update \
 && apt-get install -y --no-install-recommends curl iputils-ping knot-dnsutils netcat-openbsd tcpdump conntrack \
      net-tools lsof sudo procps \
 && rm -rf /var/lib/apt/lists/* \
 && echo 'istio-proxy ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/istio-proxy && chmod 440 /etc/sudoers.d/istio-proxy
USER 1337:1337

# Packages are unpacked and never configured: no shell, no package manager.
FROM ${BASE_IMAGE} AS unpacked
WORKDIR /packages
RUN apt-get update && mkdir -p /from /trust /out \
 && apt-get download $(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
      --no-enhances libc6 libgcc-s1 iptables nftables | grep '^[a-z]' | sort -u) \
 && for package in *.deb; do dpkg-deb -x "$package" /from || exit 1; done && rm -f *.deb \
 && apt-get download ca-certificates && dpkg-deb -x ca-certificates_*.deb /trust
COPY scripts/distroless-root /usr/local/sbin/distroless-root
RUN distroless-root /from /trust /out "$(uname -m)" \
 && install -d -o 1337 -g 1337 -m 0755 /out/etc/istio/proxy /out/etc/istio/config /out/var/lib/istio/envoy /out/var/lib/istio/data \
      /out/run/secrets/workload-spiffe-uds /out/run/secrets/credential-uds /out/run/secrets/workload-spiffe-credentials \
      /out/run/secrets/tokens /out/run/secrets/istio \
 && install -d /out/usr/local/bin && ln -s /run /out/var/run

FROM scratch AS distroless
COPY --from=unpacked /out/ /
COPY --from=envoy /usr/local/bin/envoy /usr/local/bin/envoy
COPY --from=build /pilot-agent /usr/local/bin/pilot-agent
COPY --from=build /doc/ /usr/share/doc/
ARG BASE_IMAGE
ARG VERSION
ARG REVISION=unknown
ARG PROXY_SHA=unknown
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin ISTIO_META_ISTIO_PROXY_SHA=${PROXY_SHA}
LABEL org.opencontainers.image.title="pilot-agent" \
      org.opencontainers.image.description="pilot-agent and Envoy in the shape of istio/proxyv2" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
WORKDIR /
USER 1337:1337
ENTRYPOINT ["/usr/local/bin/pilot-agent"]

FROM base
USER 1337:1337
