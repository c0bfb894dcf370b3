# Everything that the agent wrote; the user stays, as Debian does it, so that no file changes its owner. Istio's own
# package, which may have taken over, has its files in the same places: then nothing goes.

if [ ! -e /usr/local/bin/istio-start.sh ]; then
    # Key and certificates of this machine. First, because a folder that is a mount of its own stays, emptied.
    rm -f /etc/certs/key.pem /etc/certs/cert-chain.pem /etc/certs/root-cert.pem
    rm -rf /var/lib/istio /var/log/istio || true
    [ ! -d /etc/certs ] || rmdir /etc/certs 2>/dev/null || true
    # The link of Istio's package, which that one leaves behind, leads nowhere now.
    if [ "$(readlink /etc/istio 2>/dev/null)" = /var/lib/istio ]; then rm -f /etc/istio; fi
    [ -L /etc/istio ] || rm -rf /etc/istio/proxy /etc/istio/config || true
    for dir in /etc/istio/envoy /etc/istio; do
        [ -L "$dir" ] || rmdir "$dir" 2>/dev/null || true
    done
fi
