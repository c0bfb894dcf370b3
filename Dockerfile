# In the shape of istio/proxyv2: user 1337, working directory /, agent and Envoy in /usr/local/bin.
# Build with an Envoy of your choice beside it:
#   docker build --build-arg ENVOY_IMAGE=docker.io/envoyproxy/envoy:v1.40-latest -t pilot-agent .

ARG ENVOY_IMAGE=docker.io/istio/proxyv2:1.30.3
FROM docker.io/library/rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked -p pilot-agent

FROM ${ENVOY_IMAGE} AS envoy

FROM docker.io/library/debian:bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates iptables nftables iproute2 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1337 istio-proxy && useradd --uid 1337 --gid 1337 --no-create-home istio-proxy \
 && install -d -o 1337 -g 1337 -m 0755 /etc/istio/proxy /var/lib/istio/envoy /var/run/secrets
COPY --from=envoy /usr/local/bin/envoy /usr/local/bin/envoy
COPY --from=build /src/target/release/pilot-agent /usr/local/bin/pilot-agent
WORKDIR /
USER 1337:1337
ENTRYPOINT ["/usr/local/bin/pilot-agent"]
