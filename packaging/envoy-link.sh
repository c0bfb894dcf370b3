# After Envoy's package is in place: where Istio's scripts and the agent look for it. One that is there stays.
if [ ! -e /usr/local/bin/envoy ] && [ ! -L /usr/local/bin/envoy ]; then
    mkdir -p /usr/local/bin
    ln -s /usr/bin/envoy /usr/local/bin/envoy
fi
