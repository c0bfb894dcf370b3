# The settings files that aside.sh put aside, over the package's.

for file in /etc/istio/envoy/sidecar.env /etc/istio/envoy/cluster.env \
    /var/lib/istio/envoy/sidecar.env /var/lib/istio/envoy/cluster.env; do
    if [ -f "$file.before-pilot-agent" ]; then mv -f "$file.before-pilot-agent" "$file"; fi
done
