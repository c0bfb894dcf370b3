# When Envoy's package goes.
if [ "$(readlink /usr/local/bin/envoy 2>/dev/null)" = /usr/bin/envoy ]; then rm -f /usr/local/bin/envoy; fi
