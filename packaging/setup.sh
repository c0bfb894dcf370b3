# What both kinds of package do after their files are in place. No output unless something is wrong.

getent group istio-proxy >/dev/null || groupadd --system istio-proxy
getent passwd istio-proxy >/dev/null ||
    useradd --system --gid istio-proxy --home-dir /var/lib/istio --no-create-home \
        --shell /usr/sbin/nologin --comment "Istio sidecar" istio-proxy

# Istio's own package makes /etc/istio a link to /var/lib/istio: both ways work.
for dir in /var/lib/istio /var/lib/istio/envoy /var/lib/istio/proxy /var/lib/istio/config /var/lib/istio/data \
    /etc/istio/proxy /etc/istio/config /etc/certs /var/log/istio; do
    [ -d "$dir" ] || install -d -m 0755 "$dir"
    # What is inside /var/lib/istio is the proxy's to rename: a link there could lead to any folder, and is not followed.
    case $dir in
        /var/lib/istio/* | /etc/istio/*) link=-h owner=$(stat -c %U "$dir") ;;
        *) link= owner=$(stat -L -c %U "$dir") ;;
    esac
    # Of a user who is somebody, and not root: the agent runs as that one here (EXEC_USER).
    case $owner in
        root | UNKNOWN) chown $link istio-proxy:istio-proxy "$dir" ;;
    esac
done

# Where scripts look for the two files and for the binary.
for name in sidecar.env cluster.env; do
    link=/var/lib/istio/envoy/$name
    # Where /etc/istio leads to /var/lib/istio a link would lead to itself, and one of an earlier version does.
    if [ /etc/istio/envoy -ef /var/lib/istio/envoy ]; then
        if [ -L "$link" ] && [ ! -e "$link" ]; then rm -f "$link"; fi
    elif [ ! -e "$link" ] && [ ! -L "$link" ]; then ln -s "/etc/istio/envoy/$name" "$link"; fi
done
if [ ! -e /usr/local/bin/pilot-agent ] && [ ! -L /usr/local/bin/pilot-agent ]; then
    mkdir -p /usr/local/bin
    ln -s /usr/bin/pilot-agent /usr/local/bin/pilot-agent
fi
# The unit of Istio's package is /lib/systemd/system/istio.service: where /lib is a link that is the same file, and it
# goes with that package.
if [ ! -e /usr/lib/systemd/system/istio.service ]; then
    cp -p /usr/share/pilot-agent/istio.service /usr/lib/systemd/system/istio.service
fi
# What somebody has put there by hand is used in place of ours, by the PATH's order and by systemd's.
for place in /usr/local/bin/pilot-agent /etc/systemd/system/istio.service; do
    if [ -f "$place" ] && [ ! -L "$place" ]; then
        echo "pilot-agent: $place goes before what this package has: remove it, unless it is meant" >&2
    fi
done
# Of an Envoy that another package has in /usr/bin nobody but this one makes the link; and Istio's package, which came and
# went, took with it the one that ours had made. It is a relative one, by which takedown.sh knows it.
if [ -x /usr/bin/envoy ] && [ ! -e /usr/local/bin/envoy ] && [ ! -L /usr/local/bin/envoy ]; then
    ln -s ../../bin/envoy /usr/local/bin/envoy
fi
if [ ! -x /usr/local/bin/envoy ]; then
    echo "pilot-agent: there is no Envoy in /usr/local/bin/envoy: install the package envoy, or put Istio's there" >&2
fi
