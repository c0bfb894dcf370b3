# After Envoy's package is in place: where Istio's scripts and the agent look for it. One that is there stays, but the agent's
# package takes its own link with it (it is the relative one), and this package stays.
link=/usr/local/bin/envoy
if [ "$(readlink "$link" 2>/dev/null)" = ../../bin/envoy ]; then rm -f "$link"; fi
if [ ! -e "$link" ] && [ ! -L "$link" ]; then
    mkdir -p /usr/local/bin
    ln -s /usr/bin/envoy "$link"
fi
