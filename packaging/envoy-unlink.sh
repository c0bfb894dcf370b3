# When Envoy's package goes: its own link, and the one that the agent's package makes to any Envoy in /usr/bin.
case $(readlink /usr/local/bin/envoy 2>/dev/null) in
    /usr/bin/envoy | ../../bin/envoy) rm -f /usr/local/bin/envoy ;;
esac
