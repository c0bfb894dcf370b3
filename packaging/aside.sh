# Before the files of a first installation are in place. Istio's package, or what was put there by hand, may have the two
# settings files where ours go (its /etc/istio is a link to /var/lib/istio), and a package manager would ask which to
# take, put the operator's beside ours, or take it away with the old package. setup.sh puts them back over ours.

for file in /etc/istio/envoy/sidecar.env /etc/istio/envoy/cluster.env \
    /var/lib/istio/envoy/sidecar.env /var/lib/istio/envoy/cluster.env; do
    if [ -f "$file" ] && [ ! -L "$file" ] && [ ! -e "$file.before-pilot-agent" ]; then
        mv "$file" "$file.before-pilot-agent"
    fi
done
