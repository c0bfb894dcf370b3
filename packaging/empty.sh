# When an rpm goes: folders of setup.sh and of the package's files in which nothing is left. Istio's own package, which may
# have taken over, has some of the same.

if [ ! -e /usr/local/bin/istio-start.sh ]; then
    for dir in /var/lib/istio/envoy /var/lib/istio/proxy /var/lib/istio/config /var/lib/istio/data /var/lib/istio \
        /etc/istio/envoy /etc/istio/proxy /etc/istio/config /etc/istio /etc/certs /var/log/istio \
        /usr/share/pilot-agent /usr/share/licenses/pilot-agent /usr/share/doc/pilot-agent; do
        [ -L "$dir" ] || [ ! -d "$dir" ] || rmdir "$dir" 2>/dev/null || true
    done
fi
