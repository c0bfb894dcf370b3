# After the unit's file has gone. Debian's helper has hidden its name from systemd by then, which is of use where a script
# of that name stays behind. Here Istio's package may follow, whose unit has the same name and could not be started.
if [ -x /usr/bin/deb-systemd-helper ]; then deb-systemd-helper unmask istio.service >/dev/null || true; fi
if [ -d /run/systemd/system ]; then systemctl --system daemon-reload >/dev/null || true; fi
