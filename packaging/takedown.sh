# What both kinds of package do when their files go: links of ours, and nothing that somebody put in their place.

for link in /var/lib/istio/envoy/sidecar.env /var/lib/istio/envoy/cluster.env /usr/local/bin/pilot-agent \
    /usr/local/bin/envoy; do
    case $(readlink "$link" 2>/dev/null) in
        /etc/istio/envoy/* | /usr/bin/pilot-agent | ../../bin/envoy) rm -f "$link" ;;
    esac
done
